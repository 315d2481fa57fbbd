"""The pass under Inductor on real ranks: what it groups, the order in the generated code, and right results."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import ranks
import scalar_kernels  # noqa: F401
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code

import ulysses_op

BATCH, LENGTH, DIM = 2, 6, 16

Scatter = Callable[..., torch.Tensor]


def norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def attend(scatter: Scatter, gather: Scatter, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = scatter(q), scatter(k), scatter(v)
    o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    return gather(o).flatten(2)


class Weights:
    def __init__(self, heads: int) -> None:
        generator = torch.Generator().manual_seed(7)
        width = heads * DIM

        def matrix(rows: int) -> torch.Tensor:
            return torch.randn(rows, width, generator=generator) / width**0.5

        self.heads = heads
        self.fused, self.out = matrix(3 * width), matrix(width)
        self.q, self.k, self.v = matrix(width), matrix(width), matrix(width)


def fused(x: torch.Tensor, w: Weights, scatter: Scatter, gather: Scatter) -> torch.Tensor:
    q, k, v = F.linear(x, w.fused).unflatten(-1, (3, w.heads, DIM)).unbind(2)
    return F.linear(attend(scatter, gather, norm(q), norm(k), v), w.out)


def separate(x: torch.Tensor, w: Weights, scatter: Scatter, gather: Scatter) -> torch.Tensor:
    q, k, v = (F.linear(x, weight).unflatten(-1, (w.heads, DIM)) for weight in (w.q, w.k, w.v))
    return F.linear(attend(scatter, gather, norm(q), norm(k), v), w.out)


def pointwise_tail(x: torch.Tensor, w: Weights, scatter: Scatter, gather: Scatter) -> torch.Tensor:
    q, k, v = F.linear(x, w.fused).unflatten(-1, (3, w.heads, DIM)).unbind(2)
    return F.linear(attend(scatter, gather, norm(q), norm(k), v * 0.5), w.out)


def two_layers(x: torch.Tensor, w: Weights, scatter: Scatter, gather: Scatter) -> torch.Tensor:
    return separate(x + fused(x, w, scatter, gather), w, scatter, gather)


def cross(x: torch.Tensor, w: Weights, scatter: Scatter, gather: Scatter) -> torch.Tensor:
    """Keys and values that every rank holds are not exchanged."""
    q = F.linear(x, w.q).unflatten(-1, (w.heads, DIM))
    q, gate = scatter(norm(q)), scatter(q)
    return F.linear(gather(q.sigmoid() * gate).flatten(2), w.out)


BLOCKS = {block.__name__: block for block in (fused, separate, pointwise_tail, two_layers, cross)}


def events(code: str) -> list[str]:
    """Calls of the generated wrapper: "kernel" for a generated one, else the op's name."""
    found = []
    for line in code.splitlines():
        op = re.search(r"torch\.ops\.(?:ulysses_op|aten)\.(\w+)\.[\w.]+\(|extern_kernels\.(\w+)\(", line)
        if line.lstrip().startswith("assert") or "op_overload" in line:
            continue
        if op:
            found.append(op[1] or op[2])
        elif re.match(r"\s*cpp_fused\w*\(", line):
            found.append("kernel")
    return found


def compiled(
    rank: int, world_size: int, block: str, backend: str, grad: bool, adversarial: bool
) -> tuple[list[str], list[str], list[tuple[list[list[str]], list[str]]]]:
    """Checks the results; the events without and with the pass, and its reports."""
    comm = ulysses_op.Communicator(backend=backend, timeout_s=40)
    w = Weights(2 * world_size)
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(BATCH, LENGTH * world_size, w.heads * DIM, generator=generator)
    own = slice(rank * LENGTH, (rank + 1) * LENGTH)

    def run(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.clone().requires_grad_(grad)
        out = function(x)
        return (out.detach(), *torch.autograd.grad(out.square().sum(), x)) if grad else (out,)

    dense = run(lambda x: BLOCKS[block](x, w, lambda t: t, lambda t: t), whole)
    installed = ulysses_op.compile_options()
    codes = []
    for options in ({}, installed):
        torch.compiler.reset()
        if adversarial:
            options = {**options, "reorder_for_peak_memory": True, "reorder_for_locality": True}
        function = torch.compile(
            lambda x: BLOCKS[block](x, w, comm.scatter_heads, comm.gather_heads),
            fullgraph=True,
            dynamic=False,
            options=options,
        )
        with inductor_config.patch(force_disable_caches=True):
            results, code = run_and_get_code(run, function, whole[:, own])
            for _ in range(3):
                results = run(function, whole[:, own])
        codes.append(events(code[0]))
        called = re.findall(r"ulysses_op\.submit\.\w+\.(\w*)\(", code[0])
        assert set(called) == ({"python_kernel"} if "post_grad_custom_post_pass" in options else set())
        for result, wanted in zip(results, dense, strict=True):
            torch.testing.assert_close(result, wanted[:, own], atol=1e-4, rtol=1e-4)
    comm.close()
    reports = [
        ([group.members for group in r.groups], sorted(r.left)) for r in installed["post_grad_custom_post_pass"].reports
    ]
    return codes[0], codes[1], reports


@pytest.fixture
def pool() -> ranks.RankPool:
    """Two ranks: compiling is what takes the time here."""
    return ranks.pool(2)


@pytest.mark.parametrize(
    ("block", "grad", "backend"),
    [
        ("fused", False, "shm"),
        ("fused", True, "c10d"),
        ("separate", False, "c10d"),
        ("two_layers", True, "shm"),
    ],
)
def test_v_is_submitted_first_and_one_wait_completes_a_group(
    pool: ranks.RankPool, block: str, grad: bool, backend: str
) -> None:
    answers = pool.run(compiled, block, backend, grad, False, timeout_s=250)
    before, after, reports = answers[0]
    assert all(answer == answers[0] for answer in answers)  # the order is the same on every rank
    groups = 2 if block == "two_layers" else 1
    assert len(reports[0][0]) == 2 * groups  # with the gathers of the outputs
    assert (before.count("scatter_heads"), before.count("gather_heads")) == (3 * groups, groups)
    assert (after.count("submit"), after.count("wait_"), after.count("scatter_heads")) == (4 * groups, 2 * groups, 0)
    first = after.index("submit")
    assert after[:first] == ["mm"]  # V's projection, and nothing else
    # With separate projections Q leaves before K is projected, so their norms are two kernels. Own heads of q and k are
    # worked on last, where that is known to stay out of CUDA graphs' way.
    more = (0 if block == "fused" else 1) + (0 if backend == "c10d" else groups)
    assert after.count("kernel") <= before.count("kernel") + more, f"{before} {after}"
    last = after.index("wait_")
    assert after[first:last].count("submit") == 3
    assert "scaled_dot_product" in after[last + 1] or "scaled_dot_product" in after[last + 2]


def test_order_holds_against_the_scheduler(pool: ranks.RankPool) -> None:
    _, after, _ = pool.run(compiled, "fused", "shm", False, True, timeout_s=250)[0]
    assert after[:2] == ["mm", "submit"]


def test_v_with_work_of_its_own_still_goes_first(pool: ranks.RankPool) -> None:
    _, after, reports = pool.run(compiled, "pointwise_tail", "shm", False, False, timeout_s=250)[0]
    assert reports[0][0][0][0] == "scatter_heads_2"
    assert after.count("submit") == 4


def test_exchanges_that_meet_in_a_pointwise_node_are_grouped_too(pool: ranks.RankPool) -> None:
    _, after, reports = pool.run(compiled, "cross", "shm", False, False, timeout_s=250)[0]
    assert reports[0][0] == [["scatter_heads_1", "scatter_heads"], ["gather_heads"]]
    assert after.count("wait_") == 2


def returned(rank: int, world_size: int) -> list[list[str]]:
    """A scattered tensor that the graph returns is right after a later group."""
    comm = ulysses_op.Communicator(timeout_s=40)
    w = Weights(2 * world_size)
    torch.manual_seed(rank)
    x = torch.randn(BATCH, LENGTH, w.heads * DIM)

    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = comm.scatter_heads(F.linear(x, w.q).unflatten(-1, (w.heads, DIM)))
        return fused(x, w, comm.scatter_heads, comm.gather_heads), kept

    torch.compiler.reset()
    options = ulysses_op.compile_options()
    grouping = options["post_grad_custom_post_pass"]
    with inductor_config.patch(force_disable_caches=True):
        results = torch.compile(model, fullgraph=True, options=options)(x)
    for result, wanted in zip(results, model(x), strict=True):
        torch.testing.assert_close(result, wanted, atol=1e-5, rtol=1e-5)
    comm.close()
    return [[tag in group.lent for tag in group.tags] for group in grouping.reports[0].groups]


def test_a_result_that_leaves_the_graph_is_not_lent(pool: ranks.RankPool) -> None:
    assert pool.run(returned, timeout_s=250) == [[[True, True, True], [True], [False]]] * 2


def misused(rank: int, world_size: int) -> None:
    comm = ulysses_op.Communicator(timeout_s=20)
    comm.build("cpu")
    name = comm._where[0]
    x = torch.zeros(1, 2, world_size, 4)
    submit, wait = torch.ops.ulysses_op.submit, torch.ops.ulysses_op.wait_
    exchange = (name, world_size, -1, [], [], False, "scatter_heads")
    whole = list(range(world_size))
    with pytest.raises(RuntimeError, match="no group of '0' is under way"):
        wait([x], [x], name, ["0"])
    target = submit(x + rank, *exchange, "0", ["0"], "", True, False)
    with pytest.raises(RuntimeError, match="given 1 targets for the 2 tags"):
        wait([target], [x], name, ["0", "1"])
    copied = torch.full_like(target, -1)  # a compiler may hand wait_ a copy
    wait([copied], [x], name, ["0"])
    assert copied[0, ::2, 0, 0].tolist() == whole
    with pytest.raises(RuntimeError, match="waited for already"):
        wait([copied], [x], name, ["0"])
    # Two groups under way, waited for in another order than they were submitted in.
    sources = [x + rank, x + rank + 10, x + rank + 20]
    first = [
        submit(source, *exchange, tag, ["0", "1"], "", True, True) for source, tag in zip(sources, "01", strict=False)
    ]
    second = [submit(sources[2], *exchange, "2", ["2"], "", True, True)]
    wait(second, sources[2:], name, ["2"])
    wait(first, sources[:2], name, ["0", "1"])
    for index, result in enumerate((*first, *second)):
        assert result[0, ::2, 0, 0].tolist() == [10 * index + peer for peer in whole]
    # A target that somebody still waits for is not written again.
    kept = submit(x + rank, *exchange, "0", ["0"], "", True, True)
    with pytest.raises(RuntimeError, match="never waited for"):
        submit(x, *exchange, "0", ["0"], "", True, True)
    del kept
    submit(x, *exchange, "0", ["0", "1"], "", True, True)
    ranks.meet(dist.group.WORLD)
    with pytest.raises(RuntimeError, match="still open: the code that began it was left"):
        submit(x, *exchange, "0", ["0", "1"], "", True, True)
    with pytest.raises(ulysses_op.BrokenCommunicatorError):
        submit(x, *exchange, "3", ["3"], "", True, True)
    comm.close()


def test_submit_and_wait_by_hand(pool: ranks.RankPool) -> None:
    pool.run(misused)
