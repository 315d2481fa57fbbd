"""How communicators begin and end: many of them, processes that leave, die or raise, and what they leave behind."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import oracle
import pytest
import ranks
import torch
import torch.distributed as dist
from cases import even
from test_exchange import BACKENDS, MEMBERS, ok
from test_gate import arrive, refusal, works

import ulysses_op
from ulysses_op import Communicator, PeerTimeoutError


def exchange(comm: Communicator, device: str, tags: tuple[str, ...] = ("q", "k")) -> None:
    """A group and a function, results checked."""
    me, p = comm.rank, comm.world_size
    case = even("lifetime", p, b=2, dtype=torch.bfloat16, layout="fused_qkv")
    x = oracle.make_input(case, "scatter_heads", 0, me, device)
    wanted = oracle.expected(case, "scatter_heads", 0, me, device)
    with comm.group(*tags) as group:
        for tag in tags:
            group.submit(x, tag=tag)
        results = group.wait()
        problems = [oracle.difference(result, wanted) for result in results]
    problems.append(oracle.difference(comm.gather_heads(comm.scatter_heads(x)), x))
    assert not any(problems), problems


def held() -> dict[str, int]:
    """What this process holds: file descriptors, threads, mappings of shared memory."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "segments": sum("ulysses_op-" in line for line in maps),
    }


def grown(before: dict[str, int]) -> list[str]:
    """What this process holds more of than it did."""
    after = held()
    return [f"{what}: {before[what]} before, {after[what]} after" for what in after if after[what] > before[what]]


# ---- in the pool


def run_many(
    rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str, how: str, count: int
) -> list[str] | None:
    """`count` communicators made, used and closed (or dropped) in one process: nothing adds up."""
    if rank not in members:
        return None
    before: dict[str, int] = {}
    for number in range(count):
        if number == count // 10:
            gc.collect()
            before = held()
        comm = ranks.fresh_communicator(members, backend, device)
        if number % 4 == 0:
            exchange(comm, device)
        if how == "close":
            comm.close()
        del comm
    gc.collect()
    return grown(before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_communicators(pool: ranks.RankPool, backend: str) -> None:
    ok(pool.run(run_many, MEMBERS[2], backend, "cpu", "close", 200, timeout_s=120.0))


def test_many_communicators_that_nobody_closes(pool: ranks.RankPool) -> None:
    ok(pool.run(run_many, MEMBERS[2], "shm", "cpu", "drop", 50))


def run_close_releases(
    rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str
) -> list[str] | None:
    """close() releases by itself, without the help of a garbage collection."""
    if rank not in members:
        return None
    comm = ranks.fresh_communicator(members, backend, device)
    exchange(comm, device)
    comm.close()
    gc.collect()
    gc.disable()
    try:
        before = held()
        kept = []
        for _ in range(5):
            comm = ranks.fresh_communicator(members, backend, device)
            exchange(comm, device)
            comm.close()
            kept.append(comm)
        return grown(before)
    finally:
        gc.enable()


def test_close_releases(pool: ranks.RankPool) -> None:
    ok(pool.run(run_close_releases, MEMBERS[2], "shm", "cpu"))


def run_collected(rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str) -> list[str] | None:
    """Garbage collection releases mappings and threads, with a cycle or without; results outlive their communicator, on
    CPU with the segment that they lie in.
    """
    if rank not in members:
        return None
    gc.collect()
    before = held()
    problems = []
    kept = []
    for how in ("no cycle", "a cycle", "a group that is never waited for"):
        comm = ranks.fresh_communicator(members, backend, device)
        exchange(comm, device)
        x = torch.full((1, 2, len(members), 4), 7.0, device=device)
        kept.append(comm.scatter_heads(x))
        if how == "a group that is never waited for":
            comm.group("x").submit(x, tag="x")
        if how == "a cycle":
            holder: dict[str, Any] = {"comm": comm}
            holder["self"] = holder
            del holder
        del comm
        # What a cycle held may be a cycle of its own.
        gc.collect()
        gc.collect()
        kept_segments = {"segments": before["segments"] + len(kept)} if device == "cpu" else {}
        problems += [f"{how}: {what}" for what in grown({**before, **kept_segments})]
    problems += ["a result changed" for result in kept if not bool((result == 7.0).all())]
    kept.clear()
    problems += [f"without the results: {what}" for what in grown(before)]
    return problems


def test_garbage_collection_releases(pool: ranks.RankPool) -> None:
    ok(pool.run(run_collected, MEMBERS[2], "shm", "cpu"))


def run_closed_by_one(
    rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str
) -> list[str] | None:
    """The second rank closes between two groups and lives on: the others learn it before their time-out."""
    if rank not in members:
        return None
    comm = ranks.fresh_communicator(members, backend, device, timeout_s=60.0)
    exchange(comm, device)
    if comm.rank == 1:
        comm.close()
        ranks.meet(ranks.group_of(members))
        return []
    start = time.monotonic()
    problems = []
    try:
        exchange(comm, device)
        if device == "cuda":
            torch.cuda.synchronize()
            comm.check()
        problems.append("exchanged with a rank that had closed")
    except PeerTimeoutError as error:
        # With three ranks one may hear it from the other.
        if "1" not in str(error) or "closed the communicator" not in str(error):
            problems.append(str(error))
    if time.monotonic() - start > 20.0:
        problems.append("late")
    comm.close()
    ranks.meet(ranks.group_of(members))
    return problems


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_closes_is_missed_at_once(pool: ranks.RankPool, world_size: int) -> None:
    ok(pool.run(run_closed_by_one, MEMBERS[world_size], "shm", "cpu"))


def run_interrupted_close(
    rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str
) -> list[str] | None:
    """close() waits for an exchange that a peer has not begun; an interrupt ends that, and the communicator."""
    if rank not in members:
        return None
    before = held()
    comm = ranks.fresh_communicator(members, backend, device, timeout_s=30.0)
    x = torch.ones(1, 2, len(members), 4, device=device)

    def submitted(comm: Communicator) -> ulysses_op.ExchangeGroup:
        group = comm.group("x")
        group.submit(x, tag="x")
        return group

    submitted(comm).wait()
    ranks.meet(ranks.group_of(members))
    told, took_s = "nothing", 0.0
    try:
        if rank == members[0]:
            submitted(comm)
            handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            start = time.monotonic()
            try:
                comm.close()
            finally:
                took_s = time.monotonic() - start
                signal.signal(signal.SIGALRM, handler)
        else:
            while comm._engine._transport.failure() is None:
                time.sleep(0.01)
            submitted(comm)
    except (KeyboardInterrupt, RuntimeError) as error:
        told = type(error).__name__
    comm.close()
    del comm  # whose last groups hold targets
    gc.collect()
    problems = grown(before)
    wanted = "KeyboardInterrupt" if rank == members[0] else "PeerAbortError"
    return problems + ([] if (told, took_s < 15) == (wanted, True) else [f"told {told} after {took_s:.1f} s"])


def test_close_can_be_interrupted(pool: ranks.RankPool) -> None:
    ok(pool.run(run_interrupted_close, MEMBERS[2], "shm", "cpu"))


def run_use_at_exit(
    rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str
) -> list[str] | None:
    """What was released because Python exits is not there for a handler that runs later."""
    if rank not in members:
        return None
    comm = ranks.fresh_communicator(members, backend, device)
    exchange(comm, device)
    comm._release()  # as at exit
    problems = []
    for tags in (("q", "k"), ("new",)):
        try:
            exchange(comm, device, tags)
        except RuntimeError as error:
            if "Python is exiting" in str(error):
                continue
            problems.append(f"{tags}: {error}")
        else:
            problems.append(f"{tags}: no error")
    comm.close()
    return problems


@pytest.mark.parametrize("backend", BACKENDS)
def test_use_by_a_late_handler_at_exit(pool: ranks.RankPool, backend: str) -> None:
    ok(pool.run(run_use_at_exit, MEMBERS[2], backend, "cpu"))


def run_copies(rank: int, world_size: int, members: tuple[int, ...], device: str) -> list[str] | None:
    if rank not in members:
        return None
    comm = ranks.fresh_communicator(members, "auto", device)
    module = torch.nn.Linear(2, 2)
    module.exchange = comm  # type: ignore[assignment]
    copied = copy.deepcopy(module)
    problems: list[str | None] = []
    if copied.exchange is not comm or copy.deepcopy([comm])[0] is not comm:
        problems.append("deepcopy made another communicator")
    problems += works(copied.exchange, members, members.index(rank), device)  # type: ignore[arg-type]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        problems.append(refusal("pickle", lambda p=protocol: pickle.dumps(comm, p), (TypeError,), "pickle"))
    unbuilt = Communicator(ranks.group_of(members))
    problems.append(refusal("pickle before build", lambda: pickle.dumps(unbuilt), (TypeError,), "pickle"))
    comm.close()
    return [problem for problem in problems if problem]


def test_deepcopy_shares_and_pickle_refuses(pool: ranks.RankPool) -> None:
    ok(pool.run(run_copies, MEMBERS[2], "cpu"))


def run_threads(rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str) -> list[str] | None:
    """A communicator made on one thread, used on another, one at a time, and closed on a third."""
    if rank not in members:
        return None
    comm = ranks.fresh_communicator(members, backend, device)
    failures: list[BaseException] = []

    def on_a_thread(call: Any) -> None:
        def guarded() -> None:
            try:
                call()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join()

    exchange(comm, device)
    on_a_thread(lambda: exchange(comm, device))
    exchange(comm, device)
    on_a_thread(comm.close)
    return [repr(failure) for failure in failures]


@pytest.mark.parametrize("backend", BACKENDS)
def test_use_on_other_threads(pool: ranks.RankPool, backend: str) -> None:
    ok(pool.run(run_threads, MEMBERS[2], backend, "cpu"))


# ---- fresh processes: each function is one process's whole life


def leave(rank: int, world_size: int, backend: str, device: str, how: str) -> None:
    """A communicator, and a functional one, in use; then the process ends in the way that `how` says."""
    comm = Communicator(backend=backend)
    comm.build(ranks.device_of(device))
    exchange(comm, device)
    x = torch.ones(1, 2, world_size, 4, device=device)
    assert bool((ulysses_op.scatter_heads(x) == 1).all())
    if how == "nothing":
        globals()["kept"] = comm
    elif how == "close":
        comm.close()
        dist.destroy_process_group()
    elif how == "destroy":
        globals()["kept"] = comm
        dist.destroy_process_group()
    elif how == "destroy, then close":
        dist.destroy_process_group()
        comm.close()
    elif how == "not waited for":
        with comm.group("q") as group:
            group.submit(x, tag="q")
    elif how == "sys.exit":
        sys.exit(3)
    elif how == "raise":
        with comm.group("q", "k") as group:
            group.submit(x, tag="q")
            raise RuntimeError("in the middle of a group")
    elif how in ("one raises", "one raises at the first use"):
        if how == "one raises":
            with comm.group("q", "k") as group:
                group.submit(x, tag="q")
                group.submit(x, tag="k")
                group.wait()
        with comm.group("q", "k") as group:
            group.submit(x, tag="q")
            if rank == 1:
                raise RuntimeError("in the middle of a group")
            group.submit(x, tag="k")
            group.wait()
    else:
        raise ValueError(how)


@pytest.mark.parametrize(
    ("how", "tcp"),
    [
        ("nothing", False),
        ("nothing", True),
        ("close", False),
        ("destroy", True),
        ("destroy, then close", False),
        ("not waited for", False),
    ],
)
def test_leaving_in_peace(how: str, tcp: bool) -> None:
    run = ranks.run_fresh(leave, 2, "shm", "cpu", how, tcp=tcp)
    assert [(rank.status, rank.stderr) for rank in run.ranks] == [(0, "")] * 2
    assert run.leftovers == []


@pytest.mark.parametrize("how", ["nothing", "destroy"])
def test_leaving_c10d_in_peace(how: str) -> None:
    run = ranks.run_fresh(leave, 2, "c10d", "cpu", how)
    assert [(rank.status, rank.stderr) for rank in run.ranks] == [(0, "")] * 2
    assert run.leftovers == []


def only_a_traceback(stderr: str) -> bool:
    """Whether `stderr` is one traceback (or one with its causes) and nothing else. torch puts the rank before each."""
    lines = [line.removeprefix("[rank0]: ").removeprefix("[rank1]: ") for line in stderr.rstrip("\n").split("\n")]
    if not lines[0].startswith("Traceback"):
        return False
    joints = ("Traceback", "The above exception", "During handling")
    last = max(number for number, line in enumerate(lines) if line.startswith("  "))
    ends = [line for line in lines[:last] if line and not line.startswith((" ", *joints))]
    # One line of error for each traceback: those before the last one, and what follows it.
    return len(lines) == last + 2 and len(ends) == sum(line.startswith("Traceback") for line in lines) - 1


@pytest.mark.parametrize("how", ["raise", "one raises", "one raises at the first use"])
def test_exception_in_the_middle_of_a_group(how: str) -> None:
    run = ranks.run_fresh(leave, 2, "shm", "cpu", how, timeout_s=30.0)
    assert [rank.status for rank in run.ranks] == [1, 1]
    for rank in run.ranks:
        assert only_a_traceback(rank.stderr), rank.stderr
    assert "in the middle of a group" in run.ranks[1].stderr
    assert run.leftovers == []


def test_sys_exit() -> None:
    run = ranks.run_fresh(leave, 2, "shm", "cpu", "sys.exit")
    assert [(rank.status, rank.stderr) for rank in run.ranks] == [(3, "")] * 2
    assert run.leftovers == []


def lose_a_peer(rank: int, world_size: int, backend: str, device: str, timeout_s: float, seen_before: bool) -> None:
    """Rank 1 is killed in the middle of a group; the others hear of it, close, and end well."""
    comm = Communicator(backend=backend, timeout_s=timeout_s)
    comm.build(ranks.device_of(device))
    exchange(comm, device)
    x = torch.ones(1, 2, world_size, 4, device=device)
    if seen_before:
        with comm.group("q", "k") as group:
            group.submit(x, tag="q")
            group.submit(x, tag="k")
            group.wait()
    try:
        with comm.group("q", "k") as group:
            group.submit(x, tag="q")
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            group.submit(x, tag="k")
            group.wait()
        arrive(device, comm)
    except PeerTimeoutError as error:
        print(error)
    else:
        raise AssertionError("results of a group without rank 1")
    comm.close()
    if device == "cuda":
        # The device has to be usable.
        assert bool((torch.ones(4, device=device) + 1 == 2).all())
    sys.stdout.flush()
    sys.stderr.flush()
    # The process group, too, has lost a peer: what its destructors say is none of this package's business.
    os._exit(0)


# With a time-out beyond the deadline of the run: peers notice the end of a process by itself.
@pytest.mark.parametrize(
    ("world_size", "timeout_s", "seen_before"), [(2, 600.0, True), (3, 600.0, True), (2, 2.0, False)]
)
def test_killed_peer(world_size: int, timeout_s: float, seen_before: bool) -> None:
    run = ranks.run_fresh(lose_a_peer, world_size, "shm", "cpu", timeout_s, seen_before)
    assert run.ranks[1].status == -signal.SIGKILL
    for rank in (run.ranks[0], *run.ranks[2:]):
        assert (rank.status, rank.stderr) == (0, "")
        assert "1" in rank.stdout
    assert run.leftovers == []


def die(rank: int, world_size: int, device: str) -> None:
    comm = Communicator()
    comm.build(ranks.device_of(device))
    exchange(comm, device)
    with comm.group("q", "k") as group:
        group.submit(torch.ones(1, 2, world_size, 4, device=device), tag="q")
        os.kill(os.getpid(), signal.SIGKILL)


def test_killed_processes_leave_nothing_in_shared_memory() -> None:
    run = ranks.run_fresh(die, 2, "cpu")
    assert [rank.status for rank in run.ranks] == [-signal.SIGKILL] * 2
    assert run.leftovers == []


def recreate_the_world(rank: int, world_size: int, device: str) -> None:
    """The process group destroyed and made again under the same name: the functions meet the new peers."""
    x = torch.full((1, 2, world_size, 4), 1.0, device=device)
    store = dist.distributed_c10d._get_default_store()
    for life in range(3):
        assert bool((ulysses_op.scatter_heads(x * life) == life).all())
        comm = Communicator()
        exchange(comm, device)
        if life != 1:
            comm.close()
        dist.destroy_process_group()
        # The ranks change places.
        new_rank = (rank + life + 1) % world_size
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"life {life}", store), rank=new_rank, world_size=world_size
        )
        ranks.meet(dist.group.WORLD)
    dist.destroy_process_group()


def test_process_group_made_again() -> None:
    run = ranks.run_fresh(recreate_the_world, 2, "cpu")
    assert [(rank.status, rank.stderr) for rank in run.ranks] == [(0, "")] * 2
    assert run.leftovers == []


def fork_children(rank: int, world_size: int, device: str, how: str) -> None:
    """Children by fork, as data loaders make them, live and end beside a communicator; the parent goes on."""
    comm = Communicator()
    comm.build(ranks.device_of(device))
    exchange(comm, device)
    for _ in range(2):
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            if how == "drops it":
                del comm
                gc.collect()
            # Not by sys.exit(): the process group's own destructor does not survive that in a child.
            os._exit(7)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7, status
        exchange(comm, device)
    comm.close()


@pytest.mark.parametrize("how", ["leaves it alone", "drops it"])
def test_forked_children(how: str) -> None:
    run = ranks.run_fresh(fork_children, 2, "cpu", how)
    assert [rank.status for rank in run.ranks] == [0, 0], run.ranks
    assert run.leftovers == []


def run_forked_inside_a_group(
    rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str
) -> list[str] | None:
    """A child that leaves a group of its parent's, by an exception or not, is none of the parent's or the peers'
    business.
    """
    if rank not in members:
        return None
    comm = ranks.fresh_communicator(members, backend, device)
    exchange(comm, device)
    x = torch.ones(1, 2, len(members), 4, device=device)
    statuses = []
    for raises in (False, True):
        child = -1
        try:
            with comm.group("q", "k") as group:
                group.submit(x, tag="q")
                child = os.fork()
                if child == 0:
                    signal.alarm(10)
                    if raises:
                        raise ArithmeticError
                else:
                    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
                    group.submit(x, tag="k")
                    group.wait()
        except ArithmeticError:
            pass
        finally:
            if child == 0:
                os._exit(7)
    exchange(comm, device)
    comm.close()
    return [] if statuses == [7, 7] else [f"children ended with {statuses}"]


def test_a_child_forked_inside_a_group(pool: ranks.RankPool) -> None:
    ok(pool.run(run_forked_inside_a_group, MEMBERS[2], "shm", "cpu"))


def leave_unbuilt(rank: int, world_size: int) -> None:
    globals()["kept"] = Communicator()
    dropped = Communicator(timeout_s=1.0)
    dropped.close()


def test_communicator_that_was_never_built() -> None:
    run = ranks.run_fresh(leave_unbuilt, 2)
    assert [(rank.status, rank.stderr) for rank in run.ranks] == [(0, "")] * 2


def test_shared_memory_is_private_and_unlinked(pool: ranks.RankPool) -> None:
    ok(pool.run(run_shared_memory, MEMBERS[2]))


def run_shared_memory(rank: int, world_size: int, members: tuple[int, ...]) -> list[str] | None:
    """While communicators are in use nothing of theirs has a name, and their memory is this user's alone."""
    if rank not in members:
        return None
    before = ranks.shared_memory()
    ranks.meet(ranks.group_of(members))
    comm = ranks.fresh_communicator(members, "shm")
    exchange(comm, "cpu")
    ranks.meet(ranks.group_of(members))
    problems = [f"/dev/shm/{name}" for name in ranks.shared_memory_left_since(before)]
    segments = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "ulysses_op-" in line]
    if not all(name == "(deleted)" for name in segments) or not segments:
        problems.append(f"mappings {segments}")
    ranks.meet(ranks.group_of(members))
    comm.close()
    return problems
