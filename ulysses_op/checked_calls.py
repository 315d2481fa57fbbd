"""Calls of compiled code that raise where a communicator which earlier ones exchanged on has failed since, and that,
left by an exception themselves, tell the peers.

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

# Whether the communicator was used in the capture of a CUDA graph, which may be replayed.
_Used = weakref.WeakKeyDictionary[Communicator, bool]


class _Callers(threading.local):
    """The communicators that the checked calls which this thread is in have used, the innermost call's last."""

    def __init__(self) -> None:
        self.used: list[_Used] = []


_callers = _Callers()


def note(communicator: Communicator, x: torch.Tensor) -> None:
    """An op that exchanges ``x`` has found its communicator."""
    for used in _callers.used:
        known = used.get(communicator)
        if not known:
            captured = x.is_cuda and torch.cuda.is_current_stream_capturing()
            if captured or known is None:
                used[communicator] = captured


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which first raises what has failed of the communicators that it has used before: once, and from
    then on where CUDA graphs may exchange on them, for of others the ops tell. It may go on with another communicator.
    """
    used: _Used = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def call(*arguments: Any, **more: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*arguments, **more)
        for communicator, captured in tuple(used.items()):
            _check(communicator, captured, used)
        _callers.used.append(used)
        try:
            return function(*arguments, **more)
        except BaseException as error:
            for communicator, captured in tuple(used.items()):
                _leave(communicator, captured, used, error)
            raise
        finally:
            _callers.used.pop()

    if hasattr(call, "_torchdynamo_wrapper_id"):  # who compiles this again finds the function behind it by that
        call._torchdynamo_wrapper_id = id(call)
    return call


def _check(communicator: Communicator, captured: bool, used: _Used) -> None:
    if communicator._closed and not captured:
        used.pop(communicator, None)
        return
    try:
        communicator.check()
    except BaseException:
        if not captured:
            used.pop(communicator, None)
        raise


def _leave(communicator: Communicator, captured: bool, used: _Used, error: BaseException) -> None:
    if communicator._async_exchange is not None:
        communicator._async_exchange.leave(error)
    beside = communicator._companion
    failed = communicator._broken is not None or (beside is not None and beside._broken is not None)
    if failed and not captured:
        used.pop(communicator, None)  # this error tells
