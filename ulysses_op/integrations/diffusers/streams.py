"""How many tokens of each sequence a rank has; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch


class Streams:
    """The token sequences of one forward that are split over the ranks, by the name of the argument they came in as.

    Each is cut into consecutive parts, the first ones longer by one where it does not divide. A joint attention
    runs over the parts of several streams side by side, so that its sequence, gathered, goes rank by rank.

    A model cannot be relied on to bear a part without tokens: ranks that get none of a stream shorter than the group
    hold its last token instead, and leave that out of what they exchange. Lengths are without it.

    order: the streams as the model puts them side by side, for masks of the joint sequence; None if not known.
    """

    def __init__(self, world_size: int, rank: int, order: Sequence[str] | None = None) -> None:
        self.world_size = world_size
        self.rank = rank
        self.order = order
        self._lengths: dict[str, list[int]] = {}

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # A copy's hooks and its attention would not know of each other.
        raise TypeError("a split model cannot be copied or pickled: remove() first, copy, and call parallelize() again")

    def clear(self) -> None:
        """Forget the lengths of the forward before."""
        self._lengths = {}

    def divide(self, length: int) -> list[int]:
        """The lengths of the ranks' parts of ``length`` tokens."""
        return [(length + self.world_size - 1 - peer) // self.world_size for peer in range(self.world_size)]

    def part(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """What this rank holds of ``x``, a view."""
        lengths = self.divide(x.shape[dim])
        if self._held(lengths)[self.rank] != lengths[self.rank]:
            return x.narrow(dim, x.shape[dim] - 1, 1)
        return x.narrow(dim, sum(lengths[: self.rank]), lengths[self.rank])

    def add(self, name: str, length: int) -> None:
        """A stream of ``length`` tokens in all is split from here on."""
        self._lengths[name] = self.divide(length)

    def lengths_of(self, local: int) -> list[int] | None:
        """The lengths on all ranks of a sequence of which this rank holds ``local`` tokens: that of all streams
        side by side, else that of one; None if it is neither.

        Raises ValueError where two streams are as long on a rank but not on all: nothing tells them apart.
        """
        if self._held_in_all() == local:
            return self._joint()
        found = [lengths for lengths in self._lengths.values() if self._held(lengths)[self.rank] == local]
        for name, lengths in self._lengths.items():
            for other, others in self._lengths.items():
                alike = zip(self._held(lengths), self._held(others), strict=True)
                if name < other and lengths != others and any(a == b for a, b in alike):
                    raise ValueError(
                        f"{name} and {other} have as many tokens on some rank but not on all, {lengths} and {others}: "
                        "which of them an attention runs over cannot be told. Pad one of them"
                    )
        return found[0] if found else None

    def lengths_of_output(self, local: int) -> list[int] | None:
        """As :meth:`lengths_of`, of what leaves the model: hidden_states before anything else that is as long."""
        lengths = self._lengths.get("hidden_states")
        held = None if lengths is None else self._held(lengths)[self.rank]
        return lengths if held == local else self.lengths_of(local)

    def is_local(self, queries: int, keys: int) -> bool:
        """Whether an attention is one with keys that all ranks have, however many: in a model that puts its streams
        side by side it is unless its queries and keys are those of all streams.
        """
        if self.order is None or len(self._lengths) < 2 or queries == keys == self._held_in_all():
            return False
        parts = [self._held(lengths)[self.rank] for lengths in self._lengths.values()]
        return queries in (*parts, sum(parts))

    def number_held(self, lengths: Sequence[int]) -> int:
        """How many tokens this rank holds of a sequence with ``lengths``."""
        return sum(held for _, held in self._own_and_held(lengths))

    def submitted(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """``x`` (B, S_held, ...), tokens of a sequence with ``lengths``, without those that stand in for none."""
        if x.shape[1] == lengths[self.rank]:
            return x
        begin, pieces = 0, []
        for own, held in self._own_and_held(lengths):
            pieces.append(x.narrow(1, begin, own))
            begin += held
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)

    def held(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """The way back: zeros for tokens that stand in for none."""
        parts = self._own_and_held(lengths)
        if all(own == held for own, held in parts):
            return x
        begin, pieces = 0, []
        for own, held in parts:
            pieces += [x.narrow(1, begin, own), x.new_zeros((x.shape[0], held - own, *x.shape[2:]))]
            begin += own
        return torch.cat(pieces, 1)

    def is_joint(self, lengths: Sequence[int]) -> bool:
        """Whether ``lengths`` are those of more than one stream side by side."""
        return len(self._lengths) > 1 and list(lengths) == self._joint()

    def rank_by_rank(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """``x``, whose ``dim`` goes stream by stream as in the model that is not split, in the order in which the
        gathered sequence goes: rank by rank.

        Raises ValueError if the order of the streams is not known.
        """
        if len(self._lengths) < 2:
            return x
        if self.order is None:
            raise ValueError(
                f"an attention mask covers {list(self._lengths)} side by side, in an order that is not known "
                "for this model: pass parallelize() a plan with their order"
            )
        pieces, begin = {}, 0
        for name in self.order:
            lengths = self._lengths[name]
            pieces[name] = x.narrow(dim, begin, sum(lengths)).split(lengths, dim)
            begin += sum(lengths)
        return torch.cat([pieces[name][peer] for peer in range(self.world_size) for name in self.order], dim)

    def _own_and_held(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Of each stream in a sequence with ``lengths``, how many tokens this rank has and how many it holds.

        Raises ValueError if the order of the streams is not known and would have to be.
        """
        streams = [lengths]
        if self.is_joint(lengths):
            short = [name for name, parts in self._lengths.items() if self._held(parts) != list(parts)]
            if short and self.order is None:
                raise ValueError(
                    f"{short[0]} has fewer tokens than there are ranks, side by side with others in an order that is "
                    "not known for this model: pass parallelize() a plan with their order"
                )
            streams = [self._lengths[name] for name in self.order or self._lengths]
        return [(parts[self.rank], self._held(parts)[self.rank]) for parts in streams]

    def _held(self, lengths: Sequence[int]) -> list[int]:
        return [max(length, 1) for length in lengths] if lengths[0] else list(lengths)

    def _held_in_all(self) -> int:
        return sum(self._held(lengths)[self.rank] for lengths in self._lengths.values())

    def _joint(self) -> list[int]:
        return [sum(lengths[peer] for lengths in self._lengths.values()) for peer in range(self.world_size)]
