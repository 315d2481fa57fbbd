"""``python -m ulysses_op``: commands that run without writing a program."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__, doctor
from .bench import main as bench
from .demo import main as demo
from .soak import main as soak
from .trace import main as trace

COMMANDS = {
    "bench": (bench, "the exchanges and attention blocks timed, against collectives and against no communication"),
    "demo": (demo, "an attention block over a video clip, split over ranks, checked and timed"),
    "doctor": (doctor, "which backends run here, which do not, and why"),
    "soak": (soak, "random programs of exchanges, every element of every result checked"),
    "trace": (trace, "an attention block's timeline on GPUs, and how much of each copy compute hides"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ulysses_op", description="Ulysses sequence parallelism for PyTorch"
    )
    parser.add_argument("--version", action="version", version=f"ulysses_op {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=module.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_parser(command)
        command.set_defaults(main=module.main)
    options = parser.parse_args(argv)
    status: int = options.main(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
