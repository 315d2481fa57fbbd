"""Results that are views of targets, and what becomes of them when the target is written again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .mapping import PeerBuffer
from .torch_compat import can_invalidate_storage, invalidate_storage, tensor_at

LoanKey = tuple[int, str]  # (capture id or 0, tag)


class Loans:
    """Lends views of targets and ends the loans: from then on every use of the view, or of a view of it, raises.

    Only storages of CUDA builds of torch can be made to raise; elsewhere nothing is lent.
    """

    def __init__(self, device: torch.device) -> None:
        self.possible = device.type == "cuda" and can_invalidate_storage()
        self._device = device
        self._open: dict[LoanKey, list[torch.UntypedStorage]] = {}

    def lend(
        self, key: LoanKey, target: PeerBuffer, rank: int, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        view = tensor_at(target.addresses[rank], target.nbytes, tuple(shape), dtype, self._device)
        self._open.setdefault(key, []).append(view.untyped_storage())
        return view

    def keys(self) -> list[LoanKey]:
        return list(self._open)

    def end(self, keys: Iterable[LoanKey], why: str) -> None:
        for key in keys:
            for storage in self._open.pop(key, ()):
                invalidate_storage(
                    storage,
                    f"this tensor was lent by a ulysses_op group as tag {key[1]!r}, and its loan has ended: {why}. "
                    "Use it before that, or clone it",
                )
