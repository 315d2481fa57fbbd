"""Communicators made, used and closed, again and again: the process stays as large as it was, and so does its store."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import ranks
from footprint import Footprint
from test_exchange import MEMBERS
from test_lifetime import exchange

from ulysses_op import Communicator
from ulysses_op.torch_compat import group_store

CYCLES = int(os.environ.get("ULYSSES_OP_TEST_CYCLES", "100"))
SECONDS_A_CYCLE = 0.5  # far above what one takes


def run_cycles(
    rank: int,
    world_size: int,
    members: tuple[int, ...],
    backend: str,
    device: str,
    count: int,
    closes: bool = True,
) -> dict[str, Any] | None:
    """``count`` communicators, an exchange in each: what has grown behind the first tenth of them. ``closes``: whether
    they are closed; those that are not are kept until all is measured.
    """
    if rank not in members:
        return None
    footprint = None
    kept: list[Communicator] = []
    group = ranks.group_of(members)
    keys = 0
    for number in range(count):
        if number == count // 10:
            footprint = Footprint(ranks.device_of(device))
            ranks.meet(group)
            keys = group_store(group).num_keys()
            ranks.meet(group)
        comm = ranks.fresh_communicator(members, backend, device)
        exchange(comm, device)
        if closes:
            comm.close()
        else:
            kept.append(comm)
        del comm
    assert footprint is not None
    grown = footprint.grown()
    ranks.meet(group)
    keys_now = group_store(group).num_keys()
    if keys_now > keys and backend != "symm_mem":  # whose rendezvous, torch's own, leaves its keys behind
        grown.append(f"keys in the store grew from {keys} to {keys_now}")
    for comm in kept:
        with contextlib.suppress(RuntimeError):
            comm.close()
    return {"grown": grown, "held": f"{footprint}, keys in the store {keys} -> {keys_now}"}


def deadline_s(count: int) -> float:
    return 60.0 + SECONDS_A_CYCLE * count


def nothing_grown(answers: list[dict[str, Any] | None], backend: str, count: int) -> None:
    """Assert it of what :func:`run_cycles` gave. Tells what the ranks held."""
    for rank, answer in enumerate(answers):
        if answer is not None:
            print(f"{backend}, {count} communicators, rank {rank}: {answer['held']}")
    assert [answer["grown"] for answer in answers if answer is not None] == [[]] * sum(map(bool, answers)), answers


@pytest.mark.timeout(deadline_s(CYCLES) + 60.0)
@pytest.mark.parametrize("backend", ["shm", "c10d"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_cycles(pool: ranks.RankPool, world_size: int, backend: str) -> None:
    before = ranks.shared_memory()
    count = CYCLES if backend == "shm" and world_size == 2 else CYCLES // 4
    answers = pool.run(run_cycles, MEMBERS[world_size], backend, "cpu", count, timeout_s=deadline_s(count))
    nothing_grown(answers, backend, count)
    assert ranks.shared_memory_left_since(before) == []


def test_communicators_that_stay_open_are_found(pool: ranks.RankPool) -> None:
    answers = pool.run(run_cycles, MEMBERS[2], "shm", "cpu", 20, False)
    for answer in answers:
        found = set() if answer is None else {line.split(" grew")[0] for line in answer["grown"]}
        assert answer is None or found >= {"open descriptors", "threads", "mapped segments"}, answers
