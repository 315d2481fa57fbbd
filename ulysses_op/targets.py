"""The persistent buffers that peers write: found by tag, growing, bounded in number, pinned where a CUDA graph uses
them.
"""

from __future__ import annotations

from collections import OrderedDict
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


class TargetCache:
    """At most ``max_targets`` targets, least recently used out first, and any number of pinned ones.

    All calls are collective: keys, sizes and order are equal on all ranks, so hits, misses and evictions are too."""

    def __init__(self, mapping: Mapping, max_targets: int) -> None:
        self._mapping = mapping
        self._max_targets = max_targets
        self._targets: OrderedDict[TargetKey, PeerBuffer] = OrderedDict()
        self._pinned: dict[tuple[int, TargetKey], list[PeerBuffer]] = {}

    def find(self, key: TargetKey, nbytes: int) -> PeerBuffer | None:
        """The target of ``key`` if it is there and has room for ``nbytes``. Involves no other rank."""
        target = self._targets.get(key)
        if target is None or target.nbytes < nbytes:
            return None
        self._targets.move_to_end(key)
        return target

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
        leaving = [key] if key in self._targets else self._to_evict(key, in_use)
        if leaving:
            quiesce(leaving)
        # The new one is mapped on all ranks before the old ones go: a failure leaves everything in place.
        fresh = self._mapping.allocate(nbytes)
        self._mapping.release([self._targets.pop(name) for name in leaving])
        self._targets[key] = fresh
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
        pinned.append(self._targets.pop(key))
        return pinned[-1], True

    def all(self) -> list[tuple[TargetKey, PeerBuffer]]:
        """Every target there is, pinned ones too."""
        return [*self._targets.items(), *((key, target) for (_, key), many in self._pinned.items() for target in many)]

    def clear(self) -> None:
        self._targets.clear()
        self._pinned.clear()

    def __len__(self) -> int:
        return len(self._targets)

    def _to_evict(self, key: TargetKey, in_use: Collection[TargetKey]) -> list[TargetKey]:
        excess = len(self._targets) + 1 - self._max_targets
        if excess <= 0:
            return []
        candidates = [name for name in self._targets if name not in in_use and name != key]
        if len(candidates) < excess:
            raise TargetError(
                f"a group with {len(in_use) + 1} tags needs as many targets, but max_targets is {self._max_targets}: "
                "create the communicator with a larger max_targets"
            )
        return candidates[:excess]
