"""Ctrl-C for a loop on many ranks: noted when it comes, acted upon between two steps, by all ranks alike.

A rank that left in the middle of a group of exchanges would be missed by its peers, which would end with an error.
"""

from __future__ import annotations

import signal
from types import FrameType

import torch
import torch.distributed as dist


class Interrupted(Exception):
    """Raised on every rank, after the same step."""


class NotedInterrupt:
    """A context in which the first SIGINT is noted; the second one raises KeyboardInterrupt as ever."""

    def __init__(self) -> None:
        self._noted = False

    def __enter__(self) -> NotedInterrupt:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def raise_if_noted(self) -> None:
        """Raise Interrupted on all ranks if any has noted a SIGINT. Collective; no group may be under way."""
        noted = torch.tensor(int(self._noted))
        dist.all_reduce(noted, dist.ReduceOp.MAX)
        if noted:
            raise Interrupted

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
