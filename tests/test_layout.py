"""Head plans, shapes and regions of an exchange, and the errors for arguments that do not fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_oracle import gathered, scattered

from ulysses_op.layout import Exchange, HeadPlan, gather_exchange, head_plan, scatter_exchange

PARTITION = ((0, 3), (3, 5), (5, 5), (5, 6))
REPLICATED = ((0, 1), (0, 1), (1, 2), (1, 2))
SEQ_LENS = (4, 0, 3, 2)


@pytest.mark.parametrize(
    ("counts", "q", "kv"),
    [
        ((8, 8, 4), ((0, 2), (2, 4), (4, 6), (6, 8)), ((0, 2), (2, 4), (4, 6), (6, 8))),
        ((3, 3, 2), ((0, 2), (2, 3)), ((0, 2), (2, 3))),
        ((28, 7, 4), ((0, 8), (8, 16), (16, 24), (24, 28)), ((0, 2), (2, 4), (4, 6), (6, 7))),
        ((28, 7, 2), ((0, 16), (16, 28)), ((0, 4), (4, 7))),
        ((28, 7, 1), ((0, 28),), ((0, 7),)),
        ((8, 1, 2), ((0, 4), (4, 8)), ((0, 1), (0, 1))),
        ((8, 1, 4), ((0, 2), (2, 4), (4, 6), (6, 8)), ((0, 1), (0, 1), (0, 1), (0, 1))),
        ((32, 4, 4), ((0, 8), (8, 16), (16, 24), (24, 32)), ((0, 1), (1, 2), (2, 3), (3, 4))),  # kv = P
        ((32, 2, 4), ((0, 8), (8, 16), (16, 24), (24, 32)), ((0, 1), (0, 1), (1, 2), (1, 2))),  # kv = P / 2
        ((6, 3, 4), ((0, 1), (1, 2), (2, 4), (4, 6)), ((0, 1), (0, 1), (1, 2), (2, 3))),
        ((5, 1, 3), ((0, 2), (2, 4), (4, 5)), ((0, 1), (0, 1), (0, 1))),
        ((2, 1, 4), ((0, 1), (1, 2), (2, 2), (2, 2)), ((0, 1), (0, 1), (1, 1), (1, 1))),  # ranks without queries
        ((2, 2, 3), ((0, 1), (1, 1), (1, 2)), ((0, 1), (1, 1), (1, 2))),
    ],
)
def test_head_plan(counts: tuple[int, int, int], q: Any, kv: Any) -> None:
    assert head_plan(*counts) == HeadPlan(q=q, kv=kv)


@settings(max_examples=300, deadline=None)
@given(kv_heads=st.integers(1, 16), group=st.integers(1, 9), world_size=st.integers(1, 16))
def test_head_plan_gives_each_rank_the_key_heads_of_its_queries(kv_heads: int, group: int, world_size: int) -> None:
    plan = head_plan(kv_heads * group, kv_heads, world_size)
    assert [h for start, stop in plan.q for h in range(start, stop)] == list(range(kv_heads * group))
    assert {h for start, stop in plan.kv for h in range(start, stop)} == set(range(kv_heads))
    for (q_start, q_stop), (kv_start, kv_stop) in zip(plan.q, plan.kv, strict=True):
        assert {q // group for q in range(q_start, q_stop)} == set(range(kv_start, kv_stop))
        # What attention kernels ask for: the rank's queries are whole groups of its key heads.
        assert q_start == q_stop or (q_stop - q_start) % (kv_stop - kv_start) == 0
    for heads in plan:
        exchange = scatter_exchange((1, 2, max(stop for _, stop in heads), 4), world_size, 0, heads=heads)
        assert exchange.heads == heads


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((0, 1, 1), "num_q_heads must be at least 1, got 0"),
        ((1, -1, 1), "num_kv_heads must be at least 1, got -1"),
        ((1, 1, 0), "world_size must be at least 1, got 0"),
        ((28, 6, 4), "num_q_heads must be a multiple of num_kv_heads, got 28 query heads and 6 key heads"),
        ((4, 8, 4), "num_q_heads must be a multiple of num_kv_heads, got 4 query heads and 8 key heads"),
    ],
)
def test_head_plan_refuses(counts: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        head_plan(*counts)


def test_scatter_defaults_to_equal_shares() -> None:
    exchange = scatter_exchange((2, 5, 8, 3), 4, 1)
    assert exchange == Exchange("scatter_heads", 2, 8, 3, ((0, 2), (2, 4), (4, 6), (6, 8)), (5, 5, 5, 5))
    assert exchange.world_size == 4 and exchange.seq_global == 20
    assert exchange.input_shape(1) == (2, 5, 8, 3)
    assert exchange.output_shape(1) == (2, 20, 2, 3)
    assert exchange.max_output_numel == 2 * 20 * 2 * 3
    assert exchange.sent_numel(1) == 2 * 5 * 6 * 3
    assert not exchange.replicated and not exchange.replicas


def test_gather_defaults_to_equal_shares() -> None:
    exchange = gather_exchange((2, 20, 2, 3), 4, 1)
    assert exchange == scatter_exchange((2, 5, 8, 3), 4, 1).reverse()
    assert exchange.input_shape(1) == (2, 20, 2, 3)
    assert exchange.output_shape(1) == (2, 5, 8, 3)
    assert exchange.max_output_numel == 2 * 5 * 8 * 3
    assert exchange.sent_numel(1) == 2 * 15 * 2 * 3


def test_gather_of_few_heads_is_not_taken_for_an_uneven_plan() -> None:
    # H_local = 2 does not divide by 4 ranks, and need not.
    assert gather_exchange((1, 8, 2, 3), 4, 0).num_heads == 8


def test_uneven_heads_and_lengths() -> None:
    scatter = scatter_exchange((2, 3, 6, 5), 4, 2, heads=PARTITION, seq_lens=SEQ_LENS)
    assert [scatter.output_shape(r) for r in range(4)] == [(2, 9, 3, 5), (2, 9, 2, 5), (2, 9, 0, 5), (2, 9, 1, 5)]
    assert scatter.max_output_numel == 2 * 9 * 3 * 5
    assert [scatter.sent_numel(r) for r in range(4)] == [2 * 4 * 3 * 5, 0, 2 * 3 * 6 * 5, 2 * 2 * 5 * 5]
    gather = gather_exchange((2, 9, 0, 5), 4, 2, heads=PARTITION, seq_lens=SEQ_LENS)
    assert gather == scatter.reverse() and gather.reverse() == scatter
    assert [gather.output_shape(r) for r in range(4)] == [(2, 4, 6, 5), (2, 0, 6, 5), (2, 3, 6, 5), (2, 2, 6, 5)]
    assert gather.max_output_numel == 2 * 4 * 6 * 5
    assert [gather.sent_numel(r) for r in range(4)] == [2 * 5 * 3 * 5, 2 * 9 * 2 * 5, 0, 2 * 7 * 1 * 5]


def test_reverse_of_a_replicated_scatter_keeps_the_copies_apart() -> None:
    scatter = scatter_exchange((2, 4, 2, 5), 4, 0, heads=REPLICATED, seq_lens=SEQ_LENS)
    assert scatter.replicated and not scatter.replicas
    gather = scatter.reverse()
    assert gather.direction == "gather_heads" and gather.replicas and gather.replicated
    assert gather.num_heads == 2
    assert gather.output_shape(0) == (2, 4, 4, 5)
    assert [gather.head_slot(r) for r in range(4)] == [0, 1, 2, 3]
    assert gather.max_output_numel == 2 * 4 * 4 * 5
    back = gather.reverse()
    assert back.direction == "scatter_heads" and not back.replicated
    assert back.heads == ((0, 1), (1, 2), (2, 3), (3, 4))
    assert [back.input_shape(r) for r in range(4)] == [gather.output_shape(r) for r in range(4)]
    assert [back.output_shape(r) for r in range(4)] == [gather.input_shape(r) for r in range(4)]


def test_exchange_is_the_same_key_on_every_rank() -> None:
    keys = set()
    for rank in range(4):
        heads = [list(pair) for pair in PARTITION]
        keys.add(scatter_exchange((2, SEQ_LENS[rank], 6, 5), 4, rank, heads=heads, seq_lens=list(SEQ_LENS)))
    assert len(keys) == 1


@pytest.mark.parametrize("heads", [PARTITION, REPLICATED, ((0, 1),) * 4, head_plan(28, 7, 4).q, head_plan(2, 1, 4).kv])
@pytest.mark.parametrize("seq_lens", [SEQ_LENS, (3, 3, 3, 3), (0, 0, 5, 0), (1, 1, 1, 0), (0, 0, 0, 0)])
def test_regions_place_every_element_once(heads: Any, seq_lens: tuple[int, ...]) -> None:
    num_heads = max(stop for _, stop in heads)
    shape = (2, seq_lens[0], num_heads, 3)
    scatter = scatter_exchange(shape, 4, 0, heads=heads, seq_lens=seq_lens)
    for exchange in (scatter, scatter.reverse()):
        rng = np.random.default_rng(0)
        inputs = [rng.integers(0, 2**40, exchange.input_shape(r)) for r in range(4)]
        outputs = scattered(inputs, heads) if exchange is scatter else gathered(inputs, seq_lens)
        for rank in range(4):
            assert outputs[rank].shape == exchange.output_shape(rank)
            own, peers = exchange.own_dest(rank), exchange.peer_dests(rank)
            np.testing.assert_array_equal(outputs[rank][own], inputs[rank][exchange.own_source(rank)])
            count = np.zeros(exchange.output_shape(rank), dtype=np.int64)
            for region in (own, *peers):
                count[region] += 1
            assert (count == 1).all()
            assert len(peers) <= 2
            assert exchange.sent_numel(rank) == sum(
                (heads[peer][1] - heads[peer][0]) * seq_lens[rank] * 6
                if exchange is scatter
                else (heads[rank][1] - heads[rank][0]) * seq_lens[peer] * 6
                for peer in range(4)
                if peer != rank
            )
        assert exchange.max_output_numel == max(output.size for output in outputs)


def test_one_rank_exchanges_nothing() -> None:
    exchange = scatter_exchange((2, 5, 3, 4), 1, 0)
    assert exchange.peer_dests(0) == [] and exchange.sent_numel(0) == 0
    assert exchange.reverse().peer_dests(0) == []


S, G = scatter_exchange, gather_exchange


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        (S, {"shape": (2, 3, 4)}, "shape must have 4 dimensions (B, S_local, H, D), got 3: (2, 3, 4)"),
        (G, {"shape": (1,) * 5}, "shape must have 4 dimensions (B, S_global, H_local, D), got 5: (1, 1, 1, 1, 1)"),
        (S, {"shape": (2, -1, 8, 3)}, "shape must not have negative sizes, got (2, -1, 8, 3)"),
        (S, {"world_size": 0}, "world_size must be at least 1, got 0"),
        (S, {"rank": 4}, "rank must be in [0, 4), got 4"),
        (G, {"rank": -1}, "rank must be in [0, 4), got -1"),
        (
            S,
            {"shape": (2, 5, 7, 3)},
            "H = 7 heads do not split equally over world_size = 4 ranks: pass heads, for instance from "
            "ulysses_op.head_plan(num_q_heads, num_kv_heads, world_size)",
        ),
        (S, {"heads": [(0, 4), (4, 8)]}, "heads must have one (start, stop) for each of 4 ranks, got 2"),
        (S, {"heads": [(0, 8, 1)] * 4}, "heads[0] must be (start, stop), got (0, 8, 1)"),
        (S, {"heads": [(0, 8), (3, 2)] * 2}, "heads[1] must satisfy 0 <= start <= stop, got (3, 2)"),
        (G, {"heads": [(-1, 8)] * 4}, "heads[0] must satisfy 0 <= start <= stop, got (-1, 8)"),
        (S, {"heads": [(0, 8)] * 3 + [(0, 9)]}, "heads[3] must lie within the H = 8 heads, got (0, 9)"),
        (
            S,
            {"heads": [(0, 2), (2, 4), (5, 6), (6, 8)]},
            "heads must give every one of the H = 8 heads to a rank, but head 4 goes to none: "
            "extend a range to it, or slice the tensor if it is not wanted",
        ),
        (S, {"heads": [(0, 2), (2, 4), (4, 7), (8, 8)]}, "but head 7 goes to none"),
        (S, {"heads": [(8, 8), (2, 4), (4, 8), (4, 8)]}, "but head 0 goes to none"),
        (
            S,
            {"heads": [(6, 8), (4, 6), (2, 4), (0, 2)]},
            "heads that share no head must follow each other in rank order, got ((6, 8), (4, 6), (2, 4), (0, 2))",
        ),
        (S, {"seq_lens": [5, 5]}, "seq_lens must have one length for each of 4 ranks, got 2"),
        (S, {"seq_lens": [5, 5, -2, 5]}, "seq_lens[2] must not be negative, got -2"),
        (S, {"seq_lens": [5, 8, 5, 5]}, "seq_lens[1] must be this rank's S_local = 5 (shape[1]), got 8"),
        (
            G,
            {"shape": (2, 22, 2, 3)},
            "S_global = 22 (shape[1]) does not split equally over world_size = 4 ranks: "
            "pass seq_lens, one length per rank",
        ),
        (G, {"seq_lens": [5, 5, 5]}, "seq_lens must have one length for each of 4 ranks, got 3"),
        (
            G,
            {"seq_lens": [5, 5, 5, 6]},
            "seq_lens must add up to S_global = 20 (shape[1]), got (5, 5, 5, 6) with sum 21",
        ),
        (
            G,
            {"heads": REPLICATED},
            "heads must partition the H heads in rank order to be gathered, without overlap or gap, "
            "got ((0, 1), (0, 1), (1, 2), (1, 2)): gather with the plan of the queries (ulysses_op.head_plan(...).q)",
        ),
        (G, {"heads": [(0, 2), (2, 4), (5, 7), (7, 9)]}, "without overlap or gap"),
        (G, {"heads": [(2, 4), (0, 2), (4, 6), (6, 8)]}, "in rank order"),
        (G, {"heads": [(1, 3), (3, 5), (5, 7), (7, 9)]}, "without overlap or gap"),
        (
            G,
            {"heads": [(0, 3), (3, 6), (6, 7), (7, 8)]},
            "heads[1] must have this rank's H_local = 2 heads (shape[2]), got (3, 6)",
        ),
    ],
)
def test_arguments_that_do_not_fit(build: Callable[..., Exchange], arguments: dict[str, Any], message: str) -> None:
    shape = (2, 5, 8, 3) if build is scatter_exchange else (2, 20, 2, 3)
    valid: dict[str, Any] = {"shape": shape, "world_size": 4, "rank": 1}
    build(**valid)
    with pytest.raises(ValueError, match=re.escape(message)):
        build(**{**valid, **arguments})


def test_head_indices_must_be_integers() -> None:
    with pytest.raises(TypeError, match="integer"):
        scatter_exchange((1, 2, 4, 3), 2, 0, heads=[(0, 2.0), (2.0, 4)])  # type: ignore[list-item]
