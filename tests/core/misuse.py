"""Faults that a sanitizer must find in the extension, made by calling it as nobody should; "none" is a right use.

    python misuse.py {none,overflow,freed,wrapped,race}

Of the package, only the extension is loaded.
"""

from __future__ import annotations

import ctypes
import importlib.util
import secrets
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any

spec = PathFinder.find_spec("_C", [f"{folder}/ulysses_op" for folder in sys.path])
assert spec is not None and spec.loader is not None
_C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_C)

ROWS, WIDTH = 64, 1024
READY, DONE = (1 << 32) + 1, (2 << 32) + 1


def transports() -> list[Any]:
    """Two ranks in one process: each copies on a thread of its own."""
    name, size = f"/ulysses_op-{secrets.token_hex(16)}", _C.Board.size_bytes(2)
    segment = _C.SharedSegment.create(name, size)
    _C.SharedSegment.unlink(name)
    boards = [_C.Board(segment, rank, 2) for rank in range(2)]
    for board in boards:
        board.register_self()
    for board in boards:
        board.watch_peers()
    return [_C.ShmTransport(board, 30.0, False, False) for board in boards]


def route(rank: int, target: int) -> Any:
    """Half of (1, ROWS, 2, WIDTH) bytes to the other rank's target; both ranks' targets begin at ``target``."""
    shape, strides = [1, ROWS, 2, WIDTH], [ROWS * 2 * WIDTH, 2 * WIDTH, WIDTH, 1]
    plan = _C.make_copy_plan("scatter_heads", shape, strides, 1, [(0, 1), (1, 2)], [ROWS, ROWS], rank)
    return _C.Route(plan, [target, target], 0)


def exchange(ranks: list[Any], putting: int | None, source: int = 0, target: int = 0) -> None:
    """A group in which at most one rank puts something."""
    for rank, transport in enumerate(ranks):
        transport.begin(READY)
        if rank == putting:
            transport.put(route(rank, target), source)
    for number in [transport.end(DONE) for transport in ranks]:
        for transport in ranks:
            transport.wait(number)


class Buffer:
    """Bytes of the heap, gone with this object."""

    def __init__(self, rows: int = 2 * ROWS) -> None:
        self._bytes = (ctypes.c_ubyte * (rows * 2 * WIDTH))()
        self.address = ctypes.addressof(self._bytes)


def none() -> None:
    """The ranks write to the same bytes, one behind the other's handshake."""
    source, target, ranks = Buffer(), Buffer(), transports()
    for rank in (0, 1, 0):
        exchange(ranks, rank, source.address, target.address - rank_offset(rank))
    for transport in ranks:
        transport.shutdown(5.0)


def overflow() -> None:
    source, target = Buffer(), Buffer(ROWS // 4)
    exchange(transports(), 0, source.address, target.address)


def freed() -> None:
    source, target = Buffer(), Buffer()
    address = source.address
    del source
    exchange(transports(), 0, address, target.address)


def wrapped() -> None:
    """The source's heads for the other rank lie behind the last address."""
    target = Buffer()
    exchange(transports(), 0, (1 << 64) - WIDTH, target.address)


def race() -> None:
    """What :func:`none` does, but in one group."""
    source, target, ranks = Buffer(), Buffer(), transports()
    for rank, transport in enumerate(ranks):
        transport.begin(READY)
        transport.put(route(rank, target.address - rank_offset(rank)), source.address)
    for number in [transport.end(DONE) for transport in ranks]:
        for transport in ranks:
            transport.wait(number)
    for transport in ranks:
        transport.shutdown(5.0)


def rank_offset(rank: int) -> int:
    """Where in a target the rows of ``rank`` begin."""
    return rank * ROWS * WIDTH


CASES: dict[str, Callable[[], None]] = {f.__name__: f for f in (none, overflow, freed, wrapped, race)}

if __name__ == "__main__":
    CASES[sys.argv[1]]()
    print(f"nothing found in {spec.origin}", flush=True)
