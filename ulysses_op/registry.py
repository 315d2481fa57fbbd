"""Communicators by name: what an op, whose arguments are strings and numbers, finds its communicator with."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from .communicator import Communicator

# Never reset: a name is used once in a process, whatever becomes of its group.
_counts: Counter[str] = Counter()
_communicators: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()


def register(communicator: Communicator, group: dist.ProcessGroup) -> str:
    """Name a communicator: the group's name, and its number among the communicators of that group."""
    name = f"{group.group_name}#{_counts[group.group_name]}"
    _counts[group.group_name] += 1
    _communicators[name] = communicator
    return name


def find(name: str) -> Communicator | None:
    """The communicator of that name, or None if it is gone."""
    return _communicators.get(name)


def living() -> list[tuple[str, Communicator]]:
    return list(_communicators.items())


def _leave_to_parent() -> None:
    """In a forked child: the communicators there are its parent's."""
    for _, communicator in living():
        communicator._ready = None


os.register_at_fork(after_in_child=_leave_to_parent)
