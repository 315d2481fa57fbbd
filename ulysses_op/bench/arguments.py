"""Arguments that commands around attention blocks share: which shapes, of which element type."""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..launch import under_torchrun
from .profiles import PROFILES, Shape, shape_of

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MEMORY, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
_DEFAULT_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that :func:`chosen_shapes` and :func:`chosen_dtype` read."""
    parser.add_argument("--profile", nargs="+", choices=PROFILES, default=[], help="shapes by name")
    parser.add_argument(
        "--shape", nargs="+", type=_shape, default=[], metavar="B,S_local,H,D", help="shapes by number, of each rank"
    )
    parser.add_argument("--dtype", choices=tuple(_DTYPES), help="default: float32 on the CPU, bfloat16 on GPUs")


def chosen_shapes(
    options: argparse.Namespace, world_size: int, default: Sequence[Shape], left_out: list[str]
) -> list[Shape]:
    """The shapes asked for, else the default ones. Profiles that ``world_size`` ranks cannot split go to ``left_out``,
    a sentence each.
    """
    shapes: list[Shape] = list(options.shape)
    for name in options.profile:
        try:
            shapes.append(shape_of(name, world_size))
        except ValueError as error:
            left_out.append(str(error))
    return shapes if options.shape or options.profile else list(default)


def chosen_dtype(options: argparse.Namespace, device_type: str) -> torch.dtype:
    return _DTYPES[options.dtype or _DEFAULT_DTYPE[device_type]]


def unfit(shape: Shape, world_size: int, for_block: bool) -> str:
    """Why ranks cannot exchange the shape, or the attention blocks not take it; empty where they can."""
    if shape[2] % world_size:
        return f"H = {shape[2]} does not divide by {world_size} ranks"
    return "the blocks take B = 1" if for_block and shape[0] != 1 else ""


_TENSORS = {
    "exchange": 57,
    "block": 40,
    "compiled": 40,
    "ablation": 74,
    "contention": 20,
    "rows": 90,
    "host": 25,
    "model h3": 70,
    "model lingbot": 70,
}
"""How many tensors of the shape a rank holds at most, level by level, as measured on CPUs."""
_LAYER_TENSORS = {"model lingbot": 10}  # and as many of each layer's
_WEIGHTS = 8  # as many of (C, C) in the levels that have a block
_LAYER_WEIGHTS = {"model h3": 15, "model lingbot": 12}  # and in each layer


def needed_bytes(level: str, shape: Shape, dtype: torch.dtype, layers: int) -> int:
    """About what a rank needs to measure a level on the CPU."""
    elements, width = math.prod(shape), shape[2] * shape[3]
    tensors = _TENSORS[level] + layers * _LAYER_TENSORS.get(level, 0)
    weights = 0 if level in ("exchange", "host", "rows") else _WEIGHTS + layers * _LAYER_WEIGHTS.get(level, 0)
    return (tensors * elements + weights * width * width) * dtype.itemsize


def available_bytes() -> int:
    """Memory of this host, or of the container around this process, that is not in use."""
    (kilobytes,) = (line.split()[1] for line in _MEMORY.read_text().splitlines() if line.startswith("MemAvailable:"))
    found = int(kilobytes) * 1024
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
        found = min(found, int((_CGROUP / "memory.max").read_text()) - int((_CGROUP / "memory.current").read_text()))
    return max(found, 0)


def number_from(least: int) -> Callable[[str], int]:
    """An argument's type: a whole number of at least ``least``."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too few: at least {least}")
        return value

    return number


def command_line() -> str:
    """How this command was started."""
    launcher = "torchrun ... -m" if under_torchrun() else "python -m"
    return f"{launcher} ulysses_op {shlex.join(sys.argv[1:])}"


def _shape(text: str) -> Shape:
    try:
        batch, seq_local, num_heads, head_dim = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not four sizes B,S_local,H,D") from None
    if min(batch, seq_local, num_heads, head_dim) < 1 or head_dim % 2:
        raise argparse.ArgumentTypeError(f"{text!r}: sizes must be positive, and D even")
    return batch, seq_local, num_heads, head_dim
