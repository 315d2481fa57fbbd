"""The copies that `_C.make_copy_plan` lists, carried out on plain bytes for all ranks of a world."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layout_oracle import Array, gathered, scattered

from ulysses_op import _C

EXAMPLES = int(os.environ.get("ULYSSES_OP_TEST_LAYOUTS", "1500"))  # random worlds, in each direction
POISON = 0xA5
GUARD_BYTES = 16
MAX_PITCH_BYTES = 2**31 - 1
Heads = list[tuple[int, int]]
Shape = tuple[int, int, int, int]


def contiguous_strides(shape: Shape) -> Shape:
    _, s, h, d = shape
    return (s * h * d, h * d, d, 1)


def make_plan(direction: str, shape: Shape, heads: Heads, seq_lens: list[int], rank: int, **changes: Any) -> Any:
    arguments = {"strides": contiguous_strides(shape), "itemsize": 2, **changes}
    return _C.make_copy_plan(direction=direction, shape=shape, heads=heads, seq_lens=seq_lens, rank=rank, **arguments)


def rows_of(copies: list[Any]) -> list[tuple[int, int, int]]:
    """(width_bytes, height, peer) of each copy."""
    return [(c.width_bytes, c.height, c.peer) for c in copies]


@dataclass
class View:
    """A strided (B, S, H, D) tensor in a byte buffer of its own."""

    memory: Array
    offset_bytes: int
    shape: Shape
    strides: Shape
    itemsize: int

    def values(self) -> Array:
        """(B, S, H, D, itemsize) bytes."""
        return np.lib.stride_tricks.as_strided(
            self.memory[self.offset_bytes :],
            (*self.shape, self.itemsize),
            (*(stride * self.itemsize for stride in self.strides), 1),
        )


LAYOUTS = ("contiguous", "fused_qkv", "fused_heads", "sequence_first", "expanded_batch", "padded_batch")


def make_view(rng: np.random.Generator, shape: Shape, itemsize: int, layout: str, offset: int) -> View:
    b, s, h, d = shape
    dense = contiguous_strides(shape)
    strides, extra = {
        "contiguous": (dense, 0),
        "fused_qkv": ((3 * s * h * d, 3 * h * d, d, 1), h * d),  # (B, S, 3, H, D)[:, :, 1]
        "fused_heads": ((s * (h + 5) * d, (h + 5) * d, d, 1), 2 * d),  # (B, S, H + 5, D)[:, :, 2 : H + 2]
        "sequence_first": ((h * d, b * h * d, d, 1), 0),  # (S, B, H, D).transpose(0, 1)
        "expanded_batch": ((0, *dense[1:]), 0),
        "padded_batch": (((s + 2) * h * d, *dense[1:]), 0),  # (B, S + 2, H, D)[:, :S]
    }[layout]
    offset += extra
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if math.prod(shape) else -1
    numel = offset + last + 1
    memory = rng.integers(0, 256, max(numel, 1) * itemsize, dtype=np.uint8)
    return View(memory, offset * itemsize, shape, strides, itemsize)


def execute(copies: list[Any], view: View, targets: list[Array], writes: list[Array]) -> None:
    """Moves bytes as the copies say, after checks that a copy engine would not make."""
    for copy in copies:
        assert copy.width_bytes > 0 and copy.height > 0
        for pitch in (copy.src_pitch_bytes, copy.dst_pitch_bytes):
            assert pitch >= copy.width_bytes if copy.height > 1 else pitch == copy.width_bytes
        for row in range(copy.height):
            src = view.offset_bytes + copy.src_offset_bytes + row * copy.src_pitch_bytes
            dst = copy.dst_offset_bytes + row * copy.dst_pitch_bytes
            assert view.offset_bytes <= src and src + copy.width_bytes <= view.memory.size
            assert dst >= 0 and dst + copy.width_bytes <= targets[copy.peer].size - GUARD_BYTES
            targets[copy.peer][dst : dst + copy.width_bytes] = view.memory[src : src + copy.width_bytes]
            writes[copy.peer][dst : dst + copy.width_bytes] += 1


def play(direction: str, views: list[View], heads: Heads, seq_lens: list[int]) -> None:
    """Carries out the plans of all ranks and compares every target with the oracle, byte by byte."""
    inputs = [view.values() for view in views]
    expected = scattered(inputs, heads) if direction == "scatter_heads" else gathered(inputs, seq_lens)
    targets = [np.full(e.size + GUARD_BYTES, POISON, dtype=np.uint8) for e in expected]
    writes = [np.zeros(target.size, dtype=np.int32) for target in targets]
    world_size = len(views)
    for rank, view in enumerate(views):
        plan = _C.make_copy_plan(direction, view.shape, view.strides, view.itemsize, heads, seq_lens, rank)
        distances = [(copy.peer - rank) % world_size for copy in plan.copies]
        assert distances == sorted(distances) and 0 not in distances
        assert {copy.peer for copy in plan.own} <= {rank}
        execute(plan.copies, view, targets, writes)
        execute(plan.own, view, targets, writes)
    for target, count, want in zip(targets, writes, expected, strict=True):
        np.testing.assert_array_equal(target[:-GUARD_BYTES], np.ascontiguousarray(want).reshape(-1))
        assert (count[:-GUARD_BYTES] == 1).all()
        assert (target[-GUARD_BYTES:] == POISON).all()


def split(sizes: list[int]) -> Heads:
    stops = np.cumsum(sizes).tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


@st.composite
def head_ranges(draw: st.DrawFn, world_size: int) -> tuple[int, Heads]:
    """(H, heads): equal and uneven partitions, replicated key heads, and ranges that overlap or leave gaps."""
    kind = draw(st.sampled_from(("equal", "uneven", "replicated", "one_head", "any")))
    if kind == "equal":
        count = draw(st.integers(1, 3))
        return count * world_size, split([count] * world_size)
    if kind == "uneven":
        sizes = draw(st.lists(st.integers(0, 4), min_size=world_size, max_size=world_size))
        return max(sum(sizes), 1), split(sizes)
    if kind == "replicated":
        copies = draw(st.integers(1, world_size))
        heads = [(rank // copies, rank // copies + 1) for rank in range(world_size)]
        return heads[-1][1], heads
    if kind == "one_head":
        return 1, [(0, 1)] * world_size
    num_heads = draw(st.integers(1, 8))
    pair = st.tuples(st.integers(0, num_heads), st.integers(0, num_heads)).map(lambda p: (min(p), max(p)))
    return num_heads, draw(st.lists(pair, min_size=world_size, max_size=world_size))


@st.composite
def worlds(draw: st.DrawFn, direction: str) -> tuple[list[View], Heads, list[int]]:
    world_size = draw(st.integers(1, 8))
    num_heads, heads = draw(head_ranges(world_size))
    even = draw(st.booleans())
    seq_lens = (
        [draw(st.integers(1, 4))] * world_size
        if even
        else draw(st.lists(st.integers(0, 5), min_size=world_size, max_size=world_size))
    )
    batch = draw(st.sampled_from((1, 1, 2, 3)))
    dim = draw(st.sampled_from((1, 2, 3, 4)))
    itemsize = draw(st.sampled_from((1, 2, 4, 8)))
    layouts = draw(st.lists(st.sampled_from(LAYOUTS), min_size=world_size, max_size=world_size))
    offset = draw(st.sampled_from((0, 0, 1, 7)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    views = []
    for rank, layout in enumerate(layouts):
        start, stop = heads[rank]
        scatter = direction == "scatter_heads"
        seq, count = (seq_lens[rank], num_heads) if scatter else (sum(seq_lens), stop - start)
        views.append(make_view(rng, (batch, seq, count, dim), itemsize, layout, offset))
    return views, heads, seq_lens


@pytest.mark.timeout(300 + EXAMPLES / 10)
@pytest.mark.parametrize("direction", ["scatter_heads", "gather_heads"])
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(data=st.data())
def test_random_worlds_match_the_oracle(direction: str, data: st.DataObject) -> None:
    play(direction, *data.draw(worlds(direction)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", ["scatter_heads", "gather_heads"])
@pytest.mark.parametrize(
    ("heads", "seq_lens"),
    [
        (split([2, 2, 2, 1]), [3, 3, 3, 3]),  # 7 key heads over 4 ranks
        (split([8, 8, 8, 4]), [3, 2, 2, 2]),
        ([(0, 1), (0, 1), (1, 2), (1, 2)], [1, 1, 1, 0]),  # replicated, and an empty shard
        (split([1, 1, 0]), [2, 3, 4]),  # a rank without heads
    ],
)
def test_named_worlds_match_the_oracle(direction: str, heads: Heads, seq_lens: list[int], layout: str) -> None:
    rng = np.random.default_rng(0)
    num_heads = max(stop for _, stop in heads)
    shapes: list[Shape] = [
        (2, length, num_heads, 3) if direction == "scatter_heads" else (2, sum(seq_lens), stop - start, 3)
        for (start, stop), length in zip(heads, seq_lens, strict=True)
    ]
    play(direction, [make_view(rng, shape, 2, layout, 5) for shape in shapes], heads, seq_lens)


def test_there_and_back_restores_the_input() -> None:
    rng = np.random.default_rng(1)
    heads, seq_lens = split([3, 2, 2]), [4, 0, 5]
    inputs = [make_view(rng, (2, length, 7, 3), 4, "fused_qkv", 3) for length in seq_lens]
    middle = scattered([view.values() for view in inputs], heads)
    views = [
        View(np.ascontiguousarray(m).reshape(-1), 0, m.shape[:4], contiguous_strides(m.shape[:4]), 4) for m in middle
    ]
    play("gather_heads", views, heads, seq_lens)
    for restored, view in zip(gathered(middle, seq_lens), inputs, strict=True):
        np.testing.assert_array_equal(restored, view.values())


def test_strided_slice_is_one_copy_a_peer() -> None:
    # V of a fused (1, S, 3, H, D) projection.
    plan = make_plan("scatter_heads", (1, 6, 8, 16), split([2] * 4), [6] * 4, 1, strides=(2304, 384, 16, 1))
    assert rows_of(plan.copies) == [(64, 6, 2), (64, 6, 3), (64, 6, 0)]
    assert rows_of(plan.own) == [(64, 6, 1)]
    first = plan.copies[0]
    assert (first.src_offset_bytes, first.src_pitch_bytes) == (2 * 2 * 16 * 2, 768)
    assert (first.dst_offset_bytes, first.dst_pitch_bytes) == (6 * 64, 64)


def test_gather_is_one_copy_a_peer_into_the_slot_of_the_rank() -> None:
    plan = make_plan("gather_heads", (1, 12, 2, 16), split([2] * 3), [5, 4, 3], 1)
    assert rows_of(plan.copies) == [(64, 3, 2), (64, 5, 0)]
    assert [c.src_offset_bytes for c in plan.copies] == [9 * 64, 0]
    assert [(c.dst_offset_bytes, c.dst_pitch_bytes) for c in plan.copies] == [(64, 192), (64, 192)]


def test_replicated_contiguous_rows_become_one_row() -> None:
    plan = make_plan("scatter_heads", (1, 6, 1, 16), [(0, 1)] * 4, [6] * 4, 0)
    assert rows_of(plan.copies) == [(6 * 32, 1, 1), (6 * 32, 1, 2), (6 * 32, 1, 3)]
    assert [c.dst_offset_bytes for c in plan.copies] == [0, 0, 0]


def test_wide_rows_of_a_batch_are_one_copy() -> None:
    # Each batch is one row on both sides, and the batches become the rows of a pitched copy.
    plan = make_plan("scatter_heads", (3, 6, 1, 16), [(0, 1)] * 2, [6] * 2, 0)
    assert rows_of(plan.copies) == [(6 * 32, 3, 1)]
    assert (plan.copies[0].src_pitch_bytes, plan.copies[0].dst_pitch_bytes) == (6 * 32, 12 * 32)


def test_batches_that_continue_the_pitch_become_one_copy() -> None:
    # Rank 0 holds the whole sequence, so batches follow each other in the target too.
    plan = make_plan("scatter_heads", (3, 6, 4, 16), split([2, 2]), [6, 0], 0)
    assert rows_of(plan.copies) == [(64, 18, 1)]
    plan = make_plan("gather_heads", (3, 6, 2, 16), split([2, 2]), [0, 6], 0)
    assert rows_of(plan.copies) == [(64, 18, 1)]
    assert plan.own == []


def test_everything_contiguous_becomes_one_row() -> None:
    plan = make_plan("scatter_heads", (3, 6, 4, 16), [(0, 4)], [6], 0)
    assert plan.copies == []
    assert rows_of(plan.own) == [(3 * 6 * 4 * 32, 1, 0)]


def test_batches_apart_are_one_copy_each() -> None:
    plan = make_plan("scatter_heads", (3, 6, 4, 16), split([2, 2]), [6, 6], 0)
    assert rows_of(plan.copies) == [(64, 6, 1)] * 3
    assert [c.src_offset_bytes for c in plan.copies] == [64, 64 + 6 * 128, 64 + 12 * 128]
    assert [c.dst_offset_bytes for c in plan.copies] == [0, 12 * 64, 24 * 64]


def test_longer_batch_than_sequence_unrolls_the_sequence() -> None:
    plan = make_plan("scatter_heads", (9, 2, 4, 16), split([2, 2]), [2, 2], 0)
    assert rows_of(plan.copies) == [(64, 9, 1)] * 2
    plan = make_plan("scatter_heads", (9, 1, 4, 16), split([2, 2]), [1, 1], 0)
    assert rows_of(plan.copies) == [(64, 9, 1)]


def test_expanded_batch_never_has_a_pitch_below_its_width() -> None:
    plan = make_plan("scatter_heads", (9, 2, 4, 16), split([2, 2]), [2, 2], 0, strides=(0, 64, 16, 1))
    assert rows_of(plan.copies) == [(64, 2, 1)] * 9
    plan = make_plan("scatter_heads", (9, 1, 4, 16), split([2, 2]), [1, 1], 0, strides=(0, 64, 16, 1))
    assert rows_of(plan.copies) == [(64, 1, 1)] * 9


def test_steps_beyond_the_largest_pitch_are_unrolled() -> None:
    step = MAX_PITCH_BYTES // 2 + 1  # elements of 2 bytes
    for stride, expected in ((step - 1, [(64, 3, 1)]), (step, [(64, 1, 1)] * 3)):
        plan = make_plan("scatter_heads", (3, 1, 4, 16), split([2, 2]), [1, 1], 0, strides=(stride, 64, 16, 1))
        assert rows_of(plan.copies) == expected


def test_offsets_are_64_bit() -> None:
    seq = 2**26
    plan = make_plan("gather_heads", (1, 4 * seq, 2, 128), split([2] * 4), [seq] * 4, 3)
    assert [c.src_offset_bytes for c in plan.copies] == [0, seq * 512, 2 * seq * 512]
    assert [c.height for c in plan.copies] == [seq] * 3


@pytest.mark.parametrize("direction", ["scatter_heads", "gather_heads"])
def test_copies_start_at_the_next_rank_and_wrap(direction: str) -> None:
    for rank in range(5):
        shape = (1, 2, 10, 4) if direction == "scatter_heads" else (1, 10, 2, 4)
        plan = make_plan(direction, shape, split([2] * 5), [2] * 5, rank)
        assert [c.peer for c in plan.copies] == [(rank + step) % 5 for step in range(1, 5)]
        assert [c.peer for c in plan.own] == [rank]


@pytest.mark.parametrize("shape", [(0, 2, 4, 3), (1, 0, 4, 3), (1, 2, 0, 3), (1, 2, 4, 0)])
def test_empty_inputs_have_no_copies(shape: Shape) -> None:
    half = shape[2] // 2
    plan = make_plan("scatter_heads", shape, split([half, half]), [shape[1], 2], 0)
    assert plan.copies == [] and plan.own == []


def test_empty_slices_have_no_copies() -> None:
    plan = make_plan("scatter_heads", (1, 2, 4, 3), split([2, 0, 2]), [2, 2, 2], 0)
    assert [c.peer for c in plan.copies] == [2]
    plan = make_plan("gather_heads", (1, 4, 2, 3), split([2, 2, 2]), [2, 0, 2], 0)
    assert [c.peer for c in plan.copies] == [2]


@pytest.mark.parametrize(
    ("dense", "shape", "strides"),
    [
        (True, (2, 3, 4, 5), (60, 20, 5, 1)),
        (True, (2, 3, 4, 5), (180, 60, 5, 1)),  # slice of fused QKV
        (True, (2, 3, 4, 5), (20, 40, 5, 1)),  # (S, B, H, D)
        (True, (2, 3, 4, 5), (0, 20, 5, 1)),  # expanded batch
        (True, (2, 1, 4, 5), (20, 0, 5, 1)),  # one row
        (True, (2, 3, 1, 5), (15, 5, 99, 1)),  # one head
        (True, (2, 3, 4, 1), (12, 4, 1, 99)),  # D of 1
        (True, (2, 3, 0, 5), (7, 7, 7, 7)),  # empty
        (False, (2, 3, 4, 5), (15, 5, 0, 1)),  # expanded heads
        (False, (2, 3, 4, 5), (60, 20, 1, 4)),  # transposed (H, D)
        (False, (2, 3, 4, 5), (60, 5, 15, 1)),  # (B, H, S, D)
        (False, (2, 3, 4, 5), (120, 40, 10, 2)),  # [..., ::2]
        (False, (2, 3, 4, 5), (120, 40, 10, 1)),  # [..., :5] of D = 10
        (False, (2, 3, 4, 1), (24, 8, 2, 1)),  # [..., :1] of D = 2
        (False, (2, 3, 1, 5), (30, 10, 5, 2)),  # [..., ::2] of one head
        (False, (2, 3, 4, 5), (20, 0, 5, 1)),  # expanded sequence
        (False, (2, 3, 4, 5), (60, 19, 5, 1)),  # rows that overlap
    ],
)
def test_rows_dense(dense: bool, shape: Shape, strides: Shape) -> None:
    assert _C.rows_dense(shape, strides) is dense
    if not dense:
        with pytest.raises(ValueError, match=r"must be dense in memory.*contiguous\(\)"):
            _C.make_copy_plan("scatter_heads", shape, strides, 2, [(0, shape[2])], [shape[1]], 0)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (r"itemsize must be 1, 2, 4 or 8 bytes, got 3", {"itemsize": 3}),
        (r"itemsize must be 1, 2, 4 or 8 bytes, got 16", {"itemsize": 16}),
        (r"heads must have one range a rank, got none", {"heads": [], "seq_lens": []}),
        (r"seq_lens must have one length a rank as heads does, got 1 lengths and 2 ranges", {"seq_lens": [3]}),
        (r"rank must be in \[0, 2\), got 2", {"rank": 2}),
        (r"rank must be in \[0, 2\), got -1", {"rank": -1}),
        (r"shape\[0\] must not be negative, got -1", {"shape": (-1, 3, 4, 5)}),
        (r"strides\[1\] must not be negative, got -20", {"strides": (60, -20, 5, 1)}),
        (r"seq_lens\[1\] must not be negative, got -3", {"seq_lens": [3, -3]}),
        (r"heads\[1\] must be a range .* within the 4 heads of the input, got \(2, 5\)", {"heads": [(0, 2), (2, 5)]}),
        (r"heads\[0\] must be a range .*, got \(2, 0\)", {"heads": [(2, 0), (2, 4)]}),
        (r"heads\[0\] must be a range .*, got \(-1, 2\)", {"heads": [(-1, 2), (2, 4)]}),
        (r"shape\[1\] must be seq_lens\[0\] = 2, when heads are scattered, got 3", {"seq_lens": [2, 3]}),
        (r"shape\[1\] must be the sum of seq_lens, 6, when heads are gathered, got 3", {"direction": "gather_heads"}),
        (
            r"shape\[2\] must be the 2 heads of heads\[0\] when heads are gathered, got 4",
            {"direction": "gather_heads", "seq_lens": [1, 2]},
        ),
        (
            r"heads\[1\] must be a range .* that starts at 0 or later, got \(5, 4\)",
            {"direction": "gather_heads", "heads": [(0, 4), (5, 4)], "seq_lens": [1, 2]},
        ),
        (r"sizes are too large", {"seq_lens": [3, 2**62]}),
        (r"sizes are too large", {"seq_lens": [3, 2**63 - 1]}),
        (r"sizes are too large", {"strides": (2**62, 20, 5, 1)}),
    ],
)
def test_inconsistent_arguments_raise(message: str, changes: dict[str, Any]) -> None:
    valid: dict[str, Any] = {
        "direction": "scatter_heads",
        "shape": (2, 3, 4, 5),
        "strides": (60, 20, 5, 1),
        "itemsize": 2,
        "heads": [(0, 2), (2, 4)],
        "seq_lens": [3, 3],
        "rank": 0,
    }
    _C.make_copy_plan(**valid)
    with pytest.raises(ValueError, match=message):
        _C.make_copy_plan(**{**valid, **changes})
