"""One rank has no memory for a target: a TargetError on all ranks, which names it, and the communicator goes on."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from fault_table import DEADLINE_S, SLACK_S, TAGS, Case, Told, exchange, inputs, join, note, run

from ulysses_op import Communicator, UlyssesError

WORLD_SIZE = 3
LENGTH = {"cpu": 700_000, "cuda": 25_000_000}
TIMEOUT_S = 30.0  # nobody is lost
LEFT_ON_DEVICE_BYTES = 128 << 20  # for the driver's own needs, and less than a target


def target_bytes(case: Case) -> int:
    return LENGTH[case.device] * case.world_size * 2 * 4


@contextlib.contextmanager
def limited(which: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


def address_space_for(targets: float) -> Callable[[Case], contextlib.AbstractContextManager[None]]:
    def limit(case: Case) -> contextlib.AbstractContextManager[None]:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        return limited(resource.RLIMIT_AS, used + int(targets * target_bytes(case)))

    return limit


@contextlib.contextmanager
def full_device(case: Case) -> Iterator[None]:
    torch.cuda.empty_cache()
    ballast = [torch.empty(torch.cuda.mem_get_info()[0] - LEFT_ON_DEVICE_BYTES, dtype=torch.uint8, device="cuda")]
    try:
        yield
    finally:
        ballast.clear()
        torch.cuda.empty_cache()


# What the victim runs out of.
LIMITS: dict[str, Callable[[Case], contextlib.AbstractContextManager[None]]] = {
    "no file of that size": lambda case: limited(resource.RLIMIT_FSIZE, target_bytes(case) // 2),
    "no address space": address_space_for(0.5),
    "no address space for the peers' memory": address_space_for(1.5),
    "no device memory": full_device,
}
CPU_LIMITS = list(LIMITS)[:3]
# The tags of the group that needs a target. Only "v" is known.
STEPS = {
    "a first target": ("new", "newer"),
    "a target in the middle of a group": ("v", "new"),
    "a target that grows": ("v",),
}


def live(rank: int, case: Case, store_at: str, answers: Connection) -> None:
    """One rank of a case; the last is short of memory for a while."""
    join(rank, case, store_at)
    comm = Communicator(backend=case.backend, timeout_s=TIMEOUT_S)
    comm.build(ranks.device_of(case.device))
    right = exchange(comm, TAGS, 3, case.device)
    tags, grows = STEPS[case.step], case.step == "a target that grows"
    small, _ = inputs(comm, 3, case.device)
    large, wanted = inputs(comm, LENGTH[case.device], case.device)
    assert wanted.numel() * 4 == target_bytes(case)
    assert dist.group.WORLD is not None
    ranks.meet(dist.group.WORLD)
    name, text = "nothing", ""
    with LIMITS[case.fault](case) if rank == case.world_size - 1 else contextlib.nullcontext():
        ranks.meet(dist.group.WORLD)
        start = time.monotonic()
        try:
            with comm.group(*tags) as group:
                for tag in tags:
                    group.submit(large if grows or tag != "v" else small, tag=tag)
                group.wait()
        except (UlyssesError, MemoryError) as error:
            name, text = type(error).__name__, str(error)
        took_s = time.monotonic() - start
        ranks.meet(dist.group.WORLD)  # what one has not is not asked for again before all have failed
    right &= exchange(comm, TAGS, 3, case.device)
    with comm.group(*tags) as group:
        for tag in tags:
            group.submit(large, tag=tag)
        right &= all(torch.equal(result, wanted) for result in group.wait())
    comm.check()
    start = time.monotonic()
    comm.close()
    answers.send(Told(name, text, took_s, time.monotonic() - start, right, case.backend))
    sys.stderr.flush()
    os._exit(0)


def check(case: Case) -> None:
    before = ranks.shared_memory()
    told, codes = run(case, case.world_size - 1, live)
    note(case, told)
    for rank, one in enumerate(told):
        assert one is not None, f"rank {rank} ended without an answer, with status {codes[rank]}"
        assert one.error == "TargetError", one
        assert f"rank {case.world_size - 1}: " in one.text, one
        # Ranks that share a device share what is left of it.
        assert case.device == "cuda" or "rank 0" not in one.text, one
        assert one.took_s <= SLACK_S, one
        assert one.right, one
    assert codes == [0] * case.world_size
    assert ranks.shared_memory_left_since(before) == []


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("limit", CPU_LIMITS)
@pytest.mark.parametrize("step", STEPS)
def test_a_rank_without_memory(step: str, limit: str) -> None:
    check(Case("cpu", "shm", WORLD_SIZE, step, limit))
