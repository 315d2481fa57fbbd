"""A group of tagged submissions that complete together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from .arguments import Asked, whole_numbers
from .layout import Direction, Exchange, HeadPlan
from .steps import LENT, Step, Terms, check_tags, describe, is_plain, key_of, text_of

if TYPE_CHECKING:
    from types import TracebackType

    from .communicator import Communicator


class Submission:
    """One tensor on its way. What is declared below belongs to the engine that moves it; ``result`` is where the result
    will be, once delivered.
    """

    __slots__ = ("in_place", "met", "result", "source", "state", "step", "stream", "target", "version", "x")

    result: torch.Tensor  # from the engine's submit on
    source: torch.Tensor  # the input, or a copy of it that copies can read
    stream: int  # that the input came on
    target: Any
    state: Any

    def __init__(self, step: Step, x: torch.Tensor) -> None:
        self.step = step
        self.x = x
        # A view counts the writes to all of its base: those to Q while V travels are none of V's.
        self.version = None if x._is_view() or x.is_inference() else x._version
        self.met = False  # the ranks have begun to meet on its behalf: of an error from then on they must hear
        self.in_place = False  # the result is where the peers write it

    def check_unchanged(self) -> None:
        if self.version is not None and self.x._version != self.version:
            raise RuntimeError(
                f"the tensor submitted as {self.step.tag!r} was modified in place before wait(): its "
                "copies may still be reading it"
            )


def call_op(
    direction: Direction,
    x: torch.Tensor,
    where: tuple[str, int, int],
    heads: Sequence[Sequence[int]] | None,
    seq_lens: Sequence[int] | None,
) -> torch.Tensor:
    """Run the op of one exchange; ``where`` is the communicator's name, world size and rank. See ops.py."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}, a tensor is needed")
    flat: list[int] = []
    if isinstance(heads, HeadPlan):
        raise TypeError("heads is a HeadPlan: pass its .q for queries and the output, its .kv for keys and values")
    if not is_compiling():
        heads, seq_lens = whole_numbers("heads", heads, 2), whole_numbers("seq_lens", seq_lens, 1)
    else:  # numbers may be symbols
        for name, value in (("heads", heads), ("seq_lens", seq_lens)):
            if value is not None and not isinstance(value, (list, tuple)):
                raise TypeError(f"{name} is {value!r}, a list or tuple is needed")
    if heads is not None:
        if len(heads) != where[1]:
            raise ValueError(f"heads must have one (start, stop) for each of {where[1]} ranks, got {len(heads)}")
        for peer, pair in enumerate(heads):
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise ValueError(f"heads[{peer}] must be (start, stop), got {pair!r}")
            flat += pair
    lengths = list(seq_lens) if seq_lens is not None else []
    if seq_lens is not None and len(lengths) != where[1]:
        raise ValueError(f"seq_lens must have one length for each of {where[1]} ranks, got {len(lengths)}")
    communicator, world_size, rank = where
    if not flat and not lengths:
        rank = -1
    if direction == "scatter_heads":
        return torch.ops.ulysses_op.scatter_heads.default(x, communicator, world_size, rank, flat, lengths)
    return torch.ops.ulysses_op.gather_heads.default(x, communicator, world_size, rank, flat, lengths, False)


_NOTHING: dict[Any, Step] = {}
"""What follows in a group to which nothing more can be submitted."""


class ExchangeGroup:
    """Submissions under one handshake; made by :meth:`Communicator.group`, used as a context manager.

    The group begins at its first submission. The final submission is the one that completes the tags that the group
    names, or the one with ``final=True``, or, with neither, the last before :meth:`wait`.
    """

    step: Step | None = None  # the last one
    final = False
    waiting = False  # now, beneath a signal handler perhaps, or in another thread
    waited = False
    # For the flight record: nanoseconds since the epoch, 0 until then.
    begun_ns = complete_ns = delivered_ns = 0
    # These belong to the engine that moves the group.
    number = 0
    capture_id = 0  # of the CUDA graph that it is captured into, whose targets are its own
    stream = 0  # that the first input came on
    elsewhere = False  # others came on others
    state: Any = None
    _traced: dict[str, torch.Tensor] | None = None  # under torch.compile: an op for each tag

    def __init__(self, communicator: Communicator, tags: tuple[str, ...]) -> None:
        """Raises TypeError or ValueError for tags that a group cannot have."""
        self._communicator = communicator
        self.tags = tags
        if is_compiling():
            check_tags(tags, communicator._max_targets)
            self.following: dict[Any, Step] = {}
        else:
            self.following = communicator._steps.first(tags)
        self.submissions: list[Submission] = []  # under way

    def submit(
        self,
        x: torch.Tensor,
        tag: str | None = None,
        *,
        direction: Direction = "scatter_heads",
        heads: Sequence[Sequence[int]] | None = None,
        seq_lens: Sequence[int] | None = None,
        final: bool = False,
    ) -> None:
        """Start to exchange ``x`` under ``tag`` and return at once; :meth:`wait` gives the result.

        x: (B, S_local, H, D) to scatter heads, (B, S_global, H_local, D) to gather them; any strides. It must not be
           written until wait(). ``heads`` and ``seq_lens`` are as in :func:`ulysses_op.scatter_heads`.
        tag: names the submission; None takes the next name that the group has left, or the number of the submission.

        Raises ValueError or TypeError, before anything moves, for arguments that do not fit, and RuntimeError for a
        tag that was submitted already, or when the group is final or closed.
        """
        if is_compiling():
            if self._traced is None:
                self._traced = {}
            tag = self.free_tag(tag, self._traced)
            self._traced[tag] = call_op(direction, x, self._communicator._where, heads, seq_lens)
            return
        if type(x) is AsyncCollectiveTensor:
            x = x.wait()
        asked: Asked = (direction, heads, seq_lens, False)
        if is_plain(heads) and is_plain(seq_lens):
            self.submit_as(x, tag, asked, bool(final))
        else:
            step = self._communicator._next_step(self, x, tag, asked, bool(final), LENT)
            self._communicator._submit(self, x, step)

    def submit_as(
        self, x: torch.Tensor, tag: str | None, asked: Asked | Exchange, final: bool = False, terms: Terms = LENT
    ) -> Submission:
        """:meth:`submit` for those who ask in other words; ``asked`` is plain, see :func:`steps.is_plain`."""
        step: Step | None
        try:
            step = self.following[key_of(x, tag, asked, final, terms)]
            if not (x.data_ptr() or step.empty):
                step = None
        except (AttributeError, KeyError, RuntimeError, TypeError):  # a list among them, or a tensor that is refused
            step = None
        if step is None:
            step = self._communicator._next_step(self, x, tag, asked, final, terms)
        return self._communicator._submit(self, x, step)

    def wait(self, *tags: str) -> tuple[torch.Tensor, ...]:
        """The results, a tuple also where it is one: of ``tags`` in this order, else in the order in which the group
        names its tags, else as submitted.

        On CUDA the current stream waits, not the host. Without gradients, results on CUDA are lent: they are valid
        until this rank begins the next group that has the tag (the next group at all, if it names no tags); later
        uses raise RuntimeError. Elsewhere, and when a submitted tensor requires a gradient, the caller owns them.

        Raises PeerTimeoutError, PeerAbortError, MismatchError, and RuntimeError when called twice or with nothing
        submitted.
        """
        if is_compiling():
            traced = self._traced or {}
            return tuple(traced[tag] for tag in tags or self.tags or traced)
        return self._communicator._wait(self, tags)

    def free_tag(self, tag: str | None, taken: Collection[str]) -> str:
        """The tag of a submission behind those of the tags that are taken. Raises ValueError or RuntimeError where it
        may not have the one that it is to have.
        """
        if tag is None:
            left = [name for name in self.tags if name not in taken]
            tag = left[0] if left else str(len(taken))
        if self.tags and tag not in self.tags:
            raise ValueError(f"tag {tag!r} is not one of the tags that this group names, {self.tags}")
        if tag in taken:
            raise RuntimeError(f"tag {tag!r} was submitted to this group already: each tag is submitted once a group")
        return tag

    @property
    def captured(self) -> bool:
        return self.capture_id != 0

    @property
    def path(self) -> tuple[Step, ...]:
        """What was submitted, also once it is delivered."""
        return self.step.path if self.step is not None else ()

    @property
    def submitted(self) -> tuple[str, ...]:
        """The tags of it."""
        return self.step.submitted if self.step is not None else ()

    def close(self) -> None:
        """Nothing more is submitted to the group."""
        self.final = True
        self.following = _NOTHING

    def release(self) -> None:
        """Nobody waits for the group any more. It lets go of the tensors: it may outlive its results."""
        self.waited = True
        self.following = _NOTHING
        self.submissions = []

    def has(self, tag: str) -> bool:
        """Whether ``tag`` was submitted."""
        return tag in self.submitted

    def told(self) -> str:
        """All that was submitted, for people to read."""
        return "; ".join(text_of(step.compared(self.captured)) for step in self.path)

    def describe(self) -> str:
        return describe(self.submitted)

    def __enter__(self) -> ExchangeGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.waited and not is_compiling():
            self._communicator._leave(self, error)
