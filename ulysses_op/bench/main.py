"""The benchmark as a command: which tables are measured, and what is told of them."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..launch import LaunchError, add_arguments, place, positive, run
from .ablation import ablation_table, print_ablation_table
from .arguments import (
    add_shape_arguments,
    available_bytes,
    chosen_dtype,
    chosen_shapes,
    command_line,
    needed_bytes,
    number_from,
    unfit,
)
from .block import ATTENTIONS, block_table, print_block_table
from .contention import contention_table, print_contention_table
from .diffusers import MODELS, diffusers_table, print_diffusers_table
from .exchange import exchange_tables, print_exchange_table
from .handshakes import handshake_table, print_handshake_table
from .host import host_table, print_host_table
from .loops import LOOPS
from .measure import Effort, Ranks, provenance
from .plot import plot
from .profiles import Shape
from .rows import print_rows_table, rows_table
from .zero_cta import NAME as ZERO_CTA
from .zero_cta import in_force

DESCRIPTION = """\
Times the exchanges, and attention blocks around them, against a process group's all-to-all and against the same block
without communication. Every output is checked first; contenders take turns. Starts its own ranks unless torchrun did.

levels:
  exchange   the grouped scatter of q, k and v, and the gather of o
  block      fused projection, norm + RoPE, exchange, attention, exchange back, output projection; V first by hand
  compiled   the same written plainly, as one compiled graph
  model      denoising loops of several blocks and steps: h3 (fused projection), lingbot (three of them, and a cache)
  diffusers  a transformer of diffusers at its real size, against diffusers' own context parallelism (GPUs only)
  ablation   the block by hand with one of its ingredients taken away, one after the other; other kinds of handshakes
  contention what each transfer adds to a product, a norm + RoPE and an attention beside it
  rows       the rate of copies to peers by the width of their rows, against one flat copy
  host       what a group costs the host, eager and through the ops of compiled code

exit status: 0 what was measured was right; 1 an output was wrong or a contender failed; 2 nothing could be measured"""

LEVELS = ("exchange", "block", "compiled", "ablation", "contention", "rows", "model", "diffusers", "host")
_DEFAULT_SHAPES: dict[str, list[Shape]] = {
    "cuda": [(1, 9472, 28, 128), (1, 9472, 56, 128), (1, 3120, 40, 128), (1, 16380, 40, 128)],
    "cpu": [(1, 512, 8, 64), (1, 8192, 8, 64), (1, 32768, 8, 64)],  # 1, 16, 64 MiB a tensor in float32
}
_LOOP_SHAPES: dict[str, dict[str, list[Shape]]] = {
    "cuda": {"model h3": [(1, 9472, 28, 128)], "model lingbot": [(1, 3120, 40, 128)]},
    "cpu": {"model h3": [(1, 128, 8, 32)], "model lingbot": [(1, 64, 8, 32)]},
}
_LAYERS = 4  # of a loop

LEGEND = """\
us: median of the iterations, each the maximum over the ranks; q1, q3: their quartiles. GB/s: bytes to peers over the
median. "x ...": how many times as fast as this row of the process group in the same mode. over bound: time beyond that
of the block without communication."""
CUDA_LEGEND = """
The first columns begin with nothing queued, so the host's time is in them; queued: the host is ahead; captured: replay
of a CUDA graph, the host ahead. host us: until the calls have returned."""


def add_parser(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add_arguments(parser)
    parser.add_argument("--level", nargs="+", choices=LEVELS, default=["exchange"], help="default: exchange")
    add_shape_arguments(parser)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["wan-14b"], help="of level diffusers")
    parser.add_argument("--loop", nargs="+", choices=tuple(LOOPS), default=list(LOOPS), help="of level model")
    parser.add_argument("--layers", type=number_from(1), help="of models: diffusers', default all; of loops, default 4")
    parser.add_argument("--steps", type=number_from(1), default=4, help="of level model's loops, default: 4")
    parser.add_argument("--attention", choices=tuple(ATTENTIONS), default="sdpa", help="of the blocks, default: sdpa")
    parser.add_argument(
        "--warmups", type=number_from(2), default=10, help="rounds before those that count, 2 or more, default: 10"
    )
    parser.add_argument(
        "--iterations", type=number_from(2), default=50, help="rounds that count, 2 or more, default: 50"
    )
    what = "shapes that have not begun then are left out, default: 240"
    parser.add_argument("--budget", type=positive("seconds"), default=240.0, metavar="SECONDS", help=what)
    parser.add_argument("--json", metavar="FILE", help="write everything there, each iteration included")
    parser.add_argument("--plot", metavar="FILE", help="draw the medians there (needs matplotlib); .png, .svg, ...")


def main(options: argparse.Namespace) -> int:
    """Run the benchmark; the exit status."""
    try:
        placement = place(options.ranks, options.device)
        if placement.note:
            print(placement.note, file=sys.stderr)
        _check_requirements(options)
        return run(bench, (options, command_line()), placement, options.timeout)
    except LaunchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def _check_requirements(options: argparse.Namespace) -> None:
    """Raises LaunchError for what could not be written in the end, and for packages that are missing."""
    for path in filter(None, (options.json, options.plot)):
        folder = os.path.dirname(path) or "."
        if not os.access(folder, os.W_OK) or os.path.isdir(path):
            raise LaunchError(
                f"{path} cannot be written: {folder} is no folder that can be written to, or it is one itself"
            )
    if "diffusers" in options.level and importlib.util.find_spec("diffusers") is None:
        raise LaunchError("--level diffusers needs it: pip install 'ulysses_op[diffusers]'")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise LaunchError("--plot needs matplotlib: pip install 'ulysses_op[plot]'")


def bench(device: torch.device, options: argparse.Namespace, command: str) -> int:
    """The benchmark on one rank; rank 0 tells. The exit status is the same on all ranks."""
    ranks = Ranks(device, options.budget)
    facts = provenance(device, command)
    if ranks.rank == 0:
        print("\n".join(f"{name}: {text}" for name, text in facts.items()))
        print(f"\n{LEGEND}{CUDA_LEGEND if ranks.on_cuda else ''}", flush=True)
    tables: list[dict[str, Any]] = []
    left_out: list[str] = []
    looked_at: list[str] = []
    try:
        with torch.no_grad():
            for table in _tables(device, options, ranks, left_out):
                tables.append(table)
                if ranks.rank == 0:
                    _print(table)
            of_nccl = [table["shape"] for table in tables if any(name.startswith(ZERO_CTA) for name in table["rows"])]
            for shape in dict.fromkeys(of_nccl):
                looked_at.append(in_force(shape, chosen_dtype(options, device.type), ranks))
    except BaseException:
        left_out.append("everything after an exception")
        raise
    finally:
        if ranks.rank == 0:
            _finish(options, facts, tables, left_out, looked_at)
    ranks.any(False)  # nobody leaves while others still need it
    if not tables:
        return 2
    results = [result for table in tables for result in table["rows"].values()]
    return int(any(summary.get("failed") for result in results for summary in result.values()))


def _tables(
    device: torch.device, options: argparse.Namespace, ranks: Ranks, left_out: list[str]
) -> Iterator[dict[str, Any]]:
    """The tables as they are measured; what is left out, and why, goes to ``left_out``."""
    from .compiled import compiled_table  # which imports Inductor
    from .model import model_table

    dtype = chosen_dtype(options, device.type)
    effort = Effort(options.warmups, options.iterations)
    levels: dict[str, Callable[[Shape], list[dict[str, Any]]]] = {
        "exchange": lambda shape: exchange_tables(shape, dtype, effort, ranks),
        "block": lambda shape: [block_table(shape, dtype, options.attention, effort, ranks)],
        "compiled": lambda shape: [compiled_table(shape, dtype, options.attention, effort, ranks)],
        "ablation": lambda shape: [
            ablation_table(shape, dtype, options.attention, effort, ranks),
            *([handshake_table(shape, dtype, effort, ranks)] if ranks.on_cuda else []),
        ],
        "contention": lambda shape: [contention_table(shape, dtype, effort, ranks)],
        "rows": lambda shape: [rows_table(shape, dtype, effort, ranks)],
        "host": lambda shape: [host_table(shape, dtype, effort, ranks)],
    }

    def of_loop(loop: str) -> Callable[[Shape], list[dict[str, Any]]]:
        return lambda shape: [
            model_table(loop, shape, dtype, options.layers or _LAYERS, options.steps, effort, ranks),
        ]

    loops = {f"model {loop}": of_loop(loop) for loop in options.loop}
    levels.update(loops)
    if "ablation" in options.level and not ranks.on_cuda:
        left_out.append("other kinds of handshakes: they need GPUs")
    chosen = chosen_shapes(options, ranks.world_size, _DEFAULT_SHAPES[device.type], left_out)
    for level in itertools.chain.from_iterable(loops if level == "model" else (level,) for level in options.level):
        shapes = chosen
        if level in loops and not (options.shape or options.profile):
            shapes = _LOOP_SHAPES[device.type][level]
        for name in options.model if level == "diffusers" else ():
            if not ranks.on_cuda:
                left_out.append(f"diffusers {name}: it needs GPUs")
            elif ranks.over_budget():
                left_out.append(f"diffusers {name}: the budget of {options.budget:.0f} s was used up")
            else:
                yield diffusers_table(name, options.layers, effort, ranks)
                torch.cuda.empty_cache()
        for shape in shapes if level != "diffusers" else ():
            lack = unfit(shape, ranks.world_size, for_block=level not in ("exchange", "rows", "host"))
            if lack:
                left_out.append(f"{level} {shape}: {lack}")
            elif excess := _excess(level, shape, dtype, options.layers or _LAYERS, ranks):
                left_out.append(f"{level} {shape}: {excess}")
            elif ranks.over_budget():
                left_out.append(f"{level} {shape}: the budget of {options.budget:.0f} s was used up")
            else:
                yield from levels[level](shape)
                if ranks.on_cuda:
                    torch.cuda.empty_cache()


def _excess(level: str, shape: Shape, dtype: torch.dtype, layers: int, ranks: Ranks) -> str:
    """Why the CPU's memory is too small for a shape; empty where it is not, and on GPUs, which tell of it themselves.
    Collective.
    """
    if ranks.on_cuda:
        return ""
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
    needed, available = on_host * needed_bytes(level, shape, dtype, layers), available_bytes()
    if not ranks.any(needed > available):
        return ""
    return (
        f"{on_host} ranks need about {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are available: take "
        "a smaller --shape, --profile small, or --dtype bfloat16"
    )


def _print(table: dict[str, Any]) -> None:
    from .compiled import print_compiled_table
    from .model import print_model_table

    printers = {
        "attention block": print_block_table,
        "compiled block": print_compiled_table,
        "ablation": print_ablation_table,
        "contention": print_contention_table,
        "diffusers": print_diffusers_table,
        "handshakes": print_handshake_table,
        "host": print_host_table,
        "rows": print_rows_table,
        **{f"model {loop}": print_model_table for loop in LOOPS},
    }
    printers.get(table["what"], print_exchange_table)(table)
    sys.stdout.flush()


def _finish(
    options: argparse.Namespace,
    facts: dict[str, str],
    tables: list[dict[str, Any]],
    left_out: list[str],
    looked_at: list[str],
) -> None:
    notes = [*looked_at, *(f"left out: {text}" for text in left_out)]
    for table in tables:
        for name, result in table["rows"].items():
            for mode, summary in result.items():
                if "reason" in summary:
                    notes.append(f"not measured: {table['what']} {table['shape']}, {name}, {mode}: {summary['reason']}")
    if notes:
        print("", *notes, sep="\n", flush=True)
    if options.json:
        everything = {"facts": facts, "tables": tables, "left_out": left_out, "looked_at": looked_at}
        with open(options.json, "w") as file:
            json.dump(everything, file, indent=1)
    if options.plot:
        plot(tables, facts, options.plot)
