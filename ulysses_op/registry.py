"""Communicators by name: what an op, whose arguments are strings and numbers, finds its communicator with."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from .communicator import Communicator

# Counted for each live process group, so that names are the same on every rank and in the next run of a program.
_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()
_communicators: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()


def register(communicator: Communicator, group: dist.ProcessGroup) -> str:
    """Name a communicator: the group's name, and its number among the communicators of that group."""
    count = _counts.setdefault(group, Counter())
    name = f"{group.group_name}#{count[group.group_name]}"
    count[group.group_name] += 1
    _communicators[name] = communicator
    return name


def find(name: str) -> Communicator | None:
    """The communicator of that name, or None if it is gone."""
    return _communicators.get(name)
