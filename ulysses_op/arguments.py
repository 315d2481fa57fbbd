"""From a tensor and what its caller says of heads and lengths to an exchange; refuses what cannot be exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .layout import Direction, Exchange, HeadPlan, gather_exchange, scatter_exchange

_MAX_KEPT = 1024


class Exchanges:
    """The exchanges of one rank, each kept for the next call with the same arguments."""

    def __init__(self, world_size: int, rank: int) -> None:
        self._world_size = world_size
        self._rank = rank
        self._kept: dict[Any, Exchange] = {}

    def find(
        self,
        x: torch.Tensor,
        direction: Direction,
        heads: Sequence[Sequence[int]] | None,
        seq_lens: Sequence[int] | None,
        replicas: bool = False,
    ) -> Exchange:
        """Raises TypeError for what is no plain dense tensor of 1, 2, 4 or 8 bytes an element, ValueError for heads or
        lengths that do not fit.
        """
        _check_tensor(x)
        if isinstance(heads, HeadPlan):
            raise TypeError("heads is a HeadPlan: pass its .q for queries and the output, its .kv for keys and values")
        key = (direction, x.shape, _frozen(heads), _frozen(seq_lens), replicas)
        exchange = self._kept.get(key)
        if exchange is None:
            if direction not in ("scatter_heads", "gather_heads"):
                raise ValueError(f"direction is {direction!r}, expected 'scatter_heads' or 'gather_heads'")
            if direction == "scatter_heads":
                exchange = scatter_exchange(x.shape, self._world_size, self._rank, heads, seq_lens)
            else:
                exchange = gather_exchange(x.shape, self._world_size, self._rank, heads, seq_lens, replicas)
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            self._kept[key] = exchange
        return exchange


def _check_tensor(x: torch.Tensor) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}, a tensor is needed")
    kind: object = x
    if is_traceable_wrapper_subclass(kind) or isinstance(kind, FakeTensor):
        raise TypeError(f"x is a {type(x).__name__}, a plain tensor is needed: pass its local one")
    if x.layout != torch.strided or x.is_quantized:
        raise TypeError(
            f"x has layout {x.layout}{' and is quantized' if x.is_quantized else ''}: a dense tensor is needed"
        )
    if x.element_size() not in (1, 2, 4, 8):
        raise TypeError(
            f"x has dtype {x.dtype} of {x.element_size()} bytes: elements of 1, 2, 4 or 8 bytes can be exchanged"
        )


def _frozen(value: Any) -> Any:
    """A hashable copy of nested sequences."""
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value
