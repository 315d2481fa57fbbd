"""The groups behind the ops submit and wait_: several may be under way at once, and results may be lent to a compiler.

They run on a communicator beside the one they are asked of: functional exchanges may be scheduled between a submission
and its wait, and the groups of one communicator do not nest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from .arguments import Asked
from .communicator import Communicator
from .errors import UlyssesError
from .exchange_group import ExchangeGroup

complete_at_submit = False
"""Makes each submission a group of its own that is complete when submit returns: for tools that look at a submission's
result at once, such as opcheck. On all ranks alike."""


class AsyncExchange:
    """Submissions and waits in the order in which a compiled graph runs them."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._open: ExchangeGroup | None = None

    def submit(
        self,
        x: torch.Tensor,
        asked: Asked,
        tag: str,
        tags: tuple[str, ...],
        name: str,
        own_slice: bool,
        lend: bool,
    ) -> torch.Tensor:
        """Submit ``x`` as ``tag`` of the group of ``tags``, which begins with the first; where its result will be.

        name: of the exchange in the program, which the peers compare: graphs that order the same exchanges in two ways
        give them the same tags.

        own_slice: whether the result has what this rank would send to itself, too.

        lend: the result may be the target itself; the caller sees to it that it is used for the last time before the
        next submission with that tag and direction.
        """
        communicator, x = self.communicator, x.detach() if x.requires_grad else x
        if complete_at_submit:
            return communicator._exchange([(tag, x, asked)])[0]
        group = self._open
        if group is None:
            group = self._open = communicator.group(*tags)
        elif group.tags != tags or group.has(tag):
            self._open = None
            error = RuntimeError(
                f"tag {tag!r} is submitted while the group of {group.describe()} is still open: the code that began it "
                "was left before its last submission, perhaps by an exception"
            )
            communicator._break(error)
            raise error
        try:
            submission = group.submit_as(x, tag, asked, terms=(not lend, own_slice, name))
        except BaseException:
            self._open = None
            raise
        if group.final:
            self._open = None
        return submission.result

    def wait(self, targets: Sequence[torch.Tensor], tags: tuple[str, ...]) -> None:
        """Complete the group of ``tags``; its results are in ``targets`` for work that is enqueued from here on.

        Raises RuntimeError if no such group is under way.
        """
        if complete_at_submit:
            return
        group = self.communicator._group_of(tags)
        if group is self._open:
            self._open = None
        results = self.communicator._wait(group, ())
        for target, result, step in zip(targets, results, group.path, strict=True):
            if target.data_ptr() != result.data_ptr():  # a compiler has copied it, and what the result lacks is there
                everywhere = (slice(None),)
                for region in [everywhere] if step.own_slice else step.exchange.peer_dests(self.communicator.rank):
                    target[region].copy_(result[region])

    def leave(self, error: BaseException) -> None:
        """The code that submits was left by ``error``: it neither submits nor waits for what is under way any more."""
        self._open = None
        for group in tuple(self.communicator._groups):
            with contextlib.suppress(UlyssesError):  # the error that is on its way tells more
                self.communicator._leave(group, error)


def beside(communicator: Communicator) -> AsyncExchange:
    """The asynchronous exchanges of the communicator's ranks, with its settings; they end with it."""
    if communicator._companion is None:
        companion = Communicator(
            communicator._group(),
            backend=communicator._requested,
            max_targets=communicator._max_targets,
            timeout_s=communicator._timeout_s,
        )
        companion._pipelined = True
        communicator._companion = companion
        communicator._async_exchange = AsyncExchange(companion)
    exchange: AsyncExchange = communicator._async_exchange
    return exchange
