"""A group of tagged submissions that complete together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch

from .arguments import whole_numbers
from .layout import Direction, Exchange, HeadPlan

if TYPE_CHECKING:
    from types import TracebackType

    from .communicator import Communicator


class Submission:
    """One tensor on its way. ``state`` belongs to the engine that moves it."""

    __slots__ = (
        *("differentiable", "digest", "dtype", "exchange", "final", "met", "name", "own_slice", "owned", "state"),
        *("tag", "version", "x"),
    )

    def __init__(
        self,
        tag: str,
        x: torch.Tensor,
        exchange: Exchange,
        owned: bool,
        final: bool,
        name: str = "",
        own_slice: bool = True,
    ) -> None:
        self.tag = tag
        self.name = name
        self.final = final
        self.x = x
        self.dtype = x.dtype
        self.exchange = exchange
        self.differentiable = x.requires_grad and torch.is_grad_enabled()
        self.owned = owned or self.differentiable
        self.own_slice = own_slice
        # A view counts the writes to all of its base: those to Q while V travels are none of V's.
        self.version = None if x.is_inference() or x._is_view() else x._version
        # Whether the result is lent, and has the own slice, is this rank's own affair.
        self.digest = digest_of((tag, name, exchange.digest, x.dtype, self.differentiable, final))
        self.state: Any = None
        self.met = False  # the ranks have begun to meet on its behalf: of an error from then on they must hear

    def release(self) -> None:
        """Let go of the tensors: the group may outlive its results."""
        del self.x
        self.state = None

    def check_unchanged(self) -> None:
        if self.version is not None and self.x._version != self.version:
            raise RuntimeError(
                f"the tensor submitted as {self.tag!r} was modified in place before wait(): its "
                "copies may still be reading it"
            )


def text_of(fields: Mapping[str, str]) -> str:
    """What :meth:`ExchangeGroup.compared` tells, as one line, without what is not so."""
    return ", ".join(f"{name} {text}" for name, text in fields.items() if text not in ("False", "''", "()"))


_digests: dict[Any, int] = {}


def digest_of(value: Any) -> int:
    """64 bits of a value that has the same repr on every rank. Never zero, in neither half: the signals rely on it."""
    digest = _digests.get(value)
    if digest is None:
        if len(_digests) >= 4096:
            _digests.clear()
        number = int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), "little")
        digest = _digests[value] = number | (1 << 32) | 1
    return digest


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
    if not torch.compiler.is_compiling():
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


class ExchangeGroup:
    """Submissions under one handshake; made by :meth:`Communicator.group`, used as a context manager.

    The group begins at its first submission. The final submission is the one that completes the tags that the group
    names, or the one with ``final=True``, or, with neither, the last before :meth:`wait`.
    """

    def __init__(self, communicator: Communicator, tags: Sequence[str]) -> None:
        for tag in tags:
            if not isinstance(tag, str):
                raise TypeError(f"a tag is {tag!r}: group() takes names, each as an argument of its own")
        if len(set(tags)) != len(tags):
            raise ValueError(f"the tags of a group must differ, got {tuple(tags)}")
        self._communicator = communicator
        self.tags = tuple(tags)
        self.submissions: list[Submission] = []
        self._taken: set[str] = set()
        self._traced: dict[str, torch.Tensor] = {}  # under torch.compile: an op for each tag
        self.final = False
        self.waiting = False  # now, beneath a signal handler perhaps, or in another thread
        self.waited = False
        self.captured = False  # into a CUDA graph, whose targets are its own
        # For the flight record: nanoseconds since the epoch, 0 until then.
        self.begun_ns = self.complete_ns = self.delivered_ns = 0
        self.state: Any = None  # belongs to the engine that moves the group

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
        if torch.compiler.is_compiling():
            communicator = self._communicator
            self._traced[self._tag(tag)] = call_op(direction, x, communicator._where, heads, seq_lens)
            return
        self._communicator._submit(self, x, self._tag(tag), direction, heads, seq_lens, final)

    def wait(self, *tags: str) -> tuple[torch.Tensor, ...]:
        """The results, a tuple also where it is one: of ``tags`` in this order, else in the order in which the group
        names its tags, else as submitted.

        On CUDA the current stream waits, not the host. Without gradients, results on CUDA are lent: they are valid
        until this rank begins the next group that has the tag (the next group at all, if it names no tags); later
        uses raise RuntimeError. Elsewhere, and when a submitted tensor requires a gradient, the caller owns them.

        Raises PeerTimeoutError, PeerAbortError, MismatchError, and RuntimeError when called twice or with nothing
        submitted.
        """
        if torch.compiler.is_compiling():
            return tuple(self._traced[tag] for tag in tags or self.tags or self._traced)
        return self._communicator._wait(self, tags)

    def _tag(self, tag: str | None) -> str:
        taken = self._traced or self._taken
        if tag is None:
            left = [name for name in self.tags if name not in taken]
            tag = left[0] if left else str(len(taken))
        if self.tags and tag not in self.tags:
            raise ValueError(f"tag {tag!r} is not one of the tags that this group names, {self.tags}")
        if tag in taken:
            raise RuntimeError(f"tag {tag!r} was submitted to this group already: each tag is submitted once a group")
        return tag

    def add(self, submission: Submission) -> None:
        self.submissions.append(submission)
        self._taken.add(submission.tag)

    def has(self, tag: str) -> bool:
        """Whether ``tag`` was submitted."""
        return tag in self._taken

    def is_next_final(self, final: bool) -> bool:
        """Whether the next submission is the last one."""
        return final or len(self.submissions) + 1 == len(self.tags)

    def compared(self, submission: Submission) -> dict[str, str]:
        """What the ranks have to submit alike as ``submission``, by name, for people to read."""
        exchange = submission.exchange
        return {
            "tag": repr(submission.tag),
            "the group's names": str(self.tags),
            "direction": exchange.direction,
            "B": str(exchange.batch),
            "H": str(exchange.num_heads),
            "D": str(exchange.head_dim),
            "heads": str(exchange.heads),
            "seq_lens": str(exchange.seq_lens),
            "dtype": str(submission.dtype),
            "requires_grad": str(submission.differentiable),
            "final": str(submission.final),
            "in a CUDA graph": str(self.captured),
            "name in the program": repr(submission.name),
        }

    def submitted(self) -> str:
        """All of it for people to read."""
        return "; ".join(text_of(self.compared(submission)) for submission in self.submissions)

    def ready_digest(self, first: Submission) -> int:
        """What READY stands for: with the names, since READY opens the targets of all of them, and whether they are
        those of a CUDA graph."""
        return digest_of(("READY", self.tags, first.digest, self.captured))

    def done_digest(self) -> int:
        """What DONE stands for: everything that was submitted, in order."""
        return digest_of(("DONE", self.tags, *(submission.digest for submission in self.submissions)))

    def submitted_tags(self) -> tuple[str, ...]:
        return tuple(submission.tag for submission in self.submissions)

    def describe(self) -> str:
        return ", ".join(repr(submission.tag) for submission in self.submissions) or "no tag yet"

    def __enter__(self) -> ExchangeGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not torch.compiler.is_compiling():
            self._communicator._leave(self, error)
