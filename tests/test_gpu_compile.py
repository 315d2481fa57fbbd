"""The compiled exchange on CUDA devices: lent targets, captured through and partitioned around, one rank late."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import ranks
import test_lending
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code
from torch.profiler import ProfilerActivity, profile

import ulysses_op
from ulysses_op import fx_products

ONE_SIDED, PREFERRED = ranks.ONE_SIDED_ON_CUDA, ranks.PREFERRED_ON_CUDA
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ranks.DEVICES, reason="needs a CUDA device"),
    pytest.mark.timeout(200),
]
LENGTH, DIM, LAYERS = 256, 64, 4

Exchange = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def pool() -> ranks.RankPool:
    return ranks.pool(2, "cuda")


def layers(x: torch.Tensor, weights: list[Any], heads: int, scatter: Exchange, gather: Exchange) -> torch.Tensor:
    for qkv, out in weights:
        q, k, v = F.linear(x, qkv).unflatten(-1, (3, heads, DIM)).unbind(2)
        q, k = (F.rms_norm(t, (DIM,)) for t in (q, k))
        q, k, v = scatter(q), scatter(k), scatter(v)
        o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
        x = x + F.linear(gather(o).flatten(2), out)
    return x


def make_weights(heads: int) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(11)
    width = heads * DIM

    def matrix(rows: int) -> torch.Tensor:
        return (torch.randn(rows, width, generator=generator, device="cuda") / width**0.5).bfloat16()

    return [(matrix(3 * width), matrix(width)) for _ in range(LAYERS)]


def close(result: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Two roundings of the same values: bf16 has 8 bits."""
    return bool((result - wanted).abs().max() <= 0.02 * wanted.abs().max())


def graph_launches(call: Callable[[], Any]) -> int:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return sum(event.count for event in profiled.key_averages() if event.key == "cudaGraphLaunch")


def run_layers(
    rank: int, world_size: int, backend: str, cuda_graphs: str | None, how: str, calls: int
) -> dict[str, Any]:
    """Compiled layers against the eager ones, on fresh inputs, one rank late in turn. ``how``: "built" before they are
    compiled, "lazy", or "in parts": built, and every projection taken apart.
    """
    comm = ulysses_op.Communicator(backend=backend, timeout_s=20)
    if how != "lazy":
        comm.build("cuda")
    heads = 2 * world_size
    weights = make_weights(heads)
    generator = torch.Generator("cuda").manual_seed(rank)
    options: dict[str, Any] = {"triton.cudagraphs": True, "triton.cudagraph_trees": True} if cuda_graphs else {}
    torch.compiler.reset()
    installed = ulysses_op.compile_options(cuda_graphs=cuda_graphs or "auto")
    compiled = torch.compile(
        lambda x: layers(x, weights, heads, comm.scatter_heads, comm.gather_heads),
        fullgraph=True,
        options={**options, **installed},
    )
    rng = random.Random(5)
    wrong, codes = [], []
    least = 0 if how == "in parts" else fx_products.min_part
    with (
        torch.no_grad(),
        inductor_config.patch(force_disable_caches=True),
        mock.patch.object(fx_products, "min_part", least),
    ):
        for call in range(calls):
            x = torch.randn(1, LENGTH, heads * DIM, generator=generator, device="cuda").bfloat16()
            if rng.randrange(world_size) == rank:
                time.sleep(rng.uniform(0, 0.002))
                torch.cuda._sleep(int(rng.uniform(0, 2e6)))
            if call == 0:
                result, codes = run_and_get_code(compiled, x)
            else:
                result = compiled(x)
            wanted = layers(x, weights, heads, comm.scatter_heads, comm.gather_heads)
            if not close(result, wanted):
                wrong.append(call)
        launches = graph_launches(lambda: compiled(x))
    comm.check()
    report = installed["post_grad_custom_post_pass"].reports[0]
    found = comm.backend
    comm.close()
    return {
        "backend": found,
        "wrong": wrong,
        "launches": launches,
        "partitions": codes[0].count("def partition_"),
        "groups": [group.tags for group in report.groups],
        "lent": [group.lent for group in report.groups],
        "split": [len(group.split) for group in report.groups],
    }


GROUPS = [["0", "1", "2"], ["0"]] * LAYERS


@pytest.mark.parametrize("backend", [*ONE_SIDED, "c10d"])
def test_layers(pool: ranks.RankPool, backend: str) -> None:
    for answer in pool.run(run_layers, backend, None, "built", 20, timeout_s=90):
        assert (answer["backend"], answer["wrong"]) == (backend, [])
        assert answer["groups"] == answer["lent"] == GROUPS


@pytest.mark.parametrize("how", ["built", "lazy"])
@pytest.mark.parametrize("backend", ONE_SIDED)
def test_captured_through(pool: ranks.RankPool, backend: str, how: str) -> None:
    """Targets come up in the warm-up run; many layers are one graph launch."""
    for answer in pool.run(run_layers, backend, "auto", how, 50, timeout_s=90):
        assert (answer["backend"], answer["wrong"], answer["launches"]) == (backend, [], 1)
        assert answer["lent"] == GROUPS


@pytest.mark.parametrize(("backend", "asked"), [("c10d", "auto"), (PREFERRED, "around"), ("c10d", "around")])
def test_partitioned_around(pool: ranks.RankPool, backend: str, asked: str) -> None:
    """Between the exchanges of a layer lie V's projection, the norms of Q and of K, attention, and the way out."""
    for answer in pool.run(run_layers, backend, asked, "built", 20, timeout_s=90):
        assert (answer["backend"], answer["wrong"]) == (backend, [])
        assert 1 < answer["launches"] == answer["partitions"] <= 5 * LAYERS


@pytest.mark.parametrize("cuda_graphs", [None, "auto"])
@pytest.mark.parametrize("backend", [PREFERRED, "c10d"])
def test_projections_in_parts(pool: ranks.RankPool, backend: str, cuda_graphs: str | None) -> None:
    for answer in pool.run(run_layers, backend, cuda_graphs, "in parts", 50, timeout_s=90):
        assert (answer["backend"], answer["wrong"], answer["split"]) == (backend, [], [1] * 2 * LAYERS)
        if backend != "c10d":
            assert answer["lent"] == GROUPS
            assert answer["launches"] == (1 if cuda_graphs else 0)


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("backend", [*ONE_SIDED, "c10d"])
def test_bitwise_as_eager(pool: ranks.RankPool, backend: str, cuda_graphs: bool) -> None:
    arguments = (backend, "cuda", cuda_graphs, 200, False, LENGTH)
    answers = pool.run(test_lending.run_exact, *arguments, timeout_s=90)
    assert answers == [(backend, 0, test_lending.LENT)] * 2


@pytest.mark.parametrize("backend", ONE_SIDED)
def test_lending_without_proof_is_found(pool: ranks.RankPool, backend: str) -> None:
    for found, wrong, _ in pool.run(test_lending.run_exact, backend, "cuda", False, 3, True, LENGTH, timeout_s=90):
        assert found == backend
        assert wrong > 0


def run_training(rank: int, world_size: int, backend: str) -> tuple[list[float], list[list[list[str]]]]:
    """Gradients of the layers, compiled and eager; the groups of the forward and the backward graph."""
    comm = ulysses_op.Communicator(backend=backend, timeout_s=20)
    heads = 2 * world_size
    weights = [tuple(t.float().requires_grad_() for t in pair) for pair in make_weights(heads)]
    flat = [t for pair in weights for t in pair]
    torch.manual_seed(rank)
    torch.compiler.reset()
    installed = ulysses_op.compile_options()
    model = lambda x: layers(x, weights, heads, comm.scatter_heads, comm.gather_heads)  # noqa: E731
    compiled = torch.compile(model, fullgraph=True, options=installed)
    worst = []
    with inductor_config.patch(force_disable_caches=True):
        for _ in range(5):
            x = torch.randn(1, LENGTH, heads * DIM, device="cuda", requires_grad=True)
            got = torch.autograd.grad(compiled(x).square().mean(), (x, *flat))
            wanted = torch.autograd.grad(model(x).square().mean(), (x, *flat))
            pairs = zip(got, wanted, strict=True)
            worst.append(max(float((g - w).abs().max() / w.abs().max()) for g, w in pairs))
    reports = installed["post_grad_custom_post_pass"].reports
    comm.close()
    return worst, [[group.tags for group in report.groups] for report in reports]


@pytest.mark.parametrize("backend", [PREFERRED, "c10d"])
def test_training(pool: ranks.RankPool, backend: str) -> None:
    backward = [["0"], ["0", "1"], ["2"]] * LAYERS
    for worst, groups in pool.run(run_training, backend, timeout_s=90):
        assert max(worst) < 2e-2, worst
        assert groups == [GROUPS, backward]


def run_release(rank: int, world_size: int) -> int:
    """Communicators that compiled code has captured through give their memory back."""
    free = []
    for _ in range(3):
        run_layers(rank, world_size, PREFERRED, "auto", "built", 3)
        torch.compiler.reset()
        torch.cuda.empty_cache()
        dist.barrier()
        free.append(torch.cuda.mem_get_info()[0])
    return (free[0] - free[-1]) >> 20


def test_memory_comes_back(pool: ranks.RankPool) -> None:
    assert max(pool.run(run_release, timeout_s=90)) <= 64
