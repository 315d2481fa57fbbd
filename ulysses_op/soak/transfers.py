"""One random exchange: which shapes, plan, element type and strides, equal on all ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from ..layout import Direction, HeadRanges, head_plan

FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = ("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "int16", "int32", "int64", *FLOATS)
LAYOUTS = (
    *("contiguous", "contiguous", "fused_qkv", "batch_second", "heads_first", "transposed_d", "offset"),
    *("expanded_batch", "expanded_seq", "expanded_heads", "padded_d", "sliced_heads", "strided_seq"),
)

# Tags that most exchanges have, with an element type and direction each, so that targets are used again; the other
# tags, of any type and direction, evict them.
_HOT: dict[str, tuple[str, Direction]] = {
    "q": ("bfloat16", "scatter_heads"),
    "k": ("bfloat16", "scatter_heads"),
    "v": ("float32", "scatter_heads"),
    "o": ("bfloat16", "gather_heads"),
}
_COLD = tuple(f"tag{number}" for number in range(8))
TAGS = (*_HOT, *_COLD)

_BATCHES = (1, 1, 1, 2, 3)
_HEAD_DIMS = (1, 2, 3, 4, 5, 8, 16, 64, 72, 128)
_PLANS = ("even", "even", "uneven", "uneven", "queries", "keys", "shared", "overlapping")
_LARGE_BYTES = 1 << 20
_USUAL_BYTES = 100_000


@dataclass(frozen=True)
class Transfer:
    """One tensor's exchange: ``heads`` has a (start, stop), ``seq`` a length and ``layouts`` a name for each rank;
    ``pass_heads`` and ``pass_seq`` say whether the call names them.
    """

    tag: str
    direction: Direction
    dtype_name: str
    batch: int
    head_dim: int
    num_heads: int
    heads: HeadRanges
    seq: tuple[int, ...]
    layouts: tuple[str, ...]
    pass_heads: bool
    pass_seq: bool
    gradient: bool = False

    @property
    def dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype_name)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of scatter_heads and gather_heads."""
        return {"heads": self.heads if self.pass_heads else None, "seq_lens": self.seq if self.pass_seq else None}

    def input_shape(self, rank: int) -> tuple[int, int, int, int]:
        """(B, S_local, H, D) to scatter, (B, S_global, H_local, D) to gather."""
        if self.direction == "scatter_heads":
            return self.batch, self.seq[rank], self.num_heads, self.head_dim
        return self.batch, sum(self.seq), self.heads_of(rank), self.head_dim

    def output_shape(self, rank: int) -> tuple[int, int, int, int]:
        """(B, S_global, H_local, D) or (B, S_local, H, D)."""
        if self.direction == "scatter_heads":
            return self.batch, sum(self.seq), self.heads_of(rank), self.head_dim
        return self.batch, self.seq[rank], self.num_heads, self.head_dim

    def heads_of(self, rank: int) -> int:
        """H_local."""
        start, stop = self.heads[rank]
        return stop - start

    def received_bytes(self, rank: int, backward: bool = False) -> int:
        """Bytes that ``rank`` gets from its peers: in the exchange, or in its backward."""
        own_seq, own_heads = self.seq[rank], self.heads_of(rank)
        if (self.direction == "scatter_heads") != backward:
            rows = (sum(self.seq) - own_seq) * own_heads
        else:
            rows = own_seq * (sum(stop - start for start, stop in self.heads) - own_heads)
        return self.batch * rows * self.head_dim * self.dtype.itemsize


def draw_transfer(
    rng: random.Random,
    world_size: int,
    taken: tuple[str, ...] = (),
    *,
    tag: str | None = None,
    gradient: bool = False,
    there_and_back: bool = False,
) -> Transfer:
    """A random exchange under a tag that is not ``taken``.

    gradient: it is one of floating point numbers, and its input requires a gradient.
    there_and_back: it scatters heads by a plan that can be gathered again.
    """
    if tag is None:
        free = [name for name in (_HOT if rng.random() < 0.85 else _COLD) if name not in taken]
        tag = rng.choice(free or [name for name in TAGS if name not in taken])
    hot = _HOT.get(tag)
    dtype_name, direction = hot if hot is not None else (rng.choice(DTYPES), _direction(rng))
    if gradient and dtype_name not in FLOATS:
        dtype_name = rng.choice(FLOATS)
    if there_and_back:
        direction = "scatter_heads"
    disjoint = there_and_back or direction == "gather_heads"
    num_heads, heads = _draw_heads(rng, world_size, disjoint)
    batch, head_dim = rng.choice(_BATCHES), rng.choice(_HEAD_DIMS)
    row_bytes = max(1, batch * num_heads * head_dim * getattr(torch, dtype_name).itemsize)
    seq = _draw_seq(rng, world_size, row_bytes)
    if rng.random() < 0.02:
        batch, head_dim = rng.choice(((0, head_dim), (batch, 0)))
    even_heads = heads == tuple(
        (r * num_heads // world_size, (r + 1) * num_heads // world_size) for r in range(world_size)
    )
    even_heads = even_heads and num_heads % world_size == 0
    layouts = [rng.choice(LAYOUTS)] * world_size if rng.random() < 0.5 else rng.choices(LAYOUTS, k=world_size)
    return Transfer(
        tag=tag,
        direction=direction,
        dtype_name=dtype_name,
        batch=batch,
        head_dim=head_dim,
        num_heads=num_heads,
        heads=heads,
        seq=seq,
        layouts=tuple(layouts),
        pass_heads=not even_heads or rng.random() < 0.3,
        pass_seq=len(set(seq)) > 1 or rng.random() < 0.3,
        gradient=gradient,
    )


def back(transfer: Transfer) -> Transfer:
    """The gather that undoes the scatter ``transfer``, whose heads no two ranks share."""
    return replace(transfer, direction="gather_heads")


def _direction(rng: random.Random) -> Direction:
    return "scatter_heads" if rng.random() < 0.5 else "gather_heads"


def _draw_heads(rng: random.Random, world_size: int, disjoint: bool) -> tuple[int, HeadRanges]:
    """(H, heads); ``disjoint`` heads go to one rank each."""
    plan = rng.choice(_PLANS)
    if plan in ("queries", "keys"):
        keys = rng.choice((1, 2, 3, 4, 7, 8))
        queries = keys * rng.choice((1, 2, 4, 7))
        dealt = head_plan(queries, keys, world_size)
        if plan == "queries":
            return queries, dealt.q
        if not disjoint or keys >= world_size:
            return keys, dealt.kv
    if plan == "shared" and not disjoint:
        count = rng.randint(1, 3)
        return count, ((0, count),) * world_size
    if plan == "overlapping" and not disjoint:
        count = rng.randint(1, 6)
        spans = [sorted((rng.randint(0, count), rng.randint(0, count))) for _ in range(world_size)]
        spans[rng.randrange(world_size)] = [0, count]  # every head goes to some rank
        ranges = tuple((start, stop) for start, stop in spans)
        # Empty ranges beside the whole one share nothing, and are in order wherever they lie.
        return count, ranges
    if plan == "even":
        counts = [rng.randint(1, 4)] * world_size
    else:
        counts = [rng.choice((0, 1, 1, 2, 3, 5)) for _ in range(world_size)]
        counts[rng.randrange(world_size)] += rng.random() < 0.98  # or perhaps there are no heads at all
    return sum(counts), ranges_of(counts)


def ranges_of(counts: list[int]) -> HeadRanges:
    """Ranges of these lengths, one behind the other."""
    stops = list(accumulate(counts))
    return tuple((stop - count, stop) for count, stop in zip(counts, stops, strict=True))


def _draw_seq(rng: random.Random, world_size: int, row_bytes: int) -> tuple[int, ...]:
    """Lengths whose tensor has from 0 to some 100 KB, and now and then more than a megabyte."""
    chance = rng.random()
    if chance < 0.04:
        return (0,) * world_size
    if chance < 0.05:
        whole = max(world_size, int(_LARGE_BYTES * rng.uniform(0.5, 2.0)) // row_bytes)
    else:
        whole = max(world_size, int(_USUAL_BYTES ** rng.random()) // row_bytes)
    if rng.random() < 0.5:
        return (whole // world_size,) * world_size
    weights = [rng.choice((0.0, 0.2, 1.0, 1.0, 2.0)) for _ in range(world_size)]
    total = sum(weights)
    if not total:
        return (0,) * (world_size - 1) + (whole,)
    return tuple(round(whole * weight / total) for weight in weights)
