"""Calls that must raise, on all ranks, before anything moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..communicator import Communicator
from ..exchange_group import ExchangeGroup
from .values import WrongResult

_ERRORS: dict[str, type[Exception]] = {
    "three dimensions": ValueError,
    "a head to no rank": ValueError,
    "a length too many": ValueError,
    "another length": ValueError,
    "an unknown direction": ValueError,
    "a negative range": ValueError,
    "too many names": ValueError,
    "equal names": ValueError,
    "no tensor": TypeError,
    "a function of three dimensions": ValueError,
    "wait for nothing": RuntimeError,
    "wait for another": RuntimeError,
    "a tag twice": RuntimeError,
    "a function inside of it": RuntimeError,
}
_ONLY_BEFORE = ("wait for nothing",)
_ONLY_BETWEEN = ("wait for another", "a tag twice", "a function inside of it")
BEFORE = tuple(name for name in _ERRORS if name not in _ONLY_BETWEEN)
"""What can be asked of a group that has not begun."""
BETWEEN = tuple(name for name in _ERRORS if name not in _ONLY_BEFORE)
"""What can be asked of a group that has begun, and goes on."""


def refuse(
    name: str,
    communicator: Communicator,
    device: torch.device,
    group: ExchangeGroup,
    tag: str,
    submitted: tuple[str, ...],
    max_targets: int,
) -> None:
    """Make the call ``name``, on a group whose next submission has ``tag``. Raises WrongResult unless it is refused."""
    world_size, rank = communicator.world_size, communicator.rank
    heads = [(number, number + 1) for number in range(world_size)]
    lengths = [2] * world_size
    x = torch.zeros(1, 2, world_size, 3, device=device)

    def submit(x: Any = x, **arguments: Any) -> None:
        group.submit(x, tag, **arguments)

    calls: dict[str, Callable[[], object]] = {
        "three dimensions": lambda: submit(x[0]),
        "a head to no rank": lambda: submit(torch.zeros(1, 2, world_size + 1, 3, device=device), heads=heads),
        "a length too many": lambda: submit(seq_lens=[*lengths, 2]),
        "another length": lambda: submit(seq_lens=[3 if peer == rank else 2 for peer in range(world_size)]),
        "an unknown direction": lambda: submit(direction="sideways"),
        "a negative range": lambda: submit(heads=[*heads[:-1], (world_size, world_size - 1)]),
        "too many names": lambda: communicator.group(*(f"name{number}" for number in range(max_targets + 1))),
        "equal names": lambda: communicator.group("q", "q"),
        "no tensor": lambda: submit([1.0]),
        "a function of three dimensions": lambda: communicator.scatter_heads(x[0]),
        "wait for nothing": lambda: group.wait(),
        "wait for another": lambda: group.wait("never submitted"),
        "a tag twice": lambda: group.submit(x, submitted[0]),
        "a function inside of it": lambda: communicator.scatter_heads(x),
    }
    must_raise(_ERRORS[name], name, calls[name])


def must_raise(kind: type[Exception], what: str, call: Callable[[], object]) -> str:
    """The text of the error that ``call`` raises. Raises WrongResult where it raises none, or one of another type."""
    try:
        call()
    except Exception as error:
        if type(error) is kind:
            return str(error)
        raise WrongResult(f"{what}: expected {kind.__name__}, got {type(error).__name__}: {error}") from error
    raise WrongResult(f"{what}: expected {kind.__name__}, but nothing was raised")
