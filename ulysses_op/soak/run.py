"""Runs a program on one rank, and compares with the other ranks now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b

import torch
import torch.distributed as dist

from ..errors import BackendUnavailableError, BrokenCommunicatorError
from ..process_groups import GroupLike, resolve_group
from .executor import MAX_TARGETS, Executor
from .program import steps
from .resources import Growth
from .values import WrongResult

STEPS_A_ROUND = 200


@dataclass(frozen=True)
class Plan:
    """What a run does. It ends after ``minutes`` or ``steps``, whichever is given and comes first.

    steps_a_round: how often ranks compare.
    timeout_s: how long a peer may take, in exchanges and when ranks compare.
    oracle_seed: as of :class:`Executor`, on ranks where it is another one.
    """

    seed: int
    steps: int | None = None
    minutes: float | None = None
    backend: str = "auto"
    timeout_s: float = 30.0
    steps_a_round: int = STEPS_A_ROUND
    oracle_seed: int | None = None


@dataclass(frozen=True)
class Report:
    """What came of a run on this rank; ``elements``, ``received_bytes`` and ``steps`` are those of all ranks' last
    comparison. ``transfers`` counts the exchanges whose results this rank has checked, ``layouts`` those that differed
    in direction, type, shapes, plan or strides, up to LAYOUTS_COUNTED. ``problem`` is empty where all went well.

    status: 0 all held; 1 something was wrong or failed, here or on another rank; 2 nothing could be run.
    """

    status: int
    steps: int
    elements: int
    received_bytes: int
    transfers: int = 0
    layouts: int = 0
    backend: str = ""
    problem: str = ""


class Disagreement(Exception):
    """Ranks that compared themselves differ, or hold more than they should."""


def soak_rank(
    device: torch.device, plan: Plan, group: GroupLike = None, tell: Callable[[str], None] | None = None
) -> Report:
    """Run the plan on this rank; all ranks of the process group call it. ``tell`` gets a line of progress a round.

    Failures are not raised, but reported: those of this rank, and those of others as this rank notices them, which
    takes at most ``plan.timeout_s``.
    """
    try:
        executor = Executor(
            group, device, plan.seed, backend=plan.backend, timeout_s=plan.timeout_s, oracle_seed=plan.oracle_seed
        )
    except BackendUnavailableError as error:
        return Report(2, 0, 0, 0, problem=str(error))
    resolved = resolve_group(group)
    rounds = _Rounds(resolved, plan, executor, Growth(device), tell)
    number, doing = 0, "begins"
    try:
        backend = executor.backend
        for number, step in enumerate(steps(plan.seed, resolved.size(), MAX_TARGETS)):
            if number == plan.steps or (number % plan.steps_a_round == 0 and rounds.compare(number)):
                break
            doing = step.describe()
            rounds.digest.update(repr(step).encode())
            executor.run(number, step)
        doing = "the end"
        executor.check()
        rounds.compare(number)
        executor.close()
    except Exception as error:
        where = f"rank {resolved.rank()}, seed {plan.seed}, step {number} ({doing})"
        kind = "stopped, since another rank did" if isinstance(error, BrokenCommunicatorError) else "failed"
        text = str(error) if isinstance(error, (WrongResult, Disagreement)) else f"{type(error).__name__}: {error}"
        executor.give_up(error)
        problem, sums = f"{where} {kind}: {text}", (executor.checked_elements, executor.received_bytes)
        return Report(1, number, *sums, executor.checked_transfers, executor.checked_layouts, problem=problem)
    sums = (rounds.elements, rounds.received_bytes)
    return Report(0, number, *sums, executor.checked_transfers, executor.checked_layouts, backend)


class _Rounds:
    """The comparisons of a run. ``elements`` and ``received_bytes`` are sums over the ranks, as of the last one."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        plan: Plan,
        executor: Executor,
        growth: Growth,
        tell: Callable[[str], None] | None,
    ) -> None:
        self.digest = blake2b(digest_size=7)
        self.elements = self.received_bytes = 0
        self._group = group
        self._plan = plan
        self._executor = executor
        self._growth = growth
        self._tell = tell
        self._begun = time.monotonic()

    def compare(self, number: int) -> bool:
        """Whether the time is over, on all ranks alike. Collective.

        Raises Disagreement when ranks have run different programs, or one has grown; WrongResult for results that were
        written after they were delivered.
        """
        self._executor.check()
        elapsed_s = time.monotonic() - self._begun
        over = self._plan.minutes is not None and elapsed_s >= 60.0 * self._plan.minutes
        # Between two meetings, so that no rank is amid an exchange when others are measured.
        self._gather([0])
        grown = self._growth.measure()
        own = [int.from_bytes(self.digest.digest(), "little"), number, int(over), int(bool(grown))]
        rows = self._gather([*own, self._executor.checked_elements, self._executor.received_bytes])
        if grown:
            raise Disagreement(grown)
        if any(row[3] for row in rows):
            raise Disagreement(f"rank(s) {[rank for rank, row in enumerate(rows) if row[3]]} hold more than at first")
        if any(row[:2] != rows[0][:2] for row in rows):
            raise Disagreement(f"the ranks have run different programs: {[row[:2] for row in rows]}")
        self.elements, self.received_bytes = (sum(row[column] for row in rows) for column in (4, 5))
        if self._tell is not None and number:
            self._tell(f"{elapsed_s:.0f} s: {number} steps, {self.elements} elements right")
        return any(row[2] for row in rows)

    def _gather(self, row: list[int]) -> list[list[int]]:
        """The rows of all ranks. Raises RuntimeError when one is missing for ``timeout_s``."""
        own = torch.tensor(row, dtype=torch.int64)
        gathered = [torch.empty_like(own) for _ in range(self._group.size())]
        work = dist.all_gather(gathered, own, group=self._group, async_op=True)
        assert work is not None
        work.wait(timedelta(seconds=self._plan.timeout_s))
        return [tensor.tolist() for tensor in gathered]
