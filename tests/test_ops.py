"""The ops under opcheck and torch.compile, on real ranks: every rank runs the same checks in the same order."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import scalar_kernels  # noqa: F401
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import ulysses_op
from ulysses_op import asynchronous
from ulysses_op.layout import HeadRanges

BATCH, LENGTH, DIM = 2, 6, 8
OPS = torch.ops.ulysses_op
OVERLOADS = ("default", "uncaptured")
CASES = ("contiguous", "strided", "no gradient", "uneven", "gqa", "replicated")


def _flat(plan: HeadRanges | None) -> list[int]:
    return [] if plan is None else [bound for pair in plan for bound in pair]


def _inputs(rank: int, world_size: int, case: str, name: str, device: str) -> dict[str, list[Any]]:
    """Arguments of scatter_heads and of gather_heads, on the communicator of that name."""
    where = [name, world_size, -1]
    heads, num_heads, lens = None, 2 * world_size, [LENGTH] * world_size
    if case == "uneven":
        lens = [LENGTH + peer for peer in range(world_size - 1)] + [0]
        where[2] = rank
    if case in ("gqa", "replicated"):
        plan = ulysses_op.head_plan(*((14, 7) if case == "gqa" else (world_size, 1)), world_size)
        heads, num_heads = plan.kv, 7 if case == "gqa" else 1
        where[2] = rank
    local = num_heads // world_size if heads is None else heads[rank][1] - heads[rank][0]
    torch.manual_seed(rank)
    fused = torch.randn(BATCH, lens[rank], 3, num_heads, DIM, device=device)
    x = fused[:, :, 2] if case == "strided" else fused[:, :, 2].contiguous()
    y = torch.randn(BATCH, sum(lens), local, DIM, device=device)
    seq_lens = lens if case == "uneven" else []
    gradient = case != "no gradient"
    return {
        "scatter_heads": [x.requires_grad_(gradient), *where, _flat(heads), seq_lens],
        "gather_heads": [y.requires_grad_(gradient), *where, _flat(heads), seq_lens, case == "replicated"],
    }


def run_opcheck(rank: int, world_size: int, case: str, backend: str = "shm", device: str = "cpu") -> None:
    comm = ranks.communicator(tuple(range(world_size)), backend, device)
    assert comm.backend == backend
    for direction, arguments in _inputs(rank, world_size, case, comm._where[0], device).items():
        for overload in OVERLOADS:
            results = torch.library.opcheck(getattr(getattr(OPS, direction), overload), tuple(arguments))
            assert set(results.values()) == {"SUCCESS"}, results


def run_opcheck_asynchronous(rank: int, world_size: int, case: str, backend: str = "shm", device: str = "cpu") -> None:
    """As compiled code runs them: gradients are off, whatever its inputs require. A submission's result counts from its
    wait_ on; here it is complete at once, for opcheck to look at, and wait_ has nothing left to do.
    """
    comm = ranks.communicator(tuple(range(world_size)), backend, device)
    asynchronous.complete_at_submit = True
    try:
        with torch.no_grad():
            for direction, exchange in _inputs(rank, world_size, case, comm._where[0], device).items():
                x, name, *rest = exchange
                arguments = (*exchange[:6], rest[-1] is True, direction, "0", ["0"], "", True, False)
                for overload in OVERLOADS:
                    submit, wait = (getattr(packet, overload) for packet in (OPS.submit, OPS.wait_))
                    results = torch.library.opcheck(submit, arguments)
                    assert set(results.values()) == {"SUCCESS"}, results
                    target = submit(*arguments)
                    assert torch.equal(target, getattr(OPS, direction)(*exchange))
                    results = torch.library.opcheck(wait, ([target], [x], name, ["0"]))
                    assert set(results.values()) == {"SUCCESS"}, results
        assert comm.backend == comm._companion.backend == backend
    finally:
        asynchronous.complete_at_submit = False


@pytest.mark.parametrize("case", CASES)
def test_opcheck(pool: ranks.RankPool, case: str) -> None:
    pool.run(run_opcheck, case, timeout_s=200)


@pytest.mark.parametrize("case", CASES)
def test_opcheck_of_submit_and_wait(pool: ranks.RankPool, case: str) -> None:
    pool.run(run_opcheck_asynchronous, case, timeout_s=200)


@pytest.mark.gpu
@pytest.mark.skipif(not ranks.DEVICES, reason="needs a CUDA device")
@pytest.mark.parametrize("backend", [ranks.PREFERRED_ON_CUDA, "c10d"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("check", [run_opcheck, run_opcheck_asynchronous], ids=["functional", "asynchronous"])
def test_opcheck_on_gpus(check: Any, case: str, backend: str) -> None:
    ranks.pool(2, "cuda").run(check, case, backend, "cuda", timeout_s=200)


def _gradients(rank: int, world_size: int) -> None:
    """Both overloads of the functional ops have the gradient. What the pass emits behind autograd has none, and says so
    where one would be lost.
    """
    comm = ranks.communicator(tuple(range(world_size)), "shm")
    name = comm._where[0]
    for direction, arguments in _inputs(rank, world_size, "strided", name, "cpu").items():
        x = arguments[0]
        found = [
            torch.autograd.grad(
                getattr(getattr(OPS, direction), overload)(*arguments).pow(2).sum(), x, allow_unused=True
            )
            for overload in OVERLOADS
        ]
        assert found[0][0] is not None and found[1][0] is not None
        assert torch.equal(found[0][0], found[1][0])

    x, *exchange = _inputs(rank, world_size, "contiguous", name, "cpu")["scatter_heads"]
    exchange += [False, "scatter_heads", "0", ["0"], "", True, False]
    lost = "has no gradient, and a tensor that it was given requires one"
    for overload in OVERLOADS:
        submit, wait = (getattr(packet, overload) for packet in (OPS.submit, OPS.wait_))

        def by_hand(x: torch.Tensor, submit: Any = submit, wait: Any = wait) -> torch.Tensor:
            target = submit(x, *exchange)
            wait([target], [x], name, ["0"])
            return target * 2

        with pytest.raises(RuntimeError, match=f"^submit {lost}"):
            by_hand(x)
        torch.compiler.reset()
        with pytest.raises(Exception, match=f"submit {lost}"):
            torch.compile(by_hand, fullgraph=True, backend="eager")(x)
        target = submit(x.detach(), *exchange)
        with pytest.raises(RuntimeError, match=f"^wait_ {lost}"):
            wait([target], [x], name, ["0"])
        wait([target], [x.detach()], name, ["0"])
        with torch.no_grad():
            assert torch.equal(by_hand(x), target * 2)


def test_gradients_are_right_or_refused(pool: ranks.RankPool) -> None:
    pool.run(_gradients)


def _by_hand(rank: int, world_size: int, compiler: str) -> int:
    """Code that submits and waits by itself compiles as it is."""
    comm = ranks.communicator(tuple(range(world_size)), "shm")
    name = comm._where[0]
    exchange = (name, world_size, -1, [], [], False, "scatter_heads")
    tags = ["v", "q", "k"]

    def asynchronously(qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.unbind(2)
        v = v * 1.0
        sources = [v]
        targets = [OPS.submit(v, *exchange, "v", tags, "", True, False)]
        for tag, x in (("q", q), ("k", k)):
            sources.append(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
            targets.append(OPS.submit(sources[-1], *exchange, tag, tags, "", True, False))
        OPS.wait_(targets, sources, name, tags)
        v, q, k = targets
        return q * k + v

    def plainly(qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.unbind(2)
        q, k = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) for x in (q, k))
        return comm.scatter_heads(q) * comm.scatter_heads(k) + comm.scatter_heads(v)

    torch.compiler.reset()
    compiled = torch.compile(asynchronously, fullgraph=True, backend=compiler)
    wrong = 0
    for _ in range(5):
        qkv = torch.randn(BATCH, LENGTH, 3, world_size, DIM)
        wrong += not torch.allclose(compiled(qkv), plainly(qkv), atol=1e-6)
    return wrong


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_submissions_by_hand_compile(pool: ranks.RankPool, compiler: str) -> None:
    assert pool.run(_by_hand, compiler, timeout_s=200) == [0] * 4


def _block(scatter: Any, gather: Any, x: torch.Tensor, weight: torch.Tensor, heads: int) -> torch.Tensor:
    batch, length, _ = x.shape
    q, k, v = F.linear(x, weight).view(batch, length, 3, heads, DIM).unbind(2)
    q, k = (t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6) for t in (q, k))
    q, k, v = scatter(q, k, v)
    o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    return gather(o).reshape(batch, length, heads * DIM)


def _spellings(comm: Any, world_size: int) -> dict[str, tuple[Any, Any]]:
    group = dist.group.WORLD
    mesh = init_device_mesh("cpu", (world_size,))
    plan = ulysses_op.head_plan(2 * world_size, 2 * world_size, world_size).q

    def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with comm.group("q", "k", "v") as exchange:
            exchange.submit(v, tag="v")
            exchange.submit(q, tag="q")
            exchange.submit(k, tag="k")
            return exchange.wait()

    def unnamed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with comm.group() as exchange:
            for x in (v, q, k):
                exchange.submit(x, heads=plan)
            return exchange.wait("1", "2", "0")

    def each(scatter: Any) -> Any:
        return lambda q, k, v: (scatter(q), scatter(k), scatter(v))

    functions: dict[str, tuple[Any, Any]] = {
        "group": (grouped, comm.gather_heads),
        "unnamed group": (unnamed, comm.gather_heads),
        "method": (each(comm.scatter_heads), comm.gather_heads),
    }
    for name, where in (("default", None), ("name", group.group_name), ("process group", group), ("mesh", mesh)):
        functions[name] = (
            each(lambda x, where=where: ulysses_op.scatter_heads(x, where)),
            lambda x, where=where: ulysses_op.gather_heads(x, where),
        )
    lens = [LENGTH] * world_size
    functions["plan and lengths"] = (
        each(lambda x: ulysses_op.scatter_heads(x, heads=plan, seq_lens=lens)),
        lambda x: ulysses_op.gather_heads(x, heads=plan, seq_lens=lens),
    )
    return functions


def _compiled(rank: int, world_size: int, spelling: str, compiler: str) -> None:
    comm = ranks.fresh_communicator(tuple(range(world_size)), "shm")
    assert comm.backend == "shm"
    scatter, gather = _spellings(comm, world_size)[spelling]
    heads = 2 * world_size
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(3 * heads * DIM, heads * DIM, generator=generator) / 8
    whole = torch.randn(BATCH, LENGTH * world_size, heads * DIM, generator=generator)
    own = slice(rank * LENGTH, (rank + 1) * LENGTH)

    dense_x = whole.clone().requires_grad_()
    dense = _block(lambda *qkv: qkv, lambda o: o, dense_x, weight, heads)
    (dense_grad,) = torch.autograd.grad(dense.square().sum(), dense_x)

    x = whole[:, own].clone().requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: _block(scatter, gather, x, weight, heads), fullgraph=True, dynamic=False, backend=compiler
    )
    for _ in range(3):
        out = compiled(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        torch.testing.assert_close(out, dense[:, own], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(grad, dense_grad[:, own], atol=1e-4, rtol=1e-4)
    assert dict(ulysses_op.ops.known_backends()).get(dist.group.WORLD.group_name, "shm") == "shm"
    comm.close()


SPELLINGS = ("group", "unnamed group", "method", "default", "name", "process group", "mesh", "plan and lengths")


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_traces_without_a_graph_break(pool: ranks.RankPool, spelling: str) -> None:
    pool.run(_compiled, spelling, "aot_eager", timeout_s=120)


@pytest.mark.parametrize("spelling", ["group", "default"])
def test_inductor(pool: ranks.RankPool, spelling: str) -> None:
    pool.run(_compiled, spelling, "inductor", timeout_s=250)


def _dynamic(rank: int, world_size: int) -> int:
    graphs = 0

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(lambda x: ulysses_op.scatter_heads(x) * 2, fullgraph=True, backend=counting)
    for length in (5, 6, 9, 17, 33):
        x = torch.full((1, length, world_size, 4), float(rank))
        torch._dynamo.mark_dynamic(x, 1)
        y = compiled(x)
        assert y.shape == (1, length * world_size, 1, 4)
        assert y[0, ::length, 0, 0].tolist() == [2.0 * peer for peer in range(world_size)]
    return graphs


def test_one_graph_serves_many_lengths(pool: ranks.RankPool) -> None:
    assert pool.run(_dynamic) == [1] * 4


def _indivisible(rank: int, world_size: int) -> str:
    torch.compiler.reset()
    compiled = torch.compile(lambda x: ulysses_op.scatter_heads(x), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="do not split equally") as caught:
        compiled(torch.zeros(1, 4, world_size + 1, 4))
    return str(caught.value)


def test_heads_that_do_not_divide_are_an_error_while_tracing(pool: ranks.RankPool) -> None:
    assert all("pass heads, for instance from ulysses_op.head_plan" in message for message in pool.run(_indivisible))


def _exported(rank: int, world_size: int) -> list[str]:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ulysses_op.gather_heads(ulysses_op.scatter_heads(x) + 1)

    x = torch.randn(1, 4, world_size, 4)
    program = torch.export.export(Model(), (x,), strict=False)
    assert torch.equal(program.module()(x), x + 1)
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def test_export_keeps_the_ops(pool: ranks.RankPool) -> None:
    for targets in pool.run(_exported):
        assert "ulysses_op.scatter_heads.default" in targets
        assert "ulysses_op.gather_heads.default" in targets


def _gone(rank: int, world_size: int) -> None:
    x = torch.zeros(1, 2, world_size, 4)
    with pytest.raises(RuntimeError, match="is gone"):
        torch.ops.ulysses_op.scatter_heads(x, "nobody#7", world_size, -1, [], [])
    with pytest.raises(ValueError, match="no process group is named"):
        torch.ops.ulysses_op.scatter_heads(x, "nobody", world_size, -1, [], [])
    with pytest.raises(RuntimeError, match=f"compiled for {world_size + 1} ranks"):
        torch.ops.ulysses_op.scatter_heads(x, dist.group.WORLD.group_name, world_size + 1, -1, [], [])


def test_ops_that_find_no_communicator(pool: ranks.RankPool) -> None:
    pool.run(_gone)


def test_accumulate_mm() -> None:
    total, x, weight = (torch.randn(sizes) for sizes in ((3, 5), (3, 4), (4, 5)))
    wanted = total + x @ weight
    torch.library.opcheck(OPS.accumulate_mm_.default, (total.clone(), x, weight))
    OPS.accumulate_mm_(total, x, weight)
    torch.testing.assert_close(total, wanted)


@pytest.mark.parametrize("with_bias", [False, True])
def test_mm_into(with_bias: bool) -> None:
    whole, x, weight, bias = (torch.randn(sizes) for sizes in ((3, 7), (3, 4), (4, 5), (5,)))
    arguments = (bias if with_bias else None, x, weight)
    wanted = whole.clone()
    wanted[:, 1:6] = x @ weight + (bias if with_bias else 0)
    torch.library.opcheck(OPS.mm_into_.default, (whole.clone()[:, 1:6], *arguments))
    OPS.mm_into_(whole[:, 1:6], *arguments)
    torch.testing.assert_close(whole, wanted)
