"""A table: a rank is killed, stopped, ended or failed by an exception at each step of the protocol. The others get an
error in time that names it, and exchange again among themselves.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

from ulysses_op import Communicator, UlyssesError

# Three ranks, or two and four as well: the one that is lost, and more than one that is left.
WORLD_SIZES = [2, 3, 4] if os.environ.get("ULYSSES_OP_TEST_ALL_FAULTS") else [3]
TIMEOUT_S = 1.0
# What an error may take beyond the time-out: a rank does not get a core at once.
SLACK_S = 15.0
DEADLINE_S = 60.0


def end() -> None:
    os._exit(0)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise ArithmeticError("unwell")


FAULTS: dict[str, Callable[[], None]] = {
    "killed": kill,
    "ends": end,
    "stopped": stop,
    "stopped, goes on": stop,
    "raises": fail,
}
# The call of the engine, or of what it uses, in front of which the fault comes: which one, and its count in the group.
STEPS = {
    "before READY": ("submit", 1),
    "between submissions": ("submit", 2),
    "before DONE": ("finish", 1),
    "in wait": ("deliver", 1),
    "in the rendezvous of a new tag": ("_compare", 1),
    "before a target grows": ("_quiesce", 1),
}


def exchange(comm: Communicator, tags: tuple[str, ...], length: int) -> bool:
    """A group of ``tags``; whether its results are right."""
    world, rank = comm.world_size, comm.rank
    own = torch.arange(length * 2 * world, dtype=torch.float32).view(1, length, 2 * world, 1)
    x = [own + 1000 * peer for peer in range(world)]
    wanted = torch.cat(x, 1)[:, :, 2 * rank : 2 * rank + 2]
    with comm.group(*tags) as group:
        for tag in tags:
            group.submit(x[rank], tag=tag)
        return all(torch.equal(result, wanted) for result in group.wait())


def arm(comm: Communicator, step: str, fault: Callable[[], None]) -> None:
    name, count = STEPS[step]
    engine: Any = comm._engine
    call, left = getattr(engine, name), [count]

    def armed(*arguments: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            fault()
        return call(*arguments, **more)

    setattr(engine, name, armed)


def live(rank: int, world_size: int, step: str, fault: str, store_at: str, answers: Connection) -> None:
    """The last rank is the victim. Each rank answers with what it was told and after how long, and whether the others
    can go on.
    """
    ranks.join_world(rank, world_size, store_at, "cpu")
    others = list(range(world_size - 1))
    rest = dist.new_group(others)
    comm = Communicator(backend="shm", timeout_s=TIMEOUT_S)
    comm.build("cpu")
    right = all(exchange(comm, ("v", "q"), length) for length in (3, 3))
    ranks.meet(dist.group.WORLD)  # what a rank receives is void when a faster one fails in the next group
    if rank not in others:
        arm(comm, step, FAULTS[fault])
    tags = ("v", "other") if "new tag" in step else ("v", "q")
    start = time.monotonic()
    told = "nothing"
    try:
        for _ in range(2):  # a rank that is lost in its wait has sent all that the others need of that group
            exchange(comm, tags, 20_000 if "grows" in step else 3)
    except (UlyssesError, ArithmeticError) as error:
        told = f"{type(error).__name__}: {error}"
    took = time.monotonic() - start
    with contextlib.suppress(RuntimeError):
        comm.close()
    closed = time.monotonic() - start - took
    if rank in others:
        with Communicator(rest, backend="shm", timeout_s=TIMEOUT_S + SLACK_S) as again:
            right &= exchange(again, ("v", "q"), 4)
    answers.send((told, took, closed, right))
    sys.stderr.flush()
    os._exit(0)  # what destructors of the process group say of the lost peer is none of this package's business


@pytest.fixture(scope="module")
def forkserver() -> Any:
    """Starts processes that have imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "ulysses_op", "ranks"])
    return context


@pytest.mark.timeout(DEADLINE_S + 30)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("step", STEPS)
def test_faults(forkserver: Any, step: str, fault: str, world_size: int) -> None:
    before = ranks.shared_memory()
    with tempfile.TemporaryDirectory() as directory:
        processes, answers = [], []
        for rank in range(world_size):
            ours, theirs = forkserver.Pipe(duplex=False)
            arguments = (rank, world_size, step, fault, f"{directory}/store", theirs)
            process = forkserver.Process(target=live, args=arguments)
            process.start()
            theirs.close()
            processes.append(process)
            answers.append(ours)
        try:
            found = [received(answer) for answer in answers[:-1]]
            if fault == "stopped, goes on":
                os.kill(processes[-1].pid, signal.SIGCONT)
            elif fault == "stopped":
                processes[-1].kill()
            victim = received(answers[-1])
            for process in processes:
                process.join(10.0)
            codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
    for told, took, closed, right in found:
        assert told.startswith(("PeerTimeoutError", "PeerAbortError")), told
        assert re.search(rf"rank(\(s\))? \[?{world_size - 1}\b", told), told
        assert took <= TIMEOUT_S + SLACK_S
        assert closed <= SLACK_S
        assert right
    if fault == "raises":
        assert victim is not None and victim[0] == "ArithmeticError: unwell"
    elif fault == "stopped, goes on":
        assert victim is not None and victim[0].startswith(("PeerAbortError", "PeerTimeoutError")), victim
    else:
        assert victim is None
    assert codes[:-1] == [0] * (world_size - 1)
    assert codes[-1] == (-signal.SIGKILL if fault in ("killed", "stopped") else 0)
    assert ranks.shared_memory_left_since(before) == []


def received(answer: Connection) -> Any:
    """What a rank answered, None if it ended without; TimeoutError if it hangs."""
    if not answer.poll(DEADLINE_S):
        raise TimeoutError("a rank hangs")
    try:
        return answer.recv()
    except EOFError:
        return None
