"""The attention of a video diffusion transformer: on one device, or with its sequence split over ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..communicator import Communicator
from ..layout import head_plan
from .clip import Grid


class AttentionBlock(nn.Module):
    """Fused QKV projection, RMSNorm of queries and keys, 3-D RoPE, attention, output projection."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.norm_q = nn.RMSNorm(hidden // num_heads, eps=1e-6)
        self.norm_k = nn.RMSNorm(hidden // num_heads, eps=1e-6)
        self.out = nn.Linear(hidden, hidden)

    def forward(
        self,
        x: torch.Tensor,
        rope: torch.Tensor,
        comm: Communicator | None = None,
        seq_lens: list[int] | None = None,
    ) -> torch.Tensor:
        """x: (B, S, hidden), rope: (S, 1, D / 2), of the whole sequence; with ``comm``, of this rank's rows only.

        seq_lens: rows of each rank; None says that all have as many. Returns the shape of x.
        """
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)  # each (B, S, H, D)
        if comm is None:
            q, k = rotate(self.norm_q(q), rope), rotate(self.norm_k(k), rope)
            return self.out(attention(q, k, v).flatten(2))

        heads = head_plan(self.num_heads, self.num_heads, comm.world_size).q
        with comm.group("q", "k", "v") as group:
            # V is ready first: it travels, straight out of the fused projection, while Q and K are normed and rotated.
            group.submit(v, tag="v", heads=heads, seq_lens=seq_lens)
            group.submit(rotate(self.norm_q(q), rope), tag="q", heads=heads, seq_lens=seq_lens)
            group.submit(rotate(self.norm_k(k), rope), tag="k", heads=heads, seq_lens=seq_lens)
            q, k, v = group.wait()  # each (B, S_global, H_local, D)
        o = comm.gather_heads(attention(q, k, v), heads=heads, seq_lens=seq_lens)  # (B, S, H, D)
        return self.out(o.flatten(2))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Every position attends to every other: (B, S, H, D) of each, and of the result."""
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def rope_table(grid: Grid, head_dim: int, device: torch.device | str = "cpu", theta: float = 10000.0) -> torch.Tensor:
    """Rotations of 3-D RoPE: the head dimension is shared out over time, height and width.

    Returns (grid.seq_len, 1, head_dim / 2), complex64, one row a position: a rank takes the rows of its part.
    """
    side = 2 * (head_dim // 6)
    angles = []
    for axis, (size, dim) in enumerate(zip(grid, (head_dim - 2 * side, side, side), strict=True)):
        frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
        angle = torch.arange(size, device=device)[:, None] * frequencies
        shape = [1, 1, 1, dim // 2]
        shape[axis] = size
        angles.append(angle.view(shape).expand(*grid, dim // 2))
    angle = torch.cat(angles, -1).flatten(0, 2)[:, None]
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring pairs of the head dimension of x, (B, S, H, D), in float32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rope).flatten(3).type_as(x)
