"""Gradients of an exchange group: one autograd node, whose backward is one group the other way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .layout import Exchange, HeadRanges, slot_ranges

if TYPE_CHECKING:
    from .communicator import Communicator


class DifferentiableExchange(torch.autograd.Function):
    """Ties finished results to the tensors that were submitted for them."""

    @staticmethod
    def forward(
        ctx: Any,
        communicator: Communicator,
        tags: Sequence[str],
        exchanges: Sequence[Exchange],
        results: Sequence[torch.Tensor],
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.communicator = communicator
        ctx.tags = tags
        ctx.exchanges = exchanges
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tags = [f"grad:{tag}" for tag in ctx.tags]
        reverses = [exchange.reverse() for exchange in ctx.exchanges]
        parts = ctx.communicator._exchange(list(zip(tags, gradients, reverses, strict=True)))
        sums = [
            sum_replicas(part, reverse.heads) if reverse.replicas else part
            for part, reverse in zip(parts, reverses, strict=True)
        ]
        return (None, None, None, None, *sums)


def sum_replicas(parts: torch.Tensor, heads: HeadRanges) -> torch.Tensor:
    """Add up the copies of replicated heads, in rank order, half precision in fp32.

    parts: (B, S_local, sum(H_local), D), what a gather with ``replicas`` gives. Returns (B, S_local, H, D).
    """
    wide = torch.float32 if parts.dtype in (torch.float16, torch.bfloat16) else parts.dtype
    total = parts.new_zeros((*parts.shape[:2], max(stop for _, stop in heads), parts.shape[3]), dtype=wide)
    for (start, stop), (first, last) in zip(heads, slot_ranges(heads), strict=True):
        total[:, :, start:stop] += parts[:, :, first:last]
    return total.to(parts.dtype)
