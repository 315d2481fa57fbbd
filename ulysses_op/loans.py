"""Results that are views of targets, and what becomes of them when the target is written again."""

from __future__ import annotations

from collections.abc import Iterable
from sys import getrefcount

import torch

from .torch_compat import Shaped, can_invalidate_storage, invalidate_storage, storage_uses

LoanKey = tuple[int, str]  # (capture id or 0, tag)


class Lent:
    """A tensor on a target. Its ``data`` are lent, again and again, until somebody still has them when a loan ends."""

    __slots__ = ("_counts", "_storage", "_uses", "ended", "tensor")

    def __init__(self, shaped: Shaped, address: int) -> None:
        self.ended = False
        with torch.inference_mode(False):  # it outlives it
            self.tensor, self._storage = shaped.at(address)
        self._uses = storage_uses(self._storage)
        self._counts = getrefcount(self._storage), self._uses()

    def unused(self) -> bool:
        """Whether nobody has the memory through a tensor, a view of one, or a storage."""
        return (getrefcount(self._storage), self._uses()) == self._counts

    def invalidate(self, message: str) -> None:
        self.ended = True
        invalidate_storage(self._storage, message)


class Loan:
    """What is lent of a tag's targets, and the streams on which its results may be read: targets are not written again
    before these get there.
    """

    __slots__ = ("lent", "readers", "tag")

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.lent: Lent | None = None
        self.readers: set[int] = set()


class Loans:
    """What is lent of targets. When a loan has ended, every use of the tensor, or of a view of it, raises.

    Only storages of CUDA builds of torch can be made to raise; elsewhere nothing is lent.
    """

    def __init__(self, device: torch.device) -> None:
        self.possible = device.type == "cuda" and can_invalidate_storage()
        self._loans: dict[LoanKey, Loan] = {}

    def of(self, key: LoanKey) -> Loan:
        loan = self._loans.get(key)
        if loan is None:
            loan = self._loans[key] = Loan(key[1])
        return loan

    def within(self, capture_id: int) -> list[Loan]:
        return [loan for (scope, _), loan in self._loans.items() if scope == capture_id]

    def end(self, loans: Iterable[Loan], why: str) -> set[int]:
        """End loans; the streams on which their targets may still be read."""
        readers: set[int] = set()
        for loan in loans:
            lent = loan.lent
            if lent is not None:
                loan.lent = None
                if not lent.unused():
                    lent.invalidate(
                        f"this tensor was lent by a ulysses_op group as tag {loan.tag!r}, and its loan has ended: "
                        f"{why}. Use it before that, or clone it"
                    )
            if loan.readers:
                readers |= loan.readers
                loan.readers.clear()
        return readers

    def end_all(self, why: str) -> None:
        self.end(self._loans.values(), why)
