"""The engine of the backends whose peers write each other's targets: symm_mem, cuda_ipc and shm share this protocol."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from . import _C
from .errors import BrokenCommunicatorError, error_of_kind
from .exchange_group import ExchangeGroup, Submission
from .loans import Loan, Loans
from .mapping import Mapping, PeerBuffer, cuda_context
from .memory_pools import outside_memory_pools
from .places import Places
from .rendezvous import Channel
from .routes import Route, Routes
from .steps import Step
from .targets import TargetCache, TargetKey
from .torch_compat import current_stream_reader

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
        self._lends = pipelined or self._loans.possible
        self._routes = Routes(channel.rank, self._loans)
        self._capture_id = 0
        self._pipelined = pipelined
        # The last steps of groups that are finished, and neither delivered nor abandoned, by the group's number. Not
        # the groups: they hold the communicator, which is released once nobody else does.
        self._unwaited: dict[int, Step] = {}
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
        self._current_stream = current_stream_reader(self._device)
        self._copy_stream = torch.cuda.ExternalStream(self._transport.copy_stream, self._device)
        self._own_stream = torch.cuda.ExternalStream(self._transport.own_stream, self._device)

    def prepare(self, group: ExchangeGroup, submission: Submission) -> None:
        """What may still fail, or involve the host of every rank, before anything of this submission moves."""
        step = submission.step
        if self._cuda:
            submission.stream = stream = self._current_stream()
            if step.first:
                group.stream = stream
                self._capture_id = group.capture_id = self._transport.capture_id(stream)
            elif stream != group.stream:
                group.elsewhere = True
        route: Route | None = step.route
        if route is None:
            route = step.route = self._routes.find(step.tag, step.exchange, submission.x)
        entry = route.entry
        target = entry.target
        if target is None or target.nbytes < route.nbytes or self._capture_id:
            target = self._target_of(group, submission, route)
        else:
            entry.used = self._targets.tick()
        submission.target = target
        submission.source = submission.x if route.in_place else route.source(submission.x)

    def _target_of(self, group: ExchangeGroup, submission: Submission, route: Route) -> PeerBuffer:
        key, nbytes = route.key, route.nbytes
        if self._capture_id:
            scope = _ALL_CAPTURES if self._pipelined else self._capture_id
            pinned, taken = self._targets.pinned(scope, key, nbytes)
            if taken:
                self._end_outside(key, why="its target now belongs to a CUDA graph")
            return pinned
        target = self._targets.find(key, nbytes)
        if target is None:
            submission.met = True
            self._compare(submission)
            paths = (group.path, *(step.path for step in self._unwaited.values()))
            in_use = [step.route.key for path in paths for step in path]
            with torch.inference_mode(False):  # targets outlive it
                target = outside_memory_pools(
                    self._device, lambda: self._targets.get(key, nbytes, in_use, self._quiesce)
                )
        route.entry = self._targets.entry_of(key)
        return target

    def submit(self, group: ExchangeGroup, submission: Submission) -> None:
        step, target = submission.step, submission.target
        route: Route = step.route
        if route.addresses is not target.addresses:
            route.bind(target)
        if step.first:
            self._unfinished = True
            if self._poison or not self._cuda:
                self._open_targets(group, route.key)
        if not self._cuda:
            submission.result = self._result_on_cpu(submission)
            if step.first:
                self.check(group)
                self._transport.begin(step.ready(False))
            self._transport.put(route.copies, submission.source.data_ptr())
            return
        stream = submission.stream
        if step.first:
            ready, loans = step.opened or self._opened_by(group, step)
            readers = self._loans.end(loans, "a later group of the same communicator has begun")
            readers.discard(stream)
        if self._lends and not step.owned:
            lent = route.lent
            if lent is None or lent.ended:
                lent = route.lend()
            if not self._pipelined:
                loan = self._loans.of((self._capture_id, step.tag)) if self._capture_id else route.loan
                loan.lent = lent
            submission.in_place = True
            submission.result = result = lent.tensor.data
        else:
            submission.result = result = torch.empty(route.shape, dtype=step.dtype, device=self._device)
        source, own_target = submission.source.data_ptr(), result.data_ptr() if step.own_slice else 0
        if not step.first:
            self._transport.put(route.copies, source, own_target, stream)
            return
        put = (route.copies, source, own_target, stream)
        if not self._transport.begin(ready, readers, self._capture_id != 0, not step.tags, *put):
            self.check(group)

    def _result_on_cpu(self, submission: Submission) -> torch.Tensor:
        """Where the result will be: in memory of its own, or in the target, which is lent or has a place for it."""
        step, target = submission.step, submission.target
        shape, dtype = step.route.shape, step.dtype
        if self._lends and not step.owned:
            submission.in_place = True
            nbytes = math.prod(shape) * dtype.itemsize
            lent: torch.Tensor = target.written()[:nbytes].view(dtype).view(shape)
            return lent
        kept: torch.Tensor | None = target.base.hand_out(shape, dtype)
        submission.in_place = kept is not None
        return kept if kept is not None else torch.empty(shape, dtype=dtype, device=self._device)

    def finish(self, group: ExchangeGroup) -> None:
        self._unfinished = False
        step = group.submissions[-1].step
        group.number = self._last_number = number = self._transport.end(step.done)
        self._unwaited[number] = step

    def deliver(self, group: ExchangeGroup) -> list[torch.Tensor]:
        results = self._deliver_cuda(group) if self._cuda else self._deliver_cpu(group)
        del self._unwaited[group.number]
        return results

    def abandon(self, group: ExchangeGroup) -> None:
        """Results of a finished group that nobody waits for: its inputs may be freed when this returns."""
        if self._cuda:
            self._transport.wait(self._current_stream(), group.number, group.captured)
        else:
            self._transport.wait(group.number)
        del self._unwaited[group.number]

    def check(self, group: ExchangeGroup | None) -> None:
        """Raise if the exchange has failed, here or on a peer that told this rank."""
        failure = self._transport.failure()
        if failure is not None:
            raise _error_of(failure, self.rank, self.backend, group)

    def abort(self, kind: str, message: str) -> None:
        if self._transport is not None:
            self._transport.abort(kind, f"rank {self.rank}: {message}")

    def close(self, grace_s: float) -> None:
        self._loans.end_all("its communicator was closed")
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

    def _compare(self, submission: Submission) -> None:
        """Ranks that bring up targets for different things must not find each other's."""
        step = submission.step
        self._channel.compare(step.ready(False), step.compared(False), self.backend)

    def _opened_by(self, group: ExchangeGroup, step: Step) -> tuple[int, Sequence[Loan]]:
        """What READY in front of a group's first step stands for, and the loans that it ends."""
        here, ready = self._capture_id, step.ready(group.captured)
        if not step.tags:
            return ready, self._loans.within(here)
        loans = [self._loans.of((here, tag)) for tag in step.tags]
        if not here:
            step.opened = ready, loans
        return ready, loans

    def _end_outside(self, *keys: TargetKey, why: str) -> None:
        """End the loans of targets that no CUDA graph has."""
        self._loans.end([self._loans.of((0, key.tag)) for key in keys], why)

    def _deliver_cuda(self, group: ExchangeGroup) -> list[torch.Tensor]:
        stream = self._current_stream()
        if self._transport.wait(stream, group.number, group.captured):
            self.check(group)
        elsewhere = group.elsewhere or stream != group.stream
        gradients = group.submissions[-1].step.gradients
        results = []
        for submission in group.submissions:
            step, result = submission.step, submission.result
            loan = self._loans.of((group.capture_id, step.tag)) if group.capture_id else step.route.loan
            loan.readers.add(stream)
            if elsewhere:
                # The caller's stream orders the reuse of the inputs' memory only where it is the one that waits.
                submission.source.record_stream(self._copy_stream)
                submission.source.record_stream(self._own_stream)
                if not submission.in_place:
                    result.record_stream(torch.cuda.current_stream(self._device))
            if not submission.in_place:
                self._copy_out(submission, result)
            elif gradients:
                result = result.clone()
            results.append(result)
        return results

    def _deliver_cpu(self, group: ExchangeGroup) -> list[torch.Tensor]:
        results = []
        # The own slices are copied while the copy thread and the peers are at work.
        for submission in group.submissions:
            exchange, source, result = submission.step.exchange, submission.source, submission.result
            if submission.step.own_slice:
                result[exchange.own_dest(self.rank)].copy_(source[exchange.own_source(self.rank)])
            results.append(result)
        self._transport.wait(group.number)
        self.check(group)
        for submission, result in zip(group.submissions, results, strict=True):
            if not submission.in_place:
                self._copy_out(submission, result)
        self.check(group)  # a peer that gave up meanwhile may have gone on writing
        return results

    def _copy_out(self, submission: Submission, result: torch.Tensor) -> None:
        exchange, target = submission.step.exchange, submission.target
        nbytes = result.numel() * result.element_size()
        view = target.written()[:nbytes].view(result.dtype).view(result.shape)
        for region in exchange.peer_dests(self.rank):
            result[region].copy_(view[region])

    def _quiesce(self, keys: Sequence[TargetKey]) -> None:
        """Let nothing use the targets of ``keys`` any more."""
        self._end_outside(*keys, why="its target was replaced by a larger one, or evicted")
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
        own = f"; this rank: {group.told()}" if group is not None and group.submissions else ""
        what = {
            "mismatch": f"{peers} submitted another tag, shape, dtype, plan, need of a gradient, or order{own}",
            "peer_gone": f"the process of {peers} has ended, or closed the communicator",
            "timeout": f"{peers} did not signal within {failure.seconds:.1f} s (timeout_s)",
        }.get(failure.kind, f"{peers}: {failure.kind}")
        text = f"{where}{signal}: {what}"
    return error_of_kind(failure.kind)(text)
