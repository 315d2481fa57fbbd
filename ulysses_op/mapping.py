"""How memory becomes addressable by every rank of a group. One interface, three kinds of memory."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from . import _C
from .places import Places
from .rendezvous import Channel
from .torch_compat import Shaped

_GRANULE_BYTES = {"cpu": 4096, "cuda": 2 << 20}


@dataclass
class PeerBuffer:
    """A buffer on every rank: this rank's as a uint8 tensor or as places, everybody's by address as mapped in this
    process.

    It lives as long as this object does: dropping it unmaps the peers' buffers and frees this rank's.
    """

    base: torch.Tensor | Places
    addresses: list[int]
    owner: object
    nbytes: int

    def written(self) -> torch.Tensor:
        """What peers write in the group that is under way, or wrote in the last one, as uint8."""
        return self.base.bytes() if isinstance(self.base, Places) else self.base


class Mapping(Protocol):
    def allocate(self, nbytes: int) -> PeerBuffer:
        """Allocate at least ``nbytes`` on every rank, zeroed. Collective: equal calls in the same order on all ranks.

        Raises TargetError on every rank when it fails on one.
        """

    def release(self, buffers: list[PeerBuffer]) -> None:
        """Unmap and free buffers that no rank uses any more. Collective."""


def rounded(nbytes: int, device: torch.device) -> int:
    """The size that is allocated when ``nbytes`` are asked for: equal on all ranks when ``nbytes`` is."""
    granule = _GRANULE_BYTES[device.type]
    return max(1, -(-nbytes // granule)) * granule


class SharedMemory:
    """POSIX shared memory. Names are random, and gone as soon as every rank has mapped them.

    Every rank knows all names before anything has them, and removes them all: whoever is left cleans up.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._count = 0

    def allocate(self, nbytes: int) -> PeerBuffer:
        size = rounded(nbytes, torch.device("cpu"))
        segment_bytes = Places.segment_bytes(size)
        self._count += 1
        names = [f"/ulysses_op-{self._channel.prefix}-{self._count}-{peer}" for peer in range(self._channel.world_size)]
        own_name = names[self._channel.rank]
        segments: list[_C.SharedSegment] = []
        try:
            self._channel.vote(
                f"allocating {size} bytes of shared memory",
                lambda: segments.append(Places.create(own_name, size)),
            )
            own = segments.pop()

            def open_peers() -> None:
                for name in names:
                    segments.append(own if name == own_name else _C.SharedSegment.open(name, segment_bytes))

            self._channel.vote("mapping shared memory", open_peers)
        finally:
            for name in names:
                _C.SharedSegment.unlink(name)
        return PeerBuffer(Places(own, size), [segment.address for segment in segments], segments, size)

    def release(self, buffers: list[PeerBuffer]) -> None:
        buffers.clear()  # pages live until the last rank has unmapped them


class SymmetricMemory:
    """torch Symmetric Memory with its CUDA backend."""

    def __init__(self, channel: Channel, group: dist.ProcessGroup, device: torch.device) -> None:
        self._channel = channel
        self._group_name = group.group_name
        self._device = device

    def allocate(self, nbytes: int) -> PeerBuffer:
        import torch.distributed._symmetric_memory as symm_mem

        size = rounded(nbytes, self._device)
        tensors: list[torch.Tensor] = []
        addresses: list[int] = []
        handles: list[object] = []

        def create() -> None:
            tensors.append(symm_mem.empty(size, dtype=torch.uint8, device=self._device).zero_())
            torch.cuda.synchronize(self._device)

        def rendezvous() -> None:
            handle = symm_mem.rendezvous(tensors[0], self._group_name)
            handles.append(handle)
            for peer in range(self._channel.world_size):
                own = peer == self._channel.rank
                # The remote tensor's own address: a buffer may lie at an offset in its allocation.
                remote = tensors[0] if own else handle.get_remote_tensor(peer, (size,), torch.uint8)
                addresses.append(remote.data_ptr())

        # Rendezvous is collective itself, so no rank may enter it before all have their memory.
        self._channel.vote(f"allocating {size} bytes of symmetric memory", create)
        self._channel.vote("the rendezvous of symmetric memory", rendezvous)
        return PeerBuffer(tensors[0], addresses, handles, size)

    def release(self, buffers: list[PeerBuffer]) -> None:
        buffers.clear()  # the driver keeps memory until the last rank has unmapped it


class CudaIpc:
    """Device memory shared by CUDA IPC handles."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        self._channel = channel
        self._device = device
        self._context = cuda_context(device)

    def allocate(self, nbytes: int) -> PeerBuffer:
        size = rounded(nbytes, self._device)
        own: list[_C.CudaIpcBuffer] = []
        mappings: list[_C.CudaIpcMapping] = []
        addresses: list[int] = []

        def create() -> bytes:
            own.append(_C.CudaIpcBuffer(self._context, size))
            return own[0].handle()

        def open_peers() -> None:
            for peer, handle in enumerate(handles):
                if peer == self._channel.rank:
                    addresses.append(own[0].address)
                else:
                    mappings.append(_C.CudaIpcMapping(self._context, handle, size))
                    addresses.append(mappings[-1].address)

        handles = self._channel.gather_results(f"allocating {size} bytes of device memory", create)
        self._channel.vote("opening CUDA IPC handles", open_peers)
        base, _ = Shaped((size,), torch.uint8, self._device).at(own[0].address)
        return PeerBuffer(base, addresses, _CudaIpcOwner(own[0], mappings), size)

    def release(self, buffers: list[PeerBuffer]) -> None:
        if not buffers:
            return
        for buffer in buffers:
            assert isinstance(buffer.owner, _CudaIpcOwner)
            buffer.owner.mappings.clear()
        self._channel.all_gather(b"")  # CUDA wants every importer gone before the exporter frees
        buffers.clear()


@dataclass
class _CudaIpcOwner:
    own: _C.CudaIpcBuffer
    mappings: list[_C.CudaIpcMapping]


def cuda_context(device: torch.device) -> int:
    """The CUDA context that torch uses on ``device``, for threads where it is not current (autograd)."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        return _C.cuda_current_context()


def segment_name() -> str:
    """A name for shared memory that nobody can guess."""
    return f"/ulysses_op-{secrets.token_hex(16)}"
