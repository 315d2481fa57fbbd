"""Groups taken apart: real ranks driven call by call, in any order that the contract allows."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import ranks
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from ulysses_op import onesided
from ulysses_op.soak.executor import Executor
from ulysses_op.soak.refusals import BEFORE, BETWEEN
from ulysses_op.soak.transfers import TAGS, Transfer, draw_transfer

EXAMPLES = int(os.environ.get("ULYSSES_OP_TEST_EXAMPLES", "60"))
STEPS = 25
WORLD_SIZE = 2
MAX_SUBMISSIONS = 4
TIMEOUT_S = 10.0

_executors: list[Executor] = []


def act(rank: int, world_size: int, name: str, arguments: tuple[Any, ...]) -> tuple[str, int]:
    """A call of the executor that this rank keeps: what was wrong, and how many elements it has checked by now.

    "make" has a new communicator; with True, of a new process group: the last example has left the old one in disorder.
    """
    if name == "make" and arguments[0]:
        group = ranks.fresh_group(tuple(range(world_size)))
        _executors[:] = [Executor(group, torch.device("cpu"), 1, backend="shm", timeout_s=TIMEOUT_S)]
        return "", 0
    executor = _executors[0]
    try:
        getattr(executor, "reopen" if name == "make" else name)(*(() if name == "make" else arguments))
    except Exception as error:
        executor.give_up(error)
        return f"rank {rank}: {type(error).__name__}: {error}", 0
    return "", executor.checked_elements


def flip_bytes(rank: int, world_size: int, on: bool) -> None:
    """Have rank 1 get a byte of all results wrong, or right again."""
    if rank == 1:
        onesided.OneSidedEngine.deliver = _deliver_flipped if on else _deliver  # type: ignore[method-assign]


_deliver = onesided.OneSidedEngine.deliver


def _deliver_flipped(engine: Any, group: Any) -> list[torch.Tensor]:
    results = _deliver(engine, group)
    for result in results:
        if result.numel():
            result.view(torch.uint8).view(-1)[0] ^= 1
    return results


class Exchanges(RuleBasedStateMachine):
    """What the ranks may do next follows from ``group`` (None, "entered", or "left" behind its with-block), the names
    and submissions of that group, and whether it is ``final``.
    """

    disorder = True  # the ranks need a new process group
    runs = calls = 0  # of the machine, and on the ranks
    checked = 0  # elements

    def __init__(self) -> None:
        super().__init__()
        self.group: str | None = None
        self.names: tuple[str, ...] = ()
        self.submitted: list[Transfer] = []
        self.final = False
        self.number = 0

    def call(self, name: str, *arguments: Any) -> None:
        Exchanges.calls += 1
        answers = ranks.pool(WORLD_SIZE).run(act, name, arguments, timeout_s=3 * TIMEOUT_S)
        problems = [problem for problem, _ in answers if problem]
        if problems:
            self.group, Exchanges.disorder = None, True
        assert not problems, "\n".join(problems)
        Exchanges.checked = max(Exchanges.checked, *(elements for _, elements in answers))

    def key(self) -> str:
        self.number += 1
        return str(self.number)

    @initialize()
    def make(self) -> None:
        Exchanges.runs += 1
        disorder, Exchanges.disorder = Exchanges.disorder, False
        self.call("make", disorder)

    def entered(self) -> bool:
        return self.group == "entered"

    def open(self) -> bool:
        return self.entered() and not self.final and len(self.submitted) < MAX_SUBMISSIONS

    def waitable(self) -> bool:
        return self.group is not None and bool(self.submitted)

    def lost(self) -> bool:
        """Whether the group is complete, and the next one may find it."""
        return self.waitable() and (self.final or self.group == "left")

    @precondition(lambda self: self.group is None)
    @rule(names=st.lists(st.sampled_from(TAGS), unique=True, max_size=3))
    def begin(self, names: list[str]) -> None:
        self.call("begin", tuple(names))
        self.group, self.names, self.submitted, self.final = "entered", tuple(names), [], False

    @precondition(open)
    @rule(rng=st.randoms(use_true_random=False), gradient=st.booleans(), final=st.sampled_from((False, False, True)))
    def submit(self, rng: random.Random, gradient: bool, final: bool) -> None:
        taken = tuple(transfer.tag for transfer in self.submitted)
        left = [name for name in self.names if name not in taken]
        tag = rng.choice(left) if self.names else None
        transfer = draw_transfer(rng, WORLD_SIZE, taken, tag=tag, gradient=gradient)
        self.call("submit", self.key(), transfer, final)
        self.submitted.append(transfer)
        self.final = final or len(self.submitted) == len(self.names)

    @precondition(waitable)
    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        tags = [transfer.tag for transfer in self.submitted]
        some = st.lists(st.sampled_from(tags), unique=True, min_size=1)
        # Without an order of its own, wait() takes that of the names, all of which there must be then.
        all_there = set(self.names) <= set(tags)
        waited = data.draw(st.one_of(st.just([]), some) if all_there else some)
        self.call("wait", tuple(waited))
        if self.entered():
            self.call("leave")
        self.group = None

    @precondition(entered)
    @rule()
    def leave(self) -> None:
        self.call("leave")
        self.group = "left" if self.submitted else None

    @precondition(lost)
    @rule()
    def find_lost(self) -> None:
        self.call("find_lost", self.submitted[0])
        self.group = None

    @precondition(entered)
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        taken = {transfer.tag for transfer in self.submitted}
        free = [tag for tag in self.names or TAGS if tag not in taken]
        if free and not self.final:
            name = data.draw(st.sampled_from(BETWEEN if self.submitted else BEFORE))
            self.call("refuse", name, free[0])

    @precondition(lambda self: self.group is None or (self.entered() and not self.submitted))
    @rule(rng=st.randoms(use_true_random=False), gradient=st.booleans(), as_method=st.booleans(), both=st.booleans())
    def function(self, rng: random.Random, gradient: bool, as_method: bool, both: bool) -> None:
        transfer = draw_transfer(rng, WORLD_SIZE, gradient=gradient, there_and_back=both)
        self.call("round_trip" if both else "call", self.key(), transfer, as_method)

    @precondition(lambda self: self.group is None or self.lost())
    @rule()
    def reopen(self) -> None:
        self.call("reopen")
        self.group = None

    @precondition(lambda self: self.group is None)
    @rule()
    def check(self) -> None:
        self.call("check")

    def teardown(self) -> None:
        if self.submitted and self.group is not None:
            if self.entered():
                self.call("leave")
            self.call("find_lost", self.submitted[0])


def run(examples: int, **others: Any) -> None:
    Exchanges.disorder, Exchanges.runs, Exchanges.calls, Exchanges.checked = True, 0, 0, 0
    run_state_machine_as_test(
        Exchanges,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            **others,
        ),
    )


@pytest.mark.timeout(300 + EXAMPLES)
def test_exchanges_call_by_call() -> None:
    run(EXAMPLES)
    print(f"{Exchanges.runs} runs of {Exchanges.calls} calls, {Exchanges.checked} elements right on a rank")
    assert Exchanges.runs >= EXAMPLES and Exchanges.checked > 1000


def test_a_flipped_byte_is_found() -> None:
    pool = ranks.pool(WORLD_SIZE)
    pool.run(flip_bytes, True)
    try:
        with pytest.raises(AssertionError, match=r"rank 1: WrongResult: .*are wrong"):
            run(30, phases=(Phase.generate,))
    finally:
        pool.run(flip_bytes, False)
