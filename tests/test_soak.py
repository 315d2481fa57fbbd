"""The soak: random programs on real ranks, and that it finds what it is there to find."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from test_cli import command
from test_exchange import MEMBERS

from ulysses_op import communicator, gradients, launch, onesided
from ulysses_op.__main__ import main
from ulysses_op.soak import main as soak_main
from ulysses_op.soak import resources
from ulysses_op.soak.executor import MAX_TARGETS, Executor
from ulysses_op.soak.main import soak
from ulysses_op.soak.program import step_at, steps
from ulysses_op.soak.resources import GROWTH_BOUNDS
from ulysses_op.soak.run import STEPS_A_ROUND, Plan, soak_rank
from ulysses_op.soak.transfers import LAYOUTS

SECONDS = float(os.environ.get("ULYSSES_OP_TEST_SOAK_S", "10"))
PLAN = Plan(3, steps=600, backend="shm", timeout_s=20.0)


def run_soak(rank: int, world_size: int, members: tuple[int, ...], plan: Plan) -> dict[str, Any] | None:
    if rank not in members:
        return None
    return asdict(soak_rank(torch.device("cpu"), plan, ranks.group_of(members)))


@pytest.mark.timeout(SECONDS * 3 + 120)
@pytest.mark.parametrize(
    ("world_size", "backend", "share"), [(2, "shm", 1.0), (3, "shm", 0.5), (4, "shm", 0.5), (3, "c10d", 0.25)]
)
def test_everything_holds(pool: ranks.RankPool, world_size: int, backend: str, share: float) -> None:
    seconds = SECONDS * share
    plan = Plan(int(time.time()), minutes=seconds / 60, backend=backend, timeout_s=60.0)
    print(plan)  # the seed, where it fails
    members = MEMBERS[world_size]
    reports = [report for report in pool.run(run_soak, members, plan, timeout_s=2 * seconds + 90) if report]
    assert len(reports) == world_size
    for report in reports:
        assert (report["status"], report["problem"], report["backend"]) == (0, "", backend), reports
        assert report["steps"] >= STEPS_A_ROUND and report["elements"] > 10_000 and report["received_bytes"] > 10_000
        assert report["transfers"] >= report["layouts"] > STEPS_A_ROUND / 2


# What it must find.


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def changed_deliveries(change: Callable[[int, torch.Tensor], None]) -> contextlib.AbstractContextManager[None]:
    """Calls ``change(number, result)`` for the first result of each group that has elements."""
    deliver, number = onesided.OneSidedEngine.deliver, 0

    def deliver_changed(engine: Any, group: Any) -> list[torch.Tensor]:
        nonlocal number
        results = deliver(engine, group)
        if results[0].numel():
            number += 1
            change(number, results[0].view(torch.uint8))
        return results

    return patched(onesided.OneSidedEngine, "deliver", deliver_changed)


def bytes_flipped() -> contextlib.AbstractContextManager[None]:
    def flip(number: int, result: torch.Tensor) -> None:
        if number >= 20:  # not every result is waited for
            result.view(-1)[0] ^= 1

    return changed_deliveries(flip)


def results_written_later() -> contextlib.AbstractContextManager[None]:
    kept: list[torch.Tensor] = []

    def flip_an_earlier_one(number: int, result: torch.Tensor) -> None:
        if number > 20 and kept:
            kept.pop().view(-1)[-1] ^= 1
        if result.numel() < 1000:
            kept[:] = [result]

    return changed_deliveries(flip_an_earlier_one)


def a_replica_forgotten() -> contextlib.AbstractContextManager[None]:
    def forget(parts: torch.Tensor, heads: Any) -> torch.Tensor:
        total = torch.zeros((*parts.shape[:2], max(stop for _, stop in heads), parts.shape[3]), dtype=parts.dtype)
        start, stop = heads[0]
        total[:, :, start:stop] = parts[:, :, : stop - start]
        return total

    return patched(gradients, "sum_replicas", forget)


def lost_groups_untold() -> contextlib.AbstractContextManager[None]:
    def begin(self: Any, engine: Any, tag: str) -> None:
        for group in list(self._groups):
            self._abandon(engine, group)

    return patched(communicator.Communicator, "_begin", begin)


@contextlib.contextmanager
def descriptors_left() -> Iterator[None]:
    left: list[int] = []
    execute = Executor.run

    def leave_one(self: Executor, number: int, step: Any) -> None:
        left.append(os.open("/dev/null", os.O_RDONLY))
        execute(self, number, step)

    try:
        with patched(Executor, "run", leave_one):
            yield
    finally:
        for descriptor in left:
            os.close(descriptor)


SABOTAGES: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "none": contextlib.nullcontext,
    "ready": lambda: patched(onesided, "_test_skip", frozenset({"ready"})),
    "done": lambda: patched(onesided, "_test_skip", frozenset({"done"})),
    "a byte": bytes_flipped,
    "later": results_written_later,
    "a replica": a_replica_forgotten,
    "lost groups": lost_groups_untold,
    "descriptors": descriptors_left,
}


def run_sabotaged(
    rank: int, world_size: int, plan: Plan, sabotage: str, culprits: tuple[int, ...], changes: dict[str, Any]
) -> tuple[int, str, int, float]:
    """A soak in which the ranks ``culprits`` misbehave, or have another plan: its status and problem, step, seconds."""
    group = ranks.fresh_group(tuple(range(world_size)))
    begun = time.monotonic()
    with SABOTAGES[sabotage if rank in culprits else "none"]():
        report = soak_rank(torch.device("cpu"), replace(plan, **(changes if rank in culprits else {})), group)
    return report.status, report.problem, report.steps, time.monotonic() - begun


def sabotage(
    kind: str, culprits: tuple[int, ...], plan: Plan = PLAN, **changes: Any
) -> list[tuple[int, str, int, float]]:
    """What :func:`run_sabotaged` gives on two ranks."""
    return ranks.pool(2).run(run_sabotaged, plan, kind, culprits, changes, timeout_s=100.0)


def stop_together(found: list[tuple[int, str, int, float]]) -> bool:
    """Whether the ranks stopped within a fraction of the time-out: they were told."""
    seconds = [seconds for *_, seconds in found]
    return max(seconds) - min(seconds) < PLAN.timeout_s / 4


def test_a_done_left_out_is_found() -> None:
    found = sabotage("done", (0, 1))
    assert {status for status, *_ in found} == {1}
    assert any(" are wrong, the first at (b, s, h, d) = " in problem for _, problem, *_ in found), found


def test_a_ready_left_out_is_found() -> None:
    """What it protects is a matter of time: one program in ten may pass. Some end by a DONE that comes too early."""
    problems: list[str] = []
    for seed in range(3, 13):
        found = sabotage("ready", (0, 1), replace(PLAN, seed=seed, timeout_s=3.0))
        problems += [problem for _, problem, *_ in found]
        if any(" are wrong, the first at (b, s, h, d) = " in problem for problem in problems):
            return
    pytest.fail("\n".join(problems))


def test_a_byte_flipped_is_found_where_it_is() -> None:
    (status, told, _, early), (failed, problem, step, late) = sabotage("a byte", (1,))
    assert (status, failed) == (1, 1)
    pattern = (
        rf"rank 1, seed 3, step {step} \(.*\) failed: the result of \w+: 1 of \d+ elements of \(.*\) are wrong, "
        r"the first at \(b, s, h, d\) = \(0, 0, 0, 0\): 0x[0-9a-f]+, expected 0x[0-9a-f]+"
    )
    assert re.fullmatch(pattern, problem), problem
    assert "stopped, since another rank did: PeerAbortError" in told and "WrongResult" in told
    assert stop_together([(status, told, step, early), (failed, problem, step, late)])


def test_a_result_that_is_written_later_is_found() -> None:
    found = sabotage("later", (0,))
    assert [status for status, *_ in found] == [1, 1]
    assert ", kept,: 1 of " in found[0][1], found


def test_a_wrong_gradient_is_found() -> None:
    found = sabotage("a replica", (0, 1))
    assert [status for status, *_ in found] == [1, 1]
    assert any("failed: the gradient of " in problem for _, problem, *_ in found), found


def test_a_lost_group_that_is_not_told_is_found() -> None:
    found = sabotage("lost groups", (0, 1))
    assert [status for status, *_ in found] == [1, 1]
    assert any("expected RuntimeError, but nothing was raised" in problem for _, problem, *_ in found), found


def test_an_oracle_of_another_seed_is_found() -> None:
    found = sabotage("none", (1,), oracle_seed=4)
    assert [status for status, *_ in found] == [1, 1]
    assert " failed: the result of " in found[1][1] and found[1][2] < 10
    assert "stopped, since another rank did" in found[0][1] and stop_together(found)


def test_growth_is_found() -> None:
    found = sabotage("descriptors", (1,), replace(PLAN, steps_a_round=10))
    assert [status for status, *_ in found] == [1, 1], found
    assert re.search(r"open descriptors grew from \d+ to \d+, by more than 16", found[1][1])


@pytest.mark.parametrize("what", GROWTH_BOUNDS)
def test_growth_of_anything_beyond_its_bound_is_told(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    amounts = dict.fromkeys(GROWTH_BOUNDS, 10)
    monkeypatch.setattr(resources, "held", lambda device: dict(amounts))
    growth = resources.Growth(torch.device("cpu"))
    for _ in range(resources.SETTLING_ROUNDS):
        amounts[what] += 1000
        assert growth.measure() == ""
    amounts[what] += GROWTH_BOUNDS[what]
    assert growth.measure() == ""
    amounts[what] += 1
    assert growth.measure().startswith(f"{what} grew from 3010 to ")


def test_ranks_with_different_programs_are_found() -> None:
    found = sabotage("none", (1,), replace(PLAN, timeout_s=3.0), seed=4)
    assert [status for status, *_ in found] == [1, 1] and all(step == 0 for _, _, step, _ in found), found


def test_ranks_that_compare_see_different_programs() -> None:
    """Nothing is exchanged, so that only the digests differ."""
    found = ranks.pool(2).run(run_nothing, timeout_s=100.0)
    assert [status for status, _ in found] == [1, 1]
    assert all("the ranks have run different programs" in problem for _, problem in found), found


def run_nothing(rank: int, world_size: int) -> tuple[int, str]:
    group = ranks.fresh_group(tuple(range(world_size)))
    with patched(Executor, "run", lambda self, number, step: None):
        report = soak_rank(torch.device("cpu"), replace(PLAN, seed=rank), group)
    return report.status, report.problem


# Programs.


def test_programs_follow_from_the_seed_and_have_everything_in_them() -> None:
    program = list(islice(steps(7, 3, MAX_TARGETS), 3000))
    assert program[17] == step_at(7, 17, 3, MAX_TARGETS) != step_at(8, 17, 3, MAX_TARGETS)
    transfers = [transfer for step in program for transfer in step.transfers]
    assert {step.kind for step in program} == {"group", "call", "round_trip", "unwaited", "reopen"}
    assert {step.final for step in program} == {"names", "flag", "wait", "leave"}
    assert {len(step.transfers) for step in program} == {0, 1, 2, 3, 4}
    assert {transfer.dtype.itemsize for transfer in transfers} == {1, 2, 4, 8}
    assert {layout for transfer in transfers for layout in transfer.layouts} == set(LAYOUTS)
    assert len({transfer.tag for transfer in transfers}) > MAX_TARGETS
    for gradient in (False, True):
        assert any(t.gradient == gradient and sum(t.seq) and 0 in t.seq for t in transfers)
        shared = [t for t in transfers if sum(t.heads_of(rank) for rank in range(3)) > t.num_heads]
        assert any(t.gradient == gradient for t in shared)
    sizes = [t.batch * sum(t.seq) * t.num_heads * t.head_dim * t.dtype.itemsize for t in transfers]
    assert min(sizes) == 0 and max(sizes) > 1 << 20 and 50 < sorted(sizes)[len(sizes) // 2] < 100_000
    assert any(step.refused for step in program) and any(any(step.pauses_us) for step in program)
    assert any(step.waited and step.waited != tuple(t.tag for t in step.transfers) for step in program)


# The command.


def test_the_command() -> None:
    done = command("soak", "--steps", "40", "--seed", "11", "--ranks", "2", "--backend", "c10d")
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    pattern = (
        r"everything held on 2 ranks \(c10d\): 40 steps, \d+ transfers of \d+ layouts, \d+ elements checked, "
        r"\d+ bytes received; again: python -m ulysses_op soak --ranks 2 --seed 11 --steps 40"
    )
    assert re.fullmatch(pattern, last), last


def test_the_command_on_a_backend_that_cannot_run() -> None:
    done = command("soak", "--steps", "1", "--backend", "symm_mem")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "backend 'symm_mem' cannot run" in done.stderr


def soak_misled(device: torch.device, plan: Plan) -> int:
    return soak(device, replace(plan, oracle_seed=4) if dist.get_rank() == 1 else plan)


def test_the_command_when_a_rank_fails_on_c10d(capfd: pytest.CaptureFixture[str]) -> None:
    """Where ranks cannot tell each other, they run into the time-out."""
    plan = replace(PLAN, backend="c10d", timeout_s=5.0)
    assert launch.run(soak_misled, (plan,), launch.Placement(2, "cpu"), 90.0) == 1
    told = capfd.readouterr()
    assert "FAILED on rank 0: " in told.out
    assert re.search(r"^soak: rank 1, seed 3, step \d+ .* are wrong, the first at ", told.err, re.MULTILINE), told.err
    assert re.search(r"^soak: rank 0, seed 3, step \d+ .* stopped, since another rank did: ", told.err, re.MULTILINE)


def soak_dead(device: torch.device, plan: Plan) -> int:
    if dist.get_rank() == 1:
        os._exit(3)
    return soak(device, plan)


def test_the_command_when_a_rank_dies(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_main, "soak", soak_dead)
    assert main(["soak", "--device", "cpu", "--steps", "10", "--seed", "12", "--peer-timeout", "5"]) == 1
    assert "soak: seed 12: rank 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--minutes", "argument --minutes: '0' is no positive number of minutes"),
        ("--peer-timeout", "argument --peer-timeout: '0' is no positive number of seconds"),
    ],
)
def test_what_is_no_length(argument: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["soak", argument, "0"])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
