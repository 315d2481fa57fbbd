"""From a tensor and what its caller says of heads and lengths to an exchange; refuses what cannot be exchanged."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .layout import Direction, Exchange, HeadPlan, gather_exchange, scatter_exchange

_MAX_KEPT = 1024
# Whose elements are parts of bytes, or bytes that nothing copies.
_OF_BITS = frozenset(getattr(torch, name) for name in dir(torch) if re.fullmatch(r"u?int[1-7]|bits\w+", name))


Asked = tuple[Direction, "Sequence[Sequence[int]] | None", "Sequence[int] | None", bool]
"""What an exchange is worked out from, beside the tensor: direction, heads, seq_lens, and whether replicas are
admitted."""


class Exchanges:
    """The exchanges of one rank, each kept for the next call with the same arguments."""

    def __init__(self, world_size: int, rank: int) -> None:
        self._world_size = world_size
        self._rank = rank
        self._kept: dict[Any, Exchange] = {}

    def find(self, x: torch.Tensor, asked: Asked) -> Exchange:
        """Raises TypeError for what is no plain dense tensor of 1, 2, 4 or 8 bytes an element, ValueError for heads or
        lengths that do not fit.
        """
        _check_tensor(x)
        direction: Direction
        direction, heads, seq_lens, replicas = asked
        if isinstance(heads, HeadPlan):
            raise TypeError("heads is a HeadPlan: pass its .q for queries and the output, its .kv for keys and values")
        if direction not in ("scatter_heads", "gather_heads"):
            raise ValueError(f"direction is {direction!r}, expected 'scatter_heads' or 'gather_heads'")
        heads, seq_lens = whole_numbers("heads", heads, 2), whole_numbers("seq_lens", seq_lens, 1)
        key = (direction, x.shape, heads, seq_lens, replicas)
        exchange = self._kept.get(key)
        if exchange is None:
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
    if x.is_nested:
        raise TypeError("x is a nested tensor, a dense one is needed: pass its parts")
    if x.layout != torch.strided or x.is_quantized:
        raise TypeError(
            f"x has layout {x.layout}{' and is quantized' if x.is_quantized else ''}: a dense tensor is needed"
        )
    if x.element_size() not in (1, 2, 4, 8) or x.dtype in _OF_BITS:
        raise TypeError(
            f"x has dtype {x.dtype} of {x.element_size()} bytes: elements of 1, 2, 4 or 8 bytes can be exchanged"
        )
    if x.numel() and not x.is_meta and not _has_memory(x):
        raise TypeError(
            f"x, of shape {tuple(x.shape)}, has no memory of its own: its storage was freed, or it stands for another "
            "tensor (in a functional transform, or under a mode)"
        )


def _has_memory(x: torch.Tensor) -> bool:
    try:
        return x.data_ptr() != 0
    except RuntimeError:
        return False


def whole_numbers(name: str, value: Any, depth: int) -> Any:
    """Nested sequences of numbers as tuples of integers, which are equal where their content is. None stays None.

    Raises TypeError for anything else.
    """
    if depth == 0:
        return operator.index(value)
    if value is None:
        return None
    try:
        return tuple(whole_numbers(name, each, depth - 1) for each in value)
    except TypeError:
        kind = "(start, stop) pairs of whole numbers" if name == "heads" else "whole numbers"
        raise TypeError(f"{name} is {value!r}, a sequence of {kind} is needed") from None
