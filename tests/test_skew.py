"""Groups in a row under random delays, every element of every output checked, and what processes hold before and after;
that loop without one handshake, and with something that it keeps."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import ranks
import torch
from cases import Case, even
from footprint import Footprint
from test_exchange import MEMBERS

from ulysses_op import _C
from ulysses_op.mapping import segment_name

# The number of groups at two ranks; three and four ranks run three tenths of it each.
GROUPS = int(os.environ.get("ULYSSES_OP_TEST_GROUPS", "5000"))
CONTROL_GROUPS = 1000
# Before what processes hold is measured; half of the groups where there are fewer than twice as many.
WARM_UP_GROUPS = 500
LONGEST_DELAY_S = 0.0005
TAGS = ("q", "k", "v")
SUBMIT_ORDER = ("v", "q", "k")
# Far above what a group takes; the pool's deadline follows from it.
SECONDS_A_GROUP = 0.03


def tables(world_size: int, device: str) -> dict[str, Case]:
    rows = {"cpu": 2, "cuda": 512}[device]
    width = {"cpu": 4, "cuda": 64}[device]
    return {
        tag: even(tag, world_size, s=rows, h=2 * world_size, d=width, dtype=torch.int32, slot=slot)
        for slot, tag in enumerate(TAGS)
    }


def delays(rng: random.Random, device: str) -> Callable[[], None]:
    """A function that now and then holds up the host (asleep or busy), or on CUDA the current stream."""

    def delay() -> None:
        if rng.random() > 0.15:
            return
        delay_s = rng.uniform(0.0, LONGEST_DELAY_S)
        how = rng.choice(["sleep", "busy"] if device == "cpu" else ["sleep", "stream", "stream", "stream"])
        if how == "sleep":
            time.sleep(delay_s)
        elif how == "stream":
            cycles_a_second = 1.7e9
            torch.cuda._sleep(int(delay_s * cycles_a_second))
        else:
            end = time.perf_counter() + delay_s
            while time.perf_counter() < end:
                pass

    return delay


def run_skew(
    rank: int,
    world_size: int,
    members: tuple[int, ...],
    backend: str,
    device: str,
    groups: int,
    skip: tuple[str, ...] = (),
    timeout_s: float = 30.0,
    leak: str = "",
) -> dict[str, Any] | None:
    """`groups` groups of q, k, v on a new communicator without the handshakes in `skip`: how many wrong elements, and
    what has grown behind the warm-up. Each group keeps a `leak`.
    """
    if rank not in members:
        return None
    from ulysses_op import UlyssesError, onesided

    me = members.index(rank)
    before = onesided._test_skip
    onesided._test_skip = frozenset(skip)
    try:
        comm = ranks.fresh_communicator(members, backend, device, timeout_s=timeout_s)
    finally:
        onesided._test_skip = before
    built = comm.backend
    table = tables(len(members), device)
    inputs = {tag: oracle.make_input(case, "scatter_heads", 0, me, device) for tag, case in table.items()}
    wanted = {tag: oracle.expected(case, "scatter_heads", 0, me, device) for tag, case in table.items()}
    rng = random.Random(f"{rank} {world_size} {skip}")
    delay = delays(rng, device)
    check = _CheckOnDevice(device) if device == "cuda" else _CheckOnHost()
    warm_up = min(WARM_UP_GROUPS, groups // 2)
    footprint = None
    kept: list[Any] = []
    done, error = 0, None
    try:
        for step in range(groups):
            if step == warm_up:
                footprint = Footprint(ranks.device_of(device))
            if leak:
                kept.append(LEAKS[leak]())
            with check.stream(rng):
                delay()
                with comm.group(*TAGS) as group:
                    for tag in SUBMIT_ORDER:
                        # Every element differs from the same element of every other step.
                        group.submit(inputs[tag] + step, tag=tag)
                        delay()
                    results = group.wait()
                delay()
                for tag, result in zip(TAGS, results, strict=True):
                    check.compare(result, wanted[tag] + step)
            done += 1
        check.wrong()
        comm.check()
    except UlyssesError as raised:
        if not skip:
            raise
        error = repr(raised)
    wrong = check.wrong()
    grown = [] if footprint is None else footprint.grown()
    comm.close()
    for one in kept:
        release(one)
    return {"wrong": wrong, "groups": done, "backend": built, "error": error, "grown": grown, "held": str(footprint)}


def all_right(answers: list[dict[str, Any] | None], members: tuple[int, ...], backend: str, groups: int) -> None:
    """Assert that the ranks `members`, and no others, have run :func:`run_skew` and nothing was wrong. Tells what they
    held.
    """
    assert [rank for rank, answer in enumerate(answers) if answer is not None] == list(members)
    right = {"wrong": 0, "groups": groups, "backend": backend, "error": None, "grown": []}
    for rank, answer in enumerate(answers):
        if answer is not None:
            print(f"{backend}, {len(members)} ranks, {groups} groups, rank {rank}: {answer['held']}")
            assert {**answer, "held": ""} == {**right, "held": ""}, answers


def _sleeping_thread() -> threading.Event:
    end = threading.Event()
    threading.Thread(target=end.wait, daemon=True).start()
    return end


def _unlinked_segment() -> Any:
    name = segment_name()
    segment = _C.SharedSegment.create(name, 4096)
    _C.SharedSegment.unlink(name)
    return segment


def _touched_pages() -> mmap.mmap:
    """64 KiB, not out of what malloc has to spare."""
    pages = mmap.mmap(-1, 64 << 10, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.write(b"x" * len(pages))
    return pages


LEAKS: dict[str, Callable[[], Any]] = {
    "resident MiB": _touched_pages,
    "open descriptors": lambda: os.open("/dev/null", os.O_RDONLY),
    "threads": _sleeping_thread,
    "mapped segments": _unlinked_segment,
}
"""What a group may keep, by what it then is that grows."""


def release(kept: Any) -> None:
    if isinstance(kept, int):
        os.close(kept)
    elif isinstance(kept, threading.Event):
        kept.set()


class _CheckOnHost:
    def __init__(self) -> None:
        self._wrong = 0

    def stream(self, rng: random.Random) -> Any:
        return contextlib.nullcontext()

    def compare(self, actual: torch.Tensor, wanted: torch.Tensor) -> None:
        if not torch.equal(actual, wanted):
            self._wrong += oracle.wrong_elements(actual, wanted)

    def wrong(self) -> int:
        return self._wrong


class _CheckOnDevice:
    """Counts on the device, so that the host runs ahead; every step is on one of a few streams."""

    def __init__(self, device: str) -> None:
        self._streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        self._counts = [torch.zeros((), dtype=torch.int64, device=device) for _ in self._streams]
        self._at = 0
        torch.cuda.synchronize()

    def stream(self, rng: random.Random) -> Any:
        self._at = rng.randrange(len(self._streams))
        return torch.cuda.stream(self._streams[self._at])

    def compare(self, actual: torch.Tensor, wanted: torch.Tensor) -> None:
        self._counts[self._at] += (actual != wanted).sum()

    def wrong(self) -> int:
        torch.cuda.synchronize()
        return sum(int(count) for count in self._counts)


def deadline_s(groups: int) -> float:
    return 60.0 + SECONDS_A_GROUP * groups


@pytest.mark.timeout(deadline_s(GROUPS) + 60.0)
@pytest.mark.parametrize(("world_size", "groups"), [(2, GROUPS), (3, GROUPS * 3 // 10), (4, GROUPS * 3 // 10)])
def test_groups_in_a_row(pool: ranks.RankPool, world_size: int, groups: int) -> None:
    members = MEMBERS[world_size]
    answers = pool.run(run_skew, members, "shm", "cpu", groups, timeout_s=deadline_s(groups))
    all_right(answers, members, "shm", groups)


def test_groups_in_a_row_on_c10d(pool: ranks.RankPool) -> None:
    all_right(pool.run(run_skew, MEMBERS[3], "c10d", "cpu", 300), MEMBERS[3], "c10d", 300)


@pytest.mark.parametrize("leak", LEAKS)
def test_growth_is_found(pool: ranks.RankPool, leak: str) -> None:
    answers = pool.run(run_skew, MEMBERS[2], "shm", "cpu", CONTROL_GROUPS, (), 30.0, leak)
    for answer in answers:
        assert answer is None or any(line.startswith(f"{leak} grew") for line in answer["grown"]), answers


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("handshake", ["ready", "done"])
def test_without_a_handshake_the_loop_finds_wrong_elements(
    pool: ranks.RankPool, world_size: int, handshake: str
) -> None:
    # A signal that is lost without the other handshake ends the loop by a time-out.
    arguments = (MEMBERS[world_size], "shm", "cpu", CONTROL_GROUPS, (handshake,), 2.0)
    answers = pool.run(run_skew, *arguments, timeout_s=deadline_s(CONTROL_GROUPS))
    assert sum(answer["wrong"] for answer in answers if answer is not None) > 0, answers


def first_group_with_late_ranks(rank: int, world_size: int) -> dict[str, str | None]:
    """Rank 0 is late with its READY, rank 1 between two submissions: rank 2, in the rendezvous of the second one,
    meanwhile sees the signal of a rank that has not come there.
    """
    table = tables(world_size, "cpu")
    found = {}
    with ranks.fresh_communicator(MEMBERS[world_size], "shm") as comm:
        submit = comm._engine.submit

        def submit_late(*arguments: Any) -> None:
            time.sleep(1.5)
            submit(*arguments)

        if rank == 0:
            comm._engine.submit = submit_late
        with comm.group("v", "q") as group:
            group.submit(oracle.make_input(table["v"], "scatter_heads", 0, rank), tag="v")
            if rank == 1:
                time.sleep(1.5)
            group.submit(oracle.make_input(table["q"], "scatter_heads", 0, rank), tag="q")
            for tag, result in zip(("v", "q"), group.wait(), strict=True):
                found[tag] = oracle.difference(result, oracle.expected(table[tag], "scatter_heads", 0, rank))
    return found


def test_ranks_that_are_late_in_a_first_group_are_waited_for() -> None:
    assert ranks.pool(3).run(first_group_with_late_ranks) == [{"v": None, "q": None}] * 3
