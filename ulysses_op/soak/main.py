"""The soak as a command: what it is asked for, and what it tells."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from ..bench.arguments import number_from
from ..capability import BACKENDS
from ..launch import LaunchError, add_arguments, place, positive, run
from .executor import LAYOUTS_COUNTED
from .run import Plan, soak_rank

DESCRIPTION = """\
Runs random programs of exchanges and compares every element of every result with what plain indexing gives: groups and
functions, both directions, every size of element, any strides, uneven and empty parts, replicated heads, gradients,
evicted and growing buffers, groups that nobody waits for, calls that must be refused, and new communicators. Ranks
compare their programs, and what they hold, now and then. Starts its own ranks unless torchrun did.

exit status: 0 everything held on all ranks; 1 something was wrong or failed; 2 nothing could be run"""

DEFAULT_MINUTES = 1.0
_TELL_EVERY_S = 10.0


def add_parser(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add_arguments(parser, timeout_s=None)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=positive("minutes"), help=f"default: {DEFAULT_MINUTES:g}")
    length.add_argument("--steps", type=number_from(1), help="a number of steps instead")
    parser.add_argument("--seed", type=int, help="of the program and all values, default: of the time")
    parser.add_argument("--backend", choices=("auto", *BACKENDS), default="auto", help="default: auto")
    parser.add_argument(
        "--peer-timeout",
        type=positive("seconds"),
        default=30.0,
        metavar="SECONDS",
        help="how long a peer may take, and a rank to stop when another has failed, default: %(default)g",
    )


def main(options: argparse.Namespace) -> int:
    """Run the soak; the exit status."""
    minutes = DEFAULT_MINUTES if options.minutes is None and options.steps is None else options.minutes
    seed = int(time.time()) if options.seed is None else options.seed
    plan = Plan(seed, options.steps, minutes, options.backend, options.peer_timeout)
    # Programs end by themselves: what is over this is stuck.
    timeout_s = options.timeout or (600.0 if minutes is None else 60.0 * minutes) + 120.0
    try:
        placement = place(options.ranks, options.device, may_share=True)
    except LaunchError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    if placement.note:
        print(placement.note, file=sys.stderr)
    try:
        return run(soak, (plan,), placement, timeout_s)
    except LaunchError as error:  # a rank has died or is stuck
        print(f"soak: seed {seed}: {error}", file=sys.stderr)
        return 1


def soak(device: torch.device, plan: Plan) -> int:
    """The soak on one rank, whose exit status it returns; rank 0 tells of progress, each rank of its own failure."""
    rank = dist.get_rank()
    seeds = [plan.seed]
    dist.broadcast_object_list(seeds, device=torch.device("cpu"))  # torchrun's ranks have each drawn one
    plan = replace(plan, seed=seeds[0])
    told_s = time.monotonic()

    def tell(line: str) -> None:
        nonlocal told_s
        if rank == 0 and time.monotonic() - told_s >= _TELL_EVERY_S:
            told_s = time.monotonic()
            print(line, flush=True)

    report = soak_rank(device, plan, tell=tell)
    if report.problem:
        print(f"soak: {report.problem}", file=sys.stderr, flush=True)
    if rank == 0:
        verdict = {0: "everything held", 1: "FAILED", 2: "not run"}[report.status]
        whose = f"on {dist.get_world_size()} ranks" if report.status == 0 else "on rank 0"
        or_more = " or more" if report.layouts == LAYOUTS_COUNTED else ""
        print(
            f"{verdict} {whose}{f' ({report.backend})' if report.backend else ''}: {report.steps} steps, "
            f"{report.transfers} transfers of {report.layouts}{or_more} layouts, {report.elements} elements checked, "
            f"{report.received_bytes} bytes received; "
            f"again: python -m ulysses_op soak --ranks {dist.get_world_size()} --seed {plan.seed} --steps "
            f"{report.steps + (report.status == 1)}",
            flush=True,
        )
    return report.status
