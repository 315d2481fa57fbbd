"""Shapes of an exchange: which rank has which heads and which part of the sequence. Pure arithmetic, no torch.

Names: B batch, S_local a rank's part of the sequence, S_global all of it, H all heads, H_local a rank's heads,
D the head dimension. ``scatter_heads`` turns (B, S_local, H, D) into (B, S_global, H_local, D), ``gather_heads``
turns that back.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Literal, NamedTuple

Direction = Literal["scatter_heads", "gather_heads"]
HeadRanges = tuple[tuple[int, int], ...]  # (start, stop) of each rank
Region = tuple[slice, slice, slice, slice]  # an index into (B, S, H, D)

_ALL = slice(None)


class HeadPlan(NamedTuple):
    """Heads of each rank, as (start, stop): ``q`` of the queries and the output, ``kv`` of the keys and values."""

    q: HeadRanges
    kv: HeadRanges


def head_plan(num_q_heads: int, num_kv_heads: int, world_size: int) -> HeadPlan:
    """Deal query and key/value heads to ``world_size`` ranks so that each rank has the key heads its queries use.

    With at least as many key heads as ranks, key heads are split as evenly as whole groups allow, larger shares first,
    and query heads follow: 28 query and 7 key heads over 4 ranks give keys 2, 2, 2, 1 and queries 8, 8, 8, 4.
    With fewer, ranks are dealt to the key heads as evenly as possible, and the query heads of a key head are split
    evenly over its ranks, which all receive that key head. A rank left without query heads gets empty ranges.

    Raises ValueError if a count is below 1 or num_q_heads is not a multiple of num_kv_heads.
    """
    for name, value in (("num_q_heads", num_q_heads), ("num_kv_heads", num_kv_heads), ("world_size", world_size)):
        try:
            positive = operator.index(value) >= 1
        except TypeError:
            raise TypeError(f"{name} must be a whole number, got {value!r}") from None
        if not positive:
            raise ValueError(f"{name} must be at least 1, got {value}")
    group, rest = divmod(num_q_heads, num_kv_heads)
    if rest:
        raise ValueError(
            f"num_q_heads must be a multiple of num_kv_heads, got {num_q_heads} query heads "
            f"and {num_kv_heads} key heads"
        )
    if num_kv_heads >= world_size:
        kv = _split(num_kv_heads, world_size)
        return HeadPlan(q=tuple((start * group, stop * group) for start, stop in kv), kv=kv)
    q_ranges: list[tuple[int, int]] = []
    kv_ranges: list[tuple[int, int]] = []
    for key, (first, last) in enumerate(_split(world_size, num_kv_heads)):
        for start, stop in _split(group, last - first):
            q_ranges.append((key * group + start, key * group + stop))
            kv_ranges.append((key, key + 1) if start < stop else (key + 1, key + 1))
    return HeadPlan(q=tuple(q_ranges), kv=tuple(kv_ranges))


@dataclass(frozen=True)
class Exchange:
    """What all ranks share about one exchange. Hashable and equal on every rank: a cache key.

    ``heads`` has a (start, stop) and ``seq_lens`` a length for each rank; ``num_heads`` is H, ``head_dim`` is D.
    ``replicas`` marks a gather of a replicated plan, the way back of a replicated scatter: the copies of all ranks
    arrive side by side in rank order, so its output has sum(H_local) heads, and rank r's heads begin at
    ``head_slot(r)``.

    Build one with :func:`scatter_exchange` or :func:`gather_exchange`, which check it.
    """

    direction: Direction
    batch: int
    num_heads: int
    head_dim: int
    heads: HeadRanges
    seq_lens: tuple[int, ...]
    replicas: bool = False

    @cached_property
    def digest(self) -> int:
        """64 bits that are equal on every rank for equal exchanges, in every process."""
        return int.from_bytes(blake2b(repr(self).encode(), digest_size=8).digest(), "little")

    def __hash__(self) -> int:
        return self.digest

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.heads)

    @property
    def seq_global(self) -> int:
        """S_global, the sum of ``seq_lens``."""
        return sum(self.seq_lens)

    @property
    def replicated(self) -> bool:
        """Whether some head belongs to more than one rank."""
        return self.head_slot(self.world_size) > self.num_heads

    def head_count(self, rank: int) -> int:
        """H_local of ``rank``."""
        start, stop = self.heads[rank]
        return stop - start

    def head_slot(self, rank: int) -> int:
        """Heads of the ranks before ``rank``: where its heads begin in a gathered output."""
        return sum(stop - start for start, stop in self.heads[:rank])

    def seq_start(self, rank: int) -> int:
        """Where the part of ``rank`` begins in the global sequence."""
        return sum(self.seq_lens[:rank])

    def input_shape(self, rank: int) -> tuple[int, int, int, int]:
        """Shape of what ``rank`` passes in: (B, S_local, H, D) to scatter, (B, S_global, H_local, D) to gather."""
        if self._scatters:
            return (self.batch, self.seq_lens[rank], self.num_heads, self.head_dim)
        return (self.batch, self.seq_global, self.head_count(rank), self.head_dim)

    def output_shape(self, rank: int) -> tuple[int, int, int, int]:
        """Shape of what ``rank`` gets: (B, S_global, H_local, D) or (B, S_local, sum(H_local), D)."""
        if self._scatters:
            return (self.batch, self.seq_global, self.head_count(rank), self.head_dim)
        return (self.batch, self.seq_lens[rank], self.head_slot(self.world_size), self.head_dim)

    @cached_property
    def max_output_numel(self) -> int:
        """Elements of the largest output of any rank: the capacity that every target needs."""
        seq, heads = (
            (self.seq_global, max(stop - start for start, stop in self.heads))
            if self._scatters
            else (max(self.seq_lens), self.head_slot(self.world_size))
        )
        return self.batch * seq * heads * self.head_dim

    def own_source(self, rank: int) -> Region:
        """The part of the input of ``rank`` that stays with it."""
        if self._scatters:
            return (_ALL, _ALL, slice(*self.heads[rank]), _ALL)
        start = self.seq_start(rank)
        return (_ALL, slice(start, start + self.seq_lens[rank]), _ALL, _ALL)

    def own_dest(self, rank: int) -> Region:
        """The part of the output of ``rank`` that comes from its own input."""
        return self._along_exchanged(*self._own_span(rank))

    def peer_dests(self, rank: int) -> list[Region]:
        """At most two regions that, together, are the output of ``rank`` without ``own_dest(rank)``."""
        start, stop = self._own_span(rank)
        end = self.seq_global if self._scatters else self.head_slot(self.world_size)
        return [self._along_exchanged(*span) for span in ((0, start), (stop, end)) if span[0] < span[1]]

    def sent_numel(self, rank: int) -> int:
        """Elements that ``rank`` sends to other ranks."""
        if self._scatters:
            rows = self.seq_lens[rank] * (self.head_slot(self.world_size) - self.head_count(rank))
        else:
            rows = self.head_count(rank) * (self.seq_global - self.seq_lens[rank])
        return self.batch * rows * self.head_dim

    def reverse(self) -> Exchange:
        """The exchange the other way, as the backward needs it.

        The reverse of a replicated scatter is a gather with ``replicas``, whose output has sum(H_local) heads for the
        caller to add up; the reverse of that scatters those sum(H_local) heads, each copy to its own rank.
        """
        if self._scatters:
            return replace(self, direction="gather_heads", replicas=self.replicated)
        slots = slot_ranges(self.heads)
        return replace(self, direction="scatter_heads", num_heads=slots[-1][1], heads=slots, replicas=False)

    @property
    def _scatters(self) -> bool:
        return self.direction == "scatter_heads"

    def _own_span(self, rank: int) -> tuple[int, int]:
        """Own part of the output along the dimension that is exchanged: S when heads are scattered, else H."""
        if self._scatters:
            start = self.seq_start(rank)
            return start, start + self.seq_lens[rank]
        start = self.head_slot(rank)
        return start, start + self.head_count(rank)

    def _along_exchanged(self, start: int, stop: int) -> Region:
        span = slice(start, stop)
        return (_ALL, span, _ALL, _ALL) if self._scatters else (_ALL, _ALL, span, _ALL)


def slot_ranges(heads: HeadRanges) -> HeadRanges:
    """Where each rank's heads lie when all ranks' heads are put side by side in rank order."""
    stops = list(accumulate(stop - start for start, stop in heads))
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


def scatter_exchange(
    shape: Sequence[int],
    world_size: int,
    rank: int,
    heads: Sequence[Sequence[int]] | None = None,
    seq_lens: Sequence[int] | None = None,
) -> Exchange:
    """The exchange that scatters the heads of an input of ``shape`` (B, S_local, H, D) on ``rank``.

    ``heads`` is a (start, stop) per rank; None splits H equally. Ranges that share no head must follow each other in
    rank order; ranges that overlap replicate heads. ``seq_lens`` is S_local per rank; None takes this rank's for all.

    Raises ValueError if shape, world_size, rank, heads or seq_lens do not fit each other, or a head goes to no rank.
    """
    batch, seq_local, num_heads, head_dim = _check_shape(shape, world_size, rank, "(B, S_local, H, D)")
    if heads is None:
        if num_heads % world_size:
            raise ValueError(heads_do_not_split(num_heads, world_size))
        ranges = _split(num_heads, world_size)
    else:
        ranges = _check_heads(heads, world_size)
        for peer, (start, stop) in enumerate(ranges):
            if stop > num_heads:
                raise ValueError(f"heads[{peer}] must lie within the H = {num_heads} heads, got ({start}, {stop})")
        missing = _first_uncovered(ranges, num_heads)
        if missing is not None:
            raise ValueError(
                f"heads must give every one of the H = {num_heads} heads to a rank, but head {missing} goes to none: "
                "extend a range to it, or slice the tensor if it is not wanted"
            )
        if sum(stop - start for start, stop in ranges) == num_heads and not _in_rank_order(ranges):
            raise ValueError(f"heads that share no head must follow each other in rank order, got {ranges}")
    if seq_lens is None:
        lengths = (seq_local,) * world_size
    else:
        lengths = _check_seq_lens(seq_lens, world_size)
        if lengths[rank] != seq_local:
            raise ValueError(length_does_not_fit(seq_local, rank, lengths[rank]))
    return Exchange("scatter_heads", batch, num_heads, head_dim, ranges, lengths)


def gather_exchange(
    shape: Sequence[int],
    world_size: int,
    rank: int,
    heads: Sequence[Sequence[int]] | None = None,
    seq_lens: Sequence[int] | None = None,
    replicas: bool = False,
) -> Exchange:
    """The exchange that gathers the heads of an input of ``shape`` (B, S_global, H_local, D) on ``rank``.

    ``heads`` is a (start, stop) per rank that partitions the H heads in rank order; None says that every rank has
    H_local heads. ``seq_lens`` is S_local per rank; None splits S_global equally. ``replicas`` admits ranges that
    overlap, and then all copies arrive side by side.

    Raises ValueError if shape, world_size, rank, heads or seq_lens do not fit each other, or the ranges of heads
    overlap (replicated heads cannot be gathered) or leave a gap.
    """
    batch, seq_global, heads_local, head_dim = _check_shape(shape, world_size, rank, "(B, S_global, H_local, D)")
    if heads is None:
        ranges = _split(heads_local * world_size, world_size)
    else:
        ranges = _check_heads(heads, world_size)
        if not replicas and not _in_rank_order(ranges):
            raise ValueError(
                "heads must partition the H heads in rank order to be gathered, without overlap or gap, "
                f"got {ranges}: gather with the plan of the queries (ulysses_op.head_plan(...).q)"
            )
        start, stop = ranges[rank]
        if stop - start != heads_local:
            raise ValueError(own_heads_do_not_fit(heads_local, rank, (start, stop)))
    if seq_lens is None:
        if seq_global % world_size:
            raise ValueError(sequence_does_not_split(seq_global, world_size))
        lengths = (seq_global // world_size,) * world_size
    else:
        lengths = _check_seq_lens(seq_lens, world_size)
        if sum(lengths) != seq_global:
            raise ValueError(lengths_do_not_add_up(seq_global, lengths))
    num_heads = max(stop for _, stop in ranges) if replicas else sum(stop - start for start, stop in ranges)
    return Exchange("gather_heads", batch, num_heads, head_dim, ranges, lengths, replicas)


# What is said of arguments that do not fit: here, and by the ops' fakes, whose sizes may be symbols.


def heads_do_not_split(num_heads: Any, world_size: int) -> str:
    return (
        f"H = {num_heads} heads do not split equally over world_size = {world_size} ranks: "
        "pass heads, for instance from ulysses_op.head_plan(num_q_heads, num_kv_heads, world_size)"
    )


def sequence_does_not_split(seq_global: Any, world_size: int) -> str:
    return (
        f"S_global = {seq_global} (shape[1]) does not split equally over world_size = {world_size} ranks: "
        "pass seq_lens, one length per rank"
    )


def length_does_not_fit(seq_local: Any, rank: int, length: Any) -> str:
    return f"seq_lens[{rank}] must be this rank's S_local = {seq_local} (shape[1]), got {length}"


def lengths_do_not_add_up(seq_global: Any, lengths: Sequence[Any]) -> str:
    return f"seq_lens must add up to S_global = {seq_global} (shape[1]), got {tuple(lengths)} with sum {sum(lengths)}"


def own_heads_do_not_fit(heads_local: Any, rank: int, own: tuple[int, int]) -> str:
    return f"heads[{rank}] must have this rank's H_local = {heads_local} heads (shape[2]), got {own}"


def _split(count: int, parts: int) -> HeadRanges:
    """[0, count) in ``parts`` ranges as even as possible, larger ones first."""
    size, larger = divmod(count, parts)
    stops = list(accumulate(size + (i < larger) for i in range(parts)))
    return tuple(zip([0, *stops[:-1]], stops, strict=True))


def _check_shape(shape: Sequence[int], world_size: int, rank: int, form: str) -> tuple[int, int, int, int]:
    if len(shape) != 4:
        raise ValueError(f"shape must have 4 dimensions {form}, got {len(shape)}: {tuple(shape)}")
    if min(shape) < 0:
        raise ValueError(f"shape must not have negative sizes, got {tuple(shape)}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
    batch, seq, heads, dim = shape
    return batch, seq, heads, dim


def _check_heads(heads: Sequence[Sequence[int]], world_size: int) -> HeadRanges:
    if len(heads) != world_size:
        raise ValueError(f"heads must have one (start, stop) for each of {world_size} ranks, got {len(heads)}")
    ranges = []
    entries: Sequence[Any] = heads
    for rank, entry in enumerate(entries):
        if not isinstance(entry, Sequence) or len(entry) != 2:
            raise ValueError(f"heads[{rank}] must be (start, stop), got {entry!r}")
        start, stop = map(operator.index, entry)
        if not 0 <= start <= stop:
            raise ValueError(f"heads[{rank}] must satisfy 0 <= start <= stop, got ({start}, {stop})")
        ranges.append((start, stop))
    return tuple(ranges)


def _check_seq_lens(seq_lens: Sequence[int], world_size: int) -> tuple[int, ...]:
    if len(seq_lens) != world_size:
        raise ValueError(f"seq_lens must have one length for each of {world_size} ranks, got {len(seq_lens)}")
    lengths = tuple(map(operator.index, seq_lens))
    for rank, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"seq_lens[{rank}] must not be negative, got {length}")
    return lengths


def _first_uncovered(ranges: HeadRanges, num_heads: int) -> int | None:
    covered = 0
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        if start > covered:
            break
        covered = max(covered, stop)
    return covered if covered < num_heads else None


def _in_rank_order(ranges: HeadRanges) -> bool:
    """Whether the ranges that are not empty follow each other from head 0 on, without overlap or gap."""
    covered = 0
    for start, stop in ranges:
        if start < stop:
            if start != covered:
                return False
            covered = stop
    return True
