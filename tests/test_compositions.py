"""Compiled exchanges among what else a program is made of: other passes, ops that write in place, DDP, checkpoints,
autocast, eager exchanges, threads. Results are those of eager code, and the pass has found what there is to group.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import ranks
import scalar_kernels  # noqa: F401
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed import _functional_collectives as collectives
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ulysses_op
from ulysses_op.asynchronous import AsyncExchange

LENGTH, HEADS, DIM = 4, 4, 8
WIDTH = HEADS * DIM
CALLS = 3
TOLERANCE = 2e-5  # of other sums of the same numbers
# What the pass makes of a block: q, k, v and the output; in the backward the output, two of q, k, v, and the third.
FORWARD, BACKWARD = 2, 3
SUBMISSIONS = 4  # of either

Function = Callable[[Tensor], Tensor]


class Whole:
    """The exchange of a model on one device."""

    def scatter_heads(self, x: Tensor) -> Tensor:
        return x

    def gather_heads(self, x: Tensor) -> Tensor:
        return x


class Block(nn.Module):
    """Attention with weights that are the same on every rank."""

    def __init__(self, exchange: Any) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.exchange = exchange

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(2)
        q, k = (t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6) for t in (q, k))
        q, k, v = (self.exchange.scatter_heads(t) for t in (q, k, v))
        o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
        return x + self.out(self.exchange.gather_heads(o).flatten(2))


def communicator(world_size: int, backend: str = "shm") -> Any:
    comm = ranks.communicator(tuple(range(world_size)), backend)
    assert comm.backend == backend
    return comm


@contextlib.contextmanager
def without_graph_caches() -> Iterator[None]:
    """In this thread."""
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Graphs are compiled anew, so that the pass reports on them; kernels may come from a cache."""
    torch.compiler.reset()
    with without_graph_caches():
        yield


@contextlib.contextmanager
def submitted() -> Iterator[list[str]]:
    """The tags of what is submitted, in this order: functional exchanges are not."""
    tags: list[str] = []
    submit = AsyncExchange.submit

    def recording(self: AsyncExchange, *arguments: Any) -> Tensor:
        tags.append(arguments[5])
        return submit(self, *arguments)

    with mock.patch.object(AsyncExchange, "submit", recording):
        yield tags


def groups(options: dict[str, Any]) -> list[int]:
    """Of each graph that the pass has seen."""
    return [report.matched for report in options["post_grad_custom_post_pass"].reports]


def results(function: Function, x: Tensor, weights: Sequence[Tensor] | None) -> list[Tensor]:
    """The output, and with ``weights`` the gradients of x and of these."""
    if weights is None:
        with torch.no_grad():
            return [function(x)]
    x = x.clone().requires_grad_()
    out = function(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), (x, *weights))]


def distances(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[float]:
    """Between each two, relative to the largest element."""
    return [float((g - w).abs().max() / w.abs().max().clamp(min=1.0)) for g, w in zip(got, wanted, strict=True)]


def check(
    function: Function,
    eager: Function,
    rank: int,
    weights: Sequence[Tensor] | None = None,
    tolerance: float = TOLERANCE,
) -> int:
    """Compares ``function`` with ``eager`` over some calls, one of which each rank makes late; how many submissions
    ``function`` made.

    All ranks make all calls, whatever they find: one that stopped earlier would be waited for.
    """
    generator = torch.Generator().manual_seed(rank)
    wrong, submissions = [], 0
    for call in range(CALLS):
        x = torch.randn(1, LENGTH, WIDTH, generator=generator)
        if rank == call:
            time.sleep(0.02)
        with submitted() as tags:
            got = results(function, x, weights)
        submissions += len(tags)
        wrong += distances(got, results(eager, x, weights))
    assert all(distance <= tolerance for distance in wrong), wrong
    return submissions


@pytest.fixture
def pool() -> ranks.RankPool:
    """Two ranks: compiling is what takes the time here."""
    return ranks.pool(2)


# Passes.


def run_other_passes(rank: int, world_size: int, how: str) -> tuple[list[int], int]:
    """How many scatters each graph had when a pass of the user's saw it."""
    block = Block(communicator(world_size))
    found: list[int] = []

    def own(graph: torch.fx.Graph) -> None:
        found.append(sum(node.target is torch.ops.ulysses_op.scatter_heads.default for node in graph.nodes))

    with compiling():
        if how == "setting":
            with inductor_config.patch(post_grad_custom_post_pass=own):
                compiled = ulysses_op.compile(block, fullgraph=True)
        elif how == "option":
            compiled = ulysses_op.compile(block, fullgraph=True, options={"post_grad_custom_post_pass": own})
        else:
            passes = own if how == "argument" else [own, own]
            compiled = torch.compile(block, fullgraph=True, options=ulysses_op.compile_options(passes))
        return found, check(compiled, block, rank)


@pytest.mark.parametrize("how", ["argument", "option", "setting", "several"])
def test_composes_with_a_pass_that_is_there(pool: ranks.RankPool, how: str) -> None:
    """It runs once a graph, before this one."""
    answer = [3] * (2 if how == "several" else 1), CALLS * SUBMISSIONS
    assert pool.run(run_other_passes, how, timeout_s=250) == [answer] * 2


# Ops that write in place.


@torch.library.custom_op("compositions::negate_", mutates_args=("x",))
def negate_(x: Tensor) -> None:
    x.neg_()


@torch.library.custom_op("compositions::accumulate_", mutates_args=("total",))
def accumulate_(total: Tensor, x: Tensor) -> None:
    total.add_(x.sum())


class Counting(Block):
    """Writes to a buffer of its own, and to a value behind its exchange."""

    def __init__(self, exchange: Any) -> None:
        super().__init__(exchange)
        self.total = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        seen = self.exchange.scatter_heads(x.detach().unflatten(-1, (HEADS, DIM)))
        accumulate_(self.total, seen)
        negate_(seen)
        return super().forward(x) + self.total + seen.sum()


def run_mutable_ops(rank: int, world_size: int, training: bool) -> tuple[list[int], bool]:
    comm = communicator(world_size)
    block, same = Counting(comm), Counting(comm)
    same.load_state_dict(block.state_dict())
    weights = [*block.parameters()]
    with compiling():
        options = {**ulysses_op.compile_options(), "enable_auto_functionalized_v2": False}
        compiled = torch.compile(block, fullgraph=True, options=options)
        generator = torch.Generator().manual_seed(rank)
        pairs = []
        for _ in range(CALLS):
            x = torch.randn(1, LENGTH, WIDTH, generator=generator)
            got = results(compiled, x, weights if training else None)
            pairs.append((got, results(same, x, [*same.parameters()] if training else None)))
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(block.total, same.total)
    return groups(options), bool(block.total != 0)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_mutable_ops_of_the_older_functionalization(pool: ranks.RankPool, training: bool) -> None:
    wanted = [FORWARD, BACKWARD] if training else [FORWARD]
    assert pool.run(run_mutable_ops, training, timeout_s=250) == [(wanted, True)] * 2


def _index_put(x: Tensor) -> Tensor:
    return x.index_put((torch.tensor([0, 0]), torch.tensor([1, 3])), torch.full((HEADS, DIM), 9.0), accumulate=True)


def _negate(x: Tensor) -> Tensor:
    negate_(x)
    return x


def _index_put_(x: Tensor) -> Tensor:
    return x.index_put_((torch.tensor([0, 0]), torch.tensor([1, 3])), torch.full((HEADS, DIM), 9.0), accumulate=True)


# Each is in place in the generated code where nothing uses the old value afterwards.
WRITES: dict[str, Function] = {
    "custom op": _negate,
    "index_put": _index_put,
    "collective": lambda x: collectives.all_reduce(x, "sum", dist.group.WORLD),
    "input": _index_put_,
}


def run_write(rank: int, world_size: int, name: str, second: bool) -> list[int]:
    comm = communicator(world_size)
    weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(7))

    def model(x: Tensor) -> Tensor:
        y = (x if name == "input" else F.linear(x, weight)).unflatten(-1, (HEADS, DIM))
        first = comm.scatter_heads(y)
        y = WRITES[name](y)
        return comm.gather_heads(first * comm.scatter_heads(y * 2))

    with compiling():
        options = {**ulysses_op.compile_options(), "enable_auto_functionalized_v2": second}
        compiled = torch.compile(model, fullgraph=True, options=options)
        generator = torch.Generator().manual_seed(rank)
        pairs = []
        for call in range(CALLS):
            x = torch.randn(1, LENGTH, WIDTH, generator=generator)
            theirs = x.clone()
            if rank == call:
                time.sleep(0.02)  # until this rank begins, its peer's data stays where it is
            pairs.append(((compiled(x), x), (model(theirs), theirs)))
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    return groups(options)


@pytest.mark.parametrize(
    ("name", "second"),
    [("custom op", True), ("custom op", False), ("index_put", True), ("collective", True), ("input", True)],
)
def test_what_is_submitted_is_not_written_before_the_wait(pool: ranks.RankPool, name: str, second: bool) -> None:
    assert pool.run(run_write, name, second, timeout_s=250) == [[2]] * 2


# Other compilers and modes.


def run_other_ways(rank: int, world_size: int, arguments: dict[str, Any], training: bool) -> int:
    block = Block(communicator(world_size))
    with compiling():
        compiled = ulysses_op.compile(block, fullgraph=True, **arguments)
        return check(compiled, block, rank, [*block.parameters()] if training else None)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "aot_eager_decomp_partition", "cudagraphs"])
def test_other_backends_run_the_ops_as_they_are(pool: ranks.RankPool, backend: str, training: bool) -> None:
    assert pool.run(run_other_ways, {"backend": backend}, training, timeout_s=250) == [0] * 2


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes(pool: ranks.RankPool, mode: str) -> None:
    assert pool.run(run_other_ways, {"mode": mode}, False, timeout_s=250) == [CALLS * SUBMISSIONS] * 2


def test_cuda_graphs_go_one_of_the_ways_there_are() -> None:
    with pytest.raises(ValueError, match="expected one of auto, through, around"):
        ulysses_op.compile(lambda x: x, cuda_graphs="outside")


# DDP.


def run_distributed(
    rank: int, world_size: int, outer: bool, backend: str, split: bool, installed: bool
) -> tuple[list[int], int]:
    """A block whose gradients DDP averages, in one bucket or in such small ones that torch splits the graph, against
    eager DDP and the model on one device.
    """
    comm = communicator(world_size, backend)
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(1, LENGTH * world_size, WIDTH, generator=generator)
    own = slice(rank * LENGTH, (rank + 1) * LENGTH)
    dense = Block(Whole())
    out = dense(whole)
    out.square().sum().backward()
    wanted = [out[:, own].detach(), *(weight.grad / world_size for weight in dense.parameters())]

    options = ulysses_op.compile_options() if installed else {}
    first_bucket = mock.patch.object(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1) if split else contextlib.nullcontext()
    with compiling(), first_bucket:
        answers = []
        for how in ("eager", "compiled"):
            model: Any = Block(comm)
            if how == "compiled" and not outer:
                model = torch.compile(model, fullgraph=True, options=options)
            model = DistributedDataParallel(model, bucket_cap_mb=0.001 if split else 1)
            if how == "compiled" and outer:
                model = torch.compile(model, options=options)  # DDP itself traces with graph breaks
            for _ in range(CALLS):
                model.zero_grad()
                with submitted() as tags:
                    out = model(whole[:, own])
                    out.square().sum().backward()
            answers.append([out.detach(), *(weight.grad for weight in model.parameters())])
    for answer in answers:
        torch.testing.assert_close(answer, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(answers[1], answers[0], atol=1e-5, rtol=1e-5)
    return groups(options) if installed else [], len(tags)


@pytest.mark.parametrize(
    ("where", "backend", "split", "installed"),
    [
        ("outer", "shm", True, True),
        ("outer", "shm", True, False),
        ("inner", "c10d", True, True),
        ("inner", "c10d", True, False),
        ("outer", "shm", False, True),
    ],
)
def test_data_parallel(pool: ranks.RankPool, where: str, backend: str, split: bool, installed: bool) -> None:
    """The graph is split before the output projection, behind all that travels."""
    graphs = [FORWARD, 0, 0, BACKWARD] if split else [FORWARD, BACKWARD]
    answer = (graphs, 2 * SUBMISSIONS) if installed else ([], 0)
    assert pool.run(run_distributed, where == "outer", backend, split, installed, timeout_s=250) == [answer] * 2


# Other users of the same communicator, and several communicators.


def run_among_eager_exchanges(rank: int, world_size: int) -> tuple[list[int], int]:
    """A compiled part of an eager model that exchanges before, between and behind, in groups and one by one."""
    comm = communicator(world_size)
    block = Block(comm)

    def model(part: Function, x: Tensor) -> Tensor:
        with comm.group("0", "1") as group:
            for t in (x, x * 2):
                group.submit(t.unflatten(-1, (HEADS, DIM)))
            a, b = group.wait()
        x = part(comm.gather_heads(a * b).flatten(2))
        x = part(comm.gather_heads(comm.scatter_heads(x.unflatten(-1, (HEADS, DIM))) + 1).flatten(2))
        return comm.gather_heads(a + b).flatten(2) + x

    with compiling():
        options = ulysses_op.compile_options()
        compiled = torch.compile(block, fullgraph=True, options=options)
        submissions = check(lambda x: model(compiled, x), lambda x: model(block, x), rank, [*block.parameters()])
    return groups(options), submissions


def test_a_compiled_part_of_an_eager_model(pool: ranks.RankPool) -> None:
    answer = [FORWARD, BACKWARD], CALLS * 2 * 2 * SUBMISSIONS
    assert pool.run(run_among_eager_exchanges, timeout_s=250) == [answer] * 2


def run_two_models(rank: int, world_size: int) -> int:
    """Two compiled models in turn: both forward, then the backward of the one and of the other."""
    comm = communicator(world_size)
    blocks = Block(comm), Block(comm)
    with compiling():
        compiled = [ulysses_op.compile(block, fullgraph=True) for block in blocks]

        def in_turn(models: Sequence[Function], x: Tensor) -> Tensor:
            return models[0](x) * models[1](x * 2)

        weights = [weight for block in blocks for weight in block.parameters()]
        return check(lambda x: in_turn(compiled, x), lambda x: in_turn(blocks, x), rank, weights)


def test_two_compiled_models_share_a_communicator(pool: ranks.RankPool) -> None:
    assert pool.run(run_two_models, timeout_s=250) == [CALLS * 2 * 2 * SUBMISSIONS] * 2


def run_two_communicators(rank: int, world_size: int, training: bool) -> list[list[str]]:
    """Exchanges among all ranks and among every other rank in one graph; the communicators of each graph's groups."""
    everybody = communicator(world_size)
    pair = ranks.communicator((0, 2) if rank % 2 == 0 else (1, 3), "shm")
    assert pair.backend == "shm"
    names = {everybody._where[0]: "everybody", pair._where[0]: "pair"}
    blocks = Block(everybody), Block(pair)

    def model(x: Tensor) -> Tensor:
        return blocks[0](x) * blocks[1](x)

    weights = [weight for block in blocks for weight in block.parameters()]
    with compiling():
        options = ulysses_op.compile_options()
        compiled = torch.compile(model, fullgraph=True, options=options)
        submissions = check(compiled, model, rank, weights if training else None)
    assert submissions == CALLS * (1 + training) * 2 * SUBMISSIONS
    reports = options["post_grad_custom_post_pass"].reports
    return [sorted(names[group.communicator] for group in report.groups) for report in reports]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_two_communicators_in_one_graph(training: bool) -> None:
    answer = [["everybody"] * groups + ["pair"] * groups for groups in (FORWARD, BACKWARD)[: 1 + training]]
    assert ranks.pool(4).run(run_two_communicators, training, timeout_s=250) == [answer] * 4


# What runs the compiled code.


def run_checkpoint(rank: int, world_size: int, where: str) -> tuple[list[int], int]:
    """Blocks that compute their values again in the backward, exchanged or not, against ones that keep them."""
    blocks = nn.Sequential(*(Block(communicator(world_size)) for _ in range(2)))
    ops = [torch.ops.ulysses_op.scatter_heads.default, torch.ops.ulysses_op.gather_heads.default]
    keeping = {"context_fn": functools.partial(create_selective_checkpoint_contexts, ops)}

    def again(model: Function) -> Function:
        arguments = keeping if where == "inside, exchanges kept" else {}
        return lambda x: checkpoint(model, x, use_reentrant=False, **arguments)

    with compiling():
        options = ulysses_op.compile_options()
        if where == "outside":
            compiled = again(torch.compile(blocks, fullgraph=True, options=options))
        else:
            compiled = torch.compile(again(blocks), fullgraph=True, options=options)
        submissions = check(compiled, blocks, rank, [*blocks.parameters()])
    return groups(options), submissions


@pytest.mark.parametrize(
    ("where", "again", "exchanges"),
    [
        ("inside", FORWARD, 3 * SUBMISSIONS),
        ("inside, exchanges kept", 0, 2 * SUBMISSIONS),
        ("outside", 0, 3 * SUBMISSIONS),  # the forward graph runs again
    ],
    ids=["inside", "kept", "outside"],
)
def test_checkpoints(pool: ranks.RankPool, where: str, again: int, exchanges: int) -> None:
    answer = [2 * FORWARD, 2 * (again + BACKWARD)], CALLS * 2 * exchanges
    assert pool.run(run_checkpoint, where, timeout_s=250) == [answer] * 2


CONTEXTS: dict[str, Callable[[], Any]] = {
    "inference mode": torch.inference_mode,
    "no gradient": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def run_in_context(rank: int, world_size: int, name: str, training: bool) -> tuple[list[int], int]:
    """Compiled and eager calls in a context, then training outside of it, with the buffers that the former left."""
    comm = ranks.fresh_communicator(tuple(range(world_size)), "shm")
    block = Block(comm)
    weights = [*block.parameters()]

    def inside(function: Function) -> Function:
        def run(x: Tensor) -> Tensor:
            with CONTEXTS[name]():
                return function(x)

        return run

    with compiling():
        options = ulysses_op.compile_options()
        compiled = torch.compile(block, fullgraph=True, options=options)
        tolerance = 2e-2 if name == "autocast" else TOLERANCE  # bf16 has 8 bits
        submissions = check(inside(compiled), inside(block), rank, weights if training else None, tolerance)
        submissions += check(compiled, block, rank, weights)
    assert comm.backend == comm._companion.backend == "shm"
    comm.close()
    return groups(options), submissions


@pytest.mark.parametrize(
    ("name", "training"),
    [("inference mode", False), ("no gradient", False), ("autocast", True)],
)
def test_contexts(pool: ranks.RankPool, name: str, training: bool) -> None:
    once = [FORWARD, BACKWARD] if training else [FORWARD]
    answer = [*once, FORWARD, BACKWARD], CALLS * (3 + training) * SUBMISSIONS
    assert pool.run(run_in_context, name, training, timeout_s=250) == [answer] * 2


def run_compiled_autograd(rank: int, world_size: int) -> tuple[list[int], int]:
    block = Block(communicator(world_size))
    weights = [*block.parameters()]

    def step(x: Tensor) -> Tensor:
        out = block(x)
        out.square().sum().backward()
        return out.detach()

    counters.clear()
    with compiling(), torch._dynamo.config.patch(compiled_autograd=True):
        options = ulysses_op.compile_options()
        compiled = torch.compile(step, options=options)
        generator = torch.Generator().manual_seed(rank)
        found, submissions = [], 0
        for _ in range(CALLS):
            x = torch.randn(1, LENGTH, WIDTH, generator=generator)
            answers = []
            for function in (compiled, step):
                block.zero_grad()
                with submitted() as tags:
                    out = function(x)
                submissions += len(tags)
                answers.append([out, *(weight.grad for weight in weights)])
            found += distances(*answers)
    assert all(distance <= TOLERANCE for distance in found), found
    assert counters["compiled_autograd"]["captures"] == 1
    return groups(options), submissions


def test_compiled_autograd(pool: ranks.RankPool) -> None:
    answer = [FORWARD, BACKWARD], CALLS * 2 * SUBMISSIONS
    assert pool.run(run_compiled_autograd, timeout_s=250) == [answer] * 2


def run_in_thread(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """Compiled by a first call in another thread than the communicator's, and called in its own; and the other way."""
    comm = communicator(world_size)
    block = Block(comm)
    weights = [*block.parameters()]
    options = ulysses_op.compile_options(), ulysses_op.compile_options()
    submissions: list[int] = []
    failures: list[BaseException] = []

    def elsewhere(work: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        thread.join(ranks.DEADLINE_S)
        assert not thread.is_alive()
        assert not failures, failures

    for installed, where in zip(options, ((True, False), (False, True)), strict=True):
        torch.compiler.reset()
        compiled = torch.compile(block, fullgraph=True, options=installed)

        def use(compiled: Function = compiled) -> None:
            with without_graph_caches():
                submissions.append(check(compiled, block, rank, weights))

        for there in where:
            elsewhere(use) if there else use()
    return [sum(groups(each)) for each in options], submissions


def test_threads(pool: ranks.RankPool) -> None:
    answer = [FORWARD + BACKWARD] * 2, [CALLS * 2 * SUBMISSIONS] * 4
    assert pool.run(run_in_thread, timeout_s=250) == [answer] * 2
