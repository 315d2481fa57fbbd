"""An attention backend of diffusers' dispatch that exchanges heads for sequence around another backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from diffusers.models import attention_dispatch

from ...layout import HeadPlan, head_plan
from .boundary import all_gather
from .streams import Streams

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from ...communicator import Communicator
    from ...exchange_group import ExchangeGroup

_serial: Iterator[int] = count()


class ParallelConfig:
    """What processors hand to the dispatch for attentions over split sequences, in place of diffusers' own."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            "this transformer was given to ulysses_op's parallelize(), and another attention backend afterwards: call "
            f"set_attention_backend() before parallelize() ({name} is of diffusers' own context parallelism)"
        )


@dataclass
class _Submitted:
    """A value that left as soon as it was projected."""

    projection: _ValueProjection
    group: ExchangeGroup
    value: torch.Tensor
    lengths: list[int]


class UlyssesAttention:
    """The exchange around attention, for the processors of one model.

    Queries, keys and values (B, S_local, H, D) become (B, S, H_local, D), attention runs in the backend that the
    processor had, and its result goes the way back. Values go first. Keys and values that are no split sequence are
    taken to be on every rank already: such an attention is local.
    """

    def __init__(self, communicator: Communicator, streams: Streams) -> None:
        self._communicator = communicator
        self._streams = streams
        self._plans: dict[tuple[int, int], HeadPlan | None] = {}
        self._projected: tuple[_ValueProjection, torch.Tensor] | None = None
        self._submitted: _Submitted | None = None

    def attend(self, inner: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rest: Any) -> Any:
        """Attention of (B, S_local, H, D) over the whole sequence. ``rest``: the dispatch's other arguments."""
        if self._streams.is_local(query.shape[1], key.shape[1]):
            self.local()
            return attention(inner, query, key, value, rest)
        lengths = self._streams.lengths_of(query.shape[1])
        if lengths is None:
            raise ValueError(f"an attention has {query.shape[1]} queries, which is no part of what the plan has split")
        key_lengths = lengths if key.shape[1] == query.shape[1] else self._streams.lengths_of(key.shape[1])
        if key_lengths is None:
            self.local()
            return attention(inner, query, key, value, rest)
        if rest.get("is_causal") and self._streams.is_joint(key_lengths):
            raise ValueError("a causal attention over several sequences side by side is not supported")
        plan = self._plan(query.shape[2], key.shape[2])
        heads = (None, None) if plan is None else (plan.q, plan.kv)
        query, key, value = self._scatter(query, key, value, heads, (lengths, key_lengths))
        if rest.get("attn_mask") is not None:
            rest = {**rest, "attn_mask": self._mask(rest["attn_mask"], query, key, heads[0], key_lengths)}
        if query.shape[2] == 0:  # fewer heads than ranks
            out = query.new_empty((*query.shape[:3], value.shape[3]))
        else:
            out = attention(inner, query, key, value, rest)
        return self._gather(out, heads[0], lengths)

    def _plan(self, num_heads: int, num_kv_heads: int) -> HeadPlan | None:
        if num_heads == num_kv_heads and num_heads % self._communicator.world_size == 0:
            return None
        found = self._plans.get((num_heads, num_kv_heads))
        if found is None:
            found = self._plans[num_heads, num_kv_heads] = head_plan(
                num_heads, num_kv_heads, self._communicator.world_size
            )
        return found

    def _scatter(self, query: Any, key: Any, value: Any, heads: Any, lengths: Any) -> tuple[torch.Tensor, ...]:
        of_query = {"heads": heads[0], "seq_lens": _unless_equal(lengths[0])}
        of_key = {"heads": heads[1], "seq_lens": _unless_equal(lengths[1])}
        held = value
        query = self._streams.submitted(query, lengths[0])
        key, value = self._streams.submitted(key, lengths[1]), self._streams.submitted(value, lengths[1])
        if torch.compiler.is_compiling():
            exchange = self._communicator.scatter_heads
            return exchange(query, **of_query), exchange(key, **of_key), exchange(value, **of_key)
        early, self._submitted = self._submitted, None
        projected, self._projected = self._projected, None
        if early is not None:
            with early.group as group:
                group.submit(query, tag="q", **of_query)
                group.submit(key, tag="k", **of_key)
                exchanged = group.wait("q", "k", "v")
            if _is_same(early.value, held) and early.lengths == lengths[1]:
                return exchanged
            early.projection.forget()  # the value was made of more than this projection
        if projected is not None:
            projected[0].learn(projected[1], held, query.shape[2])
        with self._communicator.group("v", "q", "k") as group:
            group.submit(value, tag="v", **of_key)
            group.submit(query, tag="q", **of_query)
            group.submit(key, tag="k", **of_key)
            return group.wait("q", "k", "v")

    def _gather(self, out: torch.Tensor, heads: Any, lengths: list[int]) -> torch.Tensor:
        arguments = {"heads": heads, "seq_lens": _unless_equal(lengths)}
        if torch.compiler.is_compiling():
            return self._streams.held(self._communicator.gather_heads(out, **arguments), lengths)
        # Lent, where it can be: the output projection reads it before the next attention writes it.
        with self._communicator.group("o") as group:
            group.submit(out, tag="o", direction="gather_heads", **arguments)
            return self._streams.held(group.wait()[0], lengths)

    def _mask(self, mask: torch.Tensor, query: Any, key: Any, heads: Any, lengths: list[int]) -> torch.Tensor:
        """A mask of this rank's keys, or of all of them in the order of the model that is not split, as one of the
        gathered keys: (B, S) or (B, H, S_q, S).
        """
        if mask.ndim not in (2, 4):
            raise ValueError(f"an attention mask has {mask.ndim} dimensions: (B, S) or (B, H, S_q, S) are supported")
        if mask.shape[-1] == sum(lengths):
            mask = self._streams.rank_by_rank(mask, mask.ndim - 1)
        elif mask.shape[-1] == self._streams.number_held(lengths) and mask.numel() == mask.shape[0] * mask.shape[-1]:
            own = self._streams.submitted(mask.flatten(1).unsqueeze(2), lengths)
            whole = all_gather(own, lengths, self._communicator).squeeze(2)
            mask = whole if mask.ndim == 2 else whole[:, None, None, :]
        elif mask.shape[-1] != 1:
            raise ValueError(
                f"an attention mask {tuple(mask.shape)} fits neither {lengths} keys nor a rank's part of them"
            )
        if mask.ndim == 4 and mask.shape[2] != 1:
            if mask.shape[2] != query.shape[1]:
                raise ValueError(f"an attention mask {tuple(mask.shape)} is of this rank's queries: all are needed")
            mask = self._streams.rank_by_rank(mask, 2)
        if mask.ndim == 4 and mask.shape[1] != 1:
            rank = self._communicator.rank
            mask = mask.narrow(1, rank * query.shape[2] if heads is None else heads[rank][0], query.shape[2])
        return mask

    # Values that leave early.

    def add_hooks(self, module: torch.nn.Module) -> list[RemovableHandle]:
        """Send values off as soon as ``module``, an attention, has projected them, while it norms and rotates queries
        and keys; from the second forward on, once it has turned out that it takes its values from a projection as
        they are.
        """
        projections = [getattr(module, name, None) for name in ("to_v", "to_qkv")]
        return [
            projection.register_forward_hook(_ValueProjection(self))
            for projection in projections
            if isinstance(projection, torch.nn.Module)
        ]

    def end_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """A forward hook of the model, called after an exception too: values that are on their way then are of a group
        that peers must not wait for.
        """
        if torch.compiler.is_compiling() or self._submitted is None:
            return
        early, self._submitted = self._submitted, None
        error = RuntimeError(f"{type(module).__name__} ended without the attention for which values were submitted")
        early.group.__exit__(RuntimeError, error, None)

    def projected(self, projection: _ValueProjection, output: torch.Tensor) -> None:
        """``projection`` made ``output``, (B, S_local, C): maybe values."""
        if self._submitted is not None:
            return
        value = projection.value_in(output)
        lengths = None if value is None else self._streams.lengths_of(value.shape[1])
        if value is None or lengths is None:
            self._projected = (projection, output)
            return
        plan = self._plan(projection.num_heads, value.shape[2])
        group = self._communicator.group("v", "q", "k")
        own = self._streams.submitted(value, lengths)
        group.submit(own, tag="v", heads=None if plan is None else plan.kv, seq_lens=_unless_equal(lengths))
        self._submitted = _Submitted(projection, group, value, lengths)

    def local(self) -> None:
        """An attention of this model needs no exchange."""
        self._projected = None


class _ValueProjection:
    """A forward hook of a projection, which finds out whether values are columns of its output."""

    def __init__(self, attention: UlyssesAttention) -> None:
        self._attention = attention
        self._place: tuple[int, int, int] | None = None  # first column, heads, head dimension
        self.num_heads = 0  # of the queries

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and isinstance(output, torch.Tensor) and output.ndim == 3:
            self._attention.projected(self, output)

    def learn(self, output: torch.Tensor, value: torch.Tensor, num_heads: int) -> None:
        """An attention with ``num_heads`` query heads took ``value`` after ``output`` was made."""
        first = (value.data_ptr() - output.data_ptr()) // value.element_size()
        num_kv_heads, head_dim = value.shape[2:]
        if first < 0 or first + num_kv_heads * head_dim > output.shape[2] or value.dtype != output.dtype:
            return
        self._place, self.num_heads = (first, num_kv_heads, head_dim), num_heads
        found = self.value_in(output)
        if found is None or not _is_same(found, value):
            self.forget()

    def value_in(self, output: torch.Tensor) -> torch.Tensor | None:
        """The values (B, S_local, H, D) in ``output``, a view, if it is known where they are."""
        if self._place is None:
            return None
        first, num_kv_heads, head_dim = self._place
        return output.narrow(2, first, num_kv_heads * head_dim).unflatten(2, (num_kv_heads, head_dim))

    def forget(self) -> None:
        self._place = None


class Backend:
    """A name of diffusers' attention dispatch that stands for an attention exchanged around ``inner``: a backend's
    name, or None for the active one.
    """

    def __init__(self, exchanged: UlyssesAttention, inner: Any) -> None:
        registry = attention_dispatch._AttentionBackendRegistry
        value = f"ulysses_op.{next(_serial)}"
        # The dispatch takes members of its enumeration only, which cannot be extended: this one is made beside it.
        self.name = str.__new__(attention_dispatch.AttentionBackendName, value)
        self.name._name_ = self.name._value_ = value

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **rest: Any) -> torch.Tensor:
            if rest.pop("_parallel_config", None) is None:
                exchanged.local()
                return attention(inner, query, key, value, rest)
            return exchanged.attend(inner, query, key, value, rest)

        registry._backends[self.name] = attend
        registry._constraints[self.name] = []
        registry._supported_arg_names[self.name] = set().union(*registry._supported_arg_names.values())

    def remove(self) -> None:
        registry = attention_dispatch._AttentionBackendRegistry
        for table in (registry._backends, registry._constraints, registry._supported_arg_names):
            table.pop(self.name, None)


_DISPATCHED = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def attention(inner: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rest: Any) -> torch.Tensor:
    """diffusers' dispatch to the backend ``inner``, on this rank alone."""
    known = {name: rest[name] for name in _DISPATCHED if name in rest}
    others = {name: rest[name] for name in rest if name not in _DISPATCHED}
    return attention_dispatch.dispatch_attention_fn(
        query, key, value, **known, attention_kwargs=others, backend=inner, parallel_config=None
    )


def _unless_equal(lengths: Sequence[int]) -> list[int] | None:
    return None if all(length == lengths[0] for length in lengths) else list(lengths)


def _is_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory."""
    return (
        x.data_ptr() == y.data_ptr()
        and x.shape == y.shape
        and all(a == b for a, b, size in zip(x.stride(), y.stride(), x.shape, strict=True) if size > 1)
    )
