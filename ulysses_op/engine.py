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
    def submit(self, group: ExchangeGroup, submission: Submission) -> None: ...
    def result_of(self, submission: Submission) -> torch.Tensor:
        """Where the submission's result will be, once delivered."""

    def finish(self, group: ExchangeGroup) -> None: ...
    def deliver(self, group: ExchangeGroup) -> list[torch.Tensor]: ...
    def abandon(self, group: ExchangeGroup) -> None: ...
    def check(self, group: ExchangeGroup | None) -> None: ...
    def abort(self, kind: str, message: str) -> None: ...
    def close(self, grace_s: float) -> None: ...
