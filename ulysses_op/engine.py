"""What a communicator asks of the backend that moves its tensors."""

from __future__ import annotations

from typing import Protocol

import torch

from .exchange_group import ExchangeGroup, Submission


class Engine(Protocol):
    """How submissions move. The communicator calls it in protocol order and owns what happens on errors."""

    backend: str
    rank: int
    world_size: int

    def prepare(self, group: ExchangeGroup, submission: Submission) -> None: ...
    def submit(self, group: ExchangeGroup, submission: Submission) -> None:
        """Sets the submission's ``result``. Checks, where it is the group's first."""

    def finish(self, group: ExchangeGroup) -> None: ...
    def deliver(self, group: ExchangeGroup) -> list[torch.Tensor]:
        """Checks behind the exchange."""

    def abandon(self, group: ExchangeGroup) -> None: ...
    def check(self, group: ExchangeGroup | None) -> None:
        """Raises if the exchange has failed."""

    def abort(self, kind: str, message: str) -> None: ...
    def close(self, grace_s: float) -> None: ...
