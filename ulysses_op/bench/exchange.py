"""The grouped scatter of q, k and v, and the gather of o, against a process group's all-to-all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..communicator import Communicator
from .contenders import (
    OF_PROCESS_GROUP,
    AllToAll,
    communicators,
    gather_by_pack,
    gather_group,
    label,
    scatter_by_pack,
    scatter_group,
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
    format_table,
    measure,
    median_of,
    number,
    ratio,
)
from .other_packages import Way, fast_ulysses, ways
from .profiles import Shape
from .zero_cta import zero_cta

BACKENDS = {"cuda": ("symm_mem", "cuda_ipc", "c10d"), "cpu": ("shm", "c10d")}
NUM_SETS = 3


class Inputs(NamedTuple):
    """q, k: (B, S_local, H, D), contiguous as norm and RoPE leave them; v: of the same shape, but a slice of a fused
    projection (B, S_local, 3, H, D); o: (B, S_global, H_local, D)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor


def make_inputs(shape: Shape, dtype: torch.dtype, ranks: Ranks, seed: int) -> Inputs:
    batch, seq_local, num_heads, head_dim = shape
    generator = torch.Generator(ranks.device).manual_seed(seed * ranks.world_size + ranks.rank)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=dtype, device=ranks.device, generator=generator)

    fused = random(batch, seq_local, 3, num_heads, head_dim)
    o = random(batch, seq_local * ranks.world_size, num_heads // ranks.world_size, head_dim)
    return Inputs(random(*shape), random(*shape), fused[:, :, 2], o)


def reference_scatter(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """All-gather along the sequence, then this rank's heads."""
    heads = x.shape[2] // ranks.world_size
    return all_gather(x, ranks).transpose(0, 1).flatten(1, 2)[:, :, ranks.rank * heads : (ranks.rank + 1) * heads]


def reference_gather(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """All-gather along the heads, then this rank's part of the sequence."""
    seq = x.shape[1] // ranks.world_size
    return all_gather(x, ranks).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, ranks.rank * seq : (ranks.rank + 1) * seq]


def all_gather(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """(P, *x.shape)."""
    gathered = x.new_empty(ranks.world_size, *x.shape)
    dist.all_gather(list(gathered.unbind(0)), x.contiguous())
    return gathered


def check_bitwise(contenders: Sequence[Contender], what: str, expected: Sequence[Sequence[torch.Tensor]]) -> None:
    """Have each contender's outputs compared, input set by input set."""

    def check_of(name: str) -> Callable[[int, Sequence[torch.Tensor]], None]:
        def check(index: int, outputs: Sequence[torch.Tensor]) -> None:
            for i, (output, wanted) in enumerate(zip(outputs, expected[index], strict=True)):
                if output.shape != wanted.shape or not torch.equal(_bits(output), _bits(wanted)):
                    raise AssertionError(f"{what}, {name}: output {i} of input set {index} is not all-gather + slice")

        return check

    for contender in contenders:
        contender.check = check_of(contender.name)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def plain_copy(elements: int, dtype: torch.dtype, device: torch.device) -> Callable[[Any], tuple[torch.Tensor, ...]]:
    """A flat copy within the rank's own memory, between buffers that take turns."""
    pairs = [
        (torch.zeros(elements, dtype=dtype, device=device), torch.zeros(elements, dtype=dtype, device=device))
        for _ in range(NUM_SETS)
    ]
    turn = 0

    def run(_: Any) -> tuple[torch.Tensor, ...]:
        nonlocal turn
        turn = (turn + 1) % NUM_SETS
        pairs[turn][1].copy_(pairs[turn][0])
        return ()

    return run


def exchange_tables(shape: Shape, dtype: torch.dtype, effort: Effort, ranks: Ranks) -> list[dict[str, Any]]:
    process_group = "nccl" if ranks.on_cuda else "gloo"
    sets = [make_inputs(shape, dtype, ranks, seed) for seed in range(NUM_SETS)]
    sent = sets[0].q.numel() * (ranks.world_size - 1) // ranks.world_size
    with ExitStack() as stack:
        usable = communicators(stack, ranks, BACKENDS[ranks.device.type])
        packing = {process_group: OF_PROCESS_GROUP, **zero_cta(stack, ranks, 3 * sets[0].q.numel(), dtype)}
        other = fast_ulysses(stack, ranks)
        theirs = [] if other is None else ways(other, shape, dtype, ranks)

        def by_package(run: Callable[[Communicator, Inputs], Outputs], what: str = "") -> Iterator[Contender]:
            for backend, communicator in usable.items():

                def call(inputs: Inputs, communicator: Any = communicator) -> Outputs:
                    return run(communicator, inputs)

                yield Contender(label(backend, what), call)

        scatters = [
            Contender(f"{process_group}, 3 packs", lambda x: tuple(map(scatter_by_pack, (x.q, x.k, x.v)))),
            *(Contender(f"{name}, 1 pack", partial(_scatter_packed, by)) for name, by in packing.items()),
            *(
                Contender(f"{name}, 1 pack, strided results", partial(_scatter_packed_strided, by))
                for name, by in packing.items()
            ),
            *(Contender(way.name, partial(_scatter_by, way), not_captured=way.not_captured) for way in theirs),
            *by_package(lambda communicator, x: scatter_group(communicator, x.q, x.k, x.v)),
        ]
        expected = [[reference_scatter(x, ranks) for x in inputs[:3]] for inputs in sets]
        scatter = exchange_table("scatter of q, k, v", shape, 3 * sent, scatters, expected, sets, effort, ranks)
        gathers = [
            *(Contender(f"{name}, 1 pack", partial(_gather_packed, by)) for name, by in packing.items()),
            *(Contender(way.name, partial(_gather_by, way), not_captured=way.not_captured) for way in theirs),
            *by_package(lambda communicator, x: gather_group(communicator, x.o), "in a group"),
            *by_package(lambda communicator, x: (communicator.gather_heads(x.o),), "gather_heads()"),
        ]
        expected = [[reference_gather(inputs.o, ranks)] for inputs in sets]
        gather = exchange_table("gather of o", shape, sent, gathers, expected, sets, effort, ranks)
    return [scatter, gather]


def _scatter_packed(by: AllToAll, inputs: Inputs) -> Outputs:
    return scatter_in_one_pack(inputs[:3], by)


def _scatter_packed_strided(by: AllToAll, inputs: Inputs) -> Outputs:
    return scatter_in_one_pack_strided(inputs[:3], by)


def _gather_packed(by: AllToAll, inputs: Inputs) -> Outputs:
    return (gather_by_pack(inputs.o, by),)


def _scatter_by(way: Way, inputs: Inputs) -> Outputs:
    return way.scatter(inputs.v, lambda: inputs.q, lambda: inputs.k)


def _gather_by(way: Way, inputs: Inputs) -> Outputs:
    return (way.gather(inputs.o),)


def exchange_table(
    what: str,
    shape: Shape,
    sent: int,
    contenders: list[Contender],
    expected: list[list[torch.Tensor]],
    sets: list[Inputs],
    effort: Effort,
    ranks: Ranks,
) -> dict[str, Any]:
    """``sent``: elements that a rank sends to its peers."""
    ranks.progress(f"{what} {shape}")
    dtype = sets[0].q.dtype
    check_bitwise(contenders, f"{what} {shape}", expected)
    copy = Contender("plain copy of the bytes sent, own memory", plain_copy(sent, dtype, ranks.device))
    rows = measure(ranks, [*contenders, copy], sets, effort)
    return {
        "what": what,
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "sent_bytes_per_rank": sent * dtype.itemsize,
        "rows": rows,
    }


def print_exchange_table(table: dict[str, Any]) -> None:
    on_cuda = any(QUEUED in result for result in table["rows"].values())
    rows, sent = table["rows"], table["sent_bytes_per_rank"]
    bases = [name for name in rows if name.startswith(("nccl", "gloo")) and "strided" not in name]

    def speed(result: dict[str, Any], mode: str) -> list[str]:
        us = median_of(result, mode)
        return [
            "-" if us is None else f"{sent / us / 1e3:.1f}",
            *(ratio(median_of(rows[base], mode), us) for base in bases),
        ]

    columns = ["GB/s", *(f"x {base.split(', ', 1)[1]}" for base in bases)]
    head = ["contender", "us", "q1", "q3", *columns]
    if on_cuda:
        head += ["host us", "queued us", *columns, "captured us", *columns]
    lines = []
    for name, result in rows.items():
        cells = [name, *(number(median_of(result, ALONE, key)) for key in ("median_us", "q1_us", "q3_us"))]
        cells += speed(result, ALONE)
        if on_cuda:
            cells.append(number(median_of(result, ALONE, "host_median_us")))
            for mode in (QUEUED, CAPTURED):
                cells += [number(median_of(result, mode)), *speed(result, mode)]
        lines.append(cells)
    iterations = max(result.get(ALONE, {}).get("iterations", 0) for result in rows.values())
    title = f"{table['what']}, (B, S_local, H, D) = {tuple(table['shape'])} {table['dtype']}"
    print(f"\n{title}, {sent / 1e6:.1f} MB to peers, {iterations} iterations")
    print(format_table(head, lines))


LEGEND = """\
us: median of the iterations, each the maximum over the ranks; q1, q3: their quartiles. GB/s: bytes to peers over the
median. "x ...": how many times as fast as this row of the process group in the same mode."""
CUDA_LEGEND = """
The first columns begin with nothing queued, so the host's time is in them; queued: the host is ahead; captured: replay
of a CUDA graph, the host ahead. host us: until the calls have returned."""
