"""Wrong use of a group, and peers that fail, are late or never come."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from test_exchange import BACKENDS, MEMBERS, ok
from test_gate import arrive, refusal, works

from ulysses_op import (
    BrokenCommunicatorError,
    Communicator,
    ExchangeGroup,
    PeerAbortError,
    PeerTimeoutError,
    UlyssesError,
    gather_heads,
    scatter_heads,
)

CALLS: tuple[Any, ...] = (scatter_heads, gather_heads)


class Mine(Exception):
    """What the code around an exchange raises."""


def heads(members: tuple[int, ...], device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(1, 2, len(members), 4, device=device, dtype=dtype)


# ---- misuse that all ranks commit: refused, and the group or the communicator goes on


def misuses(comm: Communicator, members: tuple[int, ...], device: str) -> dict[str, Callable[[], list[str | None]]]:
    x = heads(members, device)
    error = (RuntimeError,)

    def one_tag_twice() -> list[str | None]:
        with comm.group("q", "k") as group:
            group.submit(x, tag="q")
            problem = refusal("the second submission of q", lambda: group.submit(x, tag="q"), error, "'q'")
            group.submit(x, tag="k")
            group.wait()
        return [problem]

    def one_tag_twice_without_names() -> list[str | None]:
        with comm.group() as group:
            group.submit(x, tag="q")
            problem = refusal("the second submission of q", lambda: group.submit(x, tag="q"), error, "'q'")
            group.wait()
        return [problem]

    def submit_after_final() -> list[str | None]:
        with comm.group() as group:
            group.submit(x, tag="q", final=True)
            problem = refusal("a submission after the final one", lambda: group.submit(x, tag="k"), error)
            group.wait()
        return [problem]

    def submit_after_wait() -> list[str | None]:
        with comm.group() as group:
            group.submit(x, tag="q")
            group.wait()
            return [refusal("a submission after wait", lambda: group.submit(x, tag="k"), error)]

    def wait_twice() -> list[str | None]:
        with comm.group() as group:
            group.submit(x, tag="q")
            group.wait()
            return [refusal("the second wait", group.wait, error)]

    def wait_for_nothing() -> list[str | None]:
        with comm.group("q") as group:
            return [refusal("wait before submit", group.wait, error)]

    def wait_for_an_unknown_tag() -> list[str | None]:
        with comm.group() as group:
            group.submit(x, tag="q")
            problem = refusal("wait for k", lambda: group.wait("k"), (*error, ValueError), "k")
            group.wait("q")
        return [problem]

    def wait_for_a_tag_too_few() -> list[str | None]:
        with comm.group("q", "k") as group:
            group.submit(x, tag="q")
            problem = refusal("wait without k", group.wait, (*error, ValueError), "k")
            group.submit(x, tag="k")
            group.wait()
        return [problem]

    def nested_groups() -> list[str | None]:
        def inner() -> None:
            with comm.group("k") as other:
                other.submit(x, tag="k")

        with comm.group("q", "v") as group:
            group.submit(x, tag="q")
            problems = [
                refusal("a group in a group", inner, error, "'q'"),
                refusal("a method in a group", lambda: comm.scatter_heads(x), error, "'q'"),
            ]
            group.submit(x, tag="v")
            group.wait()
        return problems

    def left_before_anything() -> list[str | None]:
        def leave() -> None:
            with comm.group("q"):
                raise Mine

        return [refusal("a group left by exception", leave, (Mine,))]

    def left_after_the_final_submission() -> list[str | None]:
        def leave() -> None:
            with comm.group("q") as group:
                group.submit(x, tag="q")
                raise Mine

        return [refusal("a group left by exception", leave, (Mine,))]

    def left_without_wait() -> list[str | None]:
        with comm.group("q") as group:
            group.submit(x, tag="q")
        problem = refusal("a call after results that nobody waited for", lambda: comm.scatter_heads(x), error, "'q'")
        return [problem, refusal("wait for the lost results", group.wait, error)]

    def waited_for_outside() -> list[str | None]:
        with comm.group("q") as group:
            group.submit(x, tag="q")
        (result,) = group.wait()
        return [None if torch.equal(result, torch.ones_like(result)) else "wait behind the with-block"]

    def too_many_tags() -> list[str | None]:
        tags = [str(number) for number in range(13)]
        if comm.backend == "c10d":
            return []

        def submit() -> None:
            with comm.group(*tags) as group:
                for tag in tags:
                    group.submit(x, tag=tag)

        return [refusal("more tags than targets", submit, (ValueError,), "max_targets")]

    return {name: call for name, call in locals().items() if callable(call) and name not in ("x", "error", "comm")}


def run_misuse(
    rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str, name: str
) -> list[str] | None:
    if rank not in members:
        return None
    comm = ranks.fresh_communicator(members, backend, device)
    me = members.index(rank)
    problems = misuses(comm, members, device)[name]()
    problems += works(comm, members, me, device)
    comm.close()
    return [problem for problem in problems if problem]


class _Nothing:
    backend = "none"


MISUSES = list(misuses(_Nothing(), (0, 1), "cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MISUSES)
def test_misuse(pool: ranks.RankPool, name: str, backend: str) -> None:
    ok(pool.run(run_misuse, MEMBERS[3], backend, "cpu", name))


def run_modified_input(
    rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str
) -> list[str] | None:
    """One rank writes its input before wait(): an error there, results for the others, and all go on."""
    if rank not in members:
        return None
    me = members.index(rank)
    comm = ranks.fresh_communicator(members, backend, device)
    problems: list[str | None] = []
    for culprit in range(len(members)):
        for how in ("in place", "through a view"):
            x = heads(members, device)

            def exchange(x: torch.Tensor = x, culprit: int = culprit, how: str = how) -> None:
                with comm.group("q", "k") as group:
                    group.submit(x, tag="q")
                    group.submit(x + 1, tag="k")
                    if me == culprit:
                        (x if how == "in place" else x[:, 0]).add_(1)
                    group.wait()

            if me == culprit:
                problems.append(refusal(f"an input modified {how}", exchange, (RuntimeError,), "'q'"))
            else:
                exchange()
        problems += works(comm, members, me, device)
    comm.close()
    return [problem for problem in problems if problem]


@pytest.mark.parametrize("backend", BACKENDS)
def test_input_modified_before_wait(pool: ranks.RankPool, backend: str) -> None:
    ok(pool.run(run_modified_input, MEMBERS[3], backend, "cpu"))


def run_closed(rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str) -> list[str] | None:
    if rank not in members:
        return None
    x = heads(members, device)
    back = torch.ones(1, len(members), 1, 4, device=device)
    comm = ranks.fresh_communicator(members, backend, device)
    with comm.group("q") as group:
        group.submit(x, tag="q")
        (result,) = group.wait()
    kept = comm.scatter_heads(x)
    comm.close()
    comm.close()

    def in_group() -> None:
        with comm.group("q") as group:
            group.submit(x, tag="q")

    error = (RuntimeError,)
    problems = [
        *(["the repr"] if repr(comm) != f"Communicator(rank {comm.rank} of {comm.world_size}, closed)" else []),
        refusal("scatter_heads after close", lambda: comm.scatter_heads(x), error, "closed"),
        refusal("gather_heads after close", lambda: comm.gather_heads(back), error, "closed"),
        refusal("a group after close", in_group, error, "closed"),
        refusal("build after close", comm.build, error, "closed"),
        refusal("wait after close", group.wait, error),
    ]
    if device == "cpu" and not torch.equal(result, kept):
        problems.append("a result changed by close")
    if not torch.equal(kept, torch.ones_like(kept)):
        problems.append("an owned result changed by close")

    with ranks.fresh_communicator(members, backend, device) as comm:
        comm.scatter_heads(x)
    problems.append(refusal("scatter_heads after the with-block", lambda: comm.scatter_heads(x), error, "closed"))
    unused = Communicator(ranks.group_of(members), backend=backend)
    unused.close()
    problems.append(
        refusal("scatter_heads of one closed before it was built", lambda: unused.scatter_heads(x), error, "closed")
    )

    lost = ranks.fresh_communicator(members, backend, device)
    with lost.group("q") as group:
        group.submit(x, tag="q")
    problems.append(refusal("close() over results that nobody waited for", lost.close, error, "'q'"))
    lost.close()
    return [problem for problem in problems if problem]


@pytest.mark.parametrize("backend", BACKENDS)
def test_use_after_close(pool: ranks.RankPool, backend: str) -> None:
    ok(pool.run(run_closed, MEMBERS[3], backend, "cpu"))


def run_beneath(rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str) -> list[str] | None:
    """Beneath a wait, as a signal handler or another thread would, the communicator is used: refused, and the wait goes
    on. Then it is closed.
    """
    if rank not in members:
        return None
    comm = ranks.fresh_communicator(members, backend, device)
    x = heads(members, device)
    problems: list[str | None] = []

    def exchange(beneath: Callable[[ExchangeGroup], None]) -> None:
        with comm.group("q") as group:
            group.submit(x, tag="q")
            engine = comm._engine
            deliver = engine.deliver

            def delivered(group: ExchangeGroup) -> list[torch.Tensor]:
                beneath(group)
                results: list[torch.Tensor] = deliver(group)
                return results

            engine.deliver = delivered
            try:
                group.wait()
            finally:
                engine.deliver = deliver

    def use(group: ExchangeGroup) -> None:
        for call in (lambda: comm.scatter_heads(x), group.wait):
            problems.append(refusal("use beneath a wait", call, (RuntimeError,), "being waited for"))

    def close(group: ExchangeGroup) -> None:
        problems.append(refusal("close beneath a wait", comm.close, (RuntimeError,), "never waited for"))

    exchange(use)
    exchange(lambda group: None)
    problems.append(refusal("a wait that is closed beneath", lambda: exchange(close), (RuntimeError,), "is closed"))
    return [problem for problem in problems if problem]


@pytest.mark.parametrize("backend", BACKENDS)
def test_use_beneath_a_wait(pool: ranks.RankPool, backend: str) -> None:
    ok(pool.run(run_beneath, MEMBERS[2], backend, "cpu"))


# ---- one rank fails


def run_failure(
    rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str, how: str
) -> list[str] | None:
    """Rank 1 fails in the middle of a group: the error is its own there, and peers hear of it."""
    group = ranks.fresh_group(members)
    if group is None:
        return None
    me = members.index(rank)
    comm = ranks.fresh_communicator(group, backend, device, timeout_s=2.0)
    x = heads(members, device)
    with comm.group() as exchanges:
        for tag in ("q", "k", "v"):
            exchanges.submit(x, tag=tag)
        exchanges.wait()
    ranks.meet(group)
    problems: list[str | None] = []

    def exchange() -> None:
        with comm.group("q", "k", "v") as exchanges:
            exchanges.submit(x, tag="q")
            if me == 1:
                if how == "exception":
                    raise Mine
                if how == "bad argument":
                    exchanges.submit(heads(members, device, torch.complex128), tag="k")
                if how == "close":
                    comm.close()
            exchanges.submit(x, tag="k")
            exchanges.submit(x, tag="v")
            exchanges.wait()
        arrive(device, comm)

    if me == 1:
        own = {"exception": (Mine,), "bad argument": (TypeError, ValueError), "close": (RuntimeError,)}[how]
        problems.append(refusal(f"{how} on this rank", exchange, own))
    else:
        kinds = (PeerAbortError, PeerTimeoutError)
        problems.append(refusal(f"{how} on rank 1", exchange, kinds, "rank 1" if backend != "c10d" else ""))
    later: tuple[type[Exception], ...] = (RuntimeError,) if me == 1 and how == "close" else (BrokenCommunicatorError,)
    for attempt in range(2):
        problems.append(refusal(f"later call {attempt}", lambda: comm.scatter_heads(x), later))
    comm.close()
    return [problem for problem in problems if problem]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["exception", "bad argument", "close"])
def test_one_rank_fails_inside_a_group(pool: ranks.RankPool, how: str, backend: str) -> None:
    ok(pool.run(run_failure, MEMBERS[3], backend, "cpu", how))


def run_absent(
    rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str, missed: str
) -> list[str] | None:
    """Rank 1 is away for longer than timeout_s=1: its peers give up, and it gets no data when it comes at last."""
    group = ranks.fresh_group(members)
    if group is None:
        return None
    me = members.index(rank)
    comm = ranks.fresh_communicator(group, backend, device, timeout_s=1.0)
    x = heads(members, device)
    if missed != "first group":
        with comm.group("q", "k") as exchanges:
            exchanges.submit(x, tag="q")
            exchanges.submit(x, tag="k")
            exchanges.wait()
    store, key = dist.distributed_c10d._get_default_store(), f"absent {group.group_name}"
    problems: list[str | None] = []

    def away() -> None:
        # Until all peers have given up.
        gave_up = [f"{key} {peer}" for peer in range(len(members)) if peer != 1]
        store.wait(gave_up, timedelta(seconds=ranks.DEADLINE_S / 2))

    def exchange() -> None:
        with comm.group("q", "k") as exchanges:
            if me == 1 and missed != "the last submission":
                away()
            exchanges.submit(x, tag="q")
            if me == 1 and missed == "the last submission":
                away()
            exchanges.submit(x, tag="k")
            exchanges.wait()
        arrive(device, comm)

    if me == 1:
        problems.append(refusal("the late exchange", exchange, (UlyssesError,)))
    else:
        says = "" if backend == "c10d" else "1"
        problems.append(refusal("the exchange without rank 1", exchange, (PeerTimeoutError,), says))
        store.set(f"{key} {me}", "gave up")
    problems.append(refusal("a later call", lambda: comm.scatter_heads(x), (BrokenCommunicatorError,)))
    comm.close()
    if not bool((x + 1 == 2).all()):
        problems.append("the device is not usable any more")
    return [problem for problem in problems if problem]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("missed", ["first group", "a later group", "the last submission"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_rank_that_is_late_beyond_the_timeout(pool: ranks.RankPool, world_size: int, missed: str, backend: str) -> None:
    ok(pool.run(run_absent, MEMBERS[world_size], backend, "cpu", missed))


def run_timeout_message(rank: int, world_size: int, members: tuple[int, ...], device: str, backend: str) -> str | None:
    """The text of the time-out on rank 0 when rank 1 does not come."""
    group = ranks.fresh_group(members)
    if group is None:
        return None
    comm = ranks.fresh_communicator(group, backend, device, timeout_s=1.0)
    x = heads(members, device)
    with comm.group("values") as exchanges:
        exchanges.submit(x, tag="values")
        exchanges.wait()
    text = ""
    if members.index(rank) == 0:
        try:
            with comm.group("values") as exchanges:
                exchanges.submit(x, tag="values")
                exchanges.wait()
            arrive(device, comm)
        except PeerTimeoutError as error:
            text = str(error)
    ranks.meet(group)  # one that had closed would not be waited for
    comm.close()
    return text


def test_timeout_names_rank_tag_and_signal(pool: ranks.RankPool) -> None:
    text = pool.run(run_timeout_message, MEMBERS[2], "cpu", "shm")[0]
    assert "rank(s) 1" in text
    assert "'values'" in text
    assert "READY" in text
    assert "1.0 s" in text


def run_absent_from_build(rank: int, world_size: int, members: tuple[int, ...]) -> list[str] | None:
    group = ranks.fresh_group(members)
    if group is None or members.index(rank) == 1:
        return None
    comm = Communicator(group, timeout_s=1.0)
    problems = [refusal("build without rank 1", comm.build, (PeerTimeoutError,))]
    comm.close()
    return [problem for problem in problems if problem]


def test_rank_that_never_builds(pool: ranks.RankPool) -> None:
    ok(pool.run(run_absent_from_build, MEMBERS[3]))


def run_slow(rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str) -> list[str] | None:
    """A rank that is late within timeout_s is no error, wherever it is late."""
    if rank not in members:
        return None
    me = members.index(rank)
    comm = ranks.fresh_communicator(members, backend, device, timeout_s=30.0)
    problems = []
    for late in range(len(members)):
        if me == late:
            time.sleep(0.2)
        problems += works(comm, members, me, device)
    comm.close()
    return problems


@pytest.mark.parametrize("backend", BACKENDS)
def test_rank_that_is_late_within_the_timeout(pool: ranks.RankPool, backend: str) -> None:
    ok(pool.run(run_slow, MEMBERS[3], backend, "cpu"))


def run_other_communicators_survive(
    rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str
) -> list[str] | None:
    """A broken communicator leaves another one of the same group alone."""
    if rank not in members:
        return None
    me = members.index(rank)
    x = heads(members, device)
    problems: list[Any] = []
    other = ranks.fresh_communicator(members, backend, device)
    comm = ranks.fresh_communicator(members, "shm" if device == "cpu" else backend, device, timeout_s=3.0)
    comm.scatter_heads(x)

    def exchange() -> None:
        with comm.group("q", "k") as exchanges:
            exchanges.submit(x, tag="q")
            if me == 1:
                raise Mine
            exchanges.submit(x, tag="k")
            exchanges.wait()
        arrive(device, comm)

    problems.append(refusal("the failing group", exchange, (Mine,) if me == 1 else (PeerAbortError, PeerTimeoutError)))
    problems += works(other, members, me, device)
    comm.close()
    problems += works(other, members, me, device)
    other.close()
    again = ranks.fresh_communicator(members, backend, device)
    problems += works(again, members, me, device)
    again.close()
    return [problem for problem in problems if problem]


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_communicators_survive(pool: ranks.RankPool, backend: str) -> None:
    ok(pool.run(run_other_communicators_survive, MEMBERS[3], backend, "cpu"))


def run_communicator_as_a_group(rank: int, world_size: int) -> list[str]:
    comm = ranks.communicator((0, 1), "shm")
    x = heads((0, 1), "cpu")
    words = "group is a Communicator: use its methods, comm.scatter_heads(x)"
    problems = [refusal(call.__name__, partial(call, x, comm), (TypeError,), words) for call in CALLS]
    return list(filter(None, problems))


def test_a_communicator_is_no_group() -> None:
    ok(ranks.pool(2).run(run_communicator_as_a_group))


def run_another_device(rank: int, world_size: int) -> list[str]:
    comm = ranks.communicator((0, 1), "shm")
    words = "built for cpu" if torch.cuda.is_available() else "no CUDA device is available to this process"
    problems = [
        None if comm.build("cpu") is comm and comm.build() is comm else "build() returned another",
        refusal("build for another device", lambda: comm.build("cuda"), (ValueError,), words),
        refusal("build for meta", lambda: comm.build("meta"), (ValueError,), "built for cpu: use one communicator"),
    ]
    return list(filter(None, problems))


def test_build_for_another_device() -> None:
    ok(ranks.pool(2).run(run_another_device))
