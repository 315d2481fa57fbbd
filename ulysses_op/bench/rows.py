"""The rate of copies to peers by the width of their rows: heads times elements that lie together on both sides."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from ..communicator import Communicator
from ..layout import Direction
from .block import ONE_SIDED
from .contenders import communicators, exchange_one, gather_by_pack, scatter_by_pack
from .measure import ALONE, QUEUED, Contender, Effort, Outputs, Ranks, format_table, measure, median_of, number
from .profiles import Shape

WIDTHS = (64, 128, 256, 512, 640, 1024, 1280, 2048, 2560, 5120, 10240, 16384)
"""In bytes. Attention's are H_local * D elements."""
FLAT, HANDSHAKES = "in one row", "handshakes alone"


def rows_table(shape: Shape, dtype: torch.dtype, effort: Effort, ranks: Ranks) -> dict[str, Any]:
    """Exchanges in which each peer gets as many bytes as of ``shape``, cut into rows; own slices are left out. What is
    scattered is a third of a fused tensor, what is gathered is dense.
    """
    ranks.progress(f"rows {shape}")
    batch, seq_local, num_heads, head_dim = shape
    nbytes = batch * seq_local * num_heads // ranks.world_size * head_dim * dtype.itemsize
    with ExitStack() as stack:
        contenders = []
        for communicator in communicators(stack, ranks, [ONE_SIDED[ranks.device.type]]).values():
            token = torch.zeros(1, 1, ranks.world_size, 1, dtype=dtype, device=ranks.device)
            contenders.append(Contender(HANDSHAKES, _run_of(communicator, token, "scatter_heads")))
            flat = _random(1, 1, ranks.world_size, nbytes // dtype.itemsize, dtype=dtype, ranks=ranks)
            contenders.append(_contender(FLAT, communicator, flat, "scatter_heads"))
            for width in filter(nbytes.__ge__, WIDTHS):
                elements, count = width // dtype.itemsize, nbytes // width
                fused = _random(1, count, 3, ranks.world_size, elements, dtype=dtype, ranks=ranks)
                contenders.append(_contender(f"{width} B, scattered", communicator, fused[:, :, 2], "scatter_heads"))
                dense = _random(1, count * ranks.world_size, 1, elements, dtype=dtype, ranks=ranks)
                contenders.append(_contender(f"{width} B, gathered", communicator, dense, "gather_heads"))
        mode = QUEUED if ranks.on_cuda else ALONE
        rows = measure(ranks, contenders, [None], effort, modes=(mode,))
    return {"what": "rows", "shape": shape, "mode": mode, "bytes": nbytes * (ranks.world_size - 1), "rows": rows}


def _random(*sizes: int, dtype: torch.dtype, ranks: Ranks) -> torch.Tensor:
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    return torch.randn(sizes, dtype=dtype, device=ranks.device, generator=generator)


def _run_of(communicator: Communicator, x: torch.Tensor, direction: Direction) -> Any:
    return lambda _: (exchange_one(communicator, x, direction, own_slice=False),)


def _contender(name: str, communicator: Communicator, x: torch.Tensor, direction: Direction) -> Contender:
    check = partial(_check, name, communicator, x, direction)
    return Contender(name, _run_of(communicator, x, direction), check)


def _check(
    name: str, communicator: Communicator, x: torch.Tensor, direction: Direction, _: int, outputs: Outputs
) -> None:
    """What peers have sent; the own part is nobody's."""
    expected = scatter_by_pack(x) if direction == "scatter_heads" else gather_by_pack(x)
    exchange = communicator._exchanges.find(x, (direction, None, None, False))
    for region in exchange.peer_dests(communicator.rank):
        if not torch.equal(outputs[0][region], expected[region]):
            raise AssertionError(f"{name}: the result differs from that of the process group")


def print_rows_table(table: dict[str, Any]) -> None:
    rows, mode, nbytes = table["rows"], table["mode"], table["bytes"]
    handshakes = median_of(rows.get(HANDSHAKES, {}), mode) or 0.0
    flat = median_of(rows.get(FLAT, {}), mode)
    lines = []
    for name, result in rows.items():
        us = median_of(result, mode)
        cells = [name, number(us), number(median_of(result, mode, "q1_us")), number(median_of(result, mode, "q3_us"))]
        if name == HANDSHAKES or us is None or us <= handshakes:
            cells += ["-", "-"]
        else:
            share = "-" if flat is None else f"{100 * (flat - handshakes) / (us - handshakes):.0f} %"
            cells += [f"{nbytes / (us - handshakes) / 1e3:.0f}", share]
        lines.append(cells)
    print(f"\nrows, {nbytes / 2**20:.1f} MiB to peers, own slices left out, {mode}")
    print("GB/s: bytes to peers over the time beyond that of handshakes alone; of one row: of the rate of a flat copy")
    print(format_table(["rows", "us", "q1", "q3", "GB/s", "of one row"], lines))
