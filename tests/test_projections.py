"""Which products are taken apart around exchanges, and which are left whole, on graphs built by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ulysses_op import fx_products, grouping
from ulysses_op.grouping import Report, group_exchanges

OPS = torch.ops.ulysses_op
ROWS, HEADS, DIM = 6, 4, 8
WIDTH = HEADS * DIM


@pytest.fixture(autouse=True)
def _every_product_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fx_products, "min_part", 0)
    # What is done to the parts is test_own_parts.py's.
    monkeypatch.setattr(grouping, "compute_own_parts_last", lambda graph, flights, rank_of: [])


def scatter(x: Tensor) -> Tensor:
    return OPS.scatter_heads(x, "c", 2, -1, [], [])


def gather(x: Tensor) -> Tensor:
    return OPS.gather_heads(x, "c", 2, -1, [], [], False)


def grouped(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    """The function's graph after the pass on rank 1 of two, and the pass' report."""
    with FakeTensorMode():
        module = make_fx(function)(*(torch.empty(shape, dtype=dtype) for shape in shapes))
    report = group_exchanges(module.graph, rank_of=lambda communicator: 1)
    return module, report


def split(report: Report) -> list[int]:
    return [len(group.split) for group in report.groups]


def products(module: GraphModule) -> list[tuple[int, ...]]:
    found = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return [tuple(node.meta["val"].shape) for node in module.graph.nodes if node.target in found]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q * k + v


def exchange_three(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(scatter(q.sin()), scatter(k.cos()), scatter(v))


def fused(x: Tensor, weight: Tensor) -> Tensor:
    return exchange_three(*torch.mm(x, weight).view(1, ROWS, 3, HEADS, DIM).unbind(2))


FUSED = ((ROWS, 16), (16, 3 * WIDTH))


def test_columns_that_leave_first_are_a_product_of_their_own() -> None:
    module, report = grouped(fused, *FUSED)
    assert split(report) == [1]
    assert products(module) == [(ROWS, WIDTH), (ROWS, 2 * WIDTH)]
    nodes: list[Node] = [node for node in module.graph.nodes if node.op == "call_function"]
    first, second = (node for node in nodes if node.target is torch.ops.aten.mm.default)
    submits = [node for node in nodes if node.target is OPS.submit.default]
    assert nodes.index(first) < nodes.index(submits[0]) < nodes.index(second) < nodes.index(submits[1])
    assert first.args[1].args == (module.graph.find_nodes(op="placeholder")[1], 1, 2 * WIDTH, 3 * WIDTH)
    for submit in submits:
        assert submit.args[0].meta["val"].shape == (1, ROWS, HEADS, DIM)


@pytest.mark.parametrize("order", ["qkv", "qvk", "vqk"])
def test_columns_are_found_wherever_they_lie(order: str) -> None:
    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        parts = torch.addmm(bias, x, weight).split(WIDTH, -1)
        named = {name: part.unflatten(-1, (HEADS, DIM))[None] for name, part in zip(order, parts, strict=True)}
        return exchange_three(named["q"], named["k"], named["v"])

    module, report = grouped(function, *FUSED, (3 * WIDTH,))
    assert split(report) == [1]
    at = order.index("v")
    widths = [x * WIDTH for x in (at, 1, 2 - at) if x]
    assert sorted(columns for _, columns in products(module)) == sorted(widths)


def test_values_are_those_of_the_whole() -> None:
    """The graph is run with the exchanges left out: on what is submitted."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = torch.mm(x, weight).view(2, 3, 3, HEADS, DIM).transpose(0, 1).unbind(2)
        return exchange_three(q, k, v)

    module, report = grouped(function, *FUSED)
    assert split(report) == [1]
    x, weight = torch.randn(FUSED[0]), torch.randn(FUSED[1])
    seen = {}

    class Run(torch.fx.Interpreter):
        def run_node(self, node: Node) -> Any:
            if node.target is OPS.submit.default:
                seen[node.args[10]] = self.env[node.args[0]]
                return torch.empty(node.meta["val"].shape)
            return None if node.target is OPS.wait_.default else super().run_node(node)

    Run(module).run(x, weight)
    q, k, v = torch.mm(x, weight).view(2, 3, 3, HEADS, DIM).transpose(0, 1).unbind(2)
    wanted = [q.sin(), k.cos(), v]
    for name, value in zip(["scatter_heads", "scatter_heads_1", "scatter_heads_2"], wanted, strict=True):
        torch.testing.assert_close(seen[name], value)


def test_what_keeps_a_product_whole() -> None:
    def all_of_it(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.mm(x, weight)
        return exchange_three(*whole.view(1, ROWS, 3, HEADS, DIM).unbind(2)), whole.sum()

    def leaves(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = torch.mm(x, weight).view(1, ROWS, 3, HEADS, DIM).unbind(2)
        return exchange_three(q, k, v), q

    def interleaved(x: Tensor, weight: Tensor) -> Tensor:
        return exchange_three(*torch.mm(x, weight).view(1, ROWS, HEADS, 3, DIM).unbind(3))

    def used_by_both(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = torch.mm(x, weight).view(1, ROWS, 3, HEADS, DIM).unbind(2)
        return exchange_three(q + v, k, v)

    def bytes_of_k(x: Tensor, weight: Tensor) -> Tensor:
        _, k, v = torch.mm(x, weight).view(1, ROWS, 3, HEADS, DIM).unbind(2)
        return scatter(v) + scatter(k.view(torch.int8)).view(torch.float32).sin()

    def as_complex(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = torch.mm(x, weight).view(1, ROWS, 3, HEADS, DIM).unbind(2)
        turned = torch.view_as_real(torch.view_as_complex(q.unflatten(-1, (-1, 2))) * 1j).flatten(-2)
        return exchange_three(turned, k, v)

    for function in (all_of_it, leaves, interleaved, used_by_both, bytes_of_k, as_complex):
        module, report = grouped(function, *FUSED)
        assert (function.__name__, split(report)) == (function.__name__, [0])
        assert products(module) == [(ROWS, 3 * WIDTH)]

    def conjugated(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v = torch.mm(x, weight).view(1, ROWS, 3, HEADS, DIM).unbind(2)
        return exchange_three(q, k, v.conj().resolve_conj())

    def one_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return exchange_three(*torch.addmm(bias, x, weight).view(1, ROWS, 3, HEADS, DIM).unbind(2))

    assert split(grouped(conjugated, *FUSED, dtype=torch.complex64)[1]) == [0]
    assert split(grouped(one_bias, *FUSED, (1,))[1]) == [0]


def test_small_products_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fx_products, "min_part", ROWS * 16 * WIDTH + 1)
    assert split(grouped(fused, *FUSED)[1]) == [0]
    monkeypatch.setattr(fx_products, "min_part", ROWS * 16 * WIDTH)
    assert split(grouped(fused, *FUSED)[1]) == [1]


def behind(o: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(gather(o).view(ROWS, 2 * WIDTH), weight)


BEHIND = ((1, 2 * ROWS, HEADS, DIM), (2 * WIDTH, 5))


def test_own_heads_are_multiplied_while_the_others_travel() -> None:
    module, report = grouped(behind, *BEHIND)
    assert split(report) == [1]
    ops = [node.target.__name__.split(".")[0] for node in module.graph.nodes if node.op == "call_function"]
    important = [name for name in ops if name in ("submit", "mm", "wait_", "accumulate_mm_")]
    assert important == ["submit", "mm", "wait_", "accumulate_mm_"]
    (submit,) = module.graph.find_nodes(op="call_function", target=OPS.submit.default)
    assert submit.args[11:] == (False, False)  # without the own slice, not lent yet
    # Rank 1 of two: the later rows of its input, the later rows of the weight.
    o, weight = module.graph.find_nodes(op="placeholder")
    (product,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert product.args[0].args[0].args == (o, 1, ROWS, 2 * ROWS)
    assert product.args[1].args == (weight, 0, WIDTH, 2 * WIDTH)


def test_what_keeps_a_sum_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def used_again(o: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        gathered = gather(o).view(ROWS, 2 * WIDTH)
        return torch.mm(gathered, weight), gathered.sum()

    def leaves(o: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        gathered = gather(o)
        return torch.mm(gathered.view(ROWS, 2 * WIDTH), weight), gathered

    def other_matrix(o: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(weight.t(), gather(o).view(ROWS, 2 * WIDTH).t())

    def of_another_dtype(o: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(gather(o.view(torch.int32)).view(torch.float32).view(ROWS, 2 * WIDTH), weight)

    for function in (used_again, leaves, other_matrix, of_another_dtype):
        _, report = grouped(function, *BEHIND)
        assert (function.__name__, split(report)) == (function.__name__, [0])

    # As many tokens as numbers in a token.
    def transposed(o: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(gather(o).view(WIDTH, WIDTH).t(), weight)

    def the_first_again_and_again(o: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(gather(o)[:, :1].expand(-1, WIDTH, -1, -1).view(WIDTH, WIDTH), weight)

    def as_it_is(o: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(gather(o).view(WIDTH, WIDTH), weight)

    square = ((1, 2 * WIDTH, HEADS // 2, DIM), (WIDTH, 5))
    for function, parts in ((transposed, 0), (the_first_again_and_again, 0), (as_it_is, 1)):
        assert (function.__name__, split(grouped(function, *square)[1])) == (function.__name__, [parts])
    heads_are_apart = lambda o, weight: behind(o.transpose(2, 3), weight)  # noqa: E731
    assert split(grouped(heads_are_apart, (1, 2 * ROWS, DIM, HEADS), BEHIND[1])[1]) == [0]
    assert split(grouped(behind, (2, ROWS, HEADS, DIM), BEHIND[1])[1]) == [0]


@pytest.mark.parametrize(
    ("dtype", "flag"),
    [
        (torch.bfloat16, "allow_bf16_reduced_precision_reduction"),
        (torch.float16, "allow_fp16_reduced_precision_reduction"),
    ],
)
def test_sums_are_rounded_in_the_middle_only_where_that_is_allowed(dtype: torch.dtype, flag: str) -> None:
    matmul = torch.backends.cuda.matmul
    assert split(grouped(behind, *BEHIND, dtype=dtype)[1]) == [1]
    kept = getattr(matmul, flag)
    setattr(matmul, flag, False)
    try:
        assert split(grouped(behind, *BEHIND, dtype=dtype)[1]) == [0]
        assert split(grouped(behind, *BEHIND)[1]) == [1]
    finally:
        setattr(matmul, flag, kept)
