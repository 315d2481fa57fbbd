"""Carries out exchanges on one rank and checks every element of what comes of them."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from dataclasses import dataclass, replace

import torch

from ..communicator import TIMEOUT_VARIABLE, Communicator
from ..exchange_group import ExchangeGroup
from ..functional import gather_heads, scatter_heads
from ..ops import communicator_of
from ..process_groups import GroupLike, resolve_group
from .program import Step
from .refusals import must_raise, refuse
from .transfers import Transfer, back
from .values import compare, expected, expected_gradient, make_cotangent, make_input

MAX_TARGETS = 8  # fewer than there are tags, so that targets are evicted
LAYOUTS_COUNTED = 100_000  # at most, so that counting takes no memory to speak of
_KEPT_RESULTS = 4
_KEPT_NUMEL = 1 << 14
_CYCLES_A_MICROSECOND = 1700  # of a GPU, about


@dataclass
class _Submitted:
    """A tensor on its way. ``inputs`` are those of all ranks, ``key`` what their values follow from."""

    transfer: Transfer
    key: str
    x: torch.Tensor
    inputs: list[torch.Tensor]


class Executor:
    """Exchanges on a communicator of its own. All ranks make the same calls with the same arguments.

    Every method raises WrongResult for what is not as it must be, and passes on the errors of the communicator.

    seed: of all values. oracle_seed: of those that results are compared with; another one makes every check fail.
    """

    def __init__(
        self,
        group: GroupLike,
        device: torch.device,
        seed: int,
        *,
        backend: str = "auto",
        timeout_s: float = 30.0,
        oracle_seed: int | None = None,
    ) -> None:
        self.checked_elements = 0
        self.checked_transfers = 0
        self.received_bytes = 0
        self._process_group = group
        self._device = device
        self._seed = seed
        self._oracle_seed = seed if oracle_seed is None else oracle_seed
        self._settings = {"backend": backend, "max_targets": MAX_TARGETS, "timeout_s": timeout_s}
        self._group: ExchangeGroup | None = None
        self._submitted: list[_Submitted] = []
        self._unwaited = False
        self._kept: deque[tuple[torch.Tensor, torch.Tensor, str]] = deque()
        self._layouts: set[int] = set()  # hashes
        self._step: Step | None = None
        self._point = 0
        self._open()
        self._of_functions = _communicator_of_functions(group, device, timeout_s)

    # Steps of a program.

    def run(self, number: int, step: Step) -> None:
        """Carry out step ``number``."""
        self._step, self._point = step, 0
        key = str(number)
        self._pause()
        if step.kind == "group":
            self._run_group(key, step)
        elif step.kind == "call":
            self.call(key, step.transfers[0], step.as_method)
        elif step.kind == "round_trip":
            self.round_trip(key, step.transfers[0], step.as_method)
        else:
            if step.transfers:
                self._leave_unwaited(key, step.transfers)
            if step.kind == "reopen":
                self.reopen()
            else:
                self.find_lost(step.transfers[0])

    def _run_group(self, key: str, step: Step) -> None:
        self.begin(step.names)
        for number, transfer in enumerate(step.transfers):
            for at, name in step.refused:
                if at == number:
                    self.refuse(name, transfer.tag)
            self.submit(f"{key}.{number}", transfer, step.final == "flag" and number + 1 == len(step.transfers))
            self._pause()
        if step.late:
            self.leave()
            self._pause()
        self.wait(step.waited)
        if not step.late:
            self.leave()

    def _leave_unwaited(self, key: str, transfers: tuple[Transfer, ...]) -> None:
        self.begin(())
        for number, transfer in enumerate(transfers):
            self.submit(f"{key}.{number}", transfer, False)
        self.leave()

    # The parts of a group.

    def begin(self, names: tuple[str, ...]) -> None:
        """Enter a group with ``names``, one that has none where they are empty."""
        self._group = self._communicator.group(*names)
        self._group.__enter__()
        self._submitted = []

    def submit(self, key: str, transfer: Transfer, final: bool) -> None:
        """Submit this rank's input of ``transfer``, whose values follow from the seed, ``key`` and the rank."""
        assert self._group is not None
        one = self._prepare(key, transfer)
        self._group.submit(one.x, transfer.tag, direction=transfer.direction, final=final, **transfer.arguments)
        self._submitted.append(one)
        self._unwaited = True

    def refuse(self, name: str, tag: str) -> None:
        """Make a call that must be refused, before ``tag`` is submitted."""
        assert self._group is not None
        submitted = tuple(one.transfer.tag for one in self._submitted)
        refuse(name, self._communicator, self._device, self._group, tag, submitted, MAX_TARGETS)

    def wait(self, tags: tuple[str, ...]) -> None:
        """Wait for ``tags``, or for all where there are none, and check the results and their gradients."""
        assert self._group is not None
        results = self._group.wait(*tags)
        self._unwaited = False
        order = tags or self._group.tags or tuple(one.transfer.tag for one in self._submitted)
        by_tag = {one.transfer.tag: one for one in self._submitted}
        got = [(by_tag[tag], result) for tag, result in zip(order, results, strict=True)]
        for one, result in got:
            self._check(one, result, owned=self._device.type == "cpu" or one.transfer.gradient)
        self._check_gradients(self._submitted, got)

    def leave(self) -> None:
        """The end of the group's with-block."""
        assert self._group is not None
        self._group.__exit__(None, None, None)

    def find_lost(self, transfer: Transfer) -> None:
        """After a group that was not waited for: the next one's first submission is refused, and all is well again."""
        x = make_input(transfer, "lost", self._communicator.rank, self._device)
        arguments = {"direction": transfer.direction, **transfer.arguments}

        def begin_another() -> None:
            with self._communicator.group() as group:
                group.submit(x, transfer.tag, **arguments)

        text = must_raise(RuntimeError, "a group behind one that was not waited for", begin_another)
        assert "never waited for" in text or "still open" in text, text
        self._unwaited = False

    # Functions.

    def call(self, key: str, transfer: Transfer, as_method: bool) -> None:
        """Exchange by a function, the communicator's own or the package's, and check the result and its gradient."""
        one = self._prepare(key, transfer)
        result = self._call(one.x, transfer, as_method)
        self._check(one, result, owned=True)
        self._check_gradients([one], [(one, result)])

    def round_trip(self, key: str, transfer: Transfer, as_method: bool) -> None:
        """Scatter and gather again by functions: what comes back is what was passed in."""
        one = self._prepare(key, transfer)
        there = self._call(one.x, transfer, as_method)
        self._check(one, there, owned=True)
        self._pause()
        again = self._call(there, back(transfer), as_method)
        rank = self._communicator.rank
        wanted = self._wanted_inputs(one)[rank].detach()
        compare(again, wanted, f"what came back of {transfer.tag}")
        self._count(back(transfer), again)
        self._count_transfer(back(transfer))
        if transfer.gradient:
            cotangent = make_input(transfer, f"{self._seed} {key} back", rank, self._device)
            (gradient,) = torch.autograd.grad(again, one.x, cotangent)
            compare(gradient, cotangent, f"the gradient of {transfer.tag}, there and back")
            self._count(transfer, gradient, backward=True)

    # The communicator.

    def reopen(self) -> None:
        """Close the communicator, which must tell of a group that was not waited for, and make another one."""
        if self._unwaited:
            must_raise(RuntimeError, "close() behind a group that was not waited for", self._communicator.close)
        else:
            self._communicator.close()
        must_raise(RuntimeError, "a closed communicator", self._communicator.check)
        self._open()

    def check(self) -> None:
        """Raises what has failed behind the last wait(), and WrongResult for results that were written since."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._communicator.check()
        while self._kept:
            compare(*self._kept.popleft())

    def close(self) -> None:
        """The end of a run in which all went well."""
        self.check()
        self._communicator.close()

    def give_up(self, error: BaseException) -> None:
        """Tell the peers that this rank stops because of ``error``, as far as the backend can, and let go."""
        for communicator in (self._communicator, self._of_functions):
            communicator._break(error)
            with contextlib.suppress(Exception):
                communicator.close()

    @property
    def checked_layouts(self) -> int:
        """How many of the checked transfers differed in direction, type, shapes, plan or strides, up to
        :data:`LAYOUTS_COUNTED`.
        """
        return len(self._layouts)

    @property
    def backend(self) -> str:
        """The backend in use."""
        return self._communicator.backend

    def _open(self) -> None:
        self._communicator = Communicator(self._process_group, **self._settings)  # type: ignore[arg-type]
        self._communicator.build(self._device)
        self._unwaited = False

    # What is passed in, and what must come of it.

    def _prepare(self, key: str, transfer: Transfer) -> _Submitted:
        ranks = range(self._communicator.world_size)
        inputs = [make_input(transfer, f"{self._seed} {key}", rank, self._device) for rank in ranks]
        x = inputs[self._communicator.rank]
        if transfer.gradient:
            x = x.detach().requires_grad_()
        return _Submitted(transfer, key, x, inputs)

    def _wanted_inputs(self, one: _Submitted) -> list[torch.Tensor]:
        if self._oracle_seed == self._seed:
            return one.inputs
        key, ranks = f"{self._oracle_seed} {one.key}", range(len(one.inputs))
        return [make_input(one.transfer, key, rank, self._device) for rank in ranks]

    def _call(self, x: torch.Tensor, transfer: Transfer, as_method: bool) -> torch.Tensor:
        scatters = transfer.direction == "scatter_heads"
        if as_method:
            owner = self._communicator
            return (owner.scatter_heads if scatters else owner.gather_heads)(x, **transfer.arguments)
        return (scatter_heads if scatters else gather_heads)(x, self._process_group, **transfer.arguments)

    def _check(self, one: _Submitted, result: torch.Tensor, owned: bool) -> None:
        transfer = one.transfer
        wanted = expected(transfer, self._wanted_inputs(one), self._communicator.rank)
        compare(result, wanted, f"the result of {transfer.tag}")
        self._count(transfer, result)
        self._count_transfer(transfer)
        if owned and result.numel() <= _KEPT_NUMEL:  # looked at once more when others have come after it
            self._kept.append((result.detach(), wanted, f"the result of {transfer.tag} of step {one.key}, kept,"))
            if len(self._kept) > _KEPT_RESULTS:
                compare(*self._kept.popleft())

    def _count(self, transfer: Transfer, result: torch.Tensor, backward: bool = False) -> None:
        self.checked_elements += result.numel()
        self.received_bytes += transfer.received_bytes(self._communicator.rank, backward)

    def _count_transfer(self, transfer: Transfer) -> None:
        self.checked_transfers += 1
        if len(self._layouts) < LAYOUTS_COUNTED:
            layout = replace(transfer, tag="", pass_heads=True, pass_seq=True, gradient=False)
            self._layouts.add(hash(layout))

    def _check_gradients(self, submitted: list[_Submitted], got: list[tuple[_Submitted, torch.Tensor]]) -> None:
        """Run the backward for those of ``got`` that require a gradient; all of ``submitted`` get one, then."""
        used = [(one, result) for one, result in got if one.transfer.gradient]
        if not used:
            return
        rank, ranks = self._communicator.rank, range(self._communicator.world_size)
        sources = [one for one in submitted if one.transfer.gradient]
        cotangents = {
            one.transfer.tag: [make_cotangent(one.transfer, f"{self._seed} {one.key}", r, self._device) for r in ranks]
            for one, _ in used
        }
        gradients = torch.autograd.grad(
            [result for _, result in used],
            [one.x for one in sources],
            [cotangents[one.transfer.tag][rank] for one, _ in used],
        )
        for one, gradient in zip(sources, gradients, strict=True):
            given = cotangents.get(one.transfer.tag)
            wanted = (
                expected_gradient(one.transfer, one.inputs, given, rank)
                if given is not None
                else torch.zeros(one.x.shape, dtype=one.x.dtype, device=self._device)
            )
            compare(gradient, wanted, f"the gradient of {one.transfer.tag}")
            self._count(one.transfer, gradient, backward=True)

    def _pause(self) -> None:
        """Hold up this rank's host, or on CUDA its stream, where the step says so."""
        if self._step is None:
            return
        pause_us = self._step.pause_us(self._communicator.rank, self._point)
        self._point += 1
        if pause_us and self._device.type == "cuda" and self._point % 2:
            torch.cuda._sleep(pause_us * _CYCLES_A_MICROSECOND)
        elif pause_us:
            time.sleep(pause_us / 1e6)


def _communicator_of_functions(group: GroupLike, device: torch.device, timeout_s: float) -> Communicator:
    """The communicator of the package's functions, built; with the time-out, where it was not there before."""
    before = os.environ.get(TIMEOUT_VARIABLE)
    os.environ[TIMEOUT_VARIABLE] = str(timeout_s)
    try:
        return communicator_of(resolve_group(group).group_name, device).build(device)
    finally:
        if before is None:
            del os.environ[TIMEOUT_VARIABLE]
        else:
            os.environ[TIMEOUT_VARIABLE] = before
