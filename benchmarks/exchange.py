"""The grouped scatter of q, k and v, and the gather of o, against a process group's all-to-all.

torchrun --standalone --nproc-per-node 2 benchmarks/exchange.py --device cuda [--block]
torchrun --standalone --nproc-per-node 2 benchmarks/exchange.py --device cpu
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from block import block_table, print_block_table
from contenders import (
    communicators,
    gather_by_pack,
    gather_group,
    label,
    scatter_by_pack,
    scatter_group,
    scatter_in_one_pack,
    scatter_in_one_pack_strided,
)
from measure import (
    ALONE,
    CAPTURED,
    QUEUED,
    Contender,
    Outputs,
    Ranks,
    format_table,
    measure,
    median_of,
    number,
    provenance,
    ratio,
)

import ulysses_op

Shape = tuple[int, int, int, int]

BACKENDS = {"cuda": ("symm_mem", "cuda_ipc", "c10d"), "cpu": ("shm", "c10d")}
SHAPES: dict[str, list[Shape]] = {
    "cuda": [(1, 9472, 28, 128), (1, 9472, 56, 128), (1, 3120, 40, 128), (1, 16380, 40, 128)],
    "cpu": [(1, 512, 8, 64), (1, 8192, 8, 64), (1, 32768, 8, 64)],  # 1, 16, 64 MiB a tensor in float32
}
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
NUM_SETS = 3
PROCESS_GROUP_TIMEOUT = datetime.timedelta(seconds=90)
GRACE_S = 200  # what a run may take beyond its budget before it is ended


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


def exchange_tables(shape: Shape, args: argparse.Namespace, ranks: Ranks) -> list[dict[str, Any]]:
    dtype = DTYPES[args.device]
    process_group = "nccl" if ranks.on_cuda else "gloo"
    sets = [make_inputs(shape, dtype, ranks, seed) for seed in range(NUM_SETS)]
    sent = sets[0].q.numel() * (ranks.world_size - 1) // ranks.world_size
    with ExitStack() as stack:
        usable = communicators(stack, ranks, BACKENDS[args.device])

        def by_package(
            run: Callable[[ulysses_op.Communicator, Inputs], Outputs], what: str = ""
        ) -> Iterator[Contender]:
            for backend, communicator in usable.items():

                def call(inputs: Inputs, communicator: Any = communicator) -> Outputs:
                    return run(communicator, inputs)

                yield Contender(label(backend, what), call)

        scatters = [
            Contender(f"{process_group}, 3 packs", lambda x: tuple(map(scatter_by_pack, (x.q, x.k, x.v)))),
            Contender(f"{process_group}, 1 pack", lambda x: scatter_in_one_pack((x.q, x.k, x.v))),
            Contender(f"{process_group}, 1 pack, strided results", lambda x: scatter_in_one_pack_strided(x[:3])),
            *by_package(lambda communicator, x: scatter_group(communicator, x.q, x.k, x.v)),
        ]
        expected = [[reference_scatter(x, ranks) for x in inputs[:3]] for inputs in sets]
        scatter = exchange_table("scatter of q, k, v", shape, 3 * sent, scatters, expected, sets, args, ranks)
        gathers = [
            Contender(f"{process_group}, 1 pack", lambda x: (gather_by_pack(x.o),)),
            *by_package(lambda communicator, x: gather_group(communicator, x.o), "in a group"),
            *by_package(lambda communicator, x: (communicator.gather_heads(x.o),), "gather_heads()"),
        ]
        expected = [[reference_gather(inputs.o, ranks)] for inputs in sets]
        gather = exchange_table("gather of o", shape, sent, gathers, expected, sets, args, ranks)
    return [scatter, gather]


def exchange_table(
    what: str,
    shape: Shape,
    sent: int,
    contenders: list[Contender],
    expected: list[list[torch.Tensor]],
    sets: list[Inputs],
    args: argparse.Namespace,
    ranks: Ranks,
) -> dict[str, Any]:
    """``sent``: elements that a rank sends to its peers."""
    ranks.progress(f"{what} {shape}")
    dtype = DTYPES[args.device]
    check_bitwise(contenders, f"{what} {shape}", expected)
    copy = Contender("plain copy of the bytes sent, own memory", plain_copy(sent, dtype, ranks.device))
    rows = measure(ranks, [*contenders, copy], sets, args.warmups, args.iterations)
    return {
        "what": what,
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "sent_bytes_per_rank": sent * dtype.itemsize,
        "rows": rows,
    }


def print_exchange_table(table: dict[str, Any], on_cuda: bool) -> None:
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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--shapes", nargs="+", type=_shape, metavar="B,S_local,H,D", help="instead of the built-in ones"
    )
    parser.add_argument("--warmups", type=int, default=10, help="rounds before those that count (default 10)")
    parser.add_argument("--iterations", type=int, default=50, help="rounds that count (default 50)")
    parser.add_argument("--block", action="store_true", help="time attention blocks, too")
    parser.add_argument("--no-exchange", action="store_true", help="leave out the exchanges by themselves")
    parser.add_argument("--budget-s", type=float, default=240.0, help="what is left then is skipped (default 240)")
    parser.add_argument("--json", metavar="FILE", help="write everything, each iteration included")
    args = parser.parse_args()
    if args.shapes is None:
        args.shapes = SHAPES[args.device]
    if args.warmups < 1 or args.iterations < 2:
        parser.error("--warmups must be at least 1, --iterations at least 2")
    return args


def _shape(text: str) -> Shape:
    sizes = tuple(int(part) for part in text.split(","))
    if len(sizes) != 4 or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not four positive sizes B,S_local,H,D")
    return sizes


def run_tables(args: argparse.Namespace, ranks: Ranks, tables: list[dict[str, Any]], left_out: list[str]) -> None:
    """Append the tables, and what was left out and why."""
    jobs: list[tuple[str, Callable[[Shape], list[dict[str, Any]]]]] = []
    if not args.no_exchange:
        jobs.append(("exchange", lambda shape: exchange_tables(shape, args, ranks)))
    if args.block:
        jobs.append(("block", lambda shape: [block_table(shape, DTYPES[args.device], args, ranks)]))
    for name, job in jobs:
        for shape in args.shapes:
            if shape[2] % ranks.world_size:
                left_out.append(f"{name} {shape}: H = {shape[2]} does not divide by {ranks.world_size} ranks")
            elif name == "block" and shape[0] != 1:
                left_out.append(f"{name} {shape}: the block takes B = 1")
            elif ranks.over_budget():
                left_out.append(f"{name} {shape}: the budget of {args.budget_s:.0f} s was used up")
            else:
                tables += job(shape)
                if ranks.on_cuda:
                    torch.cuda.empty_cache()


def main() -> None:
    args = parse_arguments()
    if "RANK" not in os.environ:
        sys.exit(f"run it with torchrun:\n{__doc__}")
    # Collectives end by their time-outs, and whatever else might hang by this.
    faulthandler.dump_traceback_later(args.budget_s + GRACE_S, exit=True)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=PROCESS_GROUP_TIMEOUT)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=PROCESS_GROUP_TIMEOUT)
    ranks = Ranks(device, args.budget_s)
    facts = provenance(device)
    tables: list[dict[str, Any]] = []
    left_out: list[str] = []
    try:
        with torch.no_grad():
            run_tables(args, ranks, tables, left_out)
    except Exception:
        traceback.print_exc()
        if ranks.rank == 0:
            report(args, facts, tables, [*left_out, "everything after the exception above"])
        else:
            time.sleep(PROCESS_GROUP_TIMEOUT.total_seconds() + 10)  # rank 0 may need that long to notice, and to report
        sys.stdout.flush()
        os._exit(1)  # what is left of the process groups may not end by itself
    summaries = [summary for table in tables for result in table["rows"].values() for summary in result.values()]
    if ranks.rank == 0:
        report(args, facts, tables, left_out)
    ranks.any(False)  # nobody leaves while others still need it
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    sys.exit(any(summary.get("failed") for summary in summaries))


def report(
    args: argparse.Namespace, facts: dict[str, str], tables: list[dict[str, Any]], left_out: Sequence[str]
) -> None:
    on_cuda = args.device == "cuda"
    if args.json:
        everything = {"facts": facts, "arguments": vars(args), "tables": tables, "left_out": left_out}
        with open(args.json, "w") as file:
            json.dump(everything, file, indent=1)
    print("\n".join(f"{name}: {text}" for name, text in facts.items()))
    print(f"\n{LEGEND}{CUDA_LEGEND if on_cuda else ''}")
    for table in tables:
        if table["what"] == "block":
            print_block_table(table)
        else:
            print_exchange_table(table, on_cuda)
    notes = [f"left out: {text}" for text in left_out]
    for table in tables:
        for name, result in table["rows"].items():
            for mode, summary in result.items():
                if "reason" in summary:
                    notes.append(f"not measured: {table['what']} {table['shape']}, {name}, {mode}: {summary['reason']}")
    if notes:
        print("", *notes, sep="\n")


if __name__ == "__main__":
    main()
