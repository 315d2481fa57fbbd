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

from .fx_nodes import ancestors, is_view
from .fx_order import Flight

_MM, _ADDMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
_SLICE, _VIEW, _AS_STRIDED = torch.ops.aten.slice.Tensor, torch.ops.aten.view.default, torch.ops.aten.as_strided.default
_ACCUMULATE = torch.ops.ulysses_op.accumulate_mm_.default
_WAITS = (torch.ops.ulysses_op.wait_.default, torch.ops.ulysses_op.wait_.uncaptured)
_OWN_SLICE = 11  # among a submission's arguments

min_part = 3 * 10**10
"""The least M * N * K of the parts of a product: where one were smaller, a second kernel costs more than is gained."""


@dataclass
class _Product:
    """x @ weight, or bias + x @ weight, of static shape: ``out`` is its value."""

    node: Node
    bias: Any
    x: Any
    weight: Any
    out: Any


def _product_of(node: Node) -> _Product | None:
    """None where ``node`` is no product, or none that can be taken apart."""
    if node.target not in (_MM, _ADDMM) or node.kwargs:
        return None
    arguments: Any = node.args
    bias, x, weight = arguments if node.target is _ADDMM else (None, *arguments)
    out, left = _value(node), _value(x)
    if not _is_static(out, left) or not out.is_contiguous():
        return None
    if bias is not None and tuple(_value(bias).shape) != (out.shape[1],):
        return None
    return _Product(node, bias, x, weight, out)


# Before the exchange.


def split_projections(graph: Graph, flights: Sequence[Flight]) -> list[list[str]]:
    """Rewrite ``graph`` in place; for each flight, the names of the products that were taken apart."""
    return [_split_before(graph, flight) for flight in flights]


def _split_before(graph: Graph, flight: Flight) -> list[str]:
    first, *others = flight.submits
    needed = {first, *ancestors([first])}
    shared = needed & ancestors(others)
    products = [_product_of(node) for node in graph.nodes if node in shared]
    return [product.node.name for product in products if product is not None and _split(graph, product, needed)]


@dataclass
class _Part:
    """A view of a product that others than views use, and the columns it lies in."""

    view: Node
    users: list[Node]
    start: int
    stop: int
    is_first: bool


def _split(graph: Graph, product: _Product, needed_first: set[Node]) -> bool:
    """Whether ``product`` could be taken apart, and was: what is in ``needed_first`` from the rest."""
    parts = _parts(product, needed_first)
    runs = [list(run) for _, run in groupby(sorted(parts, key=lambda part: part.start), key=lambda part: part.is_first)]
    bounds = [(run[0].start, max(part.stop for part in run)) for run in runs]
    if len(runs) < 2 or any(stop > start for (_, stop), (start, _) in pairwise(bounds)):
        return False
    rows, depth = _value(product.x).shape
    if min(stop - start for start, stop in bounds) * rows * depth < min_part:
        return False
    for run, (start, stop) in zip(runs, bounds, strict=True):
        with graph.inserting_before(product.node):
            bias = None if product.bias is None else _call(graph, _SLICE, product.bias, 0, start, stop)
            piece = _multiply(graph, bias, product.x, _call(graph, _SLICE, product.weight, 1, start, stop))
            for part in run:
                view = _view_of_piece(graph, part, product.out.shape[1], piece, start, stop)
                for user in part.users:
                    user.replace_input_with(part.view, view)
    views = set(_views(product.node))
    for node in reversed([node for node in graph.nodes if node in views and not _is_used(node, views)]):
        graph.erase_node(node)
    return True


def _parts(product: _Product, needed_first: set[Node]) -> list[_Part]:
    """All of what is used of ``product``; nothing where it is used in a way that keeps it whole."""
    found = []
    for view in _views(product.node):
        users = [user for user in view.users if not _is_view(user)]
        if not users:
            continue
        columns = _columns(_value(view), product.out)
        firsts = {user in needed_first for user in users if user.target not in _WAITS}
        if columns is None or len(firsts) != 1 or any(user.op == "output" for user in users):
            return []
        found.append(_Part(view, users, *columns, is_first=firsts.pop()))
    return found


def _columns(view: Any, out: Any) -> tuple[int, int] | None:
    """Those of ``out`` that ``view`` lies in; None where that is not known. See NOTE [Which columns]."""
    if not _is_static(view) or not view.numel() or not _has_values_of(view, out):
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
    view, narrow = _value(part.view), stop - start
    strides = [step if step < width else step // width * narrow for step in view.stride()]
    row, column = divmod(view.storage_offset(), width)
    return _call(graph, _AS_STRIDED, piece, list(view.shape), strides, row * narrow + column - start)


# Behind the exchange.


def split_output_projections(graph: Graph, flights: Sequence[Flight], rank_of: Callable[[str], int]) -> list[list[str]]:
    """Rewrite ``graph``, whose nodes are in their final order, in place; for each flight, the names of the products
    that were taken apart.

    rank_of: this rank's number in the group of a communicator.
    """
    return [_split_behind(graph, flight, rank_of) for flight in flights]


def _split_behind(graph: Graph, flight: Flight, rank_of: Callable[[str], int]) -> list[str]:
    submit = flight.submits[-1]
    views = _views(submit)
    users = {user for view in views for user in view.users if not _is_view(user)} - {flight.wait}
    product = _product_of(next(iter(users))) if len(users) == 1 else None
    if product is None or product.x not in views or len(flight.submits) > 1 or not _may_round(product.out.dtype):
        return []
    own = _own_part(submit, _value(product.x), rank_of)
    early = {product.weight, product.bias} - {None}
    if own is None or early & {flight.wait, *views} or not _all_before(graph, early, flight.wait):
        return []
    rows, (start, stop) = own
    depth = _value(product.x).shape[1]
    if min(stop - start, depth - stop + start) * product.out.numel() < min_part:
        return []
    with graph.inserting_before(flight.wait):
        x = _call(graph, _SLICE, submit.args[0], 1, *rows)
        x = _call(graph, _VIEW, x, [product.out.shape[0], stop - start])
        total = _multiply(graph, product.bias, x, _call(graph, _SLICE, product.weight, 0, start, stop))
    with graph.inserting_before(product.node):
        for begin, end in ((0, start), (stop, depth)):
            if begin < end:
                gathered = _call(graph, _SLICE, product.x, 1, begin, end)
                _call(graph, _ACCUMULATE, total, gathered, _call(graph, _SLICE, product.weight, 0, begin, end))
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
    source, whole = _value(x), _value(submit)
    if direction != "gather_heads" or replicas or not _is_static(source, whole, gathered) or source.shape[0] != 1:
        return None
    _, seq_local, num_heads, head_dim = whole.shape
    local = source.shape[2]
    if not local or not seq_local or not _has_values_of(gathered, whole) or not _has_values_of(source, whole):
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


# Of both.


def _multiply(graph: Graph, bias: Any, x: Any, weight: Any) -> Node:
    return _call(graph, _MM, x, weight) if bias is None else _call(graph, _ADDMM, bias, x, weight)


def _call(graph: Graph, op: Any, *arguments: Any) -> Node:
    """A node of ``op``, with the value that it stands for."""
    node = graph.call_function(op, arguments)
    values = [_value(each) if isinstance(each, Node) else each for each in arguments]
    with next(value.fake_mode for value in values if hasattr(value, "fake_mode")):
        node.meta["val"] = op(*values)
    return node


def _views(node: Node) -> list[Node]:
    """The node and its views."""
    found, stack = [], [node]
    while stack:
        node = stack.pop()
        found.append(node)
        stack += filter(_is_view, node.users)
    return found


def _is_view(user: Node) -> bool:
    """Whether a node that uses another is a view of it; the graph's output is none."""
    return user.op == "call_function" and is_view(user)


def _is_used(node: Node, views: set[Node]) -> bool:
    """Whether others than its views use the node, or one of these."""
    return any(user not in views or _is_used(user, views) for user in node.users)


def _has_values_of(view: Any, base: Any) -> bool:
    """Whether the view's elements are some of the base's as they are."""
    return view.dtype == base.dtype and not any(x.is_conj() or x.is_neg() for x in (view, base))


def _all_before(graph: Graph, nodes: set[Any], node: Node) -> bool:
    position = {each: index for index, each in enumerate(graph.nodes)}
    return all(position[each] < position[node] for each in nodes)


def _is_static(*values: Any) -> bool:
    """Whether they are tensors all of whose sizes and strides are known."""
    return all(
        isinstance(value, torch.Tensor) and all(isinstance(n, int) for n in (*value.shape, *value.stride()))
        for value in values
    )


def _value(node: Any) -> Any:
    return node.meta.get("val")
