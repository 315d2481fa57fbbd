"""The process group's store is lost, with the process or with the rank that hosts it. Exchanges of known tags need no
store; a new tag is an error on every rank, in time; with another store the ranks that are left go on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import ranks
import torch.distributed as dist
from fault_table import DEADLINE_S, SLACK_S, TAGS, Case, Told, exchange, forkserver, note, received

from ulysses_op import Communicator, UlyssesError

TIMEOUT_S = 1.0
WORLD_SIZE = 3
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def host(port: Connection) -> dist.TCPStore:
    store = dist.TCPStore(ranks.HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=DEADLINE_S))
    port.send(store.port)
    return store


def serve(port: Connection) -> None:
    """A process that is no rank and hosts the store."""
    ranks._die_with_parent()
    kept = host(port)
    time.sleep(2 * DEADLINE_S)
    del kept


def live(rank: int, port: int | Connection, fault: str, known: bool, directory: str, answers: Connection) -> None:
    """One rank. Where ``port`` is a connection, this rank hosts the store, and is lost. Where tags are ``known``, they
    are exchanged first.
    """
    ranks._die_with_parent()
    hosted = host(port) if isinstance(port, Connection) else None
    if hosted is None:
        assert isinstance(port, int)
        ranks.join_world(rank, WORLD_SIZE, str(port), "cpu")
    else:
        timeout = timedelta(seconds=DEADLINE_S)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=hosted, rank=rank, world_size=WORLD_SIZE, timeout=timeout)
    comm = Communicator(backend="shm", timeout_s=TIMEOUT_S)
    comm.build("cpu")
    right = exchange(comm, TAGS, 3, "cpu")
    assert dist.group.WORLD is not None
    ranks.meet(dist.group.WORLD)
    answers.send("ready")
    if hosted is not None:
        os.kill(os.getpid(), SIGNALS[fault])
    while not os.path.exists(f"{directory}/lost"):
        time.sleep(0.01)
    if known:
        right &= all([exchange(comm, TAGS, 3, "cpu") for _ in range(3)])
    start = time.monotonic()
    name, text = "nothing", ""
    try:
        exchange(comm, ("new",), 3, "cpu")
    except UlyssesError as error:
        name, text = type(error).__name__, str(error)
    took_s = time.monotonic() - start
    with contextlib.suppress(RuntimeError):
        comm.close()
    closed_s = time.monotonic() - start - took_s
    left = [0, 1, 2] if known else [1, 2]
    dist.destroy_process_group()
    ranks.join_world(left.index(rank), len(left), f"{directory}/another", "cpu")
    with Communicator(backend="shm", timeout_s=TIMEOUT_S + SLACK_S) as again:
        again.build("cpu")
        right &= exchange(again, TAGS, 4, "cpu")
    answers.send(Told(name, text, took_s, closed_s, right, again="shm"))
    sys.stderr.flush()
    os._exit(0)


def run(by_a_rank: bool, fault: str) -> tuple[list[Told | None], list[int | None]]:
    """What the ranks tell, in their order, None of the one that is lost; and their exit statuses."""
    context = forkserver()
    deadline = time.monotonic() + DEADLINE_S
    processes: list[Any] = []
    with tempfile.TemporaryDirectory() as directory:

        def start(target: Any, *arguments: Any) -> Any:
            process = context.Process(target=target, args=arguments)
            process.start()
            processes.append(process)
            return process

        try:
            ours, theirs = zip(*(context.Pipe(duplex=False) for _ in range(WORLD_SIZE)), strict=True)
            port_here, port_there = context.Pipe(duplex=False)
            known = not by_a_rank
            if by_a_rank:
                hosting = start(live, 0, port_there, fault, known, directory, theirs[0])
            else:
                hosting = start(serve, port_there)
            assert port_here.poll(DEADLINE_S)
            port = port_here.recv()
            for rank in range(1 if by_a_rank else 0, WORLD_SIZE):
                start(live, rank, port, fault, known, directory, theirs[rank])
            for end in theirs:
                end.close()
            assert [received(rank, answer, deadline) for rank, answer in enumerate(ours)] == ["ready"] * WORLD_SIZE
            if not by_a_rank:
                os.kill(hosting.pid, SIGNALS[fault])
            elif fault == "killed":
                hosting.join(DEADLINE_S)
            open(f"{directory}/lost", "w").close()
            told = [
                None if by_a_rank and rank == 0 else received(rank, answer, deadline)
                for rank, answer in enumerate(ours)
            ]
            hosting.kill()
            for process in processes:
                process.join(10.0)
            codes = [process.exitcode for process in processes if process is not hosting]
        finally:
            for process in processes:
                process.kill()
                process.join(10.0)
    return told, codes


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("fault", SIGNALS)
@pytest.mark.parametrize("by_a_rank", [False, True], ids=["hosted by a process", "hosted by rank 0"])
def test_a_store_that_is_lost(by_a_rank: bool, fault: str) -> None:
    before = ranks.shared_memory()
    told, codes = run(by_a_rank, fault)
    note(Case("cpu", "shm", WORLD_SIZE, f"store, {'rank 0' if by_a_rank else 'a process'}", fault), told)
    for rank, one in enumerate(told):
        if by_a_rank and rank == 0:
            continue
        assert one is not None, f"rank {rank} ended without an answer"
        if by_a_rank and fault == "killed":
            assert one.error == "PeerTimeoutError" and "[0]" in one.text, one
        else:
            # Who is to blame shows only where a process has ended.
            assert one.error in ("BrokenCommunicatorError", "PeerAbortError") and "store" in one.text, one
        assert one.took_s <= TIMEOUT_S + SLACK_S, one
        assert one.closed_s <= SLACK_S, one
        assert one.right, one
    assert codes == [0] * len(codes)
    assert ranks.shared_memory_left_since(before) == []
