"""The graph pass on graphs built by hand: what becomes a group, in which order, and what is left exactly as it was."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ulysses_op.grouping import group_exchanges

aten = torch.ops.aten
SCATTER = torch.ops.ulysses_op.scatter_heads.default


def scatter(graph: Graph, x: Node, communicator: str = "c") -> Node:
    return graph.call_function(SCATTER, (x, communicator, 2, -1, [], []))


def norm(graph: Graph, x: Node) -> Node:
    return graph.call_function(aten.mul.Tensor, (x, graph.call_function(aten.rsqrt.default, (x,))))


def attention(graph: Graph, *tensors: Node) -> Node:
    views = [graph.call_function(aten.transpose.int, (tensor, 1, 2)) for tensor in tensors]
    return graph.call_function(aten._scaled_dot_product_flash_attention.default, tuple(views))


def names(graph: Graph) -> list[str]:
    """Ops in order; a submission with its tag and the node that it reads."""
    found = []
    for node in graph.nodes:
        if node.target is torch.ops.ulysses_op.submit.default:
            source = node.args[0].name.replace("_default", "").replace("_int", "").replace("_tensor", "")
            found.append(f"submit {node.args[7]} of {source}{' final' if node.args[8] else ''}")
        elif node.op == "call_function":
            found.append(node.target.__name__.split(".")[0])
    return found


def fused(graph: Graph) -> Node:
    projected = graph.call_function(aten.mm.default, (graph.placeholder("x"), graph.placeholder("w")))
    q, k, v = (graph.call_function(aten.select.int, (projected, 0, index)) for index in range(3))
    q, k = norm(graph, q), norm(graph, k)
    return attention(graph, scatter(graph, q), scatter(graph, k), scatter(graph, v))


def test_v_leaves_behind_its_projection() -> None:
    graph = Graph()
    graph.output(fused(graph))
    report = group_exchanges(graph)
    assert report.matched == 1 and report.left == {}
    assert report.groups[0].members == ["scatter_heads_default_2", "scatter_heads_default", "scatter_heads_default_1"]
    # Q leaves before K is normed.
    assert names(graph) == [
        *["mm", "select", "submit 0 of select_2"],
        *["select", "rsqrt", "mul", "submit 1 of mul"],
        *["select", "rsqrt", "mul", "submit 2 of mul_1 final", "wait_"],
        *["transpose"] * 3,
        "_scaled_dot_product_flash_attention",
    ]


def test_v_projection_goes_ahead_of_the_others() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    weights = [graph.placeholder(name) for name in "qkv"]
    q, k, v = (graph.call_function(aten.mm.default, (x, weight)) for weight in weights)
    graph.output(attention(graph, scatter(graph, norm(graph, q)), scatter(graph, norm(graph, k)), scatter(graph, v)))
    group_exchanges(graph)
    assert names(graph)[:2] == ["mm", "submit 0 of mm_2"]
    assert names(graph)[2:6] == ["mm", "rsqrt", "mul", "submit 1 of mul"]


def test_layers_become_groups_of_their_own() -> None:
    graph = Graph()
    y = fused(graph)
    again = [norm(graph, graph.call_function(aten.select.int, (y, 0, index))) for index in range(3)]
    graph.output(attention(graph, *(scatter(graph, x) for x in again)))
    assert group_exchanges(graph).matched == 2
    order = names(graph)
    assert order.index("submit 0 of mul_2") > order.index("wait_")
    assert order.count("wait_") == 2


def unchanged(graph: Graph) -> dict[str, str]:
    before = str(graph)
    report = group_exchanges(graph)
    assert str(graph) == before
    assert report.matched == 0
    return report.left


def test_one_exchange_is_left_alone() -> None:
    graph = Graph()
    graph.output(attention(graph, scatter(graph, graph.placeholder("x"))))
    assert unchanged(graph) == {"scatter_heads_default": "its result meets no other exchange's"}


def test_exchanges_that_follow_each_other_are_left_alone() -> None:
    graph = Graph()
    graph.output(scatter(graph, norm(graph, scatter(graph, graph.placeholder("x")))))
    assert unchanged(graph)["scatter_heads_default"] == "another exchange needs its result"


def test_communicators_are_not_mixed() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output(graph.call_function(aten.add.Tensor, (scatter(graph, x, "a"), scatter(graph, y, "b"))))
    assert len(unchanged(graph)) == 2


def test_a_write_in_place_forbids_to_move_anything() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(aten.add_.Tensor, (x, 1))
    graph.output(attention(graph, *(scatter(graph, norm(graph, x)) for _ in range(3))))
    assert all("writes in place" in why for why in unchanged(graph).values())


def test_final_copies_to_the_inputs_do_not() -> None:
    graph = Graph()
    state = graph.placeholder("state")
    result = fused(graph)
    graph.call_function(aten.copy_.default, (state, result))
    graph.output(result)
    assert group_exchanges(graph).matched == 1
    assert names(graph)[-1] == "copy_"
