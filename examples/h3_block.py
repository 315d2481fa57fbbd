"""A block in the manner of MiniMax H3: one fused projection, so that V is ready when Q and K still have to be normed.

    the sequence of submissions    V, straight out of the projection; norm + RoPE of Q, Q; norm + RoPE of K, K

V travels while Q and K are worked on, and K, the last one, completes the group. ``schedule="v_first"`` writes this out;
``schedule="plain"`` exchanges in the order of reading, for ulysses_op.compile, which finds the same schedule.

Heads and the MLP may be split further by tensor parallelism, among ranks that hold the same rows. In
``DeviceMesh (ulysses=2, tensor=2)`` over four ranks those are (0, 1) and (2, 3), which meet in two all-reduces a block;
sequence and heads are exchanged by (0, 2) and (1, 3). For inference: these all-reduces have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rotary import rotate
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives

from ulysses_op import Communicator

Schedule = Literal["v_first", "plain"]


@dataclass(frozen=True)
class H3Size:
    """Widths of the whole block. Ulysses and tensor parallelism split the heads evenly."""

    hidden: int = 5376
    heads: int = 56
    head_dim: int = 128
    mlp: int = 21504


class H3Block(nn.Module):
    """This rank's part of attention and MLP, each with a norm before it and a residual around it.

    comm: of the ranks that split the sequence.
    tensor: the ranks that split heads and MLP; None if each has all of them.
    """

    def __init__(
        self,
        size: H3Size,
        comm: Communicator | None,
        tensor: dist.ProcessGroup | None = None,
        schedule: Schedule = "v_first",
    ) -> None:
        super().__init__()
        parts = 1 if tensor is None else tensor.size()
        self.comm = comm
        self.tensor = tensor
        self.schedule = schedule
        self.heads = size.heads // parts
        width = self.heads * size.head_dim
        self.norm_attention = nn.RMSNorm(size.hidden, eps=1e-6)
        self.qkv = nn.Linear(size.hidden, 3 * width, bias=False)  # by columns: whole heads
        self.norm_q = nn.RMSNorm(size.head_dim, eps=1e-6)
        self.norm_k = nn.RMSNorm(size.head_dim, eps=1e-6)
        self.out = nn.Linear(width, size.hidden, bias=False)  # by rows: a part of the sum
        self.norm_mlp = nn.RMSNorm(size.hidden, eps=1e-6)
        self.up = nn.Linear(size.hidden, size.mlp // parts, bias=False)
        self.down = nn.Linear(size.mlp // parts, size.hidden, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """x: (B, S_local, hidden); rope: of these rows, see :func:`rotary.rope_table`. Returns the shape of x."""
        x = x + self.summed(self.out(self.attention(self.norm_attention(x), rope).flatten(2)))
        return x + self.summed(self.down(F.gelu(self.up(self.norm_mlp(x)))))

    def attention(self, x: Tensor, rope: Tensor) -> Tensor:
        """(B, S_local, hidden) -> (B, S_local, H, D), H being the heads of this tensor-parallel rank."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # strided views of one tensor
        q, k, v = self.exchange_v_first(q, k, v, rope) if self.schedule == "v_first" else self.exchange(q, k, v, rope)
        o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
        return self.comm.gather_heads(o)

    def exchange_v_first(self, q: Tensor, k: Tensor, v: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        """Each (B, S_local, H, D) -> (B, S_global, H_local, D)."""
        with self.comm.group("q", "k", "v") as group:
            group.submit(v, tag="v")
            group.submit(rotate(self.norm_q(q), rope), tag="q")
            group.submit(rotate(self.norm_k(k), rope), tag="k")
            return group.wait()

    def exchange(self, q: Tensor, k: Tensor, v: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        """The same, without a thought to the order."""
        q = self.comm.scatter_heads(rotate(self.norm_q(q), rope))
        k = self.comm.scatter_heads(rotate(self.norm_k(k), rope))
        v = self.comm.scatter_heads(v)
        return q, k, v

    def summed(self, x: Tensor) -> Tensor:
        """The sum of the tensor-parallel ranks' parts."""
        return x if self.tensor is None else collectives.all_reduce(x, "sum", self.tensor)


class H3(nn.Module):
    """A stack of blocks that predicts the velocity of a denoising trajectory.

    ``run_block`` runs each of them: compiled, they share a graph, whose inputs their weights are.
    """

    def __init__(
        self,
        size: H3Size,
        num_blocks: int,
        comm: Communicator | None,
        tensor: dist.ProcessGroup | None = None,
        schedule: Schedule = "v_first",
    ) -> None:
        super().__init__()
        self.size = size
        self.tensor = tensor
        self.time = nn.Parameter(torch.empty(size.hidden))
        self.blocks = nn.ModuleList(H3Block(size, comm, tensor, schedule) for _ in range(num_blocks))
        self.run_block: Callable[[H3Block, Tensor, Tensor], Tensor] = H3Block.forward

    def forward(self, x: Tensor, rope: Tensor, t: float) -> Tensor:
        """x: this rank's rows, (B, S_local, hidden), at time ``t``; rope: of these rows. Returns the shape of x."""
        x = x + t * self.time
        for block in self.blocks:
            x = self.run_block(block, x, rope)
        return x

    def load_whole(self, weights: Mapping[str, Tensor]) -> None:
        """Take this rank's part of the weights of a model that is not split."""
        part, parts = (0, 1) if self.tensor is None else (self.tensor.rank(), self.tensor.size())

        def own(name: str, weight: Tensor) -> Tensor:
            kind = name.removesuffix(".weight").split(".")[-1]
            if kind == "qkv":  # (3 x H x D, hidden): each of the three by heads
                return weight.unflatten(0, (3, -1)).chunk(parts, 1)[part].flatten(0, 1)
            if kind in ("up", "out", "down"):
                return weight.chunk(parts, 0 if kind == "up" else 1)[part]
            return weight

        self.load_state_dict({name: own(name, weight) for name, weight in weights.items()})
