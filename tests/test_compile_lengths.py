"""Lengths under torch.compile with the pass: uneven, changing from call to call, growing; right against attention over
the whole sequence, and compiled as often as the shapes of a rank ask for.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import ranks
import scalar_kernels  # noqa: F401
import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch._dynamo.utils import counters

import ulysses_op

HEADS, DIM, WIDTH = 8, 4, 8

Lengths = Sequence[int]
"""Of each rank."""
Call = tuple[int, Lengths]
"""A batch, and the length that each rank has of its sequences."""


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, comm: Any, lengths: Lengths | None) -> torch.Tensor:
    """Attention over a sequence, whole where there is no communicator."""
    if comm is not None:
        q, k, v = (comm.scatter_heads(t, seq_lens=lengths) for t in (q, k, v))
    o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    return o if comm is None else comm.gather_heads(o, seq_lens=lengths)


class Block(torch.nn.Module):
    """Attention and a residual."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.qkv = torch.nn.Linear(WIDTH, 3 * HEADS * DIM)
        self.norm_q, self.norm_k = torch.nn.RMSNorm(DIM), torch.nn.RMSNorm(DIM)
        self.out = torch.nn.Linear(HEADS * DIM, WIDTH)

    def prepare(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm_q(q), self.norm_k(k)

    def forward(self, x: torch.Tensor, comm: Any = None, lengths: Lengths | None = None) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(2)
        return x + self.out(attend(*self.prepare(q, k), v, comm, lengths).flatten(2))


class Biased(Block):
    """The gradient of the bias is a sum over tokens, and so the gradient of Q itself where there is one token."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(1, 1, HEADS, DIM))

    def prepare(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm_q(q) + self.bias, self.norm_k(k)


class Scaled(Biased):
    """The gradient of Q passes one node more than that of K, a sum over tokens, which is none where there is one."""

    def prepare(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm_q(q) * self.bias, self.norm_k(k) * 1.5 * 0.7


class Sized:
    """No module, whose numbers and sizes Dynamo would take for constants where it may take them for variables."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.heads = HEADS
        self.qkv, self.out = torch.randn(3 * HEADS * DIM, WIDTH) / 3, torch.randn(WIDTH, HEADS * DIM) / 6

    def __call__(self, x: torch.Tensor, comm: Any = None, lengths: Lengths | None = None) -> torch.Tensor:
        q, k, v = F.linear(x, self.qkv).unflatten(-1, (3, self.heads, DIM)).unbind(2)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return x + F.linear(attend(q, k, v, comm, lengths).flatten(2), self.out)


BLOCKS: dict[str, Any] = {block.__name__: block for block in (Block, Biased, Scaled, Sized)}


def run(function: Any, x: torch.Tensor, grad: bool, dynamic: Sequence[int] = ()) -> tuple[torch.Tensor, ...]:
    """The output, and the gradient of half its square; ``dynamic`` are the dimensions to be marked so."""
    x = x.detach().clone().requires_grad_(grad)
    for dimension in dynamic:
        torch._dynamo.mark_dynamic(x, dimension)
    with torch.set_grad_enabled(grad):
        out = function(x)
    return (out.detach(), *torch.autograd.grad(out, x, out.detach())) if grad else (out,)


def sequence(call: Call, seed: int = 0) -> torch.Tensor:
    """The whole input, the same on every rank."""
    batch, lengths = call
    return torch.randn(batch, sum(lengths), WIDTH, generator=torch.Generator().manual_seed(seed))


def part(whole: torch.Tensor, lengths: Lengths, rank: int) -> torch.Tensor:
    return whole[:, sum(lengths[:rank]) : sum(lengths[: rank + 1])]


@dataclass
class Served:
    """What a rank tells of its calls."""

    backend: str
    compiled: list[int] = field(default_factory=list)
    """How many graphs Dynamo has made, up to and with each call."""
    groups: list[list[list[str]]] = field(default_factory=list)
    """Of each graph that Inductor compiled, the members of each group."""
    lent: list[bool] = field(default_factory=list)
    """Of each graph, whether all of its results were lent."""


# Kernels are compiled once for all ranks and tests, each by the rank that needs it; graphs each time.
OPTIONS = {"fx_graph_cache": False}


def serve(
    rank: int,
    world_size: int,
    backend: str,
    grad: bool,
    calls: list[Call],
    marked: Sequence[int] = (),
    dynamic: bool | None = None,
    uneven: bool = False,
    static_rank: int | None = None,
    name: str = "Block",
) -> Served:
    """Gives all calls to one compiled block and checks each result, and after the last call all of them once more.

    uneven: pass the lengths. static_rank: compiles for the sizes of each call alone, whatever ``dynamic``.
    """
    comm = ulysses_op.Communicator(backend=backend, timeout_s=30)
    block = BLOCKS[name]()
    options = ulysses_op.compile_options()
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(
        lambda x, lengths: block(x, comm, lengths),
        fullgraph=True,
        dynamic=False if rank == static_rank else dynamic,
        options={**OPTIONS, **options},
    )
    rng = random.Random(3)
    served = Served(backend="")
    kept = []
    with functorch_config.patch(enable_autograd_cache=False):
        for turn, (batch, lengths) in enumerate(calls):
            whole = sequence((batch, lengths), turn)
            dense = run(block, whole, grad)
            if rng.randrange(world_size) == rank:  # the others' exchanges have begun
                time.sleep(rng.uniform(0, 0.005))
            passed = lengths if uneven else None
            found = run(lambda x, passed=passed: compiled(x, passed), part(whole, lengths, rank), grad, marked)
            kept.append((found, [part(wanted, lengths, rank) for wanted in dense]))
            check(*kept[-1])
            served.compiled.append(counters["stats"]["unique_graphs"])
        for found, wanted in kept:
            check(found, wanted)
    for report in options["post_grad_custom_post_pass"].reports:
        served.groups.append([group.members for group in report.groups])
        served.lent.append(all(group.lent == group.tags for group in report.groups))
    served.backend = comm.backend
    comm.close()
    return served


def check(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


# V first, as for shapes that are known; in the backward, what is worked on alone goes first.
FORWARD = [["scatter_heads_2", "scatter_heads", "scatter_heads_1"], ["gather_heads"]]
BACKWARD = [["scatter_heads_3"], ["gather_heads_2", "gather_heads_3"], ["gather_heads_1"]]

BACKENDS = pytest.mark.parametrize("backend", ["shm", "c10d"])
MODES = pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])


@BACKENDS
@pytest.mark.parametrize(
    "lengths", [pytest.param((2, 1, 1, 1), id="5 over 4"), pytest.param((1, 1, 1, 0), id="3 over 4")]
)
def test_fewer_tokens_than_divide(pool: ranks.RankPool, lengths: Lengths, backend: str) -> None:
    for served in pool.run(serve, backend, True, [(1, lengths)] * 3, dynamic=False, uneven=True, timeout_s=200):
        assert served == Served(backend, [1, 1, 1], [FORWARD, BACKWARD], [False, True])


def even(batches: Sequence[int], lengths: Sequence[int], world_size: int = 2) -> list[Call]:
    return [(batch, (length,) * world_size) for batch, length in zip(batches, lengths, strict=True)]


@pytest.mark.parametrize(
    ("backend", "grad", "batches", "marked"),
    [
        pytest.param("shm", False, (1, 1, 1, 1, 1), (1,), id="lengths-inference-shm"),
        pytest.param("c10d", True, (1, 1, 1, 1, 1), (1,), id="lengths-training-c10d"),
        pytest.param("c10d", False, (2, 5, 3, 4, 9), (0, 1), id="batches and lengths-inference-c10d"),
        pytest.param("shm", True, (2, 5, 3, 4, 9), (0, 1), id="batches and lengths-training-shm"),
    ],
)
def test_one_compilation_serves(backend: str, grad: bool, batches: tuple[int, ...], marked: tuple[int, ...]) -> None:
    calls = even(batches, (6, 9, 4, 33, 17))
    for served in ranks.pool(2).run(serve, backend, grad, calls, marked, timeout_s=200):
        graphs = [FORWARD, BACKWARD] if grad else [FORWARD]
        assert served == Served(backend, [1] * 5, graphs, [False, True] if grad else [True])


@MODES
def test_a_second_compilation_serves_what_no_one_marked(grad: bool) -> None:
    calls = even((1,) * 5, (6, 9, 4, 17, 33))
    for served in ranks.pool(2).run(serve, "shm", grad, calls, timeout_s=200):
        assert served.backend == "shm"
        assert served.compiled == [1, 2, 2, 2, 2]
        assert served.groups == [FORWARD, BACKWARD] * 2 if grad else [FORWARD] * 2


# Rank 1's own length is the same in the first two calls, so that it then is a constant there and a variable on rank 0.
CHANGING = [(1, lengths) for lengths in ((6, 3), (4, 3), (5, 8), (9, 2), (7, 7), (2, 30))]


@pytest.mark.parametrize(("backend", "grad"), [("shm", True), ("c10d", False)], ids=["training-shm", "inference-c10d"])
def test_lengths_of_ranks_that_change(backend: str, grad: bool) -> None:
    for served in ranks.pool(2).run(serve, backend, grad, CHANGING, uneven=True, timeout_s=200):
        assert served.backend == backend
        assert served.compiled == [1, 2, 3, 3, 3, 3]  # what changes for the first time is a constant until then
        assert served.groups == [FORWARD, BACKWARD] * 3 if grad else [FORWARD] * 3


def test_one_compilation_serves_lengths_of_ranks_where_all_is_dynamic() -> None:
    for served in ranks.pool(2).run(serve, "shm", True, CHANGING, dynamic=True, uneven=True, timeout_s=200):
        assert served == Served("shm", [1] * 6, [FORWARD, BACKWARD], [False, True])


def test_lengths_of_one_and_none_among_others() -> None:
    """Dynamo takes 0 and 1 for constants, so ranks compile at different calls."""
    calls = [(2, lengths) for lengths in ((4, 3), (5, 2), (6, 1), (1, 7), (8, 0), (0, 9), (3, 5))]
    answers = ranks.pool(2).run(serve, "shm", True, calls, dynamic=True, uneven=True, timeout_s=200)
    assert [served.backend for served in answers] == ["shm"] * 2
    assert [served.compiled for served in answers] == [[1, 1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 3, 3, 3]]


def test_ranks_that_compile_for_any_size_and_for_one_agree() -> None:
    settings = {"dynamic": True, "static_rank": 1, "name": "Sized"}
    for served in ranks.pool(2).run(serve, "shm", True, even((2, 2), (6, 6)), **settings, timeout_s=100):
        assert served == Served("shm", [1, 1], [FORWARD, BACKWARD], [False, True])


@pytest.mark.parametrize(("name", "backend"), [("Biased", "shm"), ("Scaled", "c10d")])
def test_a_rank_with_one_token_orders_and_lends_as_the_others_do(name: str, backend: str) -> None:
    settings = {"dynamic": False, "uneven": True, "name": name}
    for served in ranks.pool(2).run(serve, backend, True, [(1, (1, 4))], **settings, timeout_s=100):
        assert served.backend == backend


# What does not divide.


def indivisible(rank: int, world_size: int, dynamic: bool) -> tuple[str, str]:
    """The backend, and the error of a length that does not divide; what comes before and after it is right."""
    comm = ulysses_op.Communicator(timeout_s=30)
    torch.compiler.reset()
    compiled = ulysses_op.compile(
        comm.gather_heads, fullgraph=True, dynamic=None if dynamic else False, options=OPTIONS
    )

    def gather(length: int) -> None:
        x = torch.arange(length)[None, :, None, None].expand(1, length, 1, 2) + 100.0 * rank
        if dynamic:
            torch._dynamo.mark_dynamic(x, 1)
        own = length // world_size
        wanted = torch.arange(own)[None, :, None] + own * rank + 100.0 * torch.arange(world_size)
        assert torch.equal(compiled(x), wanted[..., None].expand(1, own, world_size, 2))

    gather(2 * world_size)
    with pytest.raises(Exception, match="does not split equally") as caught:
        gather(2 * world_size + 1)
    gather(3 * world_size)
    found = comm.backend
    comm.close()
    return found, str(caught.value)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_length_that_does_not_divide_is_an_error_while_tracing(pool: ranks.RankPool, dynamic: bool) -> None:
    for backend, message in pool.run(indivisible, dynamic, timeout_s=100):
        assert backend == "shm"
        assert "does not split equally over world_size = 4 ranks: pass seq_lens, one length per rank" in message


# Targets that grow.


def grow(rank: int, world_size: int, backend: str, lengths: list[int]) -> tuple[str, int, list[bool]]:
    """The backend, how often Dynamo compiled, and of each graph whether all results were lent; two blocks on top of
    each other share targets, which are full of NaN before each write."""
    with ranks.environment(ULYSSES_OP_POISON_TARGETS="1"):
        comm = ulysses_op.Communicator(backend=backend, timeout_s=30)
        block = Block()
        options = ulysses_op.compile_options()
        torch.compiler.reset()
        counters.clear()

        def twice(x: torch.Tensor, comm: Any = None) -> torch.Tensor:
            return block(block(x, comm), comm)

        compiled = torch.compile(twice, fullgraph=True, options={**OPTIONS, **options})
        rng = random.Random(11)
        kept = []
        with functorch_config.patch(enable_autograd_cache=False):
            for turn, length in enumerate(lengths):
                call = (1, (length,) * world_size)
                whole = sequence(call, turn)
                if rng.randrange(world_size) == rank:
                    time.sleep(rng.uniform(0, 0.003))
                found = run(lambda x: compiled(x, comm), part(whole, call[1], rank), False, (1,))
                kept.append((found, [part(t, call[1], rank) for t in run(twice, whole, False)]))
        for found, wanted in kept:
            check(found, wanted)
        lent = [
            all(group.lent == group.tags for group in report.groups)
            for report in options["post_grad_custom_post_pass"].reports
        ]
        backend = comm.backend
        comm.close()
    return backend, counters["stats"]["unique_graphs"], lent


@BACKENDS
def test_lent_targets_that_grow_between_calls(backend: str) -> None:
    lengths = [8, 64] + [length for step in range(9) for length in (8, 64 + 8 * step)]
    assert ranks.pool(2).run(grow, backend, lengths, timeout_s=200) == [(backend, 1, [True])] * 2
