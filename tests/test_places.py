"""Results that stay where the peers wrote them: theirs as long as anybody has them, whatever is exchanged meanwhile."""

from __future__ import annotations

import contextlib
import gc
import os
from typing import Any

import pytest
import ranks
import torch
from oracle import values, wrong_elements
from test_targets import _scattered

import ulysses_op
from ulysses_op._C import SharedSegment, ShmTransport
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


def _small(rank: int, world_size: int) -> tuple[list[bool], int]:
    comm = ranks.fresh_communicator(tuple(range(world_size)), "shm")
    exchanged(comm, 0, rank, ("a",), True, (1, 5000, 8, 16))
    results = [exchanged(comm, 1, rank, ("a",), True, (1, length, 8, 16)) for length in (5, 2000)]
    there = [in_place(comm, result) for ((_, result),) in results]
    wrong = sum(
        count_wrong(each, rank, world_size, (1, length, 8, 16)) for each, length in zip(results, (5, 2000), strict=True)
    )
    comm.close()
    return there, wrong


def test_a_small_result_does_not_keep_a_large_place(pool: ranks.RankPool) -> None:
    assert pool.run(_small) == [([False, True], 0)] * 4


def _fork(rank: int, world_size: int) -> list[Any]:
    """What a child and its parent have of a result, each having written or let go of it meanwhile."""
    comm = ranks.fresh_communicator(tuple(range(world_size)), "shm")
    held = exchanged(comm, 0, rank, ("a",), True)
    kept = exchanged(comm, 1, rank, ("b",), True)
    assert in_place(comm, held[0][1]) and in_place(comm, kept[0][1])
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(ready, 1)
        wrong = count_wrong(held, rank, world_size)
        held[0][1].fill_(99)
        kept[0][1].fill_(99)
        os._exit(wrong)
    del held
    later = exchanged(comm, 2, rank, ("a",), True)
    there = in_place(comm, later[0][1])
    os.write(go, b"x")
    _, status = os.waitpid(pid, 0)
    wrong = count_wrong([*kept, *later], rank, world_size)
    comm.close()
    return [there, os.waitstatus_to_exitcode(status), wrong]


def test_a_forked_process_has_results_of_its_own(pool: ranks.RankPool) -> None:
    assert pool.run(_fork) == [[True, 0, 0]] * 4


def _default_device(rank: int, world_size: int) -> int:
    comm = ranks.fresh_communicator(tuple(range(world_size)), "shm")
    x = values(SHAPE, torch.float32, "cpu", 0, rank)
    with torch.device("meta"), comm.group("a") as group:
        group.submit(x, tag="a")
        (result,) = group.wait()
    comm.close()
    return count_wrong([(0, result)], rank, world_size)


def test_under_another_default_device(pool: ranks.RankPool) -> None:
    assert pool.run(_default_device) == [0] * 4


def _no_room(rank: int, world_size: int) -> list[Any]:
    """Rank 1 holds a result, and gets no memory for a second place, as from a full /dev/shm, which others need."""
    comm = ranks.fresh_communicator(tuple(range(world_size)), "shm")
    long = (1, 5000, 8, 16)
    held = exchanged(comm, 0, rank, ("a",), True, long)
    if rank != 1:
        held = [(seed, result.clone()) for seed, result in held]

    def full(self: SharedSegment, offset: int, size_bytes: int) -> None:
        raise RuntimeError("No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(SharedSegment, "reserve", full)
        try:
            exchanged(comm, 1, rank, ("a",), True, long)
            told = "nothing"
        except ulysses_op.UlyssesError as error:
            told = type(error).__name__
    wrong = count_wrong(held, rank, world_size, long)
    with contextlib.suppress(RuntimeError):
        comm.close()
    return [told, wrong]


def test_no_memory_for_a_second_place(pool: ranks.RankPool) -> None:
    expected = [[told, 0] for told in ("PeerAbortError", "TargetError", "PeerAbortError", "PeerAbortError")]
    assert pool.run(_no_room) == expected


def _overlapping(rank: int, world_size: int) -> str:
    """A group that names the tag of one which is not waited for yet: READY would open a target that is in use."""
    comm = ranks.fresh_communicator(tuple(range(world_size)), "shm")
    x, ops = values(SHAPE, torch.float32, "cpu", 0, rank), torch.ops.ulysses_op

    def submit(tag: str, tags: list[str]) -> torch.Tensor:
        exchange = (comm._where[0], world_size, -1, [], [], False, "scatter_heads")
        return ops.submit(x, *exchange, tag, tags, "", True, False)

    target = submit("t", ["t"])
    ops.wait_([target], [x], comm._where[0], ["t"])
    submit("t", ["t"])
    try:
        submit("u", ["u", "t"])
        told = "nothing"
    except RuntimeError as error:
        told = str(error)
    with contextlib.suppress(RuntimeError):
        comm.close()
    return told


def test_a_group_does_not_open_the_targets_of_one_under_way(pool: ranks.RankPool) -> None:
    assert all("'t' were never waited for" in told for told in pool.run(_overlapping))


def _empty(rank: int, world_size: int) -> tuple[int, ...]:
    comm = ranks.fresh_communicator(tuple(range(world_size)), "shm")
    ((_, result),) = exchanged(comm, 0, rank, ("a",), True, (0, 6, 8, 16))
    comm.close()
    return tuple(result.shape)


def test_results_without_elements(pool: ranks.RankPool) -> None:
    assert pool.run(_empty) == [(0, 24, 2, 16)] * 4
