"""The ways to exchange that are compared: all-to-alls of a process group, and the backends of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..communicator import Communicator
from ..errors import BackendUnavailableError
from ..layout import Direction
from .measure import Ranks

TIMEOUT_S = 60

# The exchange by a process group's all-to-all. `contiguous` and `flatten` copy only where they must.


def all_to_all(packed: torch.Tensor) -> torch.Tensor:
    packed = packed.contiguous()
    received = torch.empty_like(packed)
    dist.all_to_all_single(received, packed)
    return received


class AllToAll(NamedTuple):
    """empty: what may be packed into, like a tensor, of these sizes. exchange: anything by peer; what was received."""

    empty: Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
    exchange: Callable[[torch.Tensor], torch.Tensor]


OF_PROCESS_GROUP = AllToAll(torch.Tensor.new_empty, all_to_all)


def by_peer(x: torch.Tensor) -> torch.Tensor:
    """(B, S_local, H, D) -> (P, B, S_local, H_local, D), a view."""
    return x.unflatten(2, (dist.get_world_size(), -1)).permute(2, 0, 1, 3, 4)


def scatter_by_pack(x: torch.Tensor) -> torch.Tensor:
    return all_to_all(by_peer(x)).transpose(0, 1).flatten(1, 2)


def gather_by_pack(x: torch.Tensor, by: AllToAll = OF_PROCESS_GROUP) -> torch.Tensor:
    sent = x.unflatten(1, (dist.get_world_size(), -1)).transpose(0, 1)
    return by.exchange(sent).permute(1, 2, 0, 3, 4).flatten(2, 3)


def scatter_in_one_pack(tensors: Sequence[torch.Tensor], by: AllToAll = OF_PROCESS_GROUP) -> tuple[torch.Tensor, ...]:
    """One all-to-all for all; contiguous results."""
    parts = [by_peer(x) for x in tensors]
    peers, *sizes = parts[0].shape
    packed = by.empty(parts[0], (peers, len(parts), *sizes))
    for i, part in enumerate(parts):
        packed[:, i].copy_(part)
    return tuple(part.transpose(0, 1).flatten(1, 2) for part in by.exchange(packed).unbind(1))


def scatter_in_one_pack_strided(
    tensors: Sequence[torch.Tensor], by: AllToAll = OF_PROCESS_GROUP
) -> tuple[torch.Tensor, ...]:
    """One all-to-all for all, without an unpack (for B = 1): the results are slices of one buffer."""
    parts = [by_peer(x) for x in tensors]
    peers, batch, seq_local, heads, head_dim = parts[0].shape
    packed = by.empty(parts[0], (peers, batch, seq_local, len(parts), heads, head_dim))
    for i, part in enumerate(parts):
        packed[:, :, :, i].copy_(part)
    return by.exchange(packed).transpose(0, 1).flatten(1, 2).unbind(2)


# The exchange by this package.


def scatter_group(
    communicator: Communicator, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    with communicator.group("q", "k", "v") as group:
        group.submit(v, tag="v")
        group.submit(q, tag="q")
        group.submit(k, tag="k")
        return group.wait()


def gather_group(communicator: Communicator, o: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with communicator.group("o") as group:
        group.submit(o, tag="o", direction="gather_heads")
        return group.wait()


def exchange_one(
    communicator: Communicator, x: torch.Tensor, direction: Direction = "scatter_heads", own_slice: bool = True
) -> torch.Tensor:
    """A group of one, waited for; without the own slice, nothing but the copies to peers and the handshakes."""
    tag = direction  # one target for all, however many there are: none is evicted, and brought up while it is timed
    with communicator.group(tag) as group:
        group.submit_as(x, tag, (direction, None, None, False), terms=(False, own_slice, ""))
        return group.wait()[0]


def label(backend: str, what: str = "") -> str:
    return f"{backend} ({what})" if what else backend


def communicators(stack: ExitStack, ranks: Ranks, backends: Sequence[str]) -> dict[str, Communicator]:
    """One for each backend that these ranks can run; the reason against each other one goes to the progress lines."""
    usable = {}
    for backend in backends:
        communicator = Communicator(backend=backend, timeout_s=TIMEOUT_S)
        try:
            communicator.build(ranks.device)
        except BackendUnavailableError as error:
            ranks.progress(f"  {backend} is left out: {error}")
            continue
        usable[backend] = stack.enter_context(communicator)
    return usable
