"""The graph pass on graphs built by hand: what becomes a group, in which order, and what is left exactly as it was."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from ulysses_op.grouping import group_exchanges

aten = torch.ops.aten
GATHER = torch.ops.ulysses_op.gather_heads.default
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
            found.append(f"submit {node.args[8]} of {source}{' final' if node.args[8] == node.args[9][-1] else ''}")
        elif node.target is torch.ops.ulysses_op.wait_.default:
            found.append(" ".join(("wait_", *node.kwargs["tags"])))
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
        *["select", "rsqrt", "mul", "submit 2 of mul_1 final", "wait_ 0 1 2"],
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
    assert order.index("submit 0 of mul_2") > order.index("wait_ 0 1 2")
    assert order.count("wait_ 0 1 2") == 2


def gather(graph: Graph, x: Node) -> Node:
    return graph.call_function(GATHER, (x, "c", 2, -1, [], [], False))


def mm(graph: Graph, x: Node) -> Node:
    return graph.call_function(aten.mm.default, (x, graph.placeholder("w")))


def test_work_before_a_gather_runs_while_it_travels() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    mlp = mm(graph, x)
    o = gather(graph, attention(graph, x, x, x))
    graph.output(graph.call_function(aten.cat.default, ([o, mlp],)))
    group_exchanges(graph)
    assert names(graph)[3:] == [
        *["_scaled_dot_product_flash_attention", "submit 0 of _scaled_dot_product_flash_attention final"],
        *["mm", "wait_ 0", "cat"],
    ]


def test_work_that_only_its_use_needs_runs_before_the_wait() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    o = gather(graph, x)
    graph.output(graph.call_function(aten.cat.default, ([o, mm(graph, x)],)))
    group_exchanges(graph)
    assert names(graph) == ["submit 0 of x final", "mm", "wait_ 0", "cat"]


def gradients(graph: Graph) -> list[Node]:
    backward = graph.call_function(aten._scaled_dot_product_flash_attention_backward.default, (graph.placeholder("g"),))
    return [graph.call_function(operator.getitem, (backward, index)) for index in range(3)]


def test_the_last_gradient_travels_while_the_others_are_worked_on() -> None:
    graph = Graph()
    q, k, v = (gather(graph, gradient) for gradient in gradients(graph))
    graph.output(graph.call_function(aten.cat.default, ([norm(graph, q), norm(graph, k), v],)))
    report = group_exchanges(graph)
    assert [group.members for group in report.groups] == [
        ["gather_heads_default", "gather_heads_default_1"],
        ["gather_heads_default_2"],
    ]
    assert [group.tags for group in report.groups] == [["0", "1"], ["2"]]  # both are under way at once
    order = names(graph)
    assert order.index("submit 2 of getitem_2 final") < order.index("wait_ 0 1")
    assert order[order.index("wait_ 0 1") :] == ["wait_ 0 1", *["rsqrt", "mul"] * 2, "wait_ 2", "cat"]


def test_gradients_that_nothing_is_done_with_alone_are_one_group() -> None:
    graph = Graph()
    graph.output(graph.call_function(aten.cat.default, ([gather(graph, gradient) for gradient in gradients(graph)],)))
    assert [group.tags for group in group_exchanges(graph).groups] == [["0", "1", "2"]]


def test_attention_of_single_products_is_one_group() -> None:
    graph = Graph()
    q, k, v = (scatter(graph, graph.placeholder(name)) for name in "qkv")
    weights = graph.call_function(aten._softmax.default, (graph.call_function(aten.bmm.default, (q, k)), -1, False))
    graph.output(graph.call_function(aten.bmm.default, (weights, v)))
    assert len(group_exchanges(graph).groups) == 1


def test_one_exchange_is_a_group() -> None:
    graph = Graph()
    graph.output(attention(graph, scatter(graph, graph.placeholder("x"))))
    assert group_exchanges(graph).matched == 1
    assert names(graph)[:2] == ["submit 0 of x final", "wait_ 0"]


def test_exchanges_that_follow_each_other_are_groups_of_their_own() -> None:
    graph = Graph()
    graph.output(scatter(graph, norm(graph, scatter(graph, graph.placeholder("x")))))
    assert [group.members for group in group_exchanges(graph).groups] == [
        ["scatter_heads_default"],
        ["scatter_heads_default_1"],
    ]


def test_communicators_are_not_mixed() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output(graph.call_function(aten.add.Tensor, (scatter(graph, x, "a"), scatter(graph, y, "b"))))
    assert [group.communicator for group in group_exchanges(graph).groups] == ["a", "b"]


def test_groups_that_need_each_other_are_taken_apart() -> None:
    graph = Graph()
    first = scatter(graph, graph.placeholder("a"))
    behind = gather(graph, mm(graph, first))
    other = scatter(graph, norm(graph, behind))
    q, v = graph.placeholder("q"), graph.placeholder("v")
    graph.output(attention(graph, scatter(graph, q), scatter(graph, v), other))
    report = group_exchanges(graph)
    assert sorted(len(group.members) for group in report.groups) == [1, 1, 3]


def test_exchanges_out_of_cuda_graphs() -> None:
    graph = Graph()
    graph.output(fused(graph))
    group_exchanges(graph, lambda communicator: communicator == "c")
    targets = {node.target for node in graph.nodes}
    assert {torch.ops.ulysses_op.submit.uncaptured, torch.ops.ulysses_op.wait_.uncaptured} <= targets


def test_random_numbers_keep_their_order() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    early, late = (graph.call_function(aten.bernoulli.p, (x, 0.5)) for _ in range(2))
    graph.output(graph.call_function(aten.add.Tensor, (gather(graph, late), early)))
    group_exchanges(graph)
    assert [node for node in graph.nodes if node.target is aten.bernoulli.p] == [early, late]


def test_a_write_in_place_forbids_to_move_anything() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(aten.add_.Tensor, (x, 1))
    graph.output(attention(graph, *(scatter(graph, norm(graph, x)) for _ in range(3))))
    before = str(graph)
    report = group_exchanges(graph)
    assert str(graph) == before
    assert report.matched == 0
    assert all("writes in place" in why for why in report.left.values())


def test_final_copies_to_the_inputs_do_not() -> None:
    graph = Graph()
    state = graph.placeholder("state")
    result = fused(graph)
    graph.call_function(aten.copy_.default, (state, result))
    graph.output(result)
    assert group_exchanges(graph).matched == 1
    assert names(graph)[-1] == "copy_"
