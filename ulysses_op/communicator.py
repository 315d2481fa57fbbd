"""The communicator: decides on a backend with its peers once, then exchanges groups of tagged tensors on it."""

from __future__ import annotations

import contextlib
import operator
import os
import time
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .arguments import Asked, Exchanges
from .bringup import bring_up
from .capability import BACKENDS, Decision, Facts
from .engine import Engine
from .errors import BrokenCommunicatorError, TargetError, kind_of_error
from .exchange_group import ExchangeGroup, Submission, call_op
from .flight_record import FlightRecord, dump_on_failure, flight_record
from .gradients import DifferentiableExchange
from .layout import Exchange
from .memory_pools import outside_memory_pools
from .process_groups import GroupLike, resolve_group
from .registry import register
from .steps import OWNED, Step, Steps, Terms, is_plain, key_of
from .torch_compat import group_device_types, stops_recomputation

TIMEOUT_VARIABLE = "ULYSSES_OP_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 600.0
MAX_TIMEOUT_S = 1e6
DEFAULT_MAX_TARGETS = 12
MAX_UNWAITED = 8  # groups of one communicator that are complete and not waited for
_ELSEWHERE = "in another thread or beneath this signal handler: one thread at a time uses a communicator"
_RELEASE_GRACE_S = 2.0  # what garbage collection and interpreter exit allow queued exchanges


class Communicator:
    """Exchanges heads for sequence among the ranks of one process group.

    Constructing it is local. The first exchange, or :meth:`build`, is collective: the ranks tell each other what they
    can run, decide alike on a backend, and map their memory. Several communicators may share a process group; each
    builds and exchanges in the same order on all ranks. One thread at a time uses a communicator. It is released
    locally, without a collective, by :meth:`close`, by garbage collection, or at exit.

    group: None for the default process group, a name, a ProcessGroup, or a one-dimensional DeviceMesh.
    backend: "auto", or one of "symm_mem", "cuda_ipc", "shm", "c10d", which then runs or raises
    BackendUnavailableError on every rank.
    max_targets: persistent buffers that are kept, one for each (tag, direction, dtype); the least recently used is
    unmapped first.
    timeout_s: how long a peer may take to signal; None takes the environment's ULYSSES_OP_TIMEOUT_S, else 600.
    """

    def __init__(
        self,
        group: GroupLike = None,
        *,
        backend: str = "auto",
        max_targets: int = DEFAULT_MAX_TARGETS,
        timeout_s: float | None = None,
    ) -> None:
        if backend != "auto" and backend not in BACKENDS:
            raise ValueError(f"backend is {backend!r}, expected 'auto' or one of {', '.join(BACKENDS)}")
        if operator.index(max_targets) < 1:
            raise ValueError(f"max_targets is {max_targets}, it must be at least 1")
        if timeout_s is None:
            timeout_s = _timeout_of_environment()
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(f"timeout_s is {timeout_s}, it must be positive and at most {MAX_TIMEOUT_S:.0f}")
        resolved = resolve_group(group)
        self._group_ref = weakref.ref(resolved)  # destroy_process_group must find nobody holding on to the group
        self.rank: int = resolved.rank()
        self.world_size: int = resolved.size()
        if self.rank < 0:
            raise ValueError("this process is not a member of the process group")
        self._where = (register(self, resolved), self.world_size, self.rank)
        self._requested = backend
        self._max_targets = max_targets
        self._timeout_s = timeout_s
        self._engine: Engine | None = None
        self._ready: Engine | None = None  # the engine as long as it may be used: what _check_usable() tells otherwise
        self._device: torch.device | None = None
        self._decision: Decision | None = None
        self._facts: list[Facts] = []
        self._groups: list[ExchangeGroup] = []  # begun and not waited for, in order; the last may still be open
        self._pipelined = False  # a group may begin before those that are complete are waited for
        self._companion: Communicator | None = None  # what asynchronous.py keeps beside this one
        self._async_exchange: Any = None
        self._broken: str | None = None
        self._closed = False
        self._pid = os.getpid()
        self._release: weakref.finalize[Any, Any] | None = None
        self._exchanges = Exchanges(self.world_size, self.rank)
        self._steps = Steps(max_targets)
        self._record = FlightRecord()

    # What was decided.

    @property
    def backend(self) -> str:
        """The backend in use: "symm_mem", "cuda_ipc", "shm" or "c10d". Builds the communicator if need be
        (collective).
        """
        return self._built().backend

    @property
    def known_backend(self) -> str | None:
        """:attr:`backend` if it is decided already, else None. Local."""
        if self._engine is not None:
            return self._engine.backend
        return self._companion.known_backend if self._companion is not None else None

    @property
    def reason(self) -> str:
        """Why this backend, and why none before it; the same text on all ranks. Builds the communicator if need be
        (collective).
        """
        self._built()
        assert self._decision is not None
        return self._decision.reason

    @property
    def refused(self) -> dict[str, str]:
        """The reason against each backend that these ranks cannot run."""
        self._built()
        assert self._decision is not None
        return dict(self._decision.refused)

    @property
    def facts(self) -> list[Facts]:
        """What every rank stated when the communicator was built."""
        self._built()
        return list(self._facts)

    def build(self, device: torch.device | str | None = None) -> Communicator:
        """Decide on a backend and map memory now. Collective; a second call for the same device does nothing.

        device: of the tensors to come; None takes CUDA's current device if the process group has a backend for it,
        else the CPU.

        Raises BackendUnavailableError, on every rank, when the backend asked for cannot run, and PeerTimeoutError
        when a rank is missing; ValueError, locally, for a device that is not there, or that differs from the one which
        the communicator was built for.
        """
        self._check_usable()
        if device is not None:
            device = _present(torch.device(device))
            if self._device not in (None, device):
                raise ValueError(
                    f"device is {device}, but this communicator was built for {self._device}: use one communicator a "
                    "device"
                )
        if self._engine is None:
            self._build(self._default_device() if device is None else device)
        return self

    # Exchanges.

    def scatter_heads(
        self, x: torch.Tensor, *, heads: Sequence[Sequence[int]] | None = None, seq_lens: Sequence[int] | None = None
    ) -> torch.Tensor:
        """(B, S_local, H, D) -> (B, S_global, H_local, D); the caller owns the result. See
        :func:`ulysses_op.scatter_heads`.
        """
        return call_op("scatter_heads", x, self._where, heads, seq_lens)

    def gather_heads(
        self, x: torch.Tensor, *, heads: Sequence[Sequence[int]] | None = None, seq_lens: Sequence[int] | None = None
    ) -> torch.Tensor:
        """(B, S_global, H_local, D) -> (B, S_local, H, D); the caller owns the result. See
        :func:`ulysses_op.gather_heads`.
        """
        return call_op("gather_heads", x, self._where, heads, seq_lens)

    def group(self, *tags: str) -> ExchangeGroup:
        """A group of exchanges that complete together, as a context manager.

        ::

            with communicator.group("q", "k", "v") as group:
                group.submit(v, tag="v")          # V travels while Q and K are normed and rotated
                group.submit(rope(norm(q)), tag="q")
                group.submit(rope(norm(k)), tag="k")
                q, k, v = group.wait()

        All ranks submit the same tags, shapes, dtypes and plans in the same order.
        """
        return ExchangeGroup(self, tags)

    def check(self) -> None:
        """Raise if the communicator has failed, in groups or in compiled code. On CUDA a group's failure is found after
        wait(): synchronize, then check, to be sure of results before they leave the device. Every later call checks
        too, but for replays of CUDA graphs. Local.
        """
        self._check_usable()
        if self._engine is not None:
            self._guarded(self._engine.check, None)
        if self._companion is not None:
            self._companion.check()

    def flight_record(self) -> dict[str, Any]:
        """The last 64 groups, and the last 64 of compiled code: what was submitted to each and when, and the
        communicator they are of; plain values, as for JSON. Local. See :func:`ulysses_op.dump_flight_records`.
        """
        return flight_record(self)

    def close(self) -> None:
        """Release targets, mappings and streams. Local; waits at most ``timeout_s`` for groups that are not complete
        yet. Idempotent.

        Raises RuntimeError when results of a group were never waited for.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._ready = None
        try:
            if self._companion is not None:
                self._companion.close()
        finally:
            self._close()

    def _close(self) -> None:
        groups, self._groups = self._groups, []
        engine, self._engine = self._engine, None
        if self._release is not None and self._release.detach() is not None:
            assert engine is not None
            unfinished = any(not group.final for group in groups)
            if unfinished and self._broken is None:
                engine.abort("abort", "closed its communicator in the middle of a group")
            engine.close(0.0 if unfinished or self._broken else self._timeout_s)
        if groups and self._broken is None:
            lost = "; ".join(group.describe() for group in groups)
            raise RuntimeError(
                f"the communicator was closed, but the results of the group of {lost} were never waited for"
            )

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            with contextlib.suppress(RuntimeError):  # the error that is on its way tells more
                self.close()

    def __repr__(self) -> str:
        state = self.known_backend or "not built"
        if self._closed:
            state = "closed"
        elif self._broken is not None:
            state += ", failed"
        return f"Communicator(rank {self.rank} of {self.world_size}, {state})"

    def __copy__(self) -> Communicator:
        return self  # a copied model shares its communicator

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Communicator cannot be pickled: it is tied to this process. Create one where it is needed")

    # A group's life, called by ExchangeGroup.

    def _next_step(
        self,
        group: ExchangeGroup,
        x: torch.Tensor,
        tag: str | None,
        asked: Asked | Exchange,
        final: bool,
        terms: Terms,
    ) -> Step:
        """The step that such a submission is, new where there is none; raises, before anything moves, for what may not
        be submitted.
        """
        named = group.free_tag(tag, group.submitted)
        exchange = asked if isinstance(asked, Exchange) else self._exchanges.find(x, asked)
        self._usable(x.device)
        if group.waited:
            raise RuntimeError("submit() after wait(): begin another group")
        if group.final:
            raise RuntimeError(
                f"submit() after the final submission of the group of {group.describe()}: begin another group"
            )
        if x.device != self._device:
            raise ValueError(
                f"the tensor is on {x.device}, but this communicator exchanges tensors on "
                f"{self._device}: use one communicator a device"
            )
        plain = isinstance(asked, Exchange) or (is_plain(asked[1]) and is_plain(asked[2]))
        key = key_of(x, tag, asked if plain else exchange, final, terms)
        step = group.following.get(key)
        if step is None:
            step = Step(group.tags, group.path, named, exchange, x, final, terms)
            self._steps.add(group.following, key, step)
        return step

    def _submit(self, group: ExchangeGroup, x: torch.Tensor, step: Step) -> Submission:
        engine = self._ready or self._usable()
        if step.first:
            if self._groups:
                self._begin(engine, step.tags or step.submitted)
        elif len(self._groups) > 1 and any(other.has(step.tag) for other in self._groups if other is not group):
            error = RuntimeError(f"tag {step.tag!r} belongs to an earlier group that was not waited for yet")
            self._break(error)
            raise error
        submission = Submission(step, x)
        try:
            engine.prepare(group, submission)
        except TargetError as error:
            # Every rank raises this here, so every rank finishes the group with what it has.
            self._abandon(engine, group)
            raise error
        except BaseException as error:
            # Of ordinary errors before a group has begun the peers need not know, unless they wait for this rank.
            begun = not step.first or submission.met
            if begun or isinstance(error, BrokenCommunicatorError) or not isinstance(error, Exception):
                self._break(error)
            raise
        try:
            if step.first:
                self._groups.append(group)
                self._record.begin(group)
            engine.submit(group, submission)
            group.submissions.append(submission)
            group.step, group.following = step, step.following
            if step.final:
                self._finish(group)
        except BaseException as error:
            self._break(error)
            raise
        return submission

    def _wait(self, group: ExchangeGroup, tags: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
        engine, step = self._ready or self._usable(), group.step
        if group.waited:
            raise RuntimeError("wait() was called already: a group is waited for once")
        if group.waiting:
            raise RuntimeError(f"the group of {group.describe()} is being waited for already, {_ELSEWHERE}")
        if step is None:
            raise RuntimeError("wait() on a group to which nothing was submitted, or that a later group has replaced")
        pick = step.picker_of(tags)
        for submission in group.submissions:
            if submission.version is not None:
                submission.check_unchanged()
        group.waiting = True
        try:
            if not group.final:
                self._finish(group)
            results = engine.deliver(group)
        except BaseException as error:
            self._break(error)
            raise
        finally:
            group.waiting = False
        if self._ready is None:  # it may have been closed meanwhile
            self._check_usable()
        group.delivered_ns = time.time_ns()
        self._groups.remove(group)
        if step.gradients:
            results = self._differentiable(group, results)
        group.release()
        return pick(results)

    def _finish(self, group: ExchangeGroup) -> None:
        """Nothing more is submitted to the group."""
        assert self._engine is not None
        group.close()
        group.complete_ns = time.time_ns()
        self._engine.finish(group)

    def _leave(self, group: ExchangeGroup, error: BaseException | None) -> None:
        """The end of the with-block. Results may still be waited for after it, until the next group begins."""
        if group not in self._groups or self._engine is None or self._broken is not None:
            return
        if os.getpid() != self._pid:  # the group is the parent's, and goes on there
            return
        if error is not None and not group.final and not stops_recomputation(error):
            self._break(error)
        elif error is not None:
            self._abandon(self._engine, group)
        elif not group.final:
            self._guarded(self._finish, group)

    def _begin(self, engine: Engine, tags: Sequence[str]) -> None:
        """Whether a group of ``tags`` may begin: one after the other, except where they are pipelined."""
        for other in self._groups:
            if other.waiting:
                raise RuntimeError(f"the group of {other.describe()} is being waited for, {_ELSEWHERE}")
            if not other.final:
                raise RuntimeError(
                    f"the group of {other.describe()} is still open: finish and wait() for it, or use a second "
                    "communicator"
                )
        full = len(self._groups) >= MAX_UNWAITED
        lost = [group for group in self._groups if not self._pipelined or full or any(map(group.has, tags))]
        for group in lost:
            self._abandon(engine, group)
        if lost:
            raise RuntimeError(
                f"the results of the earlier group of {'; '.join(group.describe() for group in lost)} were never "
                "waited for, and are lost now: call a group's wait() before the next one begins"
            )

    def _group_of(self, tags: tuple[str, ...]) -> ExchangeGroup:
        """The group under way to which exactly ``tags`` were submitted, in this order."""
        if self._ready is None:
            self._check_usable()
        for group in self._groups:
            if group.submitted == tags:
                return group
        raise RuntimeError(
            f"no group of {', '.join(map(repr, tags))} is under way: it was not submitted, or was waited for already"
        )

    def _abandon(self, engine: Engine, group: ExchangeGroup) -> None:
        if group in self._groups:
            self._groups.remove(group)
        group.waited = True
        if group.submissions:
            if not group.final:
                self._guarded(self._finish, group)
            self._guarded(engine.abandon, group)
        group.release()

    def _differentiable(self, group: ExchangeGroup, results: list[torch.Tensor]) -> list[torch.Tensor]:
        index = [i for i, submission in enumerate(group.submissions) if submission.step.differentiable]
        chosen = [group.submissions[i] for i in index]
        tied = DifferentiableExchange.apply(
            self,
            [each.step.tag for each in chosen],
            [each.step.exchange for each in chosen],
            [results[i] for i in index],
            *(each.x for each in chosen),
        )
        for i, result in zip(index, tied, strict=True):
            results[i] = result
        return results

    def _exchange(self, parts: Sequence[tuple[str, torch.Tensor, Asked | Exchange]]) -> tuple[torch.Tensor, ...]:
        """One group of owned, differentiable exchanges."""
        group = self.group(*(tag for tag, _, _ in parts))
        with group:
            for tag, x, asked in parts:
                group.submit_as(x, tag, asked, terms=OWNED)
            return self._wait(group, ())

    # Building.

    def _built(self) -> Engine:
        if self._engine is None:
            self.build()
        assert self._engine is not None
        return self._engine

    def _usable(self, device: torch.device | None = None) -> Engine:
        """The engine, built if need be for tensors on ``device``; raises where it may not be used."""
        self._check_usable()
        if self._ready is None:
            self.build(device)
        assert self._ready is not None
        return self._ready

    def _group(self) -> dist.ProcessGroup:
        group = self._group_ref()
        if group is None:
            raise RuntimeError("the communicator's process group was destroyed: create both again")
        return group

    def _default_device(self) -> torch.device:
        if torch.cuda.is_available() and "cuda" in group_device_types(self._group()):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def _build(self, device: torch.device) -> None:
        group, requested, pipelined = self._group(), self._requested, self._pipelined
        with_settings = (requested, self._max_targets, self._timeout_s, pipelined)
        with torch.inference_mode(False):
            engine, decision, facts = outside_memory_pools(device, lambda: bring_up(group, device, *with_settings))
        self._engine, self._decision, self._facts, self._device = engine, decision, facts, device
        self._release = weakref.finalize(self, _release, engine, os.getpid(), weakref.ref(self))
        self._ready = engine

    # Failing.

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("the communicator belongs to the process that this one was forked from")
        if self._closed:
            raise RuntimeError("the communicator is closed: create another one")
        if self._release is not None and not self._release.alive:
            raise RuntimeError("the communicator was released: Python is exiting")
        if self._broken is not None:
            raise BrokenCommunicatorError(
                f"the communicator failed earlier and cannot be used any more: {self._broken}"
            )

    def _guarded(self, call: Any, group: ExchangeGroup | None) -> None:
        try:
            call(group)
        except BaseException as error:
            self._break(error)
            raise

    def _break(self, error: BaseException) -> None:
        if self._broken is None:
            self._broken = _text_of(error)
            self._ready = None
            self._groups.clear()
            if self._engine is not None:
                self._engine.abort(kind_of_error(error), self._broken)
            dump_on_failure(self, self._broken)
            self._record.clear()  # which holds the tensors of groups that were under way


def _timeout_of_environment() -> float:
    text = os.environ.get(TIMEOUT_VARIABLE, str(DEFAULT_TIMEOUT_S))
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{TIMEOUT_VARIABLE} is {text!r}, it must be a number of seconds") from None


def _present(device: torch.device) -> torch.device:
    """``device`` with its number: "cuda" is the current one from now on. Raises ValueError where it is not there."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {str(device)!r}, but no CUDA device is available to this process")
    return torch.empty(0, device=device).device


def _text_of(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # the peers must be told, whatever a user's exception does
        return type(error).__name__


def _release(engine: Engine, pid: int, of: weakref.ref[Communicator]) -> None:
    """What is left to do for a communicator that was not closed. In a forked child nothing of it works, and it is the
    parent's.
    """
    communicator = of()
    if communicator is not None:
        communicator._ready = None
    if os.getpid() == pid:
        engine.close(_RELEASE_GRACE_S)
