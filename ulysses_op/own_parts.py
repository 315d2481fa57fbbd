"""Computes what a rank would send to itself last, and straight into its target.

A scatter sends most of a tensor to peers, and leaves the rank's own heads where it is. The peers' heads are computed
first and leave; the own ones are computed while those travel, by the same operations, which write them where the result
belongs:

    before: mm(x, w_v), submit(v), norm + RoPE of q, submit(q), norm + RoPE of k, submit(k), wait_
    after:  mm(x, w_v of the peers), submit(v), norm + RoPE of the peers' q, submit(q), the same of k,
            norm + RoPE of the own q and k into the targets, mm(x, own w_v) into the target, wait_

What is submitted is then a buffer whose own heads are never written or read.

NOTE [Which tensors]: those that a large product gives as they are, and those that are computed from others element by
element, or with sums that do not run over heads (what does is computed whole). Nothing but the group's submissions may
use them, or what they are computed from on the way: it would be computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from . import fx_products
from .fx_narrow import Span, computed_in_part, narrow
from .fx_nodes import call, erase_unused, has_values_of, is_static, is_view_of_another, value, views_of
from .fx_order import Flight
from .fx_products import Product, product_of

_SLICE, _AS_STRIDED = torch.ops.aten.slice.Tensor, torch.ops.aten.as_strided.default
_COPY, _EMPTY = torch.ops.aten.copy_.default, torch.ops.aten.empty.memory_format
_MM_INTO = torch.ops.ulysses_op.mm_into_.default
_SUBMIT = torch.ops.ulysses_op.submit.default
_OWN_SLICE = 11  # among a submission's arguments
_HEADS = 2  # the dimension of heads


@dataclass
class _Parts:
    """Of a tensor that is scattered: the ranges of heads that peers get, that which stays, and the row of the result
    where it begins.
    """

    peers: list[tuple[int, int]]
    own: tuple[int, int]
    row: int


def compute_own_parts_last(graph: Graph, flights: Sequence[Flight], rank_of: Callable[[str], int]) -> list[list[str]]:
    """Rewrite ``graph``, whose nodes are in their final order, in place; for each flight, the names of what now is
    computed in two parts.

    rank_of: this rank's number in the group of a communicator.
    """
    return [_take_apart(graph, flight, rank_of) for flight in flights]


def _take_apart(graph: Graph, flight: Flight, rank_of: Callable[[str], int]) -> list[str]:
    names = []
    for submit, parts, product in _candidates(flight, rank_of):
        source: Any = submit.args[0]
        if product is not None:
            _multiply_in_two(graph, flight, submit, product, parts)
        else:
            _compute_in_two(graph, flight, submit, parts)
        submit.update_arg(_OWN_SLICE, False)
        names.append(source.name)
        erase_unused(graph, [source])
    return names


def _candidates(flight: Flight, rank_of: Callable[[str], int]) -> list[tuple[Node, _Parts, Product | None]]:
    """See NOTE [Which tensors]."""
    found = []
    served = _serving(flight)
    for submit in flight.submits:
        source: Any = submit.args[0]
        parts = _parts_of(submit, rank_of)
        if parts is None or not _only_exchanged(source, submit, flight):
            continue
        product = _as_a_product(source, parts)
        computed = computed_in_part(source, Span(_HEADS, *parts.own)) if product is None else set[Node]()
        if product is not None or set() < computed <= served:
            found.append((submit, parts, product))
    return found


def _serving(flight: Flight) -> set[Node]:
    """The nodes whose values go into the flight's submissions, and nowhere else."""
    served = {*flight.submits, flight.wait}
    for node in reversed(flight.wait.graph.nodes):
        if node.users and served.issuperset(node.users):
            served.add(node)
    return served


def _parts_of(submit: Node, rank_of: Callable[[str], int]) -> _Parts | None:
    """None where the own heads are none, or some of them are a peer's, too."""
    arguments: Any = submit.args
    x, communicator, world_size, rank, heads, seq_lens, replicas, direction, *_ = arguments
    source, target = value(x), value(submit)
    if submit.target is not _SUBMIT or direction != "scatter_heads" or replicas or not is_static(source, target):
        return None
    if not all(isinstance(length, int) for length in seq_lens):
        return None
    if not source.numel() or not target.numel() or source.shape[1] == target.shape[1]:  # somebody has no tokens
        return None
    rank = rank_of(communicator) if rank == -1 else rank
    local = source.shape[_HEADS] // world_size
    flat = heads or [bound for peer in range(world_size) for bound in (peer * local, (peer + 1) * local)]
    ranges = list(zip(flat[::2], flat[1::2], strict=True))
    own = ranges[rank]
    others = _joined(pair for peer, pair in enumerate(ranges) if peer != rank and pair[0] < pair[1])
    if not others or own[0] >= own[1] or any(start < own[1] and own[0] < stop for start, stop in others):
        return None
    row = sum(seq_lens[:rank]) if seq_lens else rank * source.shape[1]
    return _Parts(others, own, row)


def _joined(ranges: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same numbers in as few ranges as they can be, in order."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def _only_exchanged(source: Node, submit: Node, flight: Flight) -> bool:
    return set(source.users) <= {submit, flight.wait} and sum(each.args[0] is source for each in flight.submits) == 1


# Products.


def _as_a_product(source: Node, parts: _Parts) -> Product | None:
    """The product whose rows are the tokens of ``source``, and whose columns are its heads, if each part of it is large
    enough.
    """
    node = source
    while is_view_of_another(node) and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    product = product_of(node)
    if product is None or any(user not in views_of(node) for user in _users(node) - _users(source)):
        return None
    whole = value(source)
    batch, seq_local, num_heads, head_dim = whole.shape
    if tuple(product.out.shape) != (batch * seq_local, num_heads * head_dim) or not has_values_of(whole, product.out):
        return None
    if not whole.is_contiguous() or whole.storage_offset() != product.out.storage_offset():
        return None
    heads = [stop - start for start, stop in (*parts.peers, parts.own)]
    least = min(heads) * head_dim * seq_local * value(product.x).shape[1]
    return product if least >= fx_products.min_part else None


def _users(node: Node) -> set[Node]:
    """Who uses the node or a view of it, other than by a view."""
    return {user for view in views_of(node) for user in view.users if not is_view_of_another(user)}


def _multiply_in_two(graph: Graph, flight: Flight, submit: Node, product: Product, parts: _Parts) -> None:
    source: Any = submit.args[0]
    batch, seq_local, num_heads, head_dim = value(source).shape
    seq_global, local = value(submit).shape[1:3]

    def part(out: Node, x: Any, start: int, stop: int) -> None:
        bias = None if product.bias is None else call(graph, _SLICE, product.bias, 0, start, stop)
        call(graph, _MM_INTO, out, bias, x, call(graph, _SLICE, product.weight, 1, start, stop))

    with graph.inserting_before(product.node):
        whole = _empty(graph, [batch * seq_local, num_heads * head_dim], product.out)
        for start, stop in parts.peers:
            columns = (start * head_dim, stop * head_dim)
            part(call(graph, _SLICE, whole, 1, *columns), product.x, *columns)
    with graph.inserting_before(submit):
        view = call(graph, torch.ops.aten.view.default, whole, list(value(source).shape))
    _submit_instead(submit, flight, view)
    width = local * head_dim
    with graph.inserting_before(flight.wait):
        for index in range(batch):
            first = (index * seq_global + parts.row) * width
            out = call(graph, _AS_STRIDED, submit, [seq_local, width], [width, 1], first)
            x = call(graph, _SLICE, product.x, 0, index * seq_local, (index + 1) * seq_local)
            part(out, x, parts.own[0] * head_dim, parts.own[1] * head_dim)


# What is computed from others.


def _compute_in_two(graph: Graph, flight: Flight, submit: Node, parts: _Parts) -> None:
    source: Any = submit.args[0]
    with graph.inserting_before(submit):
        whole = _empty(graph, list(value(source).shape), value(source))
        for start, stop in parts.peers:
            computed = narrow(graph, source, Span(_HEADS, start, stop))
            _write(graph, call(graph, _SLICE, whole, _HEADS, start, stop), computed)
    _submit_instead(submit, flight, whole)
    rows = (parts.row, parts.row + value(source).shape[1])
    with graph.inserting_before(flight.wait):
        computed = narrow(graph, source, Span(_HEADS, *parts.own))
        _write(graph, call(graph, _SLICE, submit, 1, *rows), computed)


def _write(graph: Graph, out: Node, computed: Node) -> None:
    """What is put together is written piece by piece, not put together elsewhere first."""
    pieces: Any = computed.args[0]
    if computed.target is not torch.ops.aten.cat.default or computed.users:  # others use the whole
        call(graph, _COPY, out, computed)
        return
    dim, start = (*computed.args[1:], 0)[0], 0
    graph.erase_node(computed)
    for piece in pieces:
        stop = start + value(piece).shape[dim]
        part = call(graph, _SLICE, out, dim, start, stop)
        if pieces.count(piece) > 1:
            call(graph, _COPY, part, piece)
        else:
            _write(graph, part, piece)
        start = stop


def _empty(graph: Graph, shape: list[int], like: Any) -> Node:
    with like.fake_mode:
        node = graph.call_function(_EMPTY, (shape,), {"dtype": like.dtype, "device": like.device, "pin_memory": False})
        node.meta["val"] = torch.empty(shape, dtype=like.dtype, device=like.device)
    return node


def _submit_instead(submit: Node, flight: Flight, x: Node) -> None:
    """Submit ``x``, and keep it until the group is complete."""
    source: Any = submit.args[0]
    sources: Any = flight.wait.kwargs["sources"]
    submit.update_arg(0, x)
    flight.wait.update_kwarg("sources", [x if each is source else each for each in sources])
