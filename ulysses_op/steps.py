"""What a group does with each of its submissions, worked out once for all groups that submit alike.

A group goes from step to step. Which one a submission leads to depends on the steps before it, on the tensor's kind and
on what is asked for it, so that one look-up tells everything: what is exchanged, whether it is the last one, what the
ranks compare. What is refused has no step: who finds one need not check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from operator import itemgetter
from typing import Any

import torch
from torch import is_grad_enabled

from .arguments import Asked
from .layout import Exchange

_MAX_KEPT = 1024

Terms = tuple[bool, bool, str]
"""How a result is wanted: owned; with what this rank would send to itself, too; and the exchange's name in a compiled
program, which the peers compare."""

LENT: Terms = (False, True, "")
OWNED: Terms = (True, True, "")

Picker = Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]


class Step:
    """One submission behind certain others. ``following`` holds the steps behind it, by their :func:`key_of`; ``route``
    and ``opened`` belong to the engine that moves it.
    """

    __slots__ = (
        *("_pickers", "before", "differentiable", "digest", "done", "dtype", "empty", "exchange", "final", "first"),
        *("following", "gradients", "name", "opened", "own_slice", "owned", "route", "submitted", "tag", "tags"),
    )

    def __init__(
        self,
        tags: tuple[str, ...],
        before: tuple[Step, ...],
        tag: str,
        exchange: Exchange,
        x: torch.Tensor,
        final: bool,
        terms: Terms,
    ) -> None:
        self.tags = tags
        self.before = before
        self.first = not before
        self.tag = tag
        self.submitted: tuple[str, ...] = (*(step.tag for step in before), tag)
        """The tags up to this one."""
        self.owned, self.own_slice, self.name = terms
        self.exchange = exchange
        self.dtype = x.dtype
        self.empty = not x.numel()
        self.differentiable = x.requires_grad and is_grad_enabled()
        self.gradients = self.differentiable or any(step.differentiable for step in before)
        """Whether this submission, or one before it, is differentiable."""
        self.owned = self.owned or self.differentiable
        self.final = final or len(before) + 1 == len(tags)
        # Whether the result is lent, and has the own slice, is this rank's own affair.
        self.digest = digest_of((tag, self.name, exchange.digest, x.dtype, self.differentiable, self.final))
        self.done = digest_of(("DONE", tags, *(step.digest for step in self.path)))
        """What DONE stands for behind this step: everything that was submitted, in order."""
        self.following: dict[Any, Step] = {}
        self._pickers: dict[tuple[str, ...], Picker] = {}
        self.route: Any = None
        self.opened: Any = None

    @property
    def path(self) -> tuple[Step, ...]:
        """All steps up to this one."""
        return (*self.before, self)

    def ready(self, captured: bool) -> int:
        """What READY in front of this step stands for: with the names, since READY opens the targets of all of them,
        and whether they are those of a CUDA graph."""
        return digest_of(("READY", self.tags, self.digest, captured))

    def picker_of(self, tags: tuple[str, ...]) -> Picker:
        """Takes what :meth:`ExchangeGroup.wait` gives for ``tags`` from the results of all submissions.

        Raises RuntimeError for tags that were not submitted.
        """
        try:
            return self._pickers[tags]
        except (KeyError, TypeError):
            pass
        wanted = tags or self.tags or self.submitted
        missing = [tag for tag in wanted if tag not in self.submitted]
        if missing:
            raise RuntimeError(
                f"wait() for tags {missing} that were not submitted; submitted are {describe(self.submitted)}"
            )
        order = [self.submitted.index(tag) for tag in wanted]
        picker = self._pickers[tags] = itemgetter(*order) if len(order) > 1 else lambda results: (results[order[0]],)
        return picker

    def compared(self, captured: bool) -> dict[str, str]:
        """What the ranks have to submit alike, by name, for people to read."""
        exchange = self.exchange
        return {
            "tag": repr(self.tag),
            "the group's names": str(self.tags),
            "direction": exchange.direction,
            "B": str(exchange.batch),
            "H": str(exchange.num_heads),
            "D": str(exchange.head_dim),
            "heads": str(exchange.heads),
            "seq_lens": str(exchange.seq_lens),
            "dtype": str(self.dtype),
            "requires_grad": str(self.differentiable),
            "final": str(self.final),
            "in a CUDA graph": str(captured),
            "name in the program": repr(self.name),
        }


class Steps:
    """The steps of one communicator's groups."""

    def __init__(self, max_tags: int) -> None:
        self._max_tags = max_tags
        self._firsts: dict[tuple[str, ...], dict[Any, Step]] = {}
        self._made = 0

    def first(self, tags: tuple[str, ...]) -> dict[Any, Step]:
        """What a group of these tags may begin with. Raises TypeError or ValueError for tags that it cannot have."""
        following: dict[Any, Step] | None
        try:
            following = self._firsts.get(tags)
        except TypeError:  # which is told by name
            following = None
        if following is None:
            check_tags(tags, self._max_tags)
            self._make_room()
            following = self._firsts[tags] = {}
        return following

    def add(self, following: dict[Any, Step], key: Any, step: Step) -> None:
        self._make_room()
        following[key] = step

    def _make_room(self) -> None:
        """Groups under way keep the steps that they have come from."""
        if self._made >= _MAX_KEPT:
            self._firsts.clear()
            self._made = 0
        self._made += 1


def check_tags(tags: tuple[str, ...], max_tags: int) -> None:
    """Raise TypeError or ValueError unless a group can have these tags."""
    for tag in tags:
        if not isinstance(tag, str):
            raise TypeError(f"a tag is {tag!r}: group() takes names, each as an argument of its own")
    if len(set(tags)) != len(tags):
        raise ValueError(f"the tags of a group must differ, got {tags}")
    if len(tags) > max_tags:
        raise ValueError(
            f"the group names {len(tags)} tags and needs as many targets, but max_targets is {max_tags}: "
            "create the communicator with a larger max_targets"
        )


def key_of(x: torch.Tensor, tag: str | None, asked: Asked | Exchange, final: bool, terms: Terms) -> Any:
    """What the next step depends on. Raises TypeError, AttributeError or RuntimeError for some of what is refused."""
    dtype = x.dtype
    lazy = x.is_neg() or (dtype.is_complex and x.is_conj())
    needs_gradient = x.requires_grad and is_grad_enabled()
    return tag, asked, final, terms, x.shape, x.stride(), dtype, x.device, type(x), lazy, needs_gradient


def is_plain(value: Any) -> bool:
    """Whether it is None, or tuples of integers: what is equal to such a value, and plain too, says the same for good.
    Others may be written after they were looked up, or be equal to what is accepted and refused themselves.
    """
    return value is None or type(value) is int or (type(value) is tuple and all(map(is_plain, value)))


def describe(tags: Sequence[str]) -> str:
    return ", ".join(map(repr, tags)) or "no tag yet"


def text_of(fields: Mapping[str, str]) -> str:
    """What :meth:`Step.compared` tells, as one line, without what is not so."""
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
