"""Takes apart the projections around exchanges, so that data travels while the rest of a projection is computed.

A fused QKV projection is one matrix product; V could leave when its columns are done. So the columns that a group's
first submission comes from become a product of their own:

    before: mm(x, w), submit(v), norm + RoPE of q and k, submit(q), submit(k)
    after:  mm(x, w_v), submit(v), mm(x, w_qk), norm + RoPE of q, submit(q), norm + RoPE of k, submit(k)

The projection of what is gathered is a sum over heads, and the rank's own heads are there before the others arrive; the
gather need not deliver them:

    before: submit(o), wait_, mm(gathered, w)
    after:  submit(o, own_slice=False), total = mm(own o, w_own), wait_, accumulate_mm_(total, others' o, w_others)

NOTE [Numbers]: a product of some columns gives the same numbers, up to the kernel that a library picks for another
width. A sum in two parts is rounded once more, as a library does when it splits a sum itself; so it is done in half
precision only where torch.backends.cuda.matmul allows reductions of reduced precision.

NOTE [Which columns]: those that a tensor comes from are read from its strides, whatever views are in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch.fx import Graph, Node

from . import fx_products
from .fx_nodes import ancestors, call, erase_unused, has_values_of, is_static, is_view_of_another, value, views_of
from .fx_order import Flight
from .fx_products import Product, multiply, product_of

_SLICE, _VIEW, _AS_STRIDED = torch.ops.aten.slice.Tensor, torch.ops.aten.view.default, torch.ops.aten.as_strided.default
_ACCUMULATE = torch.ops.ulysses_op.accumulate_mm_.default
_WAITS = (torch.ops.ulysses_op.wait_.default, torch.ops.ulysses_op.wait_.uncaptured)
_OWN_SLICE = 11  # among a submission's arguments


# Before the exchange.


def split_projections(graph: Graph, flights: Sequence[Flight]) -> list[list[str]]:
    """Rewrite ``graph`` in place; for each flight, the names of the products that were taken apart."""
    return [_split_before(graph, flight) for flight in flights]


def _split_before(graph: Graph, flight: Flight) -> list[str]:
    first, *others = flight.submits
    needed = {first, *ancestors([first])}
    shared = needed & ancestors(others)
    products = [product_of(node) for node in graph.nodes if node in shared]
    return [product.node.name for product in products if product is not None and _split(graph, product, needed)]


@dataclass
class _Part:
    """A view of a product that others than views use, and the columns it lies in."""

    view: Node
    users: list[Node]
    start: int
    stop: int
    is_first: bool


def _split(graph: Graph, product: Product, needed_first: set[Node]) -> bool:
    """Whether ``product`` could be taken apart, and was: what is in ``needed_first`` from the rest."""
    parts = _parts(product, needed_first)
    runs = [list(run) for _, run in groupby(sorted(parts, key=lambda part: part.start), key=lambda part: part.is_first)]
    bounds = [(run[0].start, max(part.stop for part in run)) for run in runs]
    if len(runs) < 2 or any(stop > start for (_, stop), (start, _) in pairwise(bounds)):
        return False
    rows, depth = value(product.x).shape
    if min(stop - start for start, stop in bounds) * rows * depth < fx_products.min_part:
        return False
    for run, (start, stop) in zip(runs, bounds, strict=True):
        with graph.inserting_before(product.node):
            bias = None if product.bias is None else call(graph, _SLICE, product.bias, 0, start, stop)
            piece = multiply(graph, bias, product.x, call(graph, _SLICE, product.weight, 1, start, stop))
            for part in run:
                view = _view_of_piece(graph, part, product.out.shape[1], piece, start, stop)
                for user in part.users:
                    user.replace_input_with(part.view, view)
    erase_unused(graph, views_of(product.node))
    return True


def _parts(product: Product, needed_first: set[Node]) -> list[_Part]:
    """All of what is used of ``product``; nothing where it is used in a way that keeps it whole."""
    found = []
    for view in views_of(product.node):
        users = [user for user in view.users if not is_view_of_another(user)]
        if not users:
            continue
        columns = _columns(value(view), product.out)
        firsts = {user in needed_first for user in users if user.target not in _WAITS}
        if columns is None or len(firsts) != 1 or any(user.op == "output" for user in users):
            return []
        found.append(_Part(view, users, *columns, is_first=firsts.pop()))
    return found


def _columns(view: Any, out: Any) -> tuple[int, int] | None:
    """Those of ``out`` that ``view`` lies in; None where that is not known. See NOTE [Which columns]."""
    if not is_static(view) or not view.numel() or not has_values_of(view, out):
        return None
    width = out.shape[1]
    start = view.storage_offset() % width
    stop = start + 1
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size > 1 and stride < width:
            stop += (size - 1) * stride
        elif size > 1 and stride % width:
            return None
    return (start, stop) if stop <= width else None


def _view_of_piece(graph: Graph, part: _Part, width: int, piece: Node, start: int, stop: int) -> Node:
    """What ``part.view`` is of the product, of the piece of it that has the columns from ``start`` to ``stop``."""
    view, narrow = value(part.view), stop - start
    strides = [step if step < width else step // width * narrow for step in view.stride()]
    row, column = divmod(view.storage_offset(), width)
    return call(graph, _AS_STRIDED, piece, list(view.shape), strides, row * narrow + column - start)


# Behind the exchange.


def split_output_projections(graph: Graph, flights: Sequence[Flight], rank_of: Callable[[str], int]) -> list[list[str]]:
    """Rewrite ``graph``, whose nodes are in their final order, in place; for each flight, the names of the products
    that were taken apart.

    rank_of: this rank's number in the group of a communicator.
    """
    return [_split_behind(graph, flight, rank_of) for flight in flights]


def _split_behind(graph: Graph, flight: Flight, rank_of: Callable[[str], int]) -> list[str]:
    submit = flight.submits[-1]
    views = views_of(submit)
    users = {user for view in views for user in view.users if not is_view_of_another(user)} - {flight.wait}
    product = product_of(next(iter(users))) if len(users) == 1 else None
    if product is None or product.x not in views or len(flight.submits) > 1 or not _may_round(product.out.dtype):
        return []
    own = _own_part(submit, value(product.x), rank_of)
    early = {product.weight, product.bias} - {None}
    if own is None or early & {flight.wait, *views} or not _all_before(graph, early, flight.wait):
        return []
    rows, (start, stop) = own
    depth = value(product.x).shape[1]
    if min(stop - start, depth - stop + start) * product.out.numel() < fx_products.min_part:
        return []
    with graph.inserting_before(flight.wait):
        x = call(graph, _SLICE, submit.args[0], 1, *rows)
        x = call(graph, _VIEW, x, [product.out.shape[0], stop - start])
        total = multiply(graph, product.bias, x, call(graph, _SLICE, product.weight, 0, start, stop))
    with graph.inserting_before(product.node):
        for begin, end in ((0, start), (stop, depth)):
            if begin < end:
                gathered = call(graph, _SLICE, product.x, 1, begin, end)
                call(graph, _ACCUMULATE, total, gathered, call(graph, _SLICE, product.weight, 0, begin, end))
    product.node.replace_all_uses_with(total)
    graph.erase_node(product.node)
    submit.update_arg(_OWN_SLICE, False)
    return [product.node.name]


def _own_part(
    submit: Node, gathered: Any, rank_of: Callable[[str], int]
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Of a gather whose result is multiplied as the matrix ``gathered``: the rows of its input that stay here, and the
    columns that they have in the matrix. None where they do not form a matrix in memory.
    """
    arguments: Any = submit.args
    x, communicator, _, rank, heads, seq_lens, replicas, direction, *_ = arguments
    source, whole = value(x), value(submit)
    if direction != "gather_heads" or replicas or not is_static(source, whole, gathered) or source.shape[0] != 1:
        return None
    _, seq_local, num_heads, head_dim = whole.shape
    local = source.shape[2]
    if not local or not seq_local or not has_values_of(gathered, whole) or not has_values_of(source, whole):
        return None
    # All of what is gathered, a token a row.
    if tuple(gathered.shape) != (seq_local, num_heads * head_dim) or not gathered.is_contiguous():
        return None
    if gathered.storage_offset() != whole.storage_offset():
        return None
    if source.stride(3) != 1 or source.stride(2) != head_dim:
        return None
    if not all(isinstance(length, int) for length in seq_lens):
        return None
    if rank == -1:
        rank = rank_of(communicator)
    row = sum(seq_lens[:rank]) if seq_lens else rank * seq_local
    head = heads[2 * rank] if heads else rank * local
    return (row, row + seq_local), (head * head_dim, (head + local) * head_dim)


def _may_round(dtype: torch.dtype) -> bool:
    """See NOTE [Numbers]."""
    if dtype is torch.bfloat16:
        return bool(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction)
    if dtype is torch.float16:
        return bool(torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction)
    return True


def _all_before(graph: Graph, nodes: set[Any], node: Node) -> bool:
    position = {each: index for index, each in enumerate(graph.nodes)}
    return all(position[each] < position[node] for each in nodes)
