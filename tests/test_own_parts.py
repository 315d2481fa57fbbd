"""What a rank keeps is computed last and in place: on graphs built by hand, run on one rank without its peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ulysses_op import fx_products
from ulysses_op.fx_narrow import Span, computed_in_part, narrow
from ulysses_op.fx_nodes import is_view
from ulysses_op.grouping import Report, group_exchanges

OPS = torch.ops.ulysses_op
BATCH, ROWS, HEADS, DIM, DEPTH = 2, 6, 8, 4, 5
WIDTH = HEADS * DIM

Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def _every_product_is_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fx_products, "min_part", 0)


def traced(function: Function, *shapes: tuple[int, ...]) -> GraphModule:
    with FakeTensorMode():
        return make_fx(function)(*(torch.empty(shape) for shape in shapes))


# Narrowing.


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1)


def layer_norm(x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    return (x - mean) * torch.rsqrt(variance + 1)


def rope(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * 2 - second, second * 2 + first), -1)


def interleaved(x: Tensor) -> Tensor:
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((-odd, even), -1).flatten(-2) + x


def scattered(x: Tensor) -> Tensor:
    return torch.slice_scatter(torch.zeros_like(x), x[..., 1::2].sin(), -1, 0, DIM, 2)


def transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).clone().sum(-1, keepdim=True).permute(0, 2, 1, 3) + x.amax(1)[:, None]


def of_tables(x: Tensor) -> Tensor:
    table = torch.arange(HEADS * DIM, dtype=x.dtype).view(1, 1, HEADS, DIM)
    return x * table + table[0, 0, :, :1].expand(HEADS, DIM) + torch.arange(DIM)


def of_flat(x: Tensor) -> Tensor:
    return (x.reshape(BATCH, ROWS, WIDTH) * torch.linspace(0, 1, WIDTH)).view(BATCH, ROWS, HEADS, DIM)


def of_a_fused_one(x: Tensor) -> Tensor:
    many = torch.stack((x, x.sin()), 2).reshape(BATCH, ROWS, 2 * WIDTH)
    return many[:, :, WIDTH:].view(BATCH, ROWS, HEADS, DIM).cos().unsqueeze(1).squeeze(1)


def squeezed(x: Tensor) -> Tensor:
    """A dimension that is no larger than 1 in a part alone."""
    return x.squeeze(2).sin()[:, None].squeeze(1)


NARROWED = [squeezed, norm, layer_norm, rope, interleaved, scattered, transposed, of_tables, of_flat, of_a_fused_one]


@pytest.mark.parametrize("function", NARROWED, ids=lambda function: function.__name__)
@pytest.mark.parametrize("heads", [(0, 3), (3, 4), (4, 8)])
def test_a_part_is_computed_by_itself(function: Function, heads: tuple[int, int]) -> None:
    module = traced(function, (BATCH, ROWS, HEADS, DIM))
    (output,) = module.graph.find_nodes(op="output")
    (result,) = output.all_input_nodes
    assert computed_in_part(result, Span(2, *heads))
    with module.graph.inserting_before(output):
        part = narrow(module.graph, result, Span(2, *heads))
    output.args = (part,)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    x = torch.randn(BATCH, ROWS, HEADS, DIM)
    torch.testing.assert_close(module(x), function(x)[:, :, slice(*heads)], rtol=1e-6, atol=1e-6)
    assert part.meta["val"].shape == (BATCH, ROWS, heads[1] - heads[0], DIM)
    wide = [node for node in module.graph.nodes if is_computed(node) and node.meta["val"].numel() >= x.numel()]
    # The zeros that are written to; a stack whose columns are taken, and what is in it.
    assert len(wide) == {scattered: 1, of_a_fused_one: 2}.get(function, 0), wide


def is_computed(node: Node) -> bool:
    return not is_view(node) and node.op == "call_function" and isinstance(node.meta["val"], Tensor)


def over_heads(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean((-2, -1), keepdim=True) + 1)


def test_sums_over_heads_are_computed_whole() -> None:
    module = traced(over_heads, (BATCH, ROWS, HEADS, DIM))
    (output,) = module.graph.find_nodes(op="output")
    computed = computed_in_part(output.all_input_nodes[0], Span(2, 0, 1))
    assert [node.target for node in computed] == [torch.ops.aten.mul.Tensor]


# Exchanges.


class Plan:
    """Who gets which heads, and has how many tokens; rank ``rank`` of it runs."""

    def __init__(self, rank: int, heads: list[int], lens: list[int], batch: int = 1) -> None:
        self.rank, self.heads, self.lens, self.batch = rank, heads, lens, batch
        self.world_size = len(lens)
        even = self.world_size == 2
        self.arguments = ("c", self.world_size, -1 if even else rank, [] if even else heads, [] if even else lens)
        self.own = slice(*heads[2 * rank : 2 * rank + 2])
        self.rows = slice(sum(lens[:rank]), sum(lens[: rank + 1]))
        self.theirs = [head for head in range(HEADS) if not self.own.start <= head < self.own.stop]

    def scatter(self, x: Tensor) -> Tensor:
        return OPS.scatter_heads(x, *self.arguments)

    def shapes(self) -> list[tuple[int, ...]]:
        """Of x, the fused weight and bias."""
        return [(self.batch * self.lens[self.rank], DEPTH), (DEPTH, 3 * WIDTH), (3 * WIDTH,)]


EVEN = [0, 4, 4, 8]
PLANS = [
    Plan(0, EVEN, [ROWS, ROWS]),
    Plan(1, EVEN, [ROWS, ROWS], batch=2),
    Plan(1, [0, 1, 1, 4, 4, 8], [2, ROWS, 3]),
    Plan(2, [0, 1, 1, 4, 4, 8], [2, 1, ROWS], batch=2),
]


def qkv(plan: Plan, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    fused = torch.addmm(bias, x, weight).view(plan.batch, plan.lens[plan.rank], 3, HEADS, DIM)
    return rope(norm(fused[:, :, 0])), over_heads(fused[:, :, 1].sin()), fused[:, :, 2]


def attention(plan: Plan) -> Function:
    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (plan.scatter(each) for each in qkv(plan, x, weight, bias))
        return q * k + v

    return function


def grouped(plan: Plan, function: Function, *shapes: tuple[int, ...]) -> tuple[GraphModule, Report]:
    module = traced(function, *shapes)
    return module, group_exchanges(module.graph, rank_of=lambda communicator: plan.rank)


class Run(torch.fx.Interpreter):
    """Runs a graph with targets that hold NaN, into which nobody but this rank writes."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.sent: dict[str, Tensor] = {}
        self.targets: dict[str, Tensor] = {}
        self.submitted: list[int] = []
        self.at: list[str] = []

    def run_node(self, node: Node) -> Any:
        if node.target is OPS.submit.default:
            self.at.append("submit")
            name = str(node.args[10])
            self.sent[name] = self.env[node.args[0]].clone()
            self.targets[name] = torch.full(node.meta["val"].shape, torch.nan)
            return self.targets[name]
        if node.target is OPS.wait_.default:
            self.at.append("wait_")
            return None
        if node.target in (torch.ops.aten.copy_.default, OPS.mm_into_.default):
            self.at.append("write")
        return super().run_node(node)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.rank}of{plan.world_size}-{plan.batch}")
def test_peers_parts_leave_first_and_the_own_ones_are_written_in_place(plan: Plan) -> None:
    module, report = grouped(plan, attention(plan), *plan.shapes())
    assert [len(group.own_last) for group in report.groups] == [3]
    run, inputs = Run(module), [torch.randn(shape) for shape in plan.shapes()]
    run.run(*inputs)
    for name, value in zip(("scatter_heads", "scatter_heads_1", "scatter_heads_2"), qkv(plan, *inputs), strict=True):
        torch.testing.assert_close(run.sent[name][:, :, plan.theirs], value[:, :, plan.theirs])
        torch.testing.assert_close(run.targets[name][:, plan.rows], value[:, :, plan.own])
        others = torch.ones(sum(plan.lens), dtype=torch.bool)
        others[plan.rows] = False
        assert run.targets[name][:, others].isnan().all()
    # What leaves is written before each submission, and what stays behind all of them: a product for each sequence.
    pieces = 1 if plan.own.start == 0 or plan.own.stop == HEADS else 2
    assert run.at[:pieces] == ["write"] * pieces
    last = len(run.at) - 1 - run.at[::-1].index("submit")
    assert run.at[last + 1 :] == ["write"] * (plan.batch + 3) + ["wait_"]  # two for the halves of q
    for submit in module.graph.find_nodes(op="call_function", target=OPS.submit.default):
        assert submit.args[11:] == (False, False)


def put_together(x: Tensor) -> Tensor:
    half = torch.cat((x[..., :2].sin(), x[..., 2:].cos()), -1)
    return torch.cat((half, 2 * half, half), -1)


def put_together_of_three(x: Tensor) -> Tensor:
    first, second = x.sin().chunk(2, -1)
    return torch.cat((torch.cat((first, second), -1), first, first), -1)


@pytest.mark.parametrize("function", [put_together, put_together_of_three])
def test_what_is_put_together_of_what_is_used_again(function: Function) -> None:
    plan = PLANS[0]
    module, report = grouped(plan, lambda x: plan.scatter(function(x)), (1, ROWS, HEADS, DIM))
    assert len(report.groups[0].own_last) == 1
    run, x = Run(module), torch.randn(1, ROWS, HEADS, DIM)
    run.run(x)
    torch.testing.assert_close(run.sent["scatter_heads"][:, :, plan.theirs], function(x)[:, :, plan.theirs])
    torch.testing.assert_close(run.targets["scatter_heads"][:, plan.rows], function(x)[:, :, plan.own])


def test_small_products_and_their_columns_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PLANS[0]
    monkeypatch.setattr(fx_products, "min_part", ROWS * DEPTH * WIDTH)  # less than V's, more than a half of it
    module, report = grouped(plan, attention(plan), *plan.shapes())
    assert [(len(group.split), len(group.own_last)) for group in report.groups] == [(1, 2)]
    first, *others = module.graph.find_nodes(op="call_function", target=OPS.submit.default)
    assert first.args[11:] == (True, False)
    assert all(submit.args[11:] == (False, False) for submit in others)


def test_what_stays_whole() -> None:
    plan = PLANS[0]

    def used_again(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = qkv(plan, x, weight, bias)
        return plan.scatter(q) * plan.scatter(k) + plan.scatter(v), q.sum() + v.sum()

    def used_on_the_way(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = qkv(plan, x, weight, bias)
        turned = q.sin()
        return plan.scatter(turned.cos()) * plan.scatter(k) + plan.scatter(v), turned

    def twice(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        q, k, _ = qkv(plan, x, weight, bias)
        return plan.scatter(q) * plan.scatter(k) + plan.scatter(k)

    def as_it_comes(x: Tensor) -> Tensor:
        return plan.scatter(x)

    for function, count in ((used_again, 1), (used_on_the_way, 2), (twice, 1)):
        _, report = grouped(plan, function, *plan.shapes())
        found = sum(len(group.own_last) for group in report.groups)
        assert (function.__name__, found) == (function.__name__, count)
    assert grouped(plan, as_it_comes, (1, ROWS, HEADS, DIM))[1].groups[0].own_last == []


@pytest.mark.parametrize(
    ("heads", "lens"),
    [([0, 8, 0, 8], [ROWS, ROWS]), ([0, 8, 8, 8], [ROWS, ROWS]), ([0, 4, 4, 8], [ROWS, 0])],
    ids=["replicated", "none", "no tokens"],
)
def test_what_has_no_part_of_its_own_stays_whole(heads: list[int], lens: list[int]) -> None:
    for rank in range(2):
        plan = Plan(rank, heads, lens)
        plan.arguments = ("c", 2, rank, heads, lens)
        _, report = grouped(plan, _one_alone(plan), (1, lens[rank], HEADS, DIM))
        assert report.groups[0].own_last == []


def _one_alone(plan: Plan) -> Function:
    return lambda x: plan.scatter(x.sin())


def test_exchanges_outside_of_cuda_graphs_stay_whole() -> None:
    plan = PLANS[0]
    module = traced(attention(plan), *plan.shapes())
    report = group_exchanges(module.graph, uncaptured=lambda communicator: True, rank_of=lambda communicator: 0)
    assert [(len(group.split), group.own_last) for group in report.groups] == [(1, [])]
