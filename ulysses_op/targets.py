"""The persistent buffers that peers write: found by tag, growing, bounded in number, pinned where a CUDA graph uses
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch

from .errors import TargetError
from .layout import Direction
from .mapping import Mapping, PeerBuffer


class TargetKey(NamedTuple):
    """What makes two submissions use the same target. The device is the communicator's."""

    tag: str
    direction: Direction
    dtype: torch.dtype


class Entry:
    """The target of one key, None while there is none, and when it was last used."""

    __slots__ = ("target", "used")

    def __init__(self) -> None:
        self.target: PeerBuffer | None = None
        self.used = 0


class TargetCache:
    """At most ``max_targets`` targets, least recently used out first, and any number of pinned ones.

    All calls are collective: keys, sizes and order are equal on all ranks, so hits, misses and evictions are too."""

    def __init__(self, mapping: Mapping, max_targets: int) -> None:
        self._mapping = mapping
        self._max_targets = max_targets
        self._entries: dict[TargetKey, Entry] = {}
        self.tick = itertools.count(1).__next__
        """The time, for those who use an entry's target without :meth:`find`."""
        self._pinned: dict[tuple[int, TargetKey], list[PeerBuffer]] = {}

    def entry_of(self, key: TargetKey) -> Entry:
        """Where the target of ``key`` is, as long as it has one, whatever it grows to: for those who keep it."""
        return self._entries.get(key) or Entry()

    def find(self, key: TargetKey, nbytes: int) -> PeerBuffer | None:
        """The target of ``key`` if it is there and has room for ``nbytes``. Involves no other rank."""
        entry = self._entries.get(key)
        if entry is None or entry.target is None or entry.target.nbytes < nbytes:
            return None
        entry.used = self.tick()
        return entry.target

    def get(
        self,
        key: TargetKey,
        nbytes: int,
        in_use: Collection[TargetKey],
        quiesce: Callable[[Sequence[TargetKey]], None],
    ) -> PeerBuffer:
        """The target of ``key`` with room for ``nbytes``; brought up or grown where there is none.

        ``quiesce`` is called before targets go, and returns once nothing on this rank uses those of these keys.

        ``in_use`` are the keys of the group that is open: they are not evicted. Raises TargetError on every rank when
        one cannot allocate or map; the cache then is as it was before.
        """
        found = self.find(key, nbytes)
        if found is not None:
            return found
        leaving = [key] if key in self._entries else self._to_evict(key, in_use)
        if leaving:
            quiesce(leaving)
        # The new one is mapped on all ranks before the old ones go: a failure leaves everything in place.
        fresh = self._mapping.allocate(nbytes)
        self._mapping.release([self._take(name) for name in leaving])
        entry = self._entries[key] = Entry()
        entry.target = fresh
        entry.used = self.tick()
        return fresh

    def pinned(self, scope: int, key: TargetKey, nbytes: int) -> tuple[PeerBuffer, bool]:
        """The target of ``key`` for the CUDA graphs of ``scope``, and whether it was taken out of the cache for them
        just now.

        Raises RuntimeError if none is there to take: nothing can be allocated inside a capture.
        """
        pinned = self._pinned.setdefault((scope, key), [])
        for target in pinned:
            if target.nbytes >= nbytes:
                return target, False
        if self.find(key, nbytes) is None:
            raise RuntimeError(
                f"no target of {nbytes} bytes for tag {key.tag!r} ({key.direction}, {key.dtype}) is there to be "
                "captured: run the same group with these shapes once, outside of the capture and before each capture"
            )
        pinned.append(self._take(key))
        return pinned[-1], True

    def all(self) -> list[tuple[TargetKey, PeerBuffer]]:
        """Every target there is, pinned ones too."""
        kept = [(key, entry.target) for key, entry in self._entries.items() if entry.target is not None]
        return [*kept, *((key, target) for (_, key), many in self._pinned.items() for target in many)]

    def clear(self) -> None:
        for key in list(self._entries):
            self._take(key)
        self._pinned.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def _take(self, key: TargetKey) -> PeerBuffer:
        """Take a target out. Those who keep its entry do not keep it."""
        entry = self._entries.pop(key)
        target, entry.target = entry.target, None
        assert target is not None
        return target

    def _to_evict(self, key: TargetKey, in_use: Collection[TargetKey]) -> list[TargetKey]:
        excess = len(self._entries) + 1 - self._max_targets
        if excess <= 0:
            return []
        last_used = sorted(self._entries, key=lambda name: self._entries[name].used)
        candidates = [name for name in last_used if name not in in_use and name != key]
        if len(candidates) < excess:
            raise TargetError(
                f"a group with {len(in_use) + 1} tags needs as many targets, but max_targets is {self._max_targets}: "
                "create the communicator with a larger max_targets"
            )
        return candidates[:excess]
