"""The demonstration as a command: runs the case, judges it, and tells."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from .. import __version__
from ..capability import BACKENDS
from ..communicator import Communicator
from ..errors import BackendUnavailableError
from ..launch import LaunchError, Placement, add_arguments, place, run
from .case import Case, RecordingCommunicator, Size, all_ranks, compare, delivered_exactly
from .clip import Grid

DESCRIPTION = """\
Runs the attention block of a video diffusion transformer over a synthetic clip, its sequence split over ranks: fused
QKV projection, RMSNorm and 3-D RoPE of q and k, heads exchanged for sequence, attention, and back. Checks bit by bit
what the exchanges deliver, and the block's output against the same block on the whole sequence. On GPUs, times the
block on the backend in use and on torch.distributed's collectives. Starts its own ranks unless torchrun did.

exit status: 0 everything held on all ranks; 1 something did not; 2 it could not run"""

MAX_ABS_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
MIN_COSINE = 0.999
DEFAULT_SIZES = {
    "cpu": Size(Grid(5, 15, 26), 512, 8, torch.float32),
    "cuda": Size(Grid(13, 30, 52), 5120, 40, torch.bfloat16),  # 49 frames of 832x480
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PEER_TIMEOUT_S = 60.0
_WARM_UP, _REPETITIONS = 5, 25


def add_parser(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add_arguments(parser)
    parser.add_argument("--backend", choices=("auto", *BACKENDS), default="auto", help="default: auto")
    add_size_arguments(parser)


def add_size_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that :func:`size_of` reads."""
    parser.add_argument(
        "--grid",
        type=int,
        nargs=3,
        metavar=("FRAMES", "HEIGHT", "WIDTH"),
        help="patches of the clip: 4x16x16 pixels each",
    )
    parser.add_argument("--hidden", type=int, help="width of the block")
    parser.add_argument("--heads", type=int, help="attention heads")
    parser.add_argument("--dtype", choices=tuple(_DTYPES), help="default: float32 on the CPU, bfloat16 on GPUs")


def size_of(options: argparse.Namespace, device_type: str) -> Size:
    """The size that the arguments ask for, with the device's defaults. Raises LaunchError for one that cannot be."""
    default = DEFAULT_SIZES[device_type]
    grid = Grid(*options.grid) if options.grid else default.grid
    hidden = default.hidden if options.hidden is None else options.hidden
    num_heads = default.num_heads if options.heads is None else options.heads
    if min(*grid, hidden, num_heads) < 1:
        raise LaunchError(f"the grid {tuple(grid)}, hidden {hidden} and heads {num_heads} must be positive")
    if hidden % (2 * num_heads):
        raise LaunchError(f"hidden {hidden} must be a multiple of twice the heads, {num_heads}: RoPE rotates pairs")
    return Size(grid, hidden, num_heads, _DTYPES[options.dtype] if options.dtype else default.dtype)


def main(options: argparse.Namespace) -> int:
    """Run the demonstration; the exit status."""
    try:
        placement = place(options.ranks, options.device)
        size = size_of(options, placement.device_type)
        return run(demonstrate, (placement, size, options.backend), placement, options.timeout)
    except LaunchError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


@torch.inference_mode()
def demonstrate(device: torch.device, placement: Placement, size: Size, backend: str) -> int:
    """The demonstration on one rank; rank 0 tells. The exit status is the same on all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def tell(what: str, text: str) -> None:
        if rank == 0:
            print(f"{what:<10} {text}", flush=True)

    tell("ulysses_op", f"{__version__}, torch {torch.__version__}: {world_size} ranks on {_device_name(device)}")
    if placement.note:
        tell("", placement.note)
    comm = RecordingCommunicator(backend=backend, timeout_s=_PEER_TIMEOUT_S)
    with comm:
        try:
            comm.build(device)
        except BackendUnavailableError as error:
            tell("result", f"not run: {error}")
            return 2
        tell("backend", f"{comm.backend}: {comm.reason}")
        case = Case(size, rank, world_size, device)
        _describe(case, tell)
        held = _judge(case, comm, tell)
        if held and device.type == "cuda":
            _time(case, comm, device, tell)
    tell("result", "everything held on all ranks" if held else "FAILED")
    return 0 if held else 1


Tell = Callable[[str, str], None]


def _describe(case: Case, tell: Tell) -> None:
    size, grid = case.size, case.size.grid
    frames, height, width = grid.clip_shape
    patches = " x ".join(map(str, grid))
    tell("clip", f"{frames} frames of {width}x{height}: {patches} patches, sequence of {grid.seq_len}")
    tell("block", f"hidden {size.hidden}, {size.num_heads} heads of {size.head_dim}, {str(size.dtype)[6:]}")
    for rank in range(case.world_size):
        there, _ = case.exchanges(rank)
        forward, back = case.sent_bytes(rank)
        tell(
            f"rank {rank}",
            f"q, k, v {there.input_shape(rank)} -> {there.output_shape(rank)}; "
            f"sends {forward / 1e6:.3f} MB of them, and {back / 1e6:.3f} MB of the output",
        )


def _judge(case: Case, comm: RecordingCommunicator, tell: Tell) -> bool:
    """Whether exchanges and block deliver what they should on every rank. Twice: targets are used again."""
    held = True
    reference = case.run_unsplit()[:, case.rows]
    for turn in ("first", "again"):
        comm.record = []
        output = case.run_split(comm)
        _synchronize(output.device)
        comm.check()
        record, comm.record = comm.record, None
        exact = [delivered_exactly(exchanged, case) for exchanged in record]
        everyone = all_ranks([*map(float, exact), *compare(output, reference)])
        wrong = [
            f"{exchanged.tag} on rank {rank}"
            for rank, values in enumerate(everyone)
            for exchanged, value in zip(record, values[: len(record)], strict=True)
            if not value
        ]
        tags = ", ".join(exchanged.tag for exchanged in record)
        tell(
            "exchange",
            f"{turn}: WRONG for {', '.join(wrong)}" if wrong else f"{turn}: {tags} bitwise right on all ranks",
        )
        errors, cosines = [values[-2] for values in everyone], [values[-1] for values in everyone]
        limit = MAX_ABS_ERROR[case.size.dtype]
        # A NaN fails.
        close = all(error <= limit for error in errors) and all(cosine > MIN_COSINE for cosine in cosines)
        tell(
            "parity",
            f"{turn}: {'' if close else 'WRONG: '}largest error {max(errors):.1e} (at most {limit:.0e}), "
            f"cosine {min(cosines):.6f} (above {MIN_COSINE}), against the block unsplit",
        )
        held = held and close and not wrong
    return held


def _time(case: Case, comm: Communicator, device: torch.device, tell: Tell) -> None:
    """Time the block on the backend in use and on c10d, taking turns."""
    comms = {comm.backend: comm}
    if comm.backend != "c10d":
        comms["c10d"] = Communicator(backend="c10d", timeout_s=_PEER_TIMEOUT_S).build(device)
    times: dict[str, list[float]] = {name: [] for name in comms}
    in_step = torch.zeros(1, device=device)
    for turn in range(_WARM_UP + _REPETITIONS):
        for name, used in comms.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            dist.all_reduce(in_step)
            start.record()
            case.run_split(used)
            end.record()
            torch.cuda.synchronize(device)
            if turn >= _WARM_UP:
                times[name].append(start.elapsed_time(end))
    medians = {}
    for name, used in comms.items():
        used.check()
        slowest = torch.tensor(all_ranks(times[name]), dtype=torch.float64).amax(0)
        low, median, high = torch.quantile(slowest, slowest.new_tensor([0.25, 0.5, 0.75])).tolist()
        medians[name] = median
        spread = f"quartiles {low:.3f} to {high:.3f}, of {_REPETITIONS} on the slowest rank"
        tell(name, f"{median:.3f} ms a block, median ({spread})")
        if used is not comm:
            tell("", f"{median / medians[comm.backend]:.3f} times as long as on {comm.backend}")
            used.close()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
