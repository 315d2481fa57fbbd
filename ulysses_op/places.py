"""Places for results in a target in shared memory: a result has one for as long as it lives, so that nothing needs to
be copied out. While an earlier result has it, the next ones come into another place, and are copied out of that.
"""

from __future__ import annotations

import itertools
import math
import os
import select
import threading
import weakref
from collections.abc import Sequence

import torch

from . import _C
from .errors import TargetError

_COUNT = 2
_OFFSET = _C.ShmTransport.PLACES_OFFSET
_LEAST_PART = 4
"""A result of less than this part of a place is copied out, rather than keep all of the target as long as it lives."""

_CHILD_S = 30.0  # for a child to make its parent's results its own, which takes as long as to copy them

_numbers = itertools.count()
_handed_out: dict[int, tuple[weakref.ref[memoryview], int, int]] = {}
"""Address and size of every result that has a place."""


class Places:
    """The places of this rank's target. Peers write the one whose number the segment begins with."""

    def __init__(self, segment: _C.SharedSegment, nbytes: int) -> None:
        """``nbytes``: of each place. The segment is as :meth:`create` made it."""
        self._nbytes = nbytes
        self._segment = segment
        self._memory = memoryview(segment)
        self._number = torch.frombuffer(self._memory[:4], dtype=torch.int32)
        self._current = 0
        self._reserved = False  # the second place
        self._held: weakref.ref[memoryview] | None = None

    @staticmethod
    def create(name: str, nbytes: int) -> _C.SharedSegment:
        """A segment for places of ``nbytes``; memory for the second one is taken when it is needed."""
        return _C.SharedSegment.create(name, Places.segment_bytes(nbytes), _OFFSET + nbytes)

    @staticmethod
    def segment_bytes(nbytes: int) -> int:
        return _OFFSET + _COUNT * nbytes

    def choose(self) -> None:
        """Settle where the next group's result comes. Before READY: peers look behind it. Raises TargetError where
        there is no memory for a second place.
        """
        with _fork.lock:
            current = int(self._held is not None and self._held() is not None)
        if current and not self._reserved:
            try:
                self._segment.reserve(_OFFSET + self._nbytes, self._nbytes)
            except RuntimeError as error:
                raise TargetError(
                    f"an earlier result is held, and there is no shared memory for the next one beside it: {error}. "
                    "Let go of results before the next group, clone them, or enlarge /dev/shm"
                ) from error
            self._reserved = True
        if current != self._current:
            self._number.fill_(current)
            self._current = current

    def bytes(self) -> torch.Tensor:
        """The place that peers write, as uint8."""
        start = _OFFSET + self._current * self._nbytes
        return torch.frombuffer(self._memory[start : start + self._nbytes], dtype=torch.uint8)

    def hand_out(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor on that place, which has it until nobody has the tensor's memory any more. It may outlive the
        target. None where the result is to be copied out.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if self._current or nbytes * _LEAST_PART < self._nbytes:
            return None
        place = self._memory[_OFFSET : _OFFSET + nbytes]
        self._held = _hand_out(place, self._segment.address + _OFFSET)
        storage = torch.frombuffer(place, dtype=torch.uint8).untyped_storage()
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape), strides)


def _hand_out(place: memoryview, address: int) -> weakref.ref[memoryview]:
    number = next(_numbers)
    held = weakref.ref(place, lambda _: _handed_out.pop(number, None))
    _handed_out[number] = (held, address, place.nbytes)
    return held


class _Fork:
    """A forked process has what its parent's results were at that time, and nobody sees what it writes into them: their
    pages become its own. The parent, and whoever begins a group there, waits for that.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._pipe: tuple[int, int] | None = None

    def before(self) -> None:
        self.lock.acquire()
        self._pipe = os.pipe() if _handed_out else None

    def after_in_parent(self) -> None:
        pipe, self._pipe = self._pipe, None
        try:
            if pipe is not None:
                os.close(pipe[1])
                told = select.poll()
                told.register(pipe[0], select.POLLIN)
                told.poll(_CHILD_S * 1000)  # for its byte, or its end
                os.close(pipe[0])
        finally:
            self.lock.release()

    def after_in_child(self) -> None:
        pipe, self._pipe = self._pipe, None
        try:
            for held, address, nbytes in tuple(_handed_out.values()):
                if held() is not None:
                    _C.make_private(address, nbytes)
        finally:
            if pipe is not None:
                os.write(pipe[1], b"x")
                for end in pipe:
                    os.close(end)
            self.lock.release()


_fork = _Fork()
os.register_at_fork(before=_fork.before, after_in_parent=_fork.after_in_parent, after_in_child=_fork.after_in_child)
