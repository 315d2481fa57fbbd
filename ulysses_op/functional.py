"""The exchange as two functions, eager and under torch.compile, over a communicator kept for each process group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .exchange_group import call_op
from .process_groups import GroupLike, identify_group


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

    Returns (B, S_global, H_local, D), contiguous, owned by the caller; the same as gathering x along the sequence from
    all ranks and then slicing this rank's heads. Differentiable: the backward is :func:`gather_heads`, which adds up
    the gradients of replicated heads.

    Raises ValueError or TypeError for arguments that do not fit, before anything moves, and UlyssesError for failures
    of peers.
    """
    return call_op("scatter_heads", x, identify_group(group), heads, seq_lens)


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
    return call_op("gather_heads", x, identify_group(group), heads, seq_lens)
