"""What each transfer adds to a product, a norm + RoPE, and an attention that run beside it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..communicator import Communicator
from .block import ONE_SIDED, compiled_norm, make_inputs, sdpa
from .contenders import all_to_all, communicators, exchange_one
from .measure import ALONE, QUEUED, Contender, Effort, Outputs, Ranks, format_table, measure, number, quartiles
from .profiles import Shape

NOTHING = "nothing"
Call = Callable[[], object]


def contention_table(shape: Shape, dtype: torch.dtype, effort: Effort, ranks: Ranks) -> dict[str, Any]:
    """Every transfer by itself, every computation by itself, and every pair, begun at once by ranks in step. A pair's
    time is that of its computation, however long the transfer goes on.
    """
    ranks.progress(f"contention {shape}")
    computations = _computations(shape, dtype, ranks)
    side = torch.cuda.Stream() if ranks.on_cuda else None
    with ExitStack() as stack:
        made = communicators(stack, ranks, [ONE_SIDED[ranks.device.type]])
        transfers = _transfers(made, shape, dtype, ranks)
        contenders = []
        for what, transfer in transfers.items():
            contenders.append(Contender(f"{what}, alone", _alone(transfer)))
        for whereby, compute in computations.items():
            contenders.append(Contender(f"{NOTHING}, beside {whereby}", _alone(compute)))
            for what, transfer in transfers.items():
                contenders.append(Contender(f"{what}, beside {whereby}", beside(compute, transfer, side)))
        mode = QUEUED if ranks.on_cuda else ALONE
        rows = measure(ranks, contenders, [None], effort, modes=(mode,))
    return {
        "what": "contention",
        "shape": shape,
        "mode": mode,
        "transfers": list(transfers),
        "computations": list(computations),
        "rows": rows,
    }


def _computations(shape: Shape, dtype: torch.dtype, ranks: Ranks) -> dict[str, Call]:
    """Of the block's: the fused projection, the norm + RoPE of q and k, the attention."""
    inputs = make_inputs(shape, dtype, ranks)
    norm, norm_name = compiled_norm(inputs, shape, ranks)
    rest = (inputs.norm_weight, inputs.cos, inputs.sin)
    fused = F.linear(inputs.x, inputs.qkv_weight).unflatten(-1, (3, *shape[2:]))[None]
    heads = torch.randn(
        1, shape[1] * ranks.world_size, shape[2] // ranks.world_size, shape[3], dtype=dtype, device=ranks.device
    )
    return {
        "product": lambda: F.linear(inputs.x, inputs.qkv_weight),
        f"norm + RoPE ({norm_name})": lambda: (norm(fused[:, :, 0], *rest), norm(fused[:, :, 1], *rest)),
        "attention": lambda: sdpa(heads, heads, heads),
    }


def _transfers(made: dict[str, Communicator], shape: Shape, dtype: torch.dtype, ranks: Ranks) -> dict[str, Call]:
    """Of a strided V: a rank's whole exchange, its parts, and other ways to move as many bytes."""
    batch, seq_local, num_heads, head_dim = shape
    world_size, rank = ranks.world_size, ranks.rank
    v = torch.randn(batch, seq_local, 3, num_heads, head_dim, dtype=dtype, device=ranks.device)[:, :, 2]
    heads = num_heads // world_size
    own, target = v[:, :, rank * heads : (rank + 1) * heads], v.new_empty(batch, seq_local, heads, head_dim)
    dense = own.contiguous()
    packed = v.new_empty(world_size, batch, seq_local, heads, head_dim)
    token = v.new_zeros(1, 1, world_size, 1)
    transfers: dict[str, Call] = {}
    for backend, communicator in made.items():
        transfers[f"{backend}: handshakes alone"] = partial(exchange_one, communicator, token, own_slice=False)
        transfers[f"{backend}: to peers, with handshakes"] = partial(exchange_one, communicator, v, own_slice=False)
        transfers[f"{backend}: the same and the own slice"] = partial(exchange_one, communicator, v)
    transfers["own slice, by a kernel"] = lambda: target.copy_(own)
    transfers["as many bytes, dense"] = lambda: target.copy_(dense)
    process_group = "nccl" if ranks.on_cuda else "gloo"
    transfers[f"{process_group}, neither pack nor unpack"] = lambda: all_to_all(packed)
    return transfers


def _alone(call: Call) -> Callable[[Any], Outputs]:
    def run(_: Any) -> Outputs:
        call()
        return ()

    return run


def beside(compute: Call, transfer: Call, side: Any) -> Callable[[Any], Outputs]:
    """Both begin where the caller's stream is, the transfer on a stream of its own, which nobody waits for. On the CPU
    one follows on the other.
    """

    def run(_: Any) -> Outputs:
        if side is None:
            transfer()
        else:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                transfer()
        compute()
        return ()

    return run


def print_contention_table(table: dict[str, Any]) -> None:
    rows, mode = table["rows"], table["mode"]

    def times(name: str) -> list[float]:
        found: list[float] = rows.get(name, {}).get(mode, {}).get("us", [])
        return found

    head = ["transfer", "alone us"]
    for whereby in table["computations"]:
        head += [f"{whereby}: adds us", "q1", "q3", "of its length"]
    lines = [[NOTHING, "-"]]
    for whereby in table["computations"]:
        alone = times(f"{NOTHING}, beside {whereby}")
        lines[0] += [f"({statistics.median(alone):.0f})" if alone else "-", "-", "-", "-"]
    for what in table["transfers"]:
        length = times(f"{what}, alone")
        cells = [what, number(statistics.median(length) if length else None)]
        for whereby in table["computations"]:
            both, base = times(f"{what}, beside {whereby}"), times(f"{NOTHING}, beside {whereby}")
            if len(both) != len(base) or len(both) < 2 or not length:
                cells += ["-"] * 4
                continue
            added = [mine - theirs for mine, theirs in zip(both, base, strict=True)]
            q1, median, q3 = quartiles(added)
            share = f"{100 * median / statistics.median(length):.0f} %"
            cells += [number(median), number(q1), number(q3), share]
        lines.append(cells)
    print(f"\ncontention, (B, S_local, H, D) = {tuple(table['shape'])}")
    print(
        "adds: to the computation's time, iteration by iteration; the median of these differences, and their quartiles"
    )
    print(format_table(head, lines))
