"""Rotary position embedding over one axis, in real numbers, which Inductor compiles into the kernel around it."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_table(positions: Tensor, head_dim: int, theta: float = 10000.0) -> Tensor:
    """Cosines and sines, (2, S, 1, D / 2) in float32, of ``positions``, (S,): those of the rows to be rotated."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim)
    angles = positions[:, None, None] * frequencies
    return torch.stack((angles.cos(), angles.sin())).float()


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """x, (B, S, H, D), rotated in float32: dimension i of a head together with dimension i + D / 2."""
    cos, sin = rope.unbind(0)
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).type_as(x)
