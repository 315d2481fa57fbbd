"""The attention block with V first by hand, and what becomes of it when one of its ingredients is taken away."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from .. import onesided
from ..communicator import Communicator
from .block import (
    ATTENTIONS,
    BOUND,
    ONE_SIDED,
    Exchanges,
    Inputs,
    block,
    by_group,
    by_packs,
    check_close,
    compiled_norm,
    make_inputs,
    without_communication,
)
from .contenders import TIMEOUT_S, communicators, gather_by_pack, scatter_by_pack
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
    quartiles,
)
from .profiles import Shape

WHOLE = "the whole"

Scatter = Callable[[torch.Tensor, Thunk, Thunk], tuple[torch.Tensor, ...]]


def ablation_table(shape: Shape, dtype: torch.dtype, attention: str, effort: Effort, ranks: Ranks) -> dict[str, Any]:
    """Blocks of one shape (B = 1). Each one's result is compared with that of a process group's all-to-alls."""
    ranks.progress(f"ablation {shape}")
    inputs = make_inputs(shape, dtype, ranks)
    norm, norm_name = compiled_norm(inputs, shape, ranks)
    one_sided = ONE_SIDED[ranks.device.type]

    def contender(name: str, exchanges: Exchanges) -> Contender:
        def run(inputs: Inputs) -> Outputs:
            return block(inputs, shape, norm, exchanges, ATTENTIONS[attention])

        return Contender(name, run)

    packs = contender("", by_packs(lambda tensors: tuple(map(scatter_by_pack, tensors))))
    expected = packs.run(inputs)[0].float()
    with ExitStack() as stack:
        made = communicators(stack, ranks, [one_sided])
        contenders = []
        if one_sided in made:
            variants = _variants(made[one_sided], stack, ranks, shape)
            contenders = [contender(name, exchanges) for name, exchanges in variants]
            contenders.append(contender(BOUND, without_communication(made[one_sided], shape, ranks.device)))
        for each in contenders:
            each.check = check_close(each.name, expected) if each.name != BOUND else None
        rows = measure(ranks, contenders, [inputs], effort)
    return {"what": "ablation", "shape": shape, "attention": attention, "norm": norm_name, "rows": rows}


def _variants(
    communicator: Communicator, stack: ExitStack, ranks: Ranks, shape: Shape
) -> Iterator[tuple[str, Exchanges]]:
    """The whole, and each of the blocks that lack something; those that the ranks cannot run are left out."""
    scatter, gather = by_group(communicator, lent=True)
    yield WHOLE, (scatter, gather)
    yield "V not first", (partial(_v_last, communicator), gather)
    yield "nothing before all is computed", (partial(_at_the_end, communicator), gather)
    yield "a handshake each", (partial(_three_groups, communicator), gather)
    yield "packed, then flat copies", (partial(_packed, communicator), gather)
    yield "results copied out", by_group(communicator, lent=False)
    yield "own slices by kernels", (partial(_own_by_kernels, communicator), gather)
    yield "way back by the process group", (scatter, gather_by_pack)
    few = Communicator(backend=communicator.backend, max_targets=3, timeout_s=TIMEOUT_S)
    stack.enter_context(few.build(ranks.device))
    yield "targets not kept", (_without_cache(few), gather)
    if not ranks.on_cuda:
        return
    tunings = {
        "streams of no priority": (True, 3, True),
        "own slices at once": (False, 0, True),
        "own slices one submission late": (False, 1, True),
    }
    if ranks.world_size > 2:
        tunings["all ranks begin with the same peer"] = (False, 3, False)
    for name, tuning in tunings.items():
        with _tuned(tuning):
            tuned = Communicator(backend=communicator.backend, timeout_s=TIMEOUT_S)
            stack.enter_context(tuned.build(ranks.device))
        yield name, by_group(tuned, lent=True)
    for backend, other in communicators(stack, ranks, ["cuda_ipc"]).items():
        yield f"mapped by {backend}", by_group(other, lent=True)


@contextmanager
def _tuned(tuning: tuple[bool, int, bool]) -> Iterator[None]:
    before, onesided._tuning = onesided._tuning, tuning
    try:
        yield
    finally:
        onesided._tuning = before


def _v_last(communicator: Communicator, fused: torch.Tensor, q: Thunk, k: Thunk) -> tuple[torch.Tensor, ...]:
    with communicator.group("q", "k", "v") as group:
        group.submit(q(), tag="q")
        group.submit(k(), tag="k")
        group.submit(fused[:, :, 2], tag="v")
        return group.wait()


def _at_the_end(communicator: Communicator, fused: torch.Tensor, q: Thunk, k: Thunk) -> tuple[torch.Tensor, ...]:
    own_q, own_k = q(), k()
    with communicator.group("q", "k", "v") as group:
        group.submit(fused[:, :, 2], tag="v")
        group.submit(own_q, tag="q")
        group.submit(own_k, tag="k")
        return group.wait()


def _three_groups(communicator: Communicator, fused: torch.Tensor, q: Thunk, k: Thunk) -> tuple[torch.Tensor, ...]:
    """As the ops do it that a compiler has not grouped: several groups under way at once."""
    name, world_size, _ = communicator._where
    ops, sources, targets = torch.ops.ulysses_op, [], []
    for tag, compute in (("v", lambda: fused[:, :, 2]), ("q", q), ("k", k)):
        x = compute()
        arguments: Any = (name, world_size, -1, [], [], False, "scatter_heads", tag, [tag], "", True, True)
        sources.append(x)
        targets.append(ops.submit.default(x, *arguments))
    for tag, target, source in zip("vqk", targets, sources, strict=True):
        ops.wait_.default([target], [source], name, [tag])
    v, scattered_q, scattered_k = targets
    return scattered_q, scattered_k, v


def _packed(communicator: Communicator, fused: torch.Tensor, q: Thunk, k: Thunk) -> tuple[torch.Tensor, ...]:
    """Each tensor packed by peer, so that every copy is one row. What arrives, for B = 1, is in its layout already."""
    _, seq_local, num_heads, head_dim = fused[:, :, 0].shape
    world_size = communicator.world_size
    scattered = (1, world_size * seq_local, num_heads // world_size, head_dim)

    def pack(x: torch.Tensor) -> torch.Tensor:
        by_peer = x.unflatten(2, (world_size, -1)).permute(0, 2, 1, 3, 4).contiguous()
        return by_peer.view(1, 1, world_size, -1)

    with communicator.group("packed q", "packed k", "packed v") as group:
        group.submit(pack(fused[:, :, 2]), tag="packed v")
        group.submit(pack(q()), tag="packed q")
        group.submit(pack(k()), tag="packed k")
        arrived_q, arrived_k, arrived_v = (result.view(scattered) for result in group.wait())
        return arrived_q, arrived_k, arrived_v


def _own_by_kernels(communicator: Communicator, fused: torch.Tensor, q: Thunk, k: Thunk) -> tuple[torch.Tensor, ...]:
    """Own slices by copy_ on the caller's stream, as soon as they are there."""
    rank = communicator.rank
    with communicator.group("q", "k", "v") as group:
        for tag, compute in (("v", lambda: fused[:, :, 2]), ("q", q), ("k", k)):
            x = compute()
            submission = group.submit_as(x, tag, ("scatter_heads", None, None, False), terms=(False, False, ""))
            exchange, result = submission.step.exchange, submission.result
            result[exchange.own_dest(rank)].copy_(x[exchange.own_source(rank)])
        return group.wait()


def _without_cache(communicator: Communicator) -> Scatter:
    """Every group's targets are brought up anew: two sets of tags take turns, and there is room for one."""
    turn = itertools.count()

    def scatter(fused: torch.Tensor, q: Thunk, k: Thunk) -> tuple[torch.Tensor, ...]:
        tags = [f"{tag}{next_turn}" for next_turn in [next(turn) % 2] for tag in "qkv"]
        if fused.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("nothing can be brought up in a capture")
        with communicator.group(*tags) as group:
            group.submit(fused[:, :, 2], tag=tags[2])
            group.submit(q(), tag=tags[0])
            group.submit(k(), tag=tags[1])
            return group.wait()

    return scatter


def print_ablation_table(table: dict[str, Any]) -> None:
    rows = table["rows"]
    modes = [mode for mode in (ALONE, QUEUED, CAPTURED) if any(mode in result for result in rows.values())]
    head = ["lacks"]
    for mode in modes:
        head += [f"{mode} us", "over bound", "adds us", "q1", "q3"]
    lines = []
    for name, result in rows.items():
        cells = [name]
        for mode in modes:
            us, bound = median_of(result, mode), median_of(rows.get(BOUND, {}), mode)
            over = "-" if us is None or bound is None else f"{100 * (us / bound - 1):+.1f} %"
            cells += [number(us), over, *_added(result, rows.get(WHOLE, {}), mode)]
        lines.append(cells)
    what = f"{table['attention']}, norm + RoPE {table['norm']}"
    print(f"\nablation of the block, (B, S_local, H, D) = {tuple(table['shape'])}, {what}")
    print("adds: to the whole, iteration by iteration; the median of these differences, and their quartiles")
    print(format_table(head, lines))


def _added(result: dict[str, Any], whole: dict[str, Any], mode: str) -> list[str]:
    own, base = (each.get(mode, {}).get("us", []) for each in (result, whole))
    if len(own) != len(base) or len(own) < 2 or result is whole:
        return ["-"] * 3
    differences = [mine - theirs for mine, theirs in zip(own, base, strict=True)]
    q1, _, q3 = quartiles(differences)
    return [number(value) for value in (statistics.median(differences), q1, q3)]
