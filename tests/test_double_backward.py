"""Gradients of gradients: an exchange is linear, so they are exchanges again."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch

import ulysses_op


def _penalty(scatter: Any, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """A function of x whose gradient needs the gradient of the exchange's gradient."""
    (gradient,) = torch.autograd.grad((scatter(x).pow(3) * first).sum(), x, create_graph=True)
    (result,) = torch.autograd.grad((gradient * second).sum(), x)
    return result


def _check(rank: int, world_size: int, form: str, num_kv_heads: int) -> None:
    heads = ulysses_op.head_plan(4, num_kv_heads, world_size).kv
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(1, 3 * world_size, num_kv_heads, 4, generator=generator, dtype=torch.float64)
    firsts = [
        torch.randn(1, 3 * world_size, stop - start, 4, generator=generator, dtype=torch.float64)
        for start, stop in heads
    ]
    second = torch.randn(whole.shape, generator=generator, dtype=torch.float64)
    own = slice(3 * rank, 3 * rank + 3)

    # Unsplit, every rank's share of the sum at once.
    y = whole.clone().requires_grad_()
    total = sum((y[:, :, slice(*pair)].pow(3) * first).sum() for pair, first in zip(heads, firsts, strict=True))
    (gradient,) = torch.autograd.grad(total, y, create_graph=True)
    (wanted,) = torch.autograd.grad((gradient * second).sum(), y)

    comm = ulysses_op.Communicator(timeout_s=30)

    def grouped(x: torch.Tensor) -> torch.Tensor:
        with comm.group("k") as group:
            group.submit(x, tag="k", heads=heads)
            return group.wait()[0]

    scatter = grouped if form == "group" else lambda x: comm.scatter_heads(x, heads=heads)
    x = whole[:, own].clone().requires_grad_()
    torch.testing.assert_close(_penalty(scatter, x, firsts[rank], second[:, own]), wanted[:, own])
    comm.close()


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("form", ["group", "method"])
def test_double_backward(pool: ranks.RankPool, form: str, num_kv_heads: int) -> None:
    pool.run(_check, form, num_kv_heads)
