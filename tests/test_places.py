"""Results that stay where the peers wrote them: theirs as long as anybody has them, whatever is exchanged meanwhile."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import ranks
import torch
from oracle import values, wrong_elements
from test_targets import _scattered

from ulysses_op._C import ShmTransport
from ulysses_op.places import Places

SHAPE = (2, 6, 8, 16)
PLACES_OFFSET = ShmTransport.PLACES_OFFSET


def exchanged(comm: Any, seed: int, rank: int, tags: tuple[str, ...], named: bool, shape: Any = SHAPE) -> Any:
    """Seeds and results of a group; ``named``: whether it names its tags."""
    with comm.group(*tags if named else ()) as group:
        for number, tag in enumerate(tags):
            group.submit(values(shape, torch.float32, "cpu", seed + 100 * number, rank), tag=tag)
        return [(seed + 100 * number, result) for number, result in enumerate(group.wait())]


def count_wrong(results: Any, rank: int, world_size: int, shape: Any = SHAPE) -> int:
    return sum(wrong_elements(result, _scattered(seed, rank, world_size, shape)) > 0 for seed, result in results)


def in_place(comm: Any, result: torch.Tensor) -> bool:
    """Whether it is where peers have written it."""
    starts = [target.base._memory.obj.address + PLACES_OFFSET for _, target in comm._engine._targets.all()]
    return result.data_ptr() in starts


def hold(rank: int, world_size: int, named: bool, rounds: int) -> tuple[int, int]:
    """Every rank holds other results, and for other times: how many were in place, and how many were wrong."""
    comm = ranks.fresh_communicator(tuple(range(world_size)), "shm")
    kept: list[Any] = []
    places = wrong = 0
    for seed in range(rounds):
        results = exchanged(comm, seed, rank, ("v", "q", "k"), named)
        places += sum(in_place(comm, result) for _, result in results)
        wrong += count_wrong(results, rank, world_size)
        if (seed + rank) % 3 == 0:
            kept += results[rank % 3 :]
        del results
        if len(kept) > 4:
            wrong += count_wrong([kept.pop(rank % 3)], rank, world_size)
    wrong += count_wrong(kept, rank, world_size)
    comm.close()
    return places, wrong


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_results_that_are_held_keep_what_they_are(pool: ranks.RankPool, named: bool) -> None:
    answers = pool.run(hold, named, 40)
    assert [wrong for _, wrong in answers] == [0] * 4, answers
    assert all(0 < places < 120 for places, _ in answers), answers  # some found their place free, others did not


def _hold_without_a_second_place(rank: int, world_size: int) -> tuple[int, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Places, "choose", lambda self: None)
        return hold(rank, world_size, True, 12)


def test_without_a_second_place_held_results_are_overwritten(pool: ranks.RankPool) -> None:
    assert any(wrong for _, wrong in pool.run(_hold_without_a_second_place))


def _outlives(rank: int, world_size: int) -> tuple[list[bool], int]:
    comm = ranks.fresh_communicator(tuple(range(world_size)), "shm", max_targets=1)
    long = (1, 5000, 8, 16)
    first, second, grown, evicting, last = (
        exchanged(comm, seed, rank, (tag,), True, shape)
        for seed, (tag, shape) in enumerate([("a", SHAPE), ("a", SHAPE), ("a", long), ("b", SHAPE), ("b", SHAPE)])
    )
    there = [in_place(comm, result) for ((_, result),) in (evicting, last)]
    ((_, mine),) = first
    mine.neg_().neg_()
    assert not mine._is_view() and mine.is_contiguous() and mine.untyped_storage().nbytes() == mine.nbytes
    comm.close()
    del comm
    gc.collect()
    wrong = count_wrong(grown, rank, world_size, long)
    return there, wrong + count_wrong([*first, *second, *evicting, *last], rank, world_size)


def test_results_outlive_targets_and_communicators(pool: ranks.RankPool) -> None:
    assert pool.run(_outlives) == [([True, False], 0)] * 4


def _segments() -> int:
    with open("/proc/self/maps") as maps:
        return sum("/dev/shm/ulysses_op" in line for line in maps)


def _let_go(rank: int, world_size: int) -> list[int]:
    before = _segments()
    comm = ranks.fresh_communicator(tuple(range(world_size)), "shm")
    ((_, result),) = exchanged(comm, 0, rank, ("a",), True)
    part = result[0, 0, 0, :1]
    comm.close()
    del result, comm
    gc.collect()
    with_part = _segments() - before
    del part
    return [with_part, _segments() - before]


def test_memory_goes_with_the_last_view(pool: ranks.RankPool) -> None:
    assert pool.run(_let_go) == [[1, 0]] * 4


def _empty(rank: int, world_size: int) -> tuple[int, ...]:
    comm = ranks.fresh_communicator(tuple(range(world_size)), "shm")
    ((_, result),) = exchanged(comm, 0, rank, ("a",), True, (0, 6, 8, 16))
    comm.close()
    return tuple(result.shape)


def test_results_without_elements(pool: ranks.RankPool) -> None:
    assert pool.run(_empty) == [(0, 24, 2, 16)] * 4
