"""What the graph pass asks of nodes: what they depend on, their values and views, whether they compute or write."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

_MATRIX_PRODUCTS = (
    *("mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "convolution", "convolution_backward"),
    *("_int_mm", "_scaled_mm", "_scaled_grouped_mm", "_grouped_mm", "_weight_int8pack_mm", "linear", "matmul"),
)
_VARIES = ("sum", "clone", "_unsafe_view")
_NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")


def ancestors(nodes: Iterable[Node]) -> set[Node]:
    """All nodes that the values of ``nodes`` come from, without these."""
    return _closure(nodes, lambda node: node.all_input_nodes)


def descendants(nodes: Iterable[Node]) -> set[Node]:
    """All nodes whose values come from those of ``nodes``, without these."""
    return _closure(nodes, lambda node: node.users)


def _closure(nodes: Iterable[Node], neighbours: object) -> set[Node]:
    found: set[Node] = set()
    stack = [other for node in nodes for other in neighbours(node)]  # type: ignore[operator]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(neighbours(node))  # type: ignore[operator]
    return found


def is_view(node: Node) -> bool:
    """Whether the node costs nothing: an input, a view, one of several results."""
    if node.op != "call_function" or node.target is operator.getitem:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target.is_view)


def costs(node: Node) -> bool:
    """Whether the node counts as work when exchanges are ordered. Sums and copies do not: they are in the graph of one
    rank and not in that of another, whose sequence has a single token, and the order has to be the same on both. Nor
    do numbers, which are nodes only where shapes are dynamic."""
    if is_view(node) or isinstance(node.meta.get("val"), _NUMBERS):
        return False
    return not (isinstance(node.target, torch._ops.OpOverload) and node.target._opname in _VARIES)


def is_heavy(node: Node) -> bool:
    """Whether the node is a kernel of its own that no other is fused with: a matrix product, an attention, or an op
    that is not PyTorch's.
    """
    target = node.target
    if node.op != "call_function" or target is operator.getitem:
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return isinstance(target, torch._ops.HigherOrderOperator)
    name = target._opname
    return target.namespace not in ("aten", "prims") or name in _MATRIX_PRODUCTS or name.startswith(_ATTENTION)


def write_inside(graph: Graph) -> Node | None:
    """A node that writes to memory other nodes read, and is not part of the graph's final copies to its inputs."""
    tail = True
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if not writes(node):
            tail = False
        elif not (tail and node.target is torch.ops.aten.copy_.default):
            return node
    return None


def writes(node: Node) -> bool:
    """Whether the node writes to memory in place."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name() == "triton_kernel_wrapper_mutation"
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def keeps_its_turn(node: Node) -> bool:
    """Whether the node's order among others of this kind means something that the graph does not say: it has an effect,
    or draws random numbers.
    """
    if node.op != "call_function":
        return False
    tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
    return node.is_impure() or torch.Tag.nondeterministic_seeded in tags


# Values: tensors without data, which stand for what the nodes compute.


def value(node: Any) -> Any:
    return node.meta.get("val")


def is_static(*values: Any) -> bool:
    """Whether they are tensors all of whose sizes and strides are known."""
    return all(
        isinstance(each, torch.Tensor) and all(isinstance(n, int) for n in (*each.shape, *each.stride()))
        for each in values
    )


def has_values_of(view: Any, base: Any) -> bool:
    """Whether the view's elements are some of the base's as they are."""
    return view.dtype == base.dtype and not any(x.is_conj() or x.is_neg() for x in (view, base))


def call(graph: Graph, op: Any, *arguments: Any, **keywords: Any) -> Node:
    """A node of ``op``, with its value."""
    node = graph.call_function(op, arguments, keywords)
    values, named = pytree.tree_map_only(Node, value, (arguments, keywords))
    with next(each.fake_mode for each in pytree.tree_leaves((values, named)) if hasattr(each, "fake_mode")):
        node.meta["val"] = op(*values, **named)
    return node


# Views.


def views_of(node: Node) -> list[Node]:
    """The node and its views."""
    found, stack = [], [node]
    while stack:
        node = stack.pop()
        found.append(node)
        stack += filter(is_view_of_another, node.users)
    return found


def is_view_of_another(user: Node) -> bool:
    """Whether a node that uses another is a view of it; the graph's output is none."""
    return user.op == "call_function" and is_view(user)


def erase_unused(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erase those of ``nodes`` that nothing uses, and what they alone used; not what writes or has another effect."""
    left = set(nodes)
    while left:
        node = left.pop()
        if node.op == "call_function" and not node.users and not node.is_impure():
            left |= set(node.all_input_nodes)
            graph.erase_node(node)
