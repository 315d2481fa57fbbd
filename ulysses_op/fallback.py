"""The engine that runs anywhere: the same exchange as packed all-to-alls of a process group (NCCL, Gloo, ...)."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from .errors import MismatchError, PeerTimeoutError
from .exchange_group import ExchangeGroup, Submission
from .layout import Exchange, Region
from .rendezvous import Channel
from .steps import digest_of


class C10dEngine:
    """One asynchronous all-to-all a submission, so that V travels while Q and K are still computed. Results are
    always owned.

    Ranks compare what they exchange, since a collective whose sizes differ between ranks hangs or worse. For CPU
    tensors they do so before data moves, by an all-gather of 8 bytes a submission. For CUDA tensors that would stall
    the host: each new submission is compared before, through the store, and each group after, on the GPU.
    """

    backend = "c10d"

    def __init__(
        self, group: dist.ProcessGroup, rank: int, device: torch.device, channel: Channel, timeout_s: float
    ) -> None:
        self.rank = rank
        self.world_size = group.size()
        self._group_ref = weakref.ref(group)
        self._device = device
        self._channel = channel
        self._timeout_s = timeout_s
        self._agreed: set[int] = set()
        if device.type == "cuda":
            self._differs = torch.zeros((), dtype=torch.bool, device=device)
            self._differs_on_host = torch.zeros((), dtype=torch.bool, pin_memory=True)

    def prepare(self, group: ExchangeGroup, submission: Submission) -> None:
        """Nothing can fail on one rank alone before the all-to-all."""

    def submit(self, group: ExchangeGroup, submission: Submission) -> None:
        step = submission.step
        if step.first:
            self.check(group)
        digest = digest_of(("c10d", group.tags, *(each.digest for each in step.path)))
        self._compare(digest, step.compared(group.captured))
        exchange, x = step.exchange, submission.x.detach()
        parts = [_outgoing(exchange, self.rank, peer) for peer in range(self.world_size)]
        sizes = [0 if peer == self.rank else x[part].numel() for peer, part in enumerate(parts)]
        sent = torch.empty(sum(sizes), dtype=x.dtype, device=x.device)
        for piece, peer in zip(sent.split(sizes), range(self.world_size), strict=True):
            if sizes[peer]:
                piece.view(x[parts[peer]].shape).copy_(x[parts[peer]])
        shapes = [_incoming(exchange, self.rank, peer)[1] for peer in range(self.world_size)]
        counts = [0 if peer == self.rank else shape.numel() for peer, shape in enumerate(shapes)]
        received = torch.empty(sum(counts), dtype=x.dtype, device=x.device)
        width = x.element_size()
        work = dist.all_to_all_single(
            received.view(torch.uint8),
            sent.view(torch.uint8),
            [count * width for count in counts],
            [size * width for size in sizes],
            group=self._group(),
            async_op=True,
        )
        submission.result = torch.empty(exchange.output_shape(self.rank), dtype=x.dtype, device=x.device)
        submission.state = (work, received, counts, sent)

    def finish(self, group: ExchangeGroup) -> None:
        """Each all-to-all completes by itself; what is left is to compare the whole of the group."""
        step = group.submissions[-1].step
        if self._device.type == "cpu":
            if not step.final:  # a final one has told that no more follow
                self._compare(step.done, {"tag": f"none (the group ends behind {group.describe()})"})
            return
        own = torch.full((1,), step.done - (1 << 63), dtype=torch.int64, device=self._device)
        gathered = [torch.empty_like(own) for _ in range(self.world_size)]
        group.state = (dist.all_gather(gathered, own, group=self._group(), async_op=True), own, gathered)

    def deliver(self, group: ExchangeGroup) -> list[torch.Tensor]:
        results = []
        for submission in group.submissions:
            exchange, x, result = submission.step.exchange, submission.x.detach(), submission.result
            work, received, counts, _ = submission.state
            if submission.step.own_slice:
                result[exchange.own_dest(self.rank)].copy_(x[exchange.own_source(self.rank)])
            self._await(work, repr(submission.step.tag))
            for peer, piece in enumerate(received.split(counts)):
                if counts[peer]:
                    region, shape = _incoming(exchange, self.rank, peer)
                    result[region].copy_(piece.view(shape))
            results.append(result)
        if self._device.type == "cuda":
            self._verify(group)
        self.check(group)
        return results

    def abandon(self, group: ExchangeGroup) -> None:
        for submission in group.submissions:
            self._await(submission.state[0], repr(submission.step.tag))

    def check(self, group: ExchangeGroup | None) -> None:
        """Failures of the process group are raised by its own calls."""
        if self._device.type == "cuda" and self._differs_on_host:
            raise MismatchError(f"rank {self.rank} (c10d): the ranks submitted different groups; results are void")

    def abort(self, kind: str, message: str) -> None:
        """Peers are not told: their next collective of the group runs into the time-out."""

    def close(self, grace_s: float) -> None:
        self._agreed.clear()

    def _group(self) -> dist.ProcessGroup:
        group = self._group_ref()
        if group is None:
            raise RuntimeError("the communicator's process group was destroyed: create both again")
        return group

    def _await(self, work: dist.Work, what: str) -> None:
        try:
            if self._device.type == "cpu":
                work.wait(timedelta(seconds=self._timeout_s))
            else:
                work.wait()
        except RuntimeError as error:
            raise PeerTimeoutError(
                f"rank {self.rank} (c10d): the exchange of {what} did not complete within "
                f"{self._timeout_s} s, or a peer is gone: "
                f"{error}"
            ) from error

    def _compare(self, digest: int, fields: Mapping[str, str]) -> None:
        if self._device.type == "cpu":
            own = torch.tensor([digest - (1 << 63)], dtype=torch.int64, device="cpu")
            gathered = [torch.empty_like(own) for _ in range(self.world_size)]
            work = dist.all_gather(gathered, own, group=self._group(), async_op=True)
            assert work is not None
            self._await(work, fields["tag"])
            if any(int(tensor) != int(own) for tensor in gathered):  # on all ranks, then, so all tell what they have
                self._channel.compare(digest, fields, self.backend)
        elif digest in self._agreed:
            return
        else:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "the ranks have not exchanged this before, and cannot compare what they are about to exchange "
                    "inside a CUDA graph capture: run the same group once before"
                )
            self._channel.compare(digest, fields, self.backend)
            if len(self._agreed) >= 4096:
                self._agreed.clear()
            self._agreed.add(digest)

    def _verify(self, group: ExchangeGroup) -> None:
        """Look on the GPU whether all ranks closed the same group; :meth:`check` raises once it is seen that not."""
        (work, own, gathered), group.state = group.state, None
        work.wait()
        self._differs |= (torch.cat(gathered) != own).any()
        self._differs_on_host.copy_(self._differs, non_blocking=True)


def _outgoing(exchange: Exchange, rank: int, peer: int) -> Region:
    """The part of the input of ``rank`` that goes to ``peer``."""
    if exchange.direction == "scatter_heads":
        return (slice(None), slice(None), slice(*exchange.heads[peer]), slice(None))
    start = exchange.seq_start(peer)
    return (slice(None), slice(start, start + exchange.seq_lens[peer]), slice(None), slice(None))


def _incoming(exchange: Exchange, rank: int, peer: int) -> tuple[Region, torch.Size]:
    """Where in the output of ``rank`` the part from ``peer`` belongs, and its shape."""
    if exchange.direction == "scatter_heads":
        start, count = exchange.seq_start(peer), exchange.seq_lens[peer]
        shape = (exchange.batch, count, exchange.head_count(rank), exchange.head_dim)
        return (slice(None), slice(start, start + count), slice(None), slice(None)), torch.Size(shape)
    start, count = exchange.head_slot(peer), exchange.head_count(peer)
    shape = (exchange.batch, exchange.seq_lens[rank], count, exchange.head_dim)
    return (slice(None), slice(None), slice(start, start + count), slice(None)), torch.Size(shape)
