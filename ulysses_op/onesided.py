"""The engine of the backends whose peers write each other's targets: symm_mem, cuda_ipc and shm share this protocol."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Sequence
from typing import Any

import torch

from . import _C
from .errors import BrokenCommunicatorError, error_of_kind
from .exchange_group import ExchangeGroup, Submission
from .loans import LoanKey, Loans
from .mapping import Mapping, PeerBuffer, cuda_context
from .memory_pools import outside_memory_pools
from .places import Places
from .rendezvous import Channel
from .routes import Route, Routes
from .targets import TargetCache, TargetKey
from .torch_compat import current_stream_handle

_test_skip: frozenset[str] = frozenset()
"""Handshakes ("ready", "done") that communicators built from now on leave out: for tests of what they protect."""

_tuning = (False, 3, True)
"""Of CUDA communicators built from now on, the Tuning of csrc/cuda_transport.h: for measuring."""

POISON_VARIABLE = "ULYSSES_OP_POISON_TARGETS"
"""Set in the environment: targets are filled with NaN (all bits) before peers may write them, so that what they do not
write shows."""

_ALL_CAPTURES = -1

_undrained: list[OneSidedEngine] = []
"""Closed while commands of theirs were still stuck behind the caller's streams, or with a device that has failed: their
memory must stay mapped."""


class OneSidedEngine:
    """Moves submissions into the peers' targets. READY and DONE are signalled once a group, whatever it holds.

    pipelined: for the asynchronous ops. Groups may begin before earlier ones are waited for, and whoever has a target
    lent watches over the loan. No result of such a group outlives its CUDA graph, so all graphs share targets.
    """

    def __init__(
        self,
        backend: str,
        channel: Channel,
        device: torch.device,
        mapping: Mapping,
        max_targets: int,
        pipelined: bool = False,
    ) -> None:
        """Collective: maps the signal pads. Raises TargetError on every rank when it fails on one."""
        self.backend = backend
        self.rank = channel.rank
        self.world_size = channel.world_size
        self._channel = channel
        self._device = device
        self._cuda = device.type == "cuda"
        self._pads = mapping.allocate(_C.CudaTransport.pad_bytes(channel.world_size)) if self._cuda else None
        self._transport: Any = None
        self._targets = TargetCache(mapping, max_targets)
        self._loans = Loans(device)
        self._routes = Routes(channel.rank)
        self._capture_id = 0
        # Streams on which results of a tag may be read: its target is not written again before they get there.
        self._readers: dict[LoanKey, set[int]] = {}
        self._pipelined = pipelined
        # The targets of groups that are finished, and neither delivered nor abandoned, by the group's number. Not the
        # groups: they hold the communicator, which is released once nobody else does.
        self._unwaited: dict[int, list[TargetKey]] = {}
        self._last_number = 0
        self._unfinished = False
        self._poison = bool(os.environ.get(POISON_VARIABLE))

    def start(self, board: _C.Board, timeout_s: float) -> None:
        """Local: streams and threads."""
        skip_ready, skip_done = "ready" in _test_skip, "done" in _test_skip
        if self._pads is None:
            self._transport = _C.ShmTransport(board, timeout_s, skip_ready, skip_done)
            self._channel.watch(board, self._transport.idle)
            return
        self._channel.watch(board)
        context = cuda_context(self._device)
        settings = (timeout_s, skip_ready, skip_done, *_tuning)
        self._transport = _C.CudaTransport(context, board, self._pads.addresses, *settings)
        self._copy_stream = torch.cuda.ExternalStream(self._transport.copy_stream, self._device)
        self._own_stream = torch.cuda.ExternalStream(self._transport.own_stream, self._device)

    def prepare(self, group: ExchangeGroup, submission: Submission) -> None:
        """What may still fail, or involve the host of every rank, before anything of this submission moves."""
        if not group.submissions:
            if self._cuda:
                self._capture_id = self._transport.capture_id(current_stream_handle(self._device))
            group.captured = self._capture_id != 0
            group.state = _GroupInTransit()
        route = self._routes.find(submission.tag, submission.exchange, submission.x)
        target = self._target_of(group, submission, route)
        submission.state = _InTransit(route, route.source(submission.x), target)

    def _target_of(self, group: ExchangeGroup, submission: Submission, route: Route) -> PeerBuffer:
        key, nbytes = route.key, route.nbytes
        if self._capture_id:
            scope = _ALL_CAPTURES if self._pipelined else self._capture_id
            target, taken = self._targets.pinned(scope, key, nbytes)
            if taken:
                self._end([(0, key.tag)], "its target now belongs to a CUDA graph")
            return target
        found = self._targets.find(key, nbytes)
        if found is not None:
            return found
        submission.met = True
        self._compare(group, submission)
        in_use = [key for keys in (_targets_of(group), *self._unwaited.values()) for key in keys]
        with torch.inference_mode(False):  # targets outlive it
            return outside_memory_pools(self._device, lambda: self._targets.get(key, nbytes, in_use, self._quiesce))

    def submit(self, group: ExchangeGroup, submission: Submission) -> None:
        state: _InTransit = submission.state
        first = not group.submissions
        if first:
            self._unfinished = True
            if self._poison or not self._cuda:
                self._open_targets(group, state.route.key)
        route, source = state.route.into(state.target), state.source.data_ptr()
        if not self._cuda:
            state.result = self._result(submission)
            if first:
                self._transport.begin(group.ready_digest(submission))
            self._transport.put(route, source)
            return
        stream = current_stream_handle(self._device)
        readers = self._end_loans(group, stream) if first else ()
        state.result = self._result(submission)
        if first:
            self._transport.begin(group.ready_digest(submission), stream, readers, group.captured, not group.tags)
        group.state.streams.add(stream)
        own_target = state.result.data_ptr() if submission.own_slice else 0
        self._transport.put(route, source, own_target, stream, group.captured)

    def _result(self, submission: Submission) -> torch.Tensor:
        """Where the result will be: in memory of its own, or in the target, which is lent or has a place for it."""
        state: _InTransit = submission.state
        shape, dtype, places = state.route.shape, state.route.key.dtype, state.target.base
        lent = not submission.owned and (self._pipelined or self._loans.possible)
        kept = places.hand_out(shape, dtype) if isinstance(places, Places) and not lent else None
        state.in_place = lent or kept is not None
        if kept is not None:
            return kept
        if not lent:
            return torch.empty(shape, dtype=dtype, device=self._device)
        if self._cuda:
            result, storage = state.route.view_of(state.target)
            if not self._pipelined:
                self._loans.open((self._capture_id, submission.tag), storage)
            return result
        nbytes = math.prod(shape) * dtype.itemsize
        return state.target.written()[:nbytes].view(dtype).view(shape)

    def result_of(self, submission: Submission) -> torch.Tensor:
        result: torch.Tensor = submission.state.result
        return result

    def finish(self, group: ExchangeGroup) -> None:
        self._unfinished = False
        digest = group.done_digest()
        number = self._transport.end(digest, group.captured) if self._cuda else self._transport.end(digest)
        group.state.number = self._last_number = number
        self._unwaited[number] = _targets_of(group)

    def deliver(self, group: ExchangeGroup) -> list[torch.Tensor]:
        results = self._deliver_cuda(group) if self._cuda else self._deliver_cpu(group)
        del self._unwaited[group.state.number]
        return results

    def abandon(self, group: ExchangeGroup) -> None:
        """Results of a finished group that nobody waits for: its inputs may be freed when this returns."""
        self._await(group)
        del self._unwaited[group.state.number]

    def _await(self, group: ExchangeGroup) -> None:
        """On CUDA the current stream waits, else the host."""
        if self._cuda:
            self._transport.wait(current_stream_handle(self._device), group.state.number, group.captured)
        else:
            self._transport.wait(group.state.number)

    def check(self, group: ExchangeGroup | None) -> None:
        """Raise if the exchange has failed, here or on a peer that told this rank."""
        failure = self._transport.failure()
        if failure is not None:
            raise _error_of(failure, self.rank, self.backend, group)

    def abort(self, kind: str, message: str) -> None:
        if self._transport is not None:
            self._transport.abort(kind, f"rank {self.rank}: {message}")

    def close(self, grace_s: float) -> None:
        self._loans.end(self._loans.keys(), "its communicator was closed")
        if self._transport is not None:
            if self._unfinished:
                self.abort("abort", "released its communicator in the middle of a group")
            try:
                if not self._cuda:
                    self._settle(grace_s)
            finally:
                drained = self._transport.shutdown(grace_s if self._cuda else 0.0)
            if not drained:
                _undrained.append(self)
                return
        self._targets.clear()
        self._pads = None

    def _settle(self, grace_s: float) -> None:
        """Let queued exchanges run; an interrupt gets through."""
        deadline = time.monotonic() + grace_s
        while not self._transport.idle() and time.monotonic() < deadline:
            time.sleep(0.001)

    def _compare(self, group: ExchangeGroup, submission: Submission) -> None:
        """Ranks that bring up targets for different things must not find each other's."""
        self._channel.compare(group.ready_digest(submission), group.compared(submission), self.backend)

    def _end_loans(self, group: ExchangeGroup, stream: int) -> list[int]:
        """End the loans that the group's targets are under; the streams that READY has to stand behind."""
        here = self._capture_id
        if group.tags:
            keys = [(here, tag) for tag in group.tags]
        else:
            keys = list({key for key in (*self._loans.keys(), *self._readers) if key[0] == here})
        readers = self._end(keys, "a later group of the same communicator has begun")
        readers.discard(stream)
        return list(readers)

    def _end(self, keys: Collection[LoanKey], why: str) -> set[int]:
        """End loans; the streams on which their targets may still be read."""
        self._loans.end(keys, why)
        return {stream for key in keys for stream in self._readers.pop(key, ())}

    def _deliver_cuda(self, group: ExchangeGroup) -> list[torch.Tensor]:
        self._await(group)
        stream = current_stream_handle(self._device)
        elsewhere = group.state.streams != {stream}
        differentiable = any(submission.differentiable for submission in group.submissions)
        results = []
        for submission in group.submissions:
            state: _InTransit = submission.state
            self._readers.setdefault((self._capture_id, submission.tag), set()).add(stream)
            if elsewhere:
                # The caller's stream orders the reuse of the inputs' memory only where it is the one that waits.
                state.source.record_stream(self._copy_stream)
                state.source.record_stream(self._own_stream)
                if not state.in_place:
                    state.result.record_stream(torch.cuda.current_stream(self._device))
            result = state.result
            if not state.in_place:
                self._copy_out(submission, result)
            elif differentiable:
                result = result.clone()
            results.append(result)
        return results

    def _deliver_cpu(self, group: ExchangeGroup) -> list[torch.Tensor]:
        results = []
        # The own slices are copied while the copy thread and the peers are at work.
        for submission in group.submissions:
            exchange, source, result = submission.exchange, submission.state.source, submission.state.result
            if submission.own_slice:
                result[exchange.own_dest(self.rank)].copy_(source[exchange.own_source(self.rank)])
            results.append(result)
        self._await(group)
        self.check(group)
        for submission, result in zip(group.submissions, results, strict=True):
            if not submission.state.in_place:
                self._copy_out(submission, result)
        self.check(group)  # a peer that gave up meanwhile may have gone on writing
        return results

    def _copy_out(self, submission: Submission, result: torch.Tensor) -> None:
        exchange, target = submission.exchange, submission.state.target
        nbytes = result.numel() * result.element_size()
        view = target.written()[:nbytes].view(result.dtype).view(result.shape)
        for region in exchange.peer_dests(self.rank):
            result[region].copy_(view[region])

    def _quiesce(self, keys: Sequence[TargetKey]) -> None:
        """Let nothing use the targets of ``keys`` any more."""
        self._end([(0, key.tag) for key in keys], "its target was replaced by a larger one, or evicted")
        if self._cuda:
            torch.cuda.synchronize(self._device)
        else:
            self._transport.wait(self._last_number)

    def _open_targets(self, group: ExchangeGroup, first: TargetKey) -> None:
        """Before READY opens them to the peers: settle the places of the targets that the group names, or of all where
        it names none; poison those of its first submission's kind.
        """
        poisoned = {first._replace(tag=tag) for tag in (*group.tags, first.tag)} if self._poison else set()
        for key, target in self._targets.all():
            if isinstance(target.base, Places) and (not group.tags or key.tag in group.tags):
                target.base.choose()
            if key in poisoned:
                target.written().fill_(0xFF)


def _targets_of(group: ExchangeGroup) -> list[TargetKey]:
    return [submission.state.route.key for submission in group.submissions]


class _GroupInTransit:
    """A group from its first submission on: the streams that its inputs came on, and its number once finished."""

    __slots__ = ("number", "streams")

    number: int

    def __init__(self) -> None:
        self.streams: set[int] = set()


class _InTransit:
    """A submission between submit and wait. ``source`` is the input, or a copy of it that copies can read."""

    __slots__ = ("in_place", "result", "route", "source", "target")

    result: torch.Tensor  # from submit on

    def __init__(self, route: Route, source: torch.Tensor, target: PeerBuffer) -> None:
        self.route = route
        self.source = source
        self.target = target
        self.in_place = False  # the result is where the peers write it


def _error_of(failure: _C.Failure, rank: int, backend: str, group: ExchangeGroup | None) -> BrokenCommunicatorError:
    """What a transport reports, as the error that the caller sees."""
    where = f"rank {rank} ({backend})"
    if group is not None:
        where += f", group of {group.describe()}" if group.submissions else ", before a group's first submission"
    signal = f" at {failure.signal}" if failure.signal else ""
    if failure.kind == "driver":
        text = f"{where}{signal}: this rank's device has failed: {failure.message}"
    elif failure.message:
        text = f"{where}{signal}: a peer gave up, what it sent since is void: {failure.message}"
    else:
        peers = f"rank(s) {', '.join(map(str, failure.peers))}"
        own = f"; this rank: {group.submitted()}" if group is not None and group.submissions else ""
        what = {
            "mismatch": f"{peers} submitted another tag, shape, dtype, plan, need of a gradient, or order{own}",
            "peer_gone": f"the process of {peers} has ended, or closed the communicator",
            "timeout": f"{peers} did not signal within {failure.seconds:.1f} s (timeout_s)",
        }.get(failure.kind, f"{peers}: {failure.kind}")
        text = f"{where}{signal}: {what}"
    return error_of_kind(failure.kind)(text)
