"""Targets over a communicator's life: shared by shapes, growing, evicted, and not to be had."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
from oracle import values, wrong_elements

import ulysses_op


def _scattered(seed: int, rank: int, world_size: int, shape: tuple[int, ...]) -> torch.Tensor:
    whole = torch.cat([values(shape, torch.float32, "cpu", seed, peer) for peer in range(world_size)], 1)
    count = shape[2] // world_size
    return whole[:, :, rank * count : (rank + 1) * count]


def _exchange(comm: Any, tag: str, seed: int, rank: int, world_size: int, shape: tuple[int, ...]) -> None:
    with comm.group(tag) as group:
        group.submit(values(shape, torch.float32, "cpu", seed, rank), tag=tag)
        (result,) = group.wait()
    assert wrong_elements(result, _scattered(seed, rank, world_size, shape)) == 0


def _grow_and_evict(rank: int, world_size: int) -> list[int]:
    comm = ranks.fresh_communicator(tuple(range(world_size)), "shm", max_targets=3)
    cache = comm._engine._targets
    sizes = []
    for seed, (tag, length) in enumerate(
        [("a", 4), ("a", 2), ("a", 4096), ("b", 4), ("c", 4), ("d", 4), ("a", 4096), ("e", 16), ("b", 4), ("a", 8)]
    ):
        _exchange(comm, tag, seed, rank, world_size, (1, length, 4, 8))
        sizes.append(len(cache))
    with comm.group("p", "q", "r") as group:
        for tag in "pqr":
            group.submit(values((1, 4, 4, 8), torch.float32, "cpu", ord(tag), rank), tag=tag)
        for tag, result in zip("pqr", group.wait(), strict=True):
            assert wrong_elements(result, _scattered(ord(tag), rank, world_size, (1, 4, 4, 8))) == 0
    sizes.append(len(cache))
    comm.close()
    return sizes


def test_targets_are_shared_grow_and_are_evicted(pool: ranks.RankPool) -> None:
    assert pool.run(_grow_and_evict) == [[1, 1, 1, 2, 3, 3, 3, 3, 3, 3, 3]] * 4


def _too_many_tags(rank: int, world_size: int) -> list[str]:
    comm = ranks.fresh_communicator(tuple(range(world_size)), "shm", max_targets=2)
    x = values((1, 4, 4, 8), torch.float32, "cpu", 0, rank)
    with pytest.raises(ValueError) as named:
        comm.group("a", "b", "c")
    with pytest.raises(ulysses_op.TargetError) as counted, comm.group() as group:
        for _ in range(3):
            group.submit(x)
    _exchange(comm, "a", 1, rank, world_size, (1, 4, 4, 8))
    comm.close()
    return [str(named.value), str(counted.value)]


def test_more_tags_in_a_group_than_targets(pool: ranks.RankPool) -> None:
    for messages in pool.run(_too_many_tags):
        for message in messages:
            assert "max_targets is 2" in message
            assert "create the communicator with a larger max_targets" in message


def _too_large(rank: int, world_size: int, in_group: bool) -> str:
    comm = ranks.fresh_communicator(tuple(range(world_size)), "shm")
    small = values((1, 4, 4, 8), torch.float32, "cpu", 1, rank)
    huge = torch.zeros(1, 1, 1, 1).expand(1, 1 << 20, 4, 1 << 18)  # 4 TiB a rank: nothing is read of it
    with pytest.raises(ulysses_op.TargetError) as caught, comm.group("a", "b") as group:
        if in_group:
            group.submit(small, tag="a")
        group.submit(huge, tag="b")
    # The failure was a joint one: the communicator goes on.
    for seed in range(3):
        _exchange(comm, "a", seed, rank, world_size, (1, 4, 4, 8))
    comm.close()
    return str(caught.value)


@pytest.mark.parametrize("in_group", [False, True])
def test_a_target_that_cannot_be_had_is_an_error_on_all_ranks_and_breaks_nothing(
    pool: ranks.RankPool, in_group: bool
) -> None:
    (message,) = set(pool.run(_too_large, in_group))
    assert "shared memory" in message
    assert "rank 0" in message and "rank 3" in message


def _source_of_a_strided_v(rank: int, world_size: int) -> tuple[bool, bool]:
    comm = ranks.fresh_communicator(tuple(range(world_size)), "shm")
    fused = values((1, 6, 3 * 4, 8), torch.float32, "cpu", 2, rank).view(1, 6, 3, 4, 8)
    v = fused[:, :, 2]
    spread = values((1, 6, 8, 8), torch.float32, "cpu", 3, rank)[:, :, ::2]
    with comm.group("v", "spread") as group:
        group.submit(v, tag="v")
        group.submit(spread, tag="spread")
        strided, copied = (submission.source for submission in group.submissions)
        same = strided.data_ptr() == v.data_ptr() and strided.stride() == v.stride()
        own = copied.data_ptr() != spread.data_ptr() and copied.is_contiguous()
        results = group.wait()
    assert wrong_elements(results[0], comm.scatter_heads(v.contiguous())) == 0
    assert wrong_elements(results[1], comm.scatter_heads(spread.contiguous())) == 0
    comm.close()
    return same, own


def test_a_strided_v_is_read_where_it_lies(pool: ranks.RankPool) -> None:
    """Only rows that are not dense are copied first."""
    assert pool.run(_source_of_a_strided_v) == [(True, True)] * 4
