"""Places for results in a target in shared memory: a result has one for as long as it lives, so that nothing needs to
be copied out. While an earlier result has it, the next ones come into another place, and are copied out of that.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import torch

from . import _C

_COUNT = 2
_OFFSET = _C.ShmTransport.PLACES_OFFSET


class Places:
    """The places of this rank's target. Peers write the one whose number the segment begins with."""

    def __init__(self, segment: _C.SharedSegment, nbytes: int) -> None:
        """``nbytes``: of each place, as :meth:`segment_bytes` was asked for."""
        self._nbytes = nbytes
        self._memory = memoryview(segment)
        self._number = torch.frombuffer(self._memory[:4], dtype=torch.int32)
        self._current = 0
        self._held: weakref.ref[memoryview] | None = None

    @staticmethod
    def segment_bytes(nbytes: int) -> int:
        return _OFFSET + _COUNT * nbytes

    def choose(self) -> None:
        """Settle where the next group's result comes. Before READY: peers look behind it."""
        current = int(self._held is not None and self._held() is not None)
        if current != self._current:
            self._number.fill_(current)
            self._current = current

    def bytes(self) -> torch.Tensor:
        """The place that peers write, as uint8."""
        start = _OFFSET + self._current * self._nbytes
        return torch.frombuffer(self._memory[start : start + self._nbytes], dtype=torch.uint8)

    def hand_out(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor on that place, which has it until nobody has the tensor's memory any more. It may outlive the
        target. None where the place is the one to copy out of.
        """
        numel = math.prod(shape)
        if self._current or not numel:
            return None
        place = self._memory[_OFFSET : _OFFSET + numel * dtype.itemsize]
        self._held = weakref.ref(place)
        storage = torch.frombuffer(place, dtype=torch.uint8).untyped_storage()
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), strides)
