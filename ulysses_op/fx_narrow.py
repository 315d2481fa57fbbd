"""A part of a value, computed by itself: a slice of a node moved up to where the node's values come from.

    narrow(rope(norm(x)), heads 2 to 4)  ->  rope(norm(x[heads 2 to 4]))

It goes through what computes element by element, through reductions over other dimensions, and through views. What else
a value comes from is computed whole, and a slice of it is taken.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from .fx_nodes import call, is_static, is_view, value

_ATEN = torch.ops.aten
_COPIES = (_ATEN.clone.default, _ATEN._to_copy.default, _ATEN.alias.default, _ATEN.detach.default)
_RESHAPES = (_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default)
_SPLITS = (_ATEN.split.Tensor, _ATEN.split_with_sizes.default)
_MOMENTS = _ATEN.var_mean.correction


class Span(NamedTuple):
    """The elements from ``start`` to ``stop`` of dimension ``dim``, counted from the first."""

    dim: int
    start: int
    stop: int


@dataclass
class _Step:
    """How a span of a node is computed: by its op with ``arguments``, of which those in ``parts`` are narrowed. Without
    arguments it is the one part itself.
    """

    parts: dict[Node, Span]
    arguments: Sequence[Any] | None


def computed_in_part(node: Node, span: Span) -> set[Node]:
    """What :func:`narrow` would compute in part: not what costs nothing, nor what is computed whole."""
    found: set[Node] = set()
    seen: set[tuple[Node, Span]] = set()
    stack = [(node, span)]
    while stack:
        state = stack.pop()
        step = _step(*state) if state not in seen else None
        seen.add(state)
        if step is not None:
            stack += step.parts.items()
            if not is_view(state[0]):
                found.add(state[0])
    return found


def narrow(graph: Graph, node: Node, span: Span) -> Node:
    """A node with the span of ``node``'s value, placed where ``graph`` inserts, with all that it needs anew."""
    made: dict[tuple[Node, Span], Node] = {}
    stack = [(node, span)]
    while stack:
        state = stack[-1]
        step = _step(*state)
        missing = [part for part in step.parts.items() if part not in made] if step is not None else []
        if state in made or not missing:
            stack.pop()
            made[state] = made.get(state) or _make(graph, *state, step, made)
        stack += missing
    return made[node, span]


def _make(graph: Graph, node: Node, span: Span, step: _Step | None, made: dict[tuple[Node, Span], Node]) -> Node:
    if step is None:
        return call(graph, _ATEN.slice.Tensor, node, *span)
    replaced = {part: made[part, its_span] for part, its_span in step.parts.items()}
    if step.arguments is None:
        (only,) = replaced.values()
        return only
    arguments = pytree.tree_map_only(Node, lambda each: replaced.get(each, each), tuple(step.arguments))
    # What is narrowed is not dense, so that a view of it may not exist.
    op: Any = _ATEN.reshape.default if node.target in _RESHAPES else node.target
    return call(graph, op, *arguments, **node.kwargs)


def _step(node: Node, span: Span) -> _Step | None:
    """None for what is computed whole."""
    target: Any = node.target
    operands = [value(used) for used in node.all_input_nodes]
    if node.op != "call_function" or not operands or any(isinstance(each, Node) for each in node.kwargs.values()):
        return None
    if target is operator.getitem:
        return _result(node, span)
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return None
    if not is_static(*(operand for operand in operands if isinstance(operand, torch.Tensor))):
        return None
    if torch.Tag.pointwise in target.tags or target in _COPIES:
        return _pointwise(node, span)
    rule = _RULES.get(target)
    return None if rule is None else rule(node, span)


def _pointwise(node: Node, span: Span) -> _Step | None:
    parts = {}
    for used in node.all_input_nodes:
        operand = value(used)
        if isinstance(operand, torch.Tensor):
            dim = span.dim - value(node).dim() + operand.dim()
            if dim >= 0 and operand.shape[dim] != 1:
                parts[used] = span._replace(dim=dim)
    return _Step(parts, node.args) if parts else None


def _reduction(node: Node, span: Span) -> _Step:
    keeps = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    source, rank = _source(node), value(_source(node)).dim()
    given: Any = node.args[1] if len(node.args) > 1 else None
    reduced = {dim % rank for dim in given} if given else set(range(rank))
    kept = [dim for dim in range(rank) if keeps or dim not in reduced]
    return _Step({source: span._replace(dim=kept[span.dim])}, node.args)


def _result(node: Node, span: Span) -> _Step | None:
    """Of one of several results."""
    made, index = node.args
    assert isinstance(made, Node)
    if made.target is _MOMENTS and is_static(value(_source(made))):
        return _Step({made: span}, node.args)
    if made.target not in _SPLITS or not is_static(value(_source(made))):
        return None
    dim = _dim(made, 2, value(node).dim())
    if span.dim != dim:
        return _Step({made: span}, node.args)
    before = sum(result.shape[dim] for result in value(made)[:index])
    return _Step({_source(made): Span(dim, before + span.start, before + span.stop)}, None)


def _as_it_is(node: Node, span: Span) -> _Step:
    """Of all results of a split in another dimension."""
    return _Step({_source(node): span}, node.args)


def _reshape(node: Node, span: Span) -> _Step | None:
    source, sizes = _source(node), list(value(node).shape)
    size, front = sizes[span.dim], math.prod(sizes[: span.dim])
    sizes[span.dim] = span.stop - span.start
    shape = value(source).shape
    for dim, there in enumerate(shape):
        if there == 1 or math.prod(shape[:dim]) != front:
            continue
        # One step here is that many there; or that many here are one there.
        if there % size == 0:
            return _Step({source: Span(dim, *(each * (there // size) for each in span[1:]))}, (source, sizes))
        many = size // there
        if size % there == 0 and span.start % many == 0 and span.stop % many == 0:
            return _Step({source: Span(dim, span.start // many, span.stop // many)}, (source, sizes))
        break
    return None


def _permute(node: Node, span: Span) -> _Step:
    dims: Any = node.args[1]
    return _Step({_source(node): span._replace(dim=dims[span.dim] % len(dims))}, node.args)


def _transpose(node: Node, span: Span) -> _Step:
    first, second = (_dim(node, index, value(node).dim()) for index in (1, 2))
    dim = {first: second, second: first}.get(span.dim, span.dim)
    return _Step({_source(node): span._replace(dim=dim)}, node.args)


def _unsqueeze(node: Node, span: Span) -> _Step | None:
    dim = _dim(node, 1, value(node).dim())
    return (
        None if span.dim == dim else _Step({_source(node): span._replace(dim=span.dim - (span.dim > dim))}, node.args)
    )


def _squeeze(node: Node, span: Span) -> _Step:
    """Of dimensions of size 1 only: a part of another may have that size, and stays."""
    shape, dims = value(_source(node)).shape, node.args[1]
    named = {dim % len(shape) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])}  # type: ignore[operator]
    kept = [dim for dim, size in enumerate(shape) if dim not in named or size != 1]
    gone = [dim for dim in sorted(named) if dim not in kept]
    part = {_source(node): span._replace(dim=kept[span.dim])}
    if not gone:
        return _Step(part, None)
    return _Step(part, (_source(node), gone if isinstance(dims, (list, tuple)) else gone[0]))


def _expand(node: Node, span: Span) -> _Step | None:
    source, sizes = _source(node), list(value(node).shape)
    dim = span.dim - len(sizes) + value(source).dim()
    if dim < 0 or value(source).shape[dim] == 1:
        return None
    sizes[span.dim] = span.stop - span.start
    return _Step({source: span._replace(dim=dim)}, (source, sizes))


def _slice(node: Node, span: Span) -> _Step | None:
    source, dim = _source(node), _dim(node, 1, value(node).dim())
    if span.dim != dim:
        return _Step({source: span}, node.args)
    start, step = (*node.args[2:3], 0)[0] or 0, (*node.args[4:5], 1)[0]
    if step != 1:
        return None
    assert isinstance(start, int)
    size = value(source).shape[dim]
    start = min(max(start + size if start < 0 else start, 0), size)
    return _Step({source: Span(dim, start + span.start, start + span.stop)}, None)


def _select(node: Node, span: Span) -> _Step:
    dim = _dim(node, 1, value(node).dim() + 1)
    return _Step({_source(node): span._replace(dim=span.dim + (span.dim >= dim))}, node.args)


def _cat(node: Node, span: Span) -> _Step | None:
    sources: Any = node.args[0]
    rank = value(node).dim()
    if _dim(node, 1, rank) == span.dim or any(value(source).dim() != rank for source in sources):
        return None
    return _Step(dict.fromkeys(sources, span), node.args)


def _stack(node: Node, span: Span) -> _Step | None:
    sources: Any = node.args[0]
    dim = _dim(node, 1, value(node).dim())
    if dim == span.dim:
        return None
    return _Step(dict.fromkeys(sources, span._replace(dim=span.dim - (span.dim > dim))), node.args)


def _slice_scatter(node: Node, span: Span) -> _Step | None:
    source, written, *_ = node.args
    assert isinstance(source, Node) and isinstance(written, Node)
    return None if _dim(node, 2, value(node).dim()) == span.dim else _Step({source: span, written: span}, node.args)


_RULES: dict[Any, Callable[[Node, Span], _Step | None]] = {
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(_SPLITS, _as_it_is),
    **dict.fromkeys((_ATEN.mean.dim, _ATEN.sum.dim_IntList, _ATEN.amax.default, _ATEN.amin.default), _reduction),
    **dict.fromkeys((_ATEN.var.correction, _MOMENTS), _reduction),
    _ATEN.permute.default: _permute,
    _ATEN.transpose.int: _transpose,
    _ATEN.unsqueeze.default: _unsqueeze,
    _ATEN.squeeze.dim: _squeeze,
    _ATEN.squeeze.dims: _squeeze,
    _ATEN.expand.default: _expand,
    _ATEN.slice.Tensor: _slice,
    _ATEN.select.int: _select,
    _ATEN.cat.default: _cat,
    _ATEN.stack.default: _stack,
    _ATEN.slice_scatter.default: _slice_scatter,
}


def _source(node: Node) -> Node:
    """What a view, a reduction or a split is of."""
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def _dim(node: Node, index: int, rank: int) -> int:
    """The argument of a node that names a dimension; 0 where it has none."""
    given: Any = node.args[index] if len(node.args) > index else 0
    return int(given) % rank
