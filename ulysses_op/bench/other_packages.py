"""Other packages that exchange by copy engines, as contenders where they are installed: fast-ulysses."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from .measure import Ranks, Thunk
from .profiles import Shape


class FastUlysses:
    """One of its groups. It takes contiguous tensors, and has a handshake pair for each of them."""

    def __init__(self, stack: ExitStack) -> None:
        self._group: Any = importlib.import_module("fast_ulysses").UlyssesGroup()
        stack.callback(self._group.destroy)

    def scatter(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._group.all_to_all_4d(x.contiguous(), mode=0, out=out)

    def gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._group.all_to_all_4d(x.contiguous(), mode=1, out=out)

    def begin(self, x: torch.Tensor, mode: int) -> Any:
        """On a stream of its own; the result of wait() is lent."""
        return self._group.all_to_all_4d_async(x.contiguous(), mode=mode, lend=True)

    def outputs(self, shape: Shape, dtype: torch.dtype, ranks: Ranks) -> Outputs:
        """What peers write at once: q, k, v and o of a block. Collective."""
        batch, seq_local, num_heads, head_dim = shape
        x = torch.empty(shape, dtype=dtype, device=ranks.device)
        scattered = (batch, seq_local * ranks.world_size, num_heads // ranks.world_size, head_dim)
        q, k, v = (self._group.empty_output(x, mode=0) for _ in range(3))
        return Outputs(q, k, v, self._group.empty_output(x.new_empty(scattered), mode=1))


class Outputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor


def fast_ulysses(stack: ExitStack, ranks: Ranks) -> FastUlysses | None:
    """A group of all ranks, which ends with ``stack``; None where not all of them can have one. Collective."""
    found = importlib.util.find_spec("fast_ulysses") is not None
    if not ranks.on_cuda or ranks.any(not found):
        return None
    made: list[FastUlysses] = []
    reason = ranks.attempt(lambda: made.append(FastUlysses(stack)))
    if reason:
        ranks.progress(f"  fast-ulysses is left out: {reason}")
        return None
    return made[0]


class Way(NamedTuple):
    """How it exchanges v and what computes q and k, (B, S_local, H, D), and o, (B, S_global, H_local, D)."""

    name: str
    scatter: Callable[[torch.Tensor, Thunk, Thunk], tuple[torch.Tensor, ...]]
    gather: Callable[[torch.Tensor], torch.Tensor]
    not_captured: str = ""


def ways(group: FastUlysses, shape: Shape, dtype: torch.dtype, ranks: Ranks) -> list[Way]:
    """Without the copies that its plain call adds, in both forms that it has. Collective."""
    outputs = group.outputs(shape, dtype, ranks)

    def in_order(v: torch.Tensor, q: Thunk, k: Thunk) -> tuple[torch.Tensor, ...]:
        scattered_v = group.scatter(v, outputs.v)
        return group.scatter(q(), outputs.q), group.scatter(k(), outputs.k), scattered_v

    def v_first(v: torch.Tensor, q: Thunk, k: Thunk) -> tuple[torch.Tensor, ...]:
        begun_v = group.begin(v, 0)
        begun_q = group.begin(q(), 0)
        begun_k = group.begin(k(), 0)
        return begun_q.wait(), begun_k.wait(), begun_v.wait()

    return [
        Way("fast-ulysses, into outputs", in_order, lambda o: group.gather(o, outputs.o)),
        Way("fast-ulysses, asynchronous, lent", v_first, lambda o: group.begin(o, 1).wait(), "it has no captures"),
    ]
