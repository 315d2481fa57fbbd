"""From a tensor that is exchanged to the copies that move it: worked out once for all that are laid out alike."""

from __future__ import annotations

import math
from typing import Any

import torch

from . import _C
from .layout import Exchange
from .loans import Lent, Loan, Loans
from .mapping import PeerBuffer
from .places import Places
from .targets import Entry, TargetKey
from .torch_compat import Shaped

_MAX_KEPT = 1024


class Route:
    """How tensors of one layout get into the targets of one tag."""

    __slots__ = (
        *("_plan", "_rank", "_shaped", "addresses", "copies", "entry", "in_place", "key", "lent", "loan", "nbytes"),
        "shape",
    )

    copies: _C.Route
    """Into the target with those ``addresses``."""

    def __init__(self, tag: str, exchange: Exchange, x: torch.Tensor, rank: int, loan: Loan) -> None:
        self.key = TargetKey(tag, exchange.direction, x.dtype)
        self.nbytes = exchange.max_output_numel * x.element_size()
        """Room that every rank's target needs."""
        self.shape = exchange.output_shape(rank)
        """Of this rank's result."""
        self.entry = Entry()
        """Of the target, where it was found last."""
        self.loan = loan
        """Of the tag, outside of CUDA graphs."""
        self.in_place = _C.rows_dense(x.shape, x.stride()) and not _is_lazy(x)
        """Whether the copies read the tensor where it lies."""
        self._rank = rank
        self._shaped = Shaped(self.shape, x.dtype, x.device)
        # Those of dimensions of size 1 may be anything, and mean nothing.
        strides = [
            0 if size == 1 else step if self.in_place else math.prod(x.shape[i + 1 :])
            for i, (size, step) in enumerate(zip(x.shape, x.stride(), strict=True))
        ]
        self._plan = _C.make_copy_plan(
            exchange.direction, x.shape, strides, x.element_size(), exchange.heads, exchange.seq_lens, rank
        )
        self.addresses: list[int] | None = None
        self.lent: Lent | None = None

    def bind(self, target: PeerBuffer) -> None:
        """From now on the copies go into ``target``, which itself must be free to go."""
        place_bytes = target.nbytes if isinstance(target.base, Places) else 0
        self.addresses = target.addresses
        self.copies = _C.Route(self._plan, target.addresses, place_bytes)
        self.lent = None

    def lend(self) -> Lent:
        """The result where it lies on this rank's target. On CUDA only."""
        assert self.addresses is not None
        self.lent = lent = Lent(self._shaped, self.addresses[self._rank])
        return lent

    def source(self, x: torch.Tensor) -> torch.Tensor:
        """What the copies read: ``x`` where it lies, or a contiguous copy of it."""
        return x if self.in_place else x.detach().resolve_conj().resolve_neg().contiguous()


class Routes:
    """The routes of one rank."""

    def __init__(self, rank: int, loans: Loans) -> None:
        self._rank = rank
        self._loans = loans
        self._kept: dict[Any, Route] = {}

    def find(self, tag: str, exchange: Exchange, x: torch.Tensor) -> Route:
        key = (tag, exchange, x.stride(), x.dtype, _is_lazy(x))
        route = self._kept.get(key)
        if route is None:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            route = self._kept[key] = Route(tag, exchange, x, self._rank, self._loans.of((0, tag)))
        return route


def _is_lazy(x: torch.Tensor) -> bool:
    """Whether the values are not those in memory."""
    return x.is_conj() or x.is_neg()
