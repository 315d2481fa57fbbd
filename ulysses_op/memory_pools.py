"""Keeps what outlives a call out of the memory pools that CUDA graphs manage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

_Result = TypeVar("_Result")


def outside_memory_pools(device: torch.device, call: Callable[[], _Result]) -> _Result:
    """``call()`` on ``device``, where its allocations come from the allocator's common pool.

    Inductor warms a graph up with all allocations of the thread in the graph's own pool, and takes what is still there
    afterwards for an error. Routing goes by thread, so ``call`` runs in another one.
    """
    if device.type != "cuda":
        return call()
    outcome: list[tuple[bool, object]] = []

    def run() -> None:
        try:
            with torch.cuda.device(device):
                outcome.append((True, call()))
        except BaseException as error:
            outcome.append((False, error))

    thread = threading.Thread(target=run, name="ulysses_op bring-up", daemon=True)
    thread.start()
    thread.join()
    succeeded, result = outcome[0]
    if not succeeded:
        assert isinstance(result, BaseException)
        raise result
    return result  # type: ignore[return-value]
