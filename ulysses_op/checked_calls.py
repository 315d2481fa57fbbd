"""Calls of compiled code that raise where a communicator which earlier ones exchanged on has failed since.

Ops raise by themselves, but a CUDA graph that is replayed runs none: what a lost peer has left undone shows in the
communicator alone.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .communicator import Communicator


class _Callers(threading.local):
    """The checked calls that this thread is in, the innermost last, by the communicators that they have used."""

    def __init__(self) -> None:
        self.used: list[weakref.WeakSet[Communicator]] = []


_callers = _Callers()


def note(communicator: Communicator) -> None:
    """An op has found its communicator."""
    for used in _callers.used:
        used.add(communicator)


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which first raises what has failed of the communicators that it has used before."""
    used: weakref.WeakSet[Communicator] = weakref.WeakSet()

    @functools.wraps(function)
    def call(*arguments: Any, **more: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*arguments, **more)
        for communicator in tuple(used):
            communicator.check()
        _callers.used.append(used)
        try:
            return function(*arguments, **more)
        finally:
            _callers.used.pop()

    return call
