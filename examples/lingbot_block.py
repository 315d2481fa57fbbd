"""A block in the manner of LingBot-World v2: video in causal chunks, each split over the ranks, with a cache behind it.

    the sequence of submissions    projection of V, V; projection of Q, Q; projection of K, K

V travels while Q and K are projected, Q while K is, and K, the last one, completes the group. The norms of Q and K span
all heads and run before the scatter, where a rank has them all; RoPE runs behind it, on the whole chunk.

A chunk attends to itself, to the ``window`` tokens before it, and to the first ``sink`` tokens of all. Their keys and
values stay where attention needs them, (B, tokens, H_local, D) on each rank: what is cached is never exchanged again.
Once a chunk is clean, one more pass caches it. Nobody needs what that computes, so its last block only scatters V and
K, and no gather holds back a fast rank from the next chunk: the group's own handshake protects what a slow one reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rotary import rotate
from torch import Tensor, nn

from ulysses_op import Communicator


@dataclass(frozen=True)
class LingBotSize:
    """Widths of a block, and how many tokens before a chunk it attends to."""

    hidden: int = 5120
    heads: int = 40
    head_dim: int = 128
    mlp: int = 20480
    window: int = 18720
    sink: int = 6240


class KVCache(nn.Module):
    """Rotated keys, and values, of the clean tokens that the next chunk attends to, as buffers: they move with the
    model. (B, tokens, H_local, D) each; None before the first chunk."""

    k: Tensor | None
    v: Tensor | None

    def __init__(self, window: int, sink: int) -> None:
        super().__init__()
        self.window = window
        self.sink = sink
        self.clear()

    def clear(self) -> None:
        """Before the first chunk of another video."""
        self.register_buffer("k", None, persistent=False)
        self.register_buffer("v", None, persistent=False)

    def before(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All that a chunk with these keys and values attends to: new tensors, as the exchange may lend k and v."""
        if self.k is None or self.v is None:
            return k.clone(), v.clone()
        return torch.cat((self.k, k), 1), torch.cat((self.v, v), 1)

    def keep(self, k: Tensor, v: Tensor) -> None:
        """Cache what before() returned, but for what falls between the sink and the window of the next chunk."""
        behind = k.shape[1] - self.window
        if behind > self.sink:
            k, v = (torch.cat((t[:, : self.sink], t[:, behind:]), 1) for t in (k, v))
        self.k, self.v = k, v


class LingBotBlock(nn.Module):
    """Attention and MLP over this rank's rows of a chunk, each with a norm before it and a residual around it."""

    def __init__(self, size: LingBotSize, comm: Communicator | None) -> None:
        super().__init__()
        width = size.heads * size.head_dim
        self.comm = comm
        self.heads = size.heads
        self.norm_attention = nn.RMSNorm(size.hidden, eps=1e-6)
        self.q, self.k, self.v = (nn.Linear(size.hidden, width) for _ in range(3))
        self.norm_q = nn.RMSNorm(width, eps=1e-6)
        self.norm_k = nn.RMSNorm(width, eps=1e-6)
        self.out = nn.Linear(width, size.hidden)
        self.norm_mlp = nn.RMSNorm(size.hidden, eps=1e-6)
        self.up = nn.Linear(size.hidden, size.mlp)
        self.down = nn.Linear(size.mlp, size.hidden)
        self.cache = KVCache(size.window, size.sink)

    def forward(self, x: Tensor, rope: Tensor, keep: bool = False) -> Tensor:
        """x: (B, S_local, hidden), this rank's rows of a chunk; rope: of the whole chunk, see
        :func:`rotary.rope_table`. Returns the shape of x. With ``keep`` the chunk is clean, and cached.
        """
        y = self.norm_attention(x)
        with self.comm.group("q", "k", "v") as group:
            group.submit(self.by_heads(self.v(y)), tag="v")
            group.submit(self.by_heads(self.norm_q(self.q(y))), tag="q")
            group.submit(self.by_heads(self.norm_k(self.k(y))), tag="k")
            q, k, v = group.wait()  # each (B, S_chunk, H_local, D)
        q = rotate(q, rope)
        k, v = self.cache.before(rotate(k, rope), v)
        if keep:
            self.cache.keep(k, v)
        o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
        x = x + self.out(self.comm.gather_heads(o).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))

    def fill_cache(self, x: Tensor, rope: Tensor) -> None:
        """Cache a clean chunk: arguments as in forward(), which this is without Q and without a way back."""
        y = self.norm_attention(x)
        with self.comm.group("k", "v") as group:
            group.submit(self.by_heads(self.v(y)), tag="v")
            group.submit(self.by_heads(self.norm_k(self.k(y))), tag="k")
            k, v = group.wait()
        self.cache.keep(*self.cache.before(rotate(k, rope), v))

    def by_heads(self, x: Tensor) -> Tensor:
        """(B, S, H x D) -> (B, S, H, D)."""
        return x.unflatten(-1, (self.heads, -1))


class LingBot(nn.Module):
    """A stack of blocks that predicts the velocity of a chunk's denoising trajectory, given the clean chunks before."""

    def __init__(self, size: LingBotSize, num_blocks: int, comm: Communicator | None) -> None:
        super().__init__()
        self.size = size
        self.time = nn.Parameter(torch.empty(size.hidden))
        self.blocks = nn.ModuleList(LingBotBlock(size, comm) for _ in range(num_blocks))

    def forward(self, x: Tensor, rope: Tensor, t: float) -> Tensor:
        """x: this rank's rows of a chunk, (B, S_local, hidden), at time ``t``; rope: of the whole chunk."""
        x = x + t * self.time
        for block in self.blocks:
            x = block(x, rope)
        return x

    def fill_caches(self, x: Tensor, rope: Tensor) -> None:
        """Cache a clean chunk in every block."""
        *others, last = self.blocks
        for block in others:
            x = block(x, rope, keep=True)
        last.fill_cache(x, rope)

    def clear_caches(self) -> None:
        """Before the first chunk of another video."""
        for block in self.blocks:
            block.cache.clear()
