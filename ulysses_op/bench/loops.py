"""Denoising loops over stacks of blocks whose exchanges are given, in the manner of MiniMax H3 and of LingBot-World v2.
``examples/`` has these models whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .block import EPSILON, Exchanges, Norm, rope_table, sdpa
from .measure import Outputs, Ranks
from .profiles import Shape

EARLIER = 4  # chunks before a chunk of LingBot's that it attends to: three of the window, and the first of all
_SHARPNESS = 1.6  # of the norms of q and k: attention to all tokens alike would average away what was exchanged

Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Weights(NamedTuple):
    """Of one block, as F.linear takes them. projections: the fused one, or those of q, k and v. cache: keys and values
    that a chunk attends to, (1, tokens, H_local, D) each, its own last; empty where there are no chunks.
    """

    norm_attention: torch.Tensor
    projections: tuple[torch.Tensor, ...]
    norm_q: torch.Tensor
    norm_k: torch.Tensor
    out: torch.Tensor
    norm_mlp: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    cache: tuple[torch.Tensor, ...] = ()


class Parts(NamedTuple):
    """What a block that is not compiled as a whole may have compiled."""

    norm_rope: Norm
    rotate: Rotate


Block = Callable[[torch.Tensor, Weights, torch.Tensor, torch.Tensor, Shape, Parts, Exchanges], torch.Tensor]
"""From x, (1, S_local, hidden), weights, cosines and sines, (B, S_local, H, D), to what x is then."""


def h3_block(
    x: torch.Tensor,
    weights: Weights,
    cos: torch.Tensor,
    sin: torch.Tensor,
    shape: Shape,
    parts: Parts,
    exchanges: Exchanges,
) -> torch.Tensor:
    """One fused projection; norm and RoPE of q and k by heads, before they are scattered."""
    scatter, gather = exchanges
    (qkv,) = weights.projections
    fused = F.linear(_norm(x, weights.norm_attention), qkv).unflatten(-1, (3, *shape[2:]))
    q, k, v = scatter(
        fused,
        lambda: parts.norm_rope(fused[:, :, 0], weights.norm_q, cos, sin),
        lambda: parts.norm_rope(fused[:, :, 1], weights.norm_k, cos, sin),
    )
    return _rest(x, gather(sdpa(q, k, v)), weights)


def lingbot_block(
    x: torch.Tensor,
    weights: Weights,
    cos: torch.Tensor,
    sin: torch.Tensor,
    shape: Shape,
    parts: Parts,
    exchanges: Exchanges,
) -> torch.Tensor:
    """A projection each; norms over all heads, before they are scattered, RoPE behind it. The chunk's keys and values
    take their place in the cache, behind those of earlier chunks.
    """
    scatter, gather = exchanges
    y = _norm(x, weights.norm_attention)
    to_q, to_k, to_v = weights.projections
    q, k, v = scatter(
        F.linear(y, to_v).unflatten(-1, (1, *shape[2:])),
        lambda: _norm(F.linear(y, to_q), weights.norm_q).unflatten(-1, shape[2:]),
        lambda: _norm(F.linear(y, to_k), weights.norm_k).unflatten(-1, shape[2:]),
    )
    keys, values = weights.cache
    chunk = q.shape[1]
    keys[:, -chunk:] = parts.rotate(k, cos, sin)
    values[:, -chunk:] = v
    return _rest(x, gather(sdpa(parts.rotate(q, cos, sin), keys, values)), weights)


def _rest(x: torch.Tensor, o: torch.Tensor, weights: Weights) -> torch.Tensor:
    x = x + F.linear(o.flatten(2), weights.out)
    return x + F.linear(F.gelu(F.linear(_norm(x, weights.norm_mlp), weights.up)), weights.down)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, EPSILON)


@dataclass(frozen=True)
class Kind:
    """block: one of the stack. hidden, mlp: widths, as multiples of H * D. chunked: whether x is a chunk of a video."""

    block: Block
    hidden: float
    mlp: float
    chunked: bool


LOOPS = {
    "h3": Kind(h3_block, 1.5, 3, False),  # as a rank of tensor parallelism 2 has it, without its all-reduces
    "lingbot": Kind(lingbot_block, 1, 4, True),
}


@dataclass(frozen=True)
class Loop:
    """``steps`` passes through all blocks, each of which takes x a step on."""

    x: torch.Tensor
    weights: Sequence[Weights]
    cos: torch.Tensor
    sin: torch.Tensor
    steps: int

    def run(self, block: Callable[[torch.Tensor, Weights, torch.Tensor, torch.Tensor], torch.Tensor]) -> Outputs:
        x = self.x
        for _ in range(self.steps):
            velocity = functools.reduce(lambda y, weights: block(y, weights, self.cos, self.sin), self.weights, x)
            x = x - velocity / self.steps
        return (x,)


def make_loop(kind: Kind, shape: Shape, dtype: torch.dtype, blocks: int, steps: int, ranks: Ranks) -> Loop:
    """B = 1. The weights of all ranks are alike, x and what is cached are not."""
    _, seq_local, num_heads, head_dim = shape
    width, chunk = num_heads * head_dim, seq_local * ranks.world_size
    hidden, mlp = int(kind.hidden * width), int(kind.mlp * width)
    shared, own = (torch.Generator(ranks.device).manual_seed(seed) for seed in (1, 2 + ranks.rank))

    def random(generator: torch.Generator, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=dtype, device=ranks.device, generator=generator)

    def linear(outputs: int, inputs: int) -> torch.Tensor:
        return random(shared, outputs, inputs) * inputs**-0.5

    def norm(size: int, scale: float = 1.0) -> torch.Tensor:
        return scale * (1 + 0.1 * random(shared, size))

    def one_block() -> Weights:
        normed = width if kind.chunked else head_dim
        cached = (1, (EARLIER + 1) * chunk, num_heads // ranks.world_size, head_dim)
        return Weights(
            norm(hidden),
            tuple(linear(width, hidden) for _ in range(3)) if kind.chunked else (linear(3 * width, hidden),),
            norm(normed, _SHARPNESS),
            norm(normed, _SHARPNESS),
            linear(hidden, width),
            norm(hidden),
            linear(mlp, hidden),
            linear(hidden, mlp),
            tuple(random(own, *cached) for _ in range(2)) if kind.chunked else (),
        )

    if kind.chunked:  # whose rows are rotated when all are there
        positions = torch.arange(EARLIER * chunk, (EARLIER + 1) * chunk, device=ranks.device)
    else:
        positions = torch.arange(ranks.rank * seq_local, (ranks.rank + 1) * seq_local, device=ranks.device)
    weights = [one_block() for _ in range(blocks)]
    return Loop(random(own, 1, seq_local, hidden), weights, *rope_table(positions, head_dim), steps)
