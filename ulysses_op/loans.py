"""Results that are views of targets, and what becomes of them when the target is written again."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .torch_compat import can_invalidate_storage, invalidate_storage

LoanKey = tuple[int, str]  # (capture id or 0, tag)


class Loans:
    """What is lent of targets. When a loan has ended, every use of the tensor, or of a view of it, raises.

    Only storages of CUDA builds of torch can be made to raise; elsewhere nothing is lent.
    """

    def __init__(self, device: torch.device) -> None:
        self.possible = device.type == "cuda" and can_invalidate_storage()
        self._open: dict[LoanKey, list[torch.UntypedStorage]] = {}

    def open(self, key: LoanKey, storage: torch.UntypedStorage) -> None:
        """Lend a tensor on ``storage``, which lies on a target."""
        self._open.setdefault(key, []).append(storage)

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
