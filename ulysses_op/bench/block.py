"""An attention block around the exchanges, against the same block without communication."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..communicator import Communicator
from .contenders import (
    OF_PROCESS_GROUP,
    AllToAll,
    communicators,
    gather_by_pack,
    gather_group,
    label,
    scatter_by_pack,
    scatter_in_one_pack,
    scatter_in_one_pack_strided,
)
from .measure import (
    ALONE,
    CAPTURED,
    QUEUED,
    Contender,
    Effort,
    Outputs,
    Ranks,
    Thunk,
    format_table,
    measure,
    median_of,
    number,
)
from .other_packages import Way, fast_ulysses, ways
from .profiles import Shape
from .zero_cta import zero_cta

ONE_SIDED = {"cuda": "symm_mem", "cpu": "shm"}
EPSILON = 1e-6
BOUND = "no communication, in step"


class Inputs(NamedTuple):
    """x: (S_local, C) with C = H * D; weights as F.linear takes them; cos, sin: (S_local, 1, D / 2) in float32."""

    x: torch.Tensor
    qkv_weight: torch.Tensor
    out_weight: torch.Tensor
    norm_weight: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor


def make_inputs(shape: Shape, dtype: torch.dtype, ranks: Ranks) -> Inputs:
    _, seq_local, num_heads, head_dim = shape
    width = num_heads * head_dim
    generator = torch.Generator(ranks.device).manual_seed(1)  # the weights of all ranks are alike

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=dtype, device=ranks.device, generator=generator)

    qkv_weight, out_weight = random(3 * width, width) * width**-0.5, random(width, width) * width**-0.5
    norm_weight = 1 + 0.1 * random(head_dim)
    generator.manual_seed(2 + ranks.rank)
    positions = torch.arange(ranks.rank * seq_local, (ranks.rank + 1) * seq_local, device=ranks.device)
    return Inputs(random(seq_local, width), qkv_weight, out_weight, norm_weight, *rope_table(positions, head_dim))


def norm_rope(x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RMSNorm over D, then rotary embedding, in float32. x: (1, S_local, H, D)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON) * weight.float()
    return rotate(wide, cos, sin).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (B, S, H, D) in float32; cos, sin: see :func:`rope_table`."""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def rope_table(positions: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of ``positions``, (S, 1, D / 2) in float32."""
    half = head_dim // 2
    angle = (positions[:, None] * 10000.0 ** -(torch.arange(half, device=positions.device) / half))[:, None]
    return angle.cos(), angle.sin()


Norm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Exchanges = tuple[
    # (B, S_local, n, H, D), dense, whose last part is V; what computes q and k.
    Callable[[torch.Tensor, Thunk, Thunk], tuple[torch.Tensor, ...]],
    Callable[[torch.Tensor], torch.Tensor],
]


Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From q, k and v, each (B, S_global, H_local, D), to what is gathered, of that shape."""


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def identity(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """No attention: shows the exchanges alone, and as much of them as the fastest attention would."""
    return v


ATTENTIONS: dict[str, Attention] = {"sdpa": sdpa, "identity": identity}


def block(inputs: Inputs, shape: Shape, norm: Norm, exchanges: Exchanges, attention: Attention = sdpa) -> Outputs:
    scatter, gather = exchanges
    fused = F.linear(inputs.x, inputs.qkv_weight).unflatten(-1, (3, *shape[2:]))[None]
    rest = (inputs.norm_weight, inputs.cos, inputs.sin)
    q, k, v = scatter(fused, lambda: norm(fused[:, :, 0], *rest), lambda: norm(fused[:, :, 1], *rest))
    return (F.linear(gather(attention(q, k, v)).flatten(2), inputs.out_weight),)


def by_packs(
    packed: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]], by: AllToAll = OF_PROCESS_GROUP
) -> Exchanges:
    return lambda fused, q, k: packed((q(), k(), fused[:, :, -1])), lambda o: gather_by_pack(o, by)


def by_way(way: Way) -> Exchanges:
    return lambda fused, q, k: way.scatter(fused[:, :, -1], q, k), way.gather


def by_group(communicator: Communicator, lent: bool) -> Exchanges:
    """V first: it travels while Q and K are normed and rotated."""

    def scatter(fused: torch.Tensor, q: Thunk, k: Thunk) -> tuple[torch.Tensor, ...]:
        with communicator.group("q", "k", "v") as group:
            group.submit(fused[:, :, -1], tag="v")
            group.submit(q(), tag="q")
            group.submit(k(), tag="k")
            return group.wait()

    return scatter, (lambda o: gather_group(communicator, o)[0]) if lent else communicator.gather_heads


def without_communication(communicator: Communicator, shape: Shape, device: torch.device) -> Exchanges:
    """Views in place of the exchanges, and the handshakes of the exchanges, which keep the ranks in step."""
    batch, seq_local, num_heads, head_dim = shape
    world_size = communicator.world_size
    scattered = (batch, seq_local * world_size, num_heads // world_size, head_dim)
    token = torch.zeros(1, 1, world_size, 1, device=device)
    way_back_token = torch.zeros(1, world_size, 1, 1, device=device)

    def scatter(fused: torch.Tensor, q: Thunk, k: Thunk) -> tuple[torch.Tensor, ...]:
        with communicator.group("bound q", "bound k", "bound v") as group:
            group.submit(token, tag="bound v")
            own_q = q()
            group.submit(token, tag="bound q")
            own_k = k()
            group.submit(token, tag="bound k")
            group.wait()
        # V's slice has no dense view of that shape; the end of the memory has, with numbers of the same kind.
        own_v = fused.view(-1)[-own_k.numel() :]
        return own_q.view(scattered), own_k.view(scattered), own_v.view(scattered)

    def gather(o: torch.Tensor) -> torch.Tensor:
        with communicator.group("bound o") as group:
            group.submit(way_back_token, tag="bound o", direction="gather_heads")
            group.wait()
        return o.reshape(shape)

    return scatter, gather


def compiled_norm(inputs: Inputs, shape: Shape, ranks: Ranks) -> tuple[Norm, str]:
    """norm_rope through Inductor where that works on every rank, and its name."""
    fused = inputs.x.new_zeros(1, shape[1], 3, *shape[2:])
    return compiled_part(norm_rope, (fused[:, :, 0], inputs.norm_weight, inputs.cos, inputs.sin), "norm + RoPE", ranks)


def compiled_part(
    function: Callable[..., torch.Tensor], arguments: tuple[torch.Tensor, ...], what: str, ranks: Ranks
) -> tuple[Callable[..., torch.Tensor], str]:
    """The function through Inductor where that works on every rank with such arguments, else as it is; and which."""
    reason = "" if ranks.on_cuda and importlib.util.find_spec("triton") else "Triton is not installed"
    compiled = torch.compile(function, dynamic=False)
    if not reason:
        try:
            compiled(*arguments)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
    if ranks.any(bool(reason)):
        ranks.progress(f"  {what} is not compiled: {reason or 'a peer cannot'}")
        return function, "eager"
    return compiled, "compiled"


def block_table(shape: Shape, dtype: torch.dtype, attention: str, effort: Effort, ranks: Ranks) -> dict[str, Any]:
    """All contenders of one shape (B = 1). Each one's result is compared with the first one's."""
    ranks.progress(f"block {shape}")
    inputs = make_inputs(shape, dtype, ranks)
    norm, norm_name = compiled_norm(inputs, shape, ranks)
    process_group = "nccl" if ranks.on_cuda else "gloo"

    def contender(name: str, exchanges: Exchanges, not_captured: str = "") -> Contender:
        def run(inputs: Inputs) -> Outputs:
            return block(inputs, shape, norm, exchanges, ATTENTIONS[attention])

        return Contender(name, run, not_captured=not_captured)

    contenders = [contender(f"{process_group}, 3 packs", by_packs(lambda x: tuple(map(scatter_by_pack, x))))]
    with ExitStack() as stack:
        packing = {process_group: OF_PROCESS_GROUP, **zero_cta(stack, ranks, 3 * math.prod(shape), dtype)}
        for name, by in packing.items():
            strided = partial(scatter_in_one_pack_strided, by=by)
            contenders += [
                contender(f"{name}, 1 pack", by_packs(partial(scatter_in_one_pack, by=by), by)),
                contender(f"{name}, 1 pack, strided results", by_packs(strided, by)),
            ]
        if (other := fast_ulysses(stack, ranks)) is not None:
            contenders += [
                contender(way.name, by_way(way), way.not_captured) for way in ways(other, shape, dtype, ranks)
            ]
        for backend, communicator in communicators(stack, ranks, [ONE_SIDED[ranks.device.type]]).items():
            for lent in (False, True):
                name = label(backend, f"V first, o by {'a group' if lent else 'gather_heads()'}")
                contenders.append(contender(name, by_group(communicator, lent)))
            bound = contender(BOUND, without_communication(communicator, shape, ranks.device))
            contenders.append(bound)
        expected = contenders[0].run(inputs)[0].float()
        for each in contenders:
            each.check = check_close(each.name, expected) if each.name != BOUND else None
        rows = measure(ranks, contenders, [inputs], effort)
    return {"what": "attention block", "shape": shape, "attention": attention, "norm": norm_name, "rows": rows}


def check_close(name: str, expected: torch.Tensor, tolerance: float = 0.01) -> Callable[[int, Outputs], None]:
    """The arithmetic is the same, but other strides may get other kernels: so much of the norm is allowed."""

    def check(_: int, outputs: Outputs) -> None:
        error = float((outputs[0].float() - expected).norm() / expected.norm())
        if not error < tolerance:
            raise AssertionError(f"{name}: the result differs by {error:.3g} of its norm from the first contender's")

    return check


def print_block_table(table: dict[str, Any]) -> None:
    rows = table["rows"]
    modes = [mode for mode in (ALONE, QUEUED, CAPTURED) if any(mode in result for result in rows.values())]
    head = ["contender", "us", "q1", "q3", "over bound", "host us"]
    for mode in modes[1:]:
        head += [f"{mode} us", "over bound"]
    bound = rows.get(BOUND, {})

    def over(result: dict[str, Any], mode: str) -> str:
        us, least = median_of(result, mode), median_of(bound, mode)
        return "-" if us is None or least is None else f"{100 * (us / least - 1):+.1f} %"

    lines = []
    for name, result in rows.items():
        cells = [name, *(number(median_of(result, ALONE, key)) for key in ("median_us", "q1_us", "q3_us"))]
        cells += [over(result, ALONE), number(median_of(result, ALONE, "host_median_us"))]
        for mode in modes[1:]:
            cells += [number(median_of(result, mode)), over(result, mode)]
        lines.append(cells)
    what = f"{table['attention']}, norm + RoPE {table['norm']}"
    print(f"\n{table['what']}, (B, S_local, H, D) = {tuple(table['shape'])}, {what}")
    print(format_table(head, lines))
