"""Matrix products of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from .fx_nodes import call, is_static, value

MM, ADDMM = torch.ops.aten.mm.default, torch.ops.aten.addmm.default

min_part = 3 * 10**10
"""The least M * N * K of the parts of a product: where one were smaller, a second kernel costs more than is gained."""


@dataclass
class Product:
    """x @ weight, or bias + x @ weight with a bias of one element a column, of static shape: ``out`` is its value."""

    node: Node
    bias: Any
    x: Any
    weight: Any
    out: Any


def product_of(node: Node) -> Product | None:
    """None where ``node`` is no product, or none that can be taken apart."""
    if node.target not in (MM, ADDMM) or node.kwargs:
        return None
    arguments: Any = node.args
    bias, x, weight = arguments if node.target is ADDMM else (None, *arguments)
    out, left = value(node), value(x)
    if not is_static(out, left) or not out.is_contiguous():
        return None
    if bias is not None and tuple(value(bias).shape) != (out.shape[1],):
        return None
    return Product(node, bias, x, weight, out)


def multiply(graph: Graph, bias: Any, x: Any, weight: Any) -> Node:
    return call(graph, MM, x, weight) if bias is None else call(graph, ADDMM, bias, x, weight)
