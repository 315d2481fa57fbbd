"""The exchange as two functions, over a communicator that is kept for each process group."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from .communicator import Communicator, check_tensor
from .process_groups import GroupLike, resolve_group

# Tied to the live group: one that is destroyed and created again under the same name gets a communicator of its own.
_communicators: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Communicator]] = weakref.WeakKeyDictionary()


def communicator_of(group: GroupLike, device: torch.device) -> Communicator:
    """The communicator that the functional forms use for ``group`` and tensors on ``device``."""
    of_group = _communicators.setdefault(resolve_group(group), {})
    communicator = of_group.get(str(device))
    if communicator is None:
        communicator = of_group[str(device)] = Communicator(group)
    return communicator


def scatter_heads(
    x: torch.Tensor,
    group: GroupLike = None,
    *,
    heads: Sequence[Sequence[int]] | None = None,
    seq_lens: Sequence[int] | None = None,
) -> torch.Tensor:
    """Exchange a part of the sequence of all heads for the whole sequence of some heads, as attention needs it.

    x: (B, S_local, H, D), any strides, elements of 1, 2, 4 or 8 bytes; all ranks pass the same B, H, D and dtype.
    heads: (start, stop) of each rank, for instance ``head_plan(...).q`` or ``.kv``; None splits H equally. Ranges may
    overlap: heads are replicated.
    seq_lens: S_local of each rank; None says that all are equal.

    Returns (B, S_global, H_local, D), contiguous, owned by the caller; the same as gathering x along the sequence
    from all ranks and then slicing this rank's heads. Differentiable: the backward is :func:`gather_heads`, which
    adds up the gradients of replicated heads.

    Raises ValueError or TypeError for arguments that do not fit, before anything moves, and UlyssesError for failures
    of peers.
    """
    check_tensor(x)
    return communicator_of(group, x.device).scatter_heads(x, heads=heads, seq_lens=seq_lens)


def gather_heads(
    x: torch.Tensor,
    group: GroupLike = None,
    *,
    heads: Sequence[Sequence[int]] | None = None,
    seq_lens: Sequence[int] | None = None,
) -> torch.Tensor:
    """Exchange the whole sequence of some heads for a part of the sequence of all heads: the way back of
    :func:`scatter_heads`.

    x: (B, S_global, H_local, D), any strides. ``heads`` must partition the heads; ``seq_lens`` as in scatter_heads.

    Returns (B, S_local, H, D), contiguous, owned by the caller. Differentiable; raises as scatter_heads does.
    """
    check_tensor(x)
    return communicator_of(group, x.device).gather_heads(x, heads=heads, seq_lens=seq_lens)
