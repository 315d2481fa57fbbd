"""Groups taken apart: real ranks driven call by call, in any order that the contract allows."""

from __future__ import annotations

import os
import random
from typing import Any

import ranks
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from ulysses_op.soak.executor import Executor
from ulysses_op.soak.refusals import BEFORE, BETWEEN
from ulysses_op.soak.transfers import TAGS, Transfer, draw_transfer

EXAMPLES = int(os.environ.get("ULYSSES_OP_TEST_EXAMPLES", "60"))
STEPS = 25
WORLD_SIZE = 2
MAX_SUBMISSIONS = 4
TIMEOUT_S = 10.0

_executors: list[Executor] = []


def act(rank: int, world_size: int, calls: list[tuple[str, tuple[Any, ...]]]) -> int:
    """Calls of the executor that this rank keeps, one after the other; how many elements it has checked by now.

    "make" has a new communicator, whatever the last example has left.
    """
    for name, arguments in calls:
        if name != "make":
            getattr(_executors[0], name)(*arguments)
        elif _executors:
            _executors[0].reopen()
        else:
            _executors.append(Executor(None, torch.device("cpu"), 1, backend="shm", timeout_s=TIMEOUT_S))
    return _executors[0].checked_elements


class Exchanges(RuleBasedStateMachine):
    """What the ranks may do next follows from ``group`` (None, "entered", or "left" behind its with-block), the names
    and submissions of that group, and whether it is ``final``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.group: str | None = None
        self.names: tuple[str, ...] = ()
        self.submitted: list[Transfer] = []
        self.final = False
        self.number = 0
        self.checked = 0

    def call(self, name: str, *arguments: Any) -> None:
        checked = ranks.pool(WORLD_SIZE).run(act, [(name, arguments)], timeout_s=2 * TIMEOUT_S)
        assert all(elements >= self.checked for elements in checked)
        self.checked = min(checked)

    def key(self) -> str:
        self.number += 1
        return str(self.number)

    @initialize()
    def make(self) -> None:
        self.call("make")

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


def test_exchanges_call_by_call() -> None:
    run_state_machine_as_test(
        Exchanges,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
