"""One rank has no memory for a target: a TargetError on all ranks, which names it, and the communicator goes on."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from fault_table import DEADLINE_S, SLACK_S, TAGS, TIMEOUT_S, Case, Told, exchange, inputs, note, run

from ulysses_op import Communicator, UlyssesError

WORLD_SIZE = 3
LENGTH = 700_000
TARGET_BYTES = LENGTH * WORLD_SIZE * 2 * 4  # of 17 MB


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


# What the victim runs out of: a resource and how much of it is left.
LIMITS = {
    "no file of that size": lambda: (resource.RLIMIT_FSIZE, TARGET_BYTES // 2),
    "no address space": lambda: (resource.RLIMIT_AS, address_space() + TARGET_BYTES // 2),
    "no address space for the peers' memory": lambda: (resource.RLIMIT_AS, address_space() + TARGET_BYTES * 3 // 2),
}
# The tags of the group that needs a target: the first of them is known, or the second, or none.
STEPS = {
    "a first target": ("new", "newer"),
    "a target in the middle of a group": ("v", "new"),
    "a target that grows": ("v",),
}


@contextlib.contextmanager
def limited(which: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


def live(rank: int, case: Case, store_at: str, answers: Connection) -> None:
    """One rank of a case; the last is short of memory for a while."""
    ranks._die_with_parent()
    ranks.join_world(rank, case.world_size, store_at, "cpu")
    comm = Communicator(backend=case.backend, timeout_s=TIMEOUT_S["cpu"])
    comm.build("cpu")
    right = exchange(comm, TAGS, 3, "cpu")
    tags, grows = STEPS[case.step], case.step == "a target that grows"
    small, _ = inputs(comm, 3, "cpu")
    large, wanted = inputs(comm, LENGTH, "cpu")
    assert wanted.numel() * 4 == TARGET_BYTES
    assert dist.group.WORLD is not None
    ranks.meet(dist.group.WORLD)
    limit = LIMITS[case.fault]() if rank == case.world_size - 1 else None
    start = time.monotonic()
    name, text = "nothing", ""
    try:
        with limited(*limit) if limit else contextlib.nullcontext(), comm.group(*tags) as group:
            for tag in tags:
                group.submit(large if grows or tag != "v" else small, tag=tag)
            group.wait()
    except (UlyssesError, MemoryError) as error:
        name, text = type(error).__name__, str(error)
    took_s = time.monotonic() - start
    right &= exchange(comm, TAGS, 3, "cpu")
    with comm.group(*tags) as group:
        for tag in tags:
            group.submit(large, tag=tag)
        right &= all(torch.equal(result, wanted) for result in group.wait())
    start = time.monotonic()
    comm.close()
    answers.send(Told(name, text, took_s, time.monotonic() - start, right, comm._requested))
    sys.stderr.flush()
    os._exit(0)


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("step", STEPS)
def test_a_rank_without_memory(step: str, limit: str) -> None:
    before = ranks.shared_memory()
    case = Case("cpu", "shm", WORLD_SIZE, step, limit)
    told, codes = run(case, live)
    note(case, told)
    for rank, one in enumerate(told):
        assert one is not None, f"rank {rank} ended without an answer, with status {codes[rank]}"
        assert one.error == "TargetError", one
        assert f"rank {WORLD_SIZE - 1}: " in one.text and "rank 0" not in one.text, one
        assert one.took_s <= SLACK_S, one
        assert one.right, one
    assert codes == [0] * WORLD_SIZE
    assert ranks.shared_memory_left_since(before) == []
