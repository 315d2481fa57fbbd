"""Parts of torch whose names or presence differ between the supported versions (2.11 to 2.14)."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils import checkpoint

_stores: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.Store] = weakref.WeakKeyDictionary()


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """The store that ``group`` was made with, over a connection of our own where the store can be cloned.

    A blocking call on a shared connection would hold up its other users, NCCL's heartbeat among them. One connection a
    process group: making one may take seconds where the resolver is slow.
    """
    if group not in _stores:
        store = distributed_c10d._get_process_group_store(group)
        try:
            _stores[group] = store.clone()  # type: ignore[attr-defined]
        except (AttributeError, RuntimeError, NotImplementedError):
            return store
    return _stores[group]


def group_device_types(group: dist.ProcessGroup) -> set[str]:
    """Device types that ``group`` has a backend for."""
    return {device.type for device in group._device_types}


def current_stream_reader(device: torch.device) -> Callable[[], int]:
    """Tells the current CUDA stream of ``device`` as an integer, without making a Stream object of it."""
    return functools.partial(torch._C._cuda_getCurrentRawStream, device.index)


def can_invalidate_storage() -> bool:
    """Whether a storage can be made to raise on access. Only CUDA builds have this."""
    return hasattr(torch._C, "_set_storage_data_ptr_access_error_msg")


def invalidate_storage(storage: torch.UntypedStorage, message: str) -> None:
    """Make every access to the storage's data raise RuntimeError(message), through any tensor that views it."""
    torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, message)


def storage_uses(storage: torch.UntypedStorage) -> Callable[[], int]:
    """Tells how many tensors share the storage, and itself. Not to be called once it is gone."""
    return functools.partial(torch._C._storage_Use_Count, storage._cdata)


class Shaped:
    """How contiguous tensors of one shape are made on memory that somebody else owns. On CUDA only: there it costs a
    third of an empty tensor's set_()."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        self._device = device
        self._nbytes = math.prod(shape) * dtype.itemsize
        self._metadata = {
            "nbytes": self._nbytes,
            "size": tuple(shape),
            "stride": tuple(strides),
            "dtype": dtype,
            "device": device,
            "storage_offset": 0,
        }

    def at(self, address: int) -> tuple[torch.Tensor, torch.UntypedStorage]:
        """A tensor there, and its storage, which is its own."""
        storage: Any = torch._C._construct_storage_from_data_pointer(address, self._device, self._nbytes)
        tensor = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(self._metadata, storage)
        return tensor, storage


def stops_recomputation(error: BaseException) -> bool:
    """Whether ``error`` is how activation checkpointing leaves a recomputation once it has what it needs."""
    stop = getattr(checkpoint, "_StopRecomputationError", None)
    return stop is not None and isinstance(error, stop)
