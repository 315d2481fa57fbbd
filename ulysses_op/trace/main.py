"""The timeline of an attention block as a command: what is run, recorded and told."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..bench.arguments import add_shape_arguments, chosen_dtype, chosen_shapes, command_line, number_from, unfit
from ..bench.block import Inputs, block, by_group, by_packs, check_close, compiled_norm, make_inputs, norm_rope
from ..bench.contenders import communicators, scatter_by_pack
from ..bench.device_timeline import read_spans, record
from ..bench.measure import Outputs, Ranks, format_table, number, provenance
from ..bench.profiles import Shape
from ..communicator import Communicator
from ..launch import LaunchError, add_arguments, place, run
from .picture import draw
from .timeline import Step, middle_step, read_steps, summarise

DESCRIPTION = """\
Records what the GPUs do when in an attention block: fused projection, norm + RoPE, exchange, attention, exchange back,
output projection. Tells of each copy to a peer how much of it compute of the same GPU hid, and draws one step. For each
mode and rank it writes MODE-SHAPE-rankR.json, a Chrome trace (chrome://tracing, Perfetto), and .svg and .png of the
same name where matplotlib is installed. Starts its own ranks unless torchrun did.

modes:
  eager      V first by hand, in a group; norm + RoPE compiled where Triton is installed
  compiled   written plainly, by ulysses_op.compile

exit status: 0 what was recorded holds what a block does; 1 an output was wrong or a recording does not; 2 nothing could
be recorded"""

MODES = ("eager", "compiled")
BACKENDS = ("symm_mem", "cuda_ipc")  # the first that all ranks can run
_DEFAULT_SHAPES: list[Shape] = [(1, 9472, 28, 128)]
PICTURES = (".svg", ".png")

LEGEND = """\
us: how long the copy to the peers ran, hidden us: how long of that a kernel ran on the same GPU, own us: how long none
did, but the rank's own slice was copied, by multiprocessors; medians of the steps. hidden: that part of all steps'
copies; or own: together with that beside own slices. Which copy is which is told by the order of submission."""

Build = Callable[[Shape, Inputs, Communicator, Ranks], Callable[[], Outputs]]


def add_parser(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add_arguments(parser)
    add_shape_arguments(parser)
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES), help="default: both")
    parser.add_argument(
        "--warmups", type=number_from(1), default=5, help="calls before those that are recorded, default: %(default)s"
    )
    parser.add_argument(
        "--steps",
        type=number_from(1),
        default=5,
        help="calls that count, default: %(default)s; one more is recorded before them, for the profiler to warm up",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("trace"), metavar="DIR", help="where the files go, default: %(default)s"
    )
    what = "run nothing, and read traces that this command wrote; pictures go to DIR"
    parser.add_argument("--read", nargs="+", type=Path, default=[], metavar="FILE", help=what)


def main(options: argparse.Namespace) -> int:
    """Record, or read what was recorded; the exit status."""
    try:
        if options.read:
            missing = [str(path) for path in options.read if not path.is_file()]
            if missing:
                raise LaunchError(f"no such file: {', '.join(missing)}")
            _make_folder(options.out)
            return read(options)
        placement = place(options.ranks, options.device)
        if placement.device_type != "cuda":
            why = placement.note or "device is 'cpu'"
            raise LaunchError(f"what GPUs do is recorded here, and {why}; --read takes what was recorded elsewhere")
        if placement.world_size < 2:
            raise LaunchError("one rank has no peer to copy to: 2 ranks or more are needed")
        _make_folder(options.out)
        return run(trace, (options, command_line()), placement, options.timeout)
    except LaunchError as error:
        print(f"trace: {error}", file=sys.stderr)
        return 2


def _make_folder(folder: Path) -> None:
    """Raises LaunchError where nothing could be written in the end."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise LaunchError(f"{folder} cannot be written to: {error}") from None


def read(options: argparse.Namespace) -> int:
    """Tables and pictures of recorded traces; 1 if one of them holds no block."""
    print(LEGEND)
    status = 0
    for path in options.read:
        try:
            steps = read_steps(read_spans(path))
        except (OSError, ValueError) as error:
            print(f"trace: {path}: {error}", file=sys.stderr)
            status = 1
            continue
        print(table(path.stem, steps))
        lack = draw_pictures(middle_step(steps), path.stem, options.out / path.stem)
        if lack:
            print(f"no picture: {lack}")
    return status


def trace(device: torch.device, options: argparse.Namespace, command: str) -> int:
    """The command on one rank; rank 0 tells. The exit status is the same on all ranks."""
    ranks = Ranks(device, options.timeout)
    facts = provenance(device, command)
    if ranks.rank == 0:
        print("\n".join(f"{name}: {text}" for name, text in facts.items()))
        print(f"\n{LEGEND}", flush=True)
    left_out: list[str] = []
    shapes = chosen_shapes(options, ranks.world_size, _DEFAULT_SHAPES, left_out)
    reasons: list[str] = []
    with torch.no_grad(), ExitStack() as stack:
        communicator = _first_usable(stack, ranks)
        if communicator is None:
            left_out.append(f"everything: the ranks can run none of {', '.join(BACKENDS)}")
        else:
            reasons = _trace_all(shapes, communicator, options, ranks, left_out)
        torch.cuda.empty_cache()
    if ranks.rank == 0:
        print("", *(f"left out: {text}" for text in left_out), f"files are in {options.out}", sep="\n", flush=True)
    ranks.any(False)  # nobody leaves while others still need it
    return int(any(reasons)) if reasons else 2


def _first_usable(stack: ExitStack, ranks: Ranks) -> Communicator | None:
    for backend in BACKENDS:
        for communicator in communicators(stack, ranks, [backend]).values():
            return communicator
    return None


def _trace_all(
    shapes: Sequence[Shape],
    communicator: Communicator,
    options: argparse.Namespace,
    ranks: Ranks,
    left_out: list[str],
) -> list[str]:
    """What :func:`trace_block` says of each block that the ranks can run."""
    reasons = []
    for shape in shapes:
        lack = unfit(shape, ranks.world_size, for_block=True)
        if lack:
            left_out.append(f"{shape}: {lack}")
            continue
        for mode in options.mode:
            reason = trace_block(mode, shape, communicator, options, ranks)
            reasons.append(reason)
            if reason:
                left_out.append(f"{mode} {shape}: {reason}")
    return reasons


def trace_block(mode: str, shape: Shape, communicator: Communicator, options: argparse.Namespace, ranks: Ranks) -> str:
    """Check the block's output, record it, tell. Why that failed on some rank, else nothing. Collective."""
    ranks.progress(f"{mode} {shape}")
    torch.compiler.reset()
    inputs = make_inputs(shape, chosen_dtype(options, ranks.device.type), ranks)
    call = _BUILDS[mode](shape, inputs, communicator, ranks)
    name = f"{mode}-{'x'.join(map(str, shape))}-rank{ranks.rank}"
    path = options.out / f"{name}.json"
    found: list[Step] = []

    def check() -> None:
        packs = by_packs(lambda tensors: tuple(map(scatter_by_pack, tensors)))
        expected = block(inputs, shape, norm_rope, packs)[0].float()
        check_close(mode, expected)(0, call())

    def warm_up() -> None:
        for _ in range(options.warmups):
            ranks.in_step()
            call()
        if ranks.on_cuda:
            torch.cuda.synchronize()

    def analyse() -> None:
        found.extend(read_steps(read_spans(path)))

    reason = ranks.attempt(check) or ranks.attempt(warm_up)
    reason = reason or ranks.attempt(partial(record, call, ranks, path, options.steps + 1))
    reason = reason or ranks.attempt(analyse)
    if reason:
        return reason
    title = f"{mode}, (B, S_local, H, D) = {tuple(shape)}, {communicator.backend}, rank {ranks.rank}"
    note = draw_pictures(middle_step(found), title, options.out / name)
    of_ranks: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(of_ranks, (table(title, found), note))
    if ranks.rank == 0:
        print(*(text for text, _ in of_ranks), sep="\n")
        print(*sorted({f"no picture: {lack}" for _, lack in of_ranks if lack}), sep="\n", end="", flush=True)
    return ""


def _eager(shape: Shape, inputs: Inputs, communicator: Communicator, ranks: Ranks) -> Callable[[], Outputs]:
    norm, _ = compiled_norm(inputs, shape, ranks)
    return partial(block, inputs, shape, norm, by_group(communicator, lent=True))


def _compiled(shape: Shape, inputs: Inputs, communicator: Communicator, ranks: Ranks) -> Callable[[], Outputs]:
    from ..bench.compiled import COMPILERS, PASS, by_functions  # which imports Inductor

    exchanges = by_functions(communicator)

    def plain(inputs: Inputs) -> Outputs:
        return block(inputs, shape, norm_rope, exchanges)

    return partial(COMPILERS[PASS](plain, fullgraph=True, dynamic=False), inputs)


_BUILDS: dict[str, Build] = {"eager": _eager, "compiled": _compiled}


def draw_pictures(step: Step, title: str, path: Path) -> str:
    """Draw ``path`` with the endings of pictures; why that could not be done, else nothing."""
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed (pip install 'ulysses_op[plot]'); --read draws elsewhere what is recorded"
    try:
        draw(step, title, [path.with_name(path.name + ending) for ending in PICTURES])
    except Exception as error:  # the recording is good without it
        return f"{type(error).__name__}: {error}"
    return ""


def table(title: str, steps: Sequence[Step]) -> str:
    """What is told of one rank's steps."""
    step = middle_step(steps)
    lines = [
        [
            row.what,
            *(number(us, 1) for us in (row.us, row.hidden_us, row.exposed_us, row.own_us)),
            *(f"{100 * part:.0f} %" for part in (row.hidden, row.or_own)),
        ]
        for row in summarise(steps)
    ]
    what = f"steps: {len(steps)}, the middle one {step.us:.0f} us, of which nothing ran for {step.idle_us:.0f} us"
    head = ["copy", "us", "hidden us", "exposed us", "own us", "hidden", "or own"]
    return f"\n{title}\n{what}\n{format_table(head, lines)}"
