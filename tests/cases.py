"""The exchanges that the tests run, as a table a world size.

A case is one tensor's exchange described by what all ranks share. Head plans and sequence splits stand here as
literal numbers or by the plainest arithmetic, so that they do not lean on the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

HeadRanges = tuple[tuple[int, int], ...]

DTYPES = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)

# How a rank's (B, S, H, D) input lies in memory; see oracle.place.
LAYOUTS = (
    "contiguous",
    "fused_qkv",
    "sb",
    "heads_first",
    "transposed_d",
    "expanded_batch",
    "expanded_seq",
    "expanded_heads",
    "offset",
    "padded_d",
    "sliced_heads",
    "strided_seq",
    "mixed_by_rank",
)


@dataclass(frozen=True)
class Case:
    """`seq` and `ranges` hold the true length and heads of each rank; `pass_*` say whether the call names them."""

    name: str
    batch: int
    head_dim: int
    num_heads: int
    seq: tuple[int, ...]
    ranges: HeadRanges
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    pass_heads: bool = False
    pass_seq: bool = False
    # Tells the tensors of one group apart: part of the seed of the values.
    slot: int = 0

    @property
    def world_size(self) -> int:
        return len(self.seq)

    @property
    def replicated(self) -> bool:
        return sum(stop - start for start, stop in self.ranges) > self.num_heads

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of scatter_heads and gather_heads."""
        return {"heads": self.ranges if self.pass_heads else None, "seq_lens": self.seq if self.pass_seq else None}

    def input_shape(self, direction: str, rank: int) -> tuple[int, int, int, int]:
        if direction == "scatter_heads":
            return (self.batch, self.seq[rank], self.num_heads, self.head_dim)
        return (self.batch, sum(self.seq), self.ranges[rank][1] - self.ranges[rank][0], self.head_dim)


def split(total: int, world_size: int) -> tuple[int, ...]:
    """`total` over the ranks as evenly as possible, larger shares first."""
    return tuple(total // world_size + (rank < total % world_size) for rank in range(world_size))


def ranges_of(counts: tuple[int, ...]) -> HeadRanges:
    """Consecutive head ranges of the given lengths."""
    return tuple((sum(counts[:rank]), sum(counts[: rank + 1])) for rank in range(len(counts)))


def even(name: str, world_size: int, *, b: int = 1, s: int = 6, h: int | None = None, d: int = 8, **other: Any) -> Case:
    """The same length and the same head count on every rank: `s` a rank, `h` in all (2 a rank)."""
    h = 2 * world_size if h is None else h
    assert h % world_size == 0
    return Case(name, b, d, h, (s,) * world_size, ranges_of(split(h, world_size)), **other)


def uneven(
    name: str,
    *,
    seq: tuple[int, ...],
    counts: tuple[int, ...] | None = None,
    ranges: HeadRanges | None = None,
    h: int | None = None,
    b: int = 1,
    d: int = 8,
    **other: Any,
) -> Case:
    """Lengths and heads as named, both handed to the call: `counts` a partition, or `ranges` of `h` heads."""
    if ranges is None:
        assert counts is not None
        ranges = ranges_of(counts)
        h = sum(counts)
    assert h is not None
    return Case(name, b, d, h, seq, ranges, pass_heads=True, pass_seq=True, **other)


# 28 query heads with 7 key heads, whole groups of 4; and 8 query heads with fewer key heads than ranks.
GQA_28_7 = {
    2: ((16, 12), (4, 3)),
    3: ((12, 8, 8), (3, 2, 2)),
    4: ((8, 8, 8, 4), (2, 2, 2, 1)),
}


def cases(world_size: int) -> list[Case]:
    p = world_size
    table = [
        # Every dimension distinct, more than one batch.
        even("distinct_dims", p, b=2, s=5, h=3 * p, d=7),
        even("batch", p, b=3, s=4, d=8, layout="sb"),
        even("batch_fused_qkv", p, b=2, s=4, d=8, layout="fused_qkv"),
        # Head counts that divide by the world size where the heads a rank holds do not.
        even("local_heads_below_world", p, h=p, s=4),
        even("odd_local_heads", p, h={2: 6, 3: 6, 4: 8}[p], s=4, d=4),
        # One head count after another in one process.
        uneven("seven_heads", seq=(4,) * p, counts={2: (4, 3), 3: (3, 2, 2), 4: (2, 2, 2, 1)}[p]),
        even("twenty_heads", p, h={2: 20, 3: 21, 4: 20}[p], s=4),
        uneven("three_heads", seq=(4,) * p, counts={2: (2, 1), 3: (1, 1, 1), 4: (1, 1, 1, 0)}[p], d=2),
        # Grouped queries.
        uneven("gqa_28_7_q", seq=(3,) * p, counts=GQA_28_7[p][0], dtype=torch.bfloat16),
        uneven("gqa_28_7_kv", seq=(3,) * p, counts=GQA_28_7[p][1], dtype=torch.bfloat16),
        even("kv_heads_equal_world", p, h=p, s=3, dtype=torch.bfloat16),
        uneven("one_kv_head", seq=(3,) * p, ranges=((0, 1),) * p, h=1, dtype=torch.bfloat16),
        # Uneven lengths, down to an empty shard.
        uneven("seq_8558", seq=split(8558, p), counts=(1,) * p, d=16, dtype=torch.bfloat16),
        uneven("seq_3", seq=split(3, p), counts=(2,) * p),
        uneven("seq_one_rank_only", seq=(0,) * (p - 1) + (5,), counts=(1,) * p, b=2),
        uneven("seq_and_heads", seq=tuple(range(2, 2 + p)), counts=tuple(range(p, 0, -1)), b=2, d=5),
        # A sequence of an image and a text part, each split over the ranks.
        uneven(
            "image_and_text",
            seq=tuple(i + t for i, t in zip(split(8558, p), split(1024, p), strict=True)),
            counts={2: (16, 16), 3: (11, 11, 10), 4: (8, 8, 8, 8)}[p],
            d=2,
            dtype=torch.bfloat16,
        ),
        # Elements of one byte that make odd rows, and an empty exchange.
        even("odd_row_bytes", p, b=2, s=3, h=3 * p, d=3, dtype=torch.uint8, layout="offset"),
        even("no_sequence", p, s=0),
    ]
    if p == 4:
        table.append(
            uneven("two_kv_heads", seq=(3,) * 4, ranges=((0, 1), (0, 1), (1, 2), (1, 2)), h=2, dtype=torch.bfloat16)
        )
    if p > 2:
        # Overlapping ranges that repeat some heads only.
        overlap = {3: ((0, 2), (1, 3), (2, 4)), 4: ((0, 2), (1, 3), (2, 4), (0, 4))}[p]
        table.append(uneven("overlapping_heads", seq=tuple(range(1, 1 + p)), ranges=overlap, h=4, b=2))
    for d in (1, 3, 64, 72, 80, 128):
        table.append(even(f"d{d}", p, b=2, s=3, h=p, d=d, dtype=torch.bfloat16))
    for dtype in DTYPES:
        table.append(even(f"dtype_{str(dtype).removeprefix('torch.')}", p, b=2, s=4, d=6, dtype=dtype))
    for layout in LAYOUTS:
        table.append(even(f"layout_{layout}", p, b=2, s=4, h=3 * p, d=4, dtype=torch.bfloat16, layout=layout))
    assert len({case.name for case in table}) == len(table)
    return table


def qkv(world_size: int, *, dtype: torch.dtype = torch.bfloat16, layout: str = "fused_qkv") -> dict[str, Case]:
    """q, k and v of one attention with grouped heads, K's D unlike V's, uneven lengths."""
    seq = tuple(3 + rank % 2 for rank in range(world_size))
    q, kv = GQA_28_7[world_size]
    common: dict[str, Any] = {"seq": seq, "b": 2, "dtype": dtype, "layout": layout}
    return {
        "q": uneven("q", counts=q, d=8, slot=1, **common),
        "k": uneven("k", counts=kv, d=8, slot=2, **common),
        "v": uneven("v", counts=kv, d=12, slot=3, **common),
    }
