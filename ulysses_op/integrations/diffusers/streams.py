"""How many tokens of each sequence a rank has; pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Streams:
    """The token sequences of one forward that are split over the ranks, by the name of the argument they came in as.

    Each is cut into consecutive parts, the first ones longer by one where it does not divide. A joint attention
    runs over the parts of several streams side by side, so that its sequence, gathered, goes rank by rank.

    order: the streams as the model puts them side by side, for masks of the joint sequence; None if not known.
    """

    def __init__(self, world_size: int, rank: int, order: Sequence[str] | None = None) -> None:
        self.world_size = world_size
        self.rank = rank
        self.order = order
        self._lengths: dict[str, list[int]] = {}

    def clear(self) -> None:
        """Forget the lengths of the forward before."""
        self._lengths = {}

    def divide(self, length: int) -> list[int]:
        """The lengths of the ranks' parts of ``length`` tokens."""
        return [(length + self.world_size - 1 - peer) // self.world_size for peer in range(self.world_size)]

    def part(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of ``x``, a view."""
        lengths = self.divide(x.shape[dim])
        return x.narrow(dim, sum(lengths[: self.rank]), lengths[self.rank])

    def add(self, name: str, length: int) -> None:
        """A stream of ``length`` tokens in all is split from here on."""
        self._lengths[name] = self.divide(length)

    def lengths_of(self, local: int) -> list[int] | None:
        """The lengths on all ranks of a sequence of which this rank has ``local`` tokens: that of all streams
        side by side, else that of one; None if it is neither.

        Raises ValueError where two streams are as long on a rank but not on all: nothing tells them apart.
        """
        joint = self._joint()
        if joint[self.rank] == local:
            return joint
        found = [lengths for lengths in self._lengths.values() if lengths[self.rank] == local]
        for name, lengths in self._lengths.items():
            for other, others in self._lengths.items():
                if name < other and lengths != others and any(a == b for a, b in zip(lengths, others, strict=True)):
                    raise ValueError(
                        f"{name} and {other} have as many tokens on some rank but not on all, {lengths} and {others}: "
                        "which of them an attention runs over cannot be told. Pad one of them"
                    )
        return found[0] if found else None

    def lengths_of_output(self, local: int) -> list[int] | None:
        """As :meth:`lengths_of`, of what leaves the model: hidden_states before anything else that is as long."""
        lengths = self._lengths.get("hidden_states")
        return lengths if lengths is not None and lengths[self.rank] == local else self.lengths_of(local)

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

    def _joint(self) -> list[int]:
        return [sum(lengths[peer] for lengths in self._lengths.values()) for peer in range(self.world_size)]
