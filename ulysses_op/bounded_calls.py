"""Calls that may never return, with a time-out, and what becomes of those that did not."""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

_SLICE_S = 0.1
_EXIT_GRACE_S = 1.0  # for threads that nobody waits for any more

_Result = TypeVar("_Result")

_left_alone: weakref.WeakSet[threading.Event] = weakref.WeakSet()
"""Set once a thread that nobody waits for any more is through: Thread.join() that was interrupted takes a thread for
ended, in some versions of Python."""


def bounded(call: Callable[[threading.Event], _Result], timeout_s: float) -> _Result:
    """``call(left)``, in a thread of its own; TimeoutError after ``timeout_s``, and the thread is left to itself. So it
    is where the caller is interrupted. ``left`` is set then: the call is to end when it can.

    Calls of a store have no time-out where the process that hosts it stands still.
    """
    left, through = threading.Event(), threading.Event()
    outcome: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call(left))
        except BaseException as error:
            errors.append(error)
        finally:
            through.set()

    thread = threading.Thread(target=run, name="ulysses_op rendezvous", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # there is no memory for one: the ranks must hear of what else failed here
        return call(left)
    try:
        # In slices: a process that stood still itself goes on where it was, instead of finding its time over.
        for _ in range(math.ceil(timeout_s / _SLICE_S)):
            if through.wait(_SLICE_S):
                break
    finally:
        if not through.is_set():
            left.set()
            _left_alone.add(through)
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # whose traceback holds this frame
    if not outcome:
        raise TimeoutError(f"no answer within {timeout_s} s")
    return outcome[0]


@atexit.register
def _end_threads() -> None:
    """A thread that comes out of a store's call once Python is gone aborts the process: what can end does before."""
    deadline = time.monotonic() + _EXIT_GRACE_S
    for through in tuple(_left_alone):
        through.wait(max(0.0, deadline - time.monotonic()))
