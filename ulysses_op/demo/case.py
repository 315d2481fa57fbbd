"""One attention block over one clip, on ranks, and the checks of what their exchanges and the block deliver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..communicator import Communicator
from ..exchange_group import ExchangeGroup
from ..layout import Direction, Exchange, HeadRanges, gather_exchange, head_plan, scatter_exchange
from .block import AttentionBlock, rope_table
from .clip import Grid, moving_scene, patch_tokens


@dataclass(frozen=True)
class Size:
    """A block, and the clip that it attends over."""

    grid: Grid
    hidden: int
    num_heads: int
    dtype: torch.dtype

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads


class Case:
    """One size on one rank. All ranks hold the same weights and the same clip."""

    def __init__(self, size: Size, rank: int, world_size: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.size = size
        self.block = AttentionBlock(size.hidden, size.num_heads).to(device, size.dtype)
        clip = moving_scene(*size.grid.clip_shape, device)
        self.tokens = patch_tokens(clip, size.grid, size.hidden).to(size.dtype)  # (1, S_global, hidden)
        self.rope = rope_table(size.grid, size.head_dim, device)
        self.seq_lens = split_rows(size.grid.seq_len, world_size)
        self.rank = rank
        self.world_size = world_size

    @property
    def rows(self) -> slice:
        """This rank's part of the sequence."""
        start = sum(self.seq_lens[: self.rank])
        return slice(start, start + self.seq_lens[self.rank])

    @property
    def heads(self) -> HeadRanges:
        return head_plan(self.size.num_heads, self.size.num_heads, self.world_size).q

    def run_split(self, comm: Communicator) -> torch.Tensor:
        """This rank's rows of the block's output, (1, S_local, hidden)."""
        return self.block(self.tokens[:, self.rows], self.rope[self.rows], comm, self.seq_lens)

    def run_unsplit(self) -> torch.Tensor:
        """The block's output over the whole sequence, without an exchange: (1, S_global, hidden)."""
        return self.block(self.tokens, self.rope)

    def exchanges(self, rank: int) -> tuple[Exchange, Exchange]:
        """Of q, k or v, and of the attention's output, as ``rank`` takes part in them."""
        start, stop = self.heads[rank]
        there = (1, self.seq_lens[rank], self.size.num_heads, self.size.head_dim)
        back = (1, self.size.grid.seq_len, stop - start, self.size.head_dim)
        return (
            scatter_exchange(there, self.world_size, rank, self.heads, self.seq_lens),
            gather_exchange(back, self.world_size, rank, self.heads, self.seq_lens),
        )

    def sent_bytes(self, rank: int) -> tuple[int, int]:
        """What ``rank`` sends to other ranks: of q, k and v together, and of the attention's output."""
        there, back = self.exchanges(rank)
        width = self.size.dtype.itemsize
        return 3 * there.sent_numel(rank) * width, back.sent_numel(rank) * width


def split_rows(seq_len: int, world_size: int) -> list[int]:
    """Rows of each rank: as even as they can be, the longer shares first."""
    return [seq_len // world_size + (rank < seq_len % world_size) for rank in range(world_size)]


def compare(actual: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Largest absolute difference, and cosine of the angle between the two; NaN where a value is."""
    actual, expected = actual.double().flatten(), expected.double().flatten()
    return (actual - expected).abs().max().item(), F.cosine_similarity(actual, expected, dim=0).item()


@dataclass
class Exchanged:
    """What one rank put into an exchange, and what it got."""

    tag: str
    direction: Direction
    sent: torch.Tensor
    received: torch.Tensor


class RecordingCommunicator(Communicator):
    """A communicator that keeps what passes through it, while ``record`` is a list."""

    record: list[Exchanged] | None = None

    def group(self, *tags: str) -> ExchangeGroup:
        return _RecordingGroup(self, tags, self._keep)

    def gather_heads(self, x: torch.Tensor, **plan: Any) -> torch.Tensor:
        received = super().gather_heads(x, **plan)
        self._keep(Exchanged("o", "gather_heads", x, received))
        return received

    def _keep(self, exchanged: Exchanged) -> None:
        if self.record is not None:
            # Copies: on CUDA a group's results are lent until the next group.
            received = exchanged.received.clone()
            self.record.append(Exchanged(exchanged.tag, exchanged.direction, exchanged.sent, received))


class _RecordingGroup(ExchangeGroup):
    def __init__(self, communicator: Communicator, tags: tuple[str, ...], keep: Callable[[Exchanged], None]) -> None:
        super().__init__(communicator, tags)
        self._keep = keep

    def wait(self, *tags: str) -> tuple[torch.Tensor, ...]:
        sent = {submission.step.tag: submission.x for submission in self.submissions}
        results = super().wait(*tags)
        for tag, received in zip(tags or self.tags or sent, results, strict=True):
            self._keep(Exchanged(tag, "scatter_heads", sent[tag], received))
        return results


def delivered_exactly(exchanged: Exchanged, case: Case) -> bool:
    """Whether this rank got, bit by bit, what all ranks' inputs, all-gathered, hold for it. Collective."""
    if exchanged.direction == "scatter_heads":
        expected = torch.cat(_all_gather(exchanged.sent, 1, case.seq_lens), 1)[:, :, slice(*case.heads[case.rank])]
    else:
        counts = [stop - start for start, stop in case.heads]
        expected = torch.cat(_all_gather(exchanged.sent, 2, counts), 2)[:, case.rows]
    received = exchanged.received
    return expected.shape == received.shape and torch.equal(_bits(expected), _bits(received))


def all_ranks(values: list[float]) -> list[list[float]]:
    """``values`` of every rank, in rank order. Collective."""
    own = torch.tensor(values, dtype=torch.float64)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    return [part.tolist() for part in gathered]


def _all_gather(x: torch.Tensor, dim: int, sizes: list[int]) -> list[torch.Tensor]:
    """Every rank's x, whose length along ``dim`` is ``sizes[rank]``."""
    shape = list(x.shape)
    shape[dim] = max(sizes)
    padded = x.new_zeros(shape)
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather([_bits(part) for part in gathered], _bits(padded))
    return [part.narrow(dim, 0, size) for part, size in zip(gathered, sizes, strict=True)]


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)
