"""The same on CUDA devices, and what only they have: streams, graphs, loans, and copies that cost no memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import oracle
import pytest
import ranks
import test_cycles
import test_exchange
import test_gate
import test_lifetime
import test_misuse
import test_skew
import torch
from cases import Case, qkv
from test_exchange import DIRECTIONS, GRADIENTS, GROUP_FORMS, MEMBERS, exchanges, ok
from test_gate import MISMATCHES, refusal, works
from test_misuse import MISUSES

from ulysses_op import Communicator

# Ranks share one device if it is the only one, else each has its own: then there are no more than devices.
RANKS = 4 if ranks.SHARED_DEVICE else min(4, ranks.DEVICES)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ranks.DEVICES, reason="needs a CUDA device")]

ONE_SIDED = ranks.ONE_SIDED_ON_CUDA
BACKENDS = (*ONE_SIDED, "c10d")
WORLDS = [world_size for world_size in (2, 3, 4) if world_size <= max(2, RANKS)]
SKEW_GROUPS = test_skew.GROUPS // 5
TAGS = test_skew.TAGS

EXCHANGES = [parameter for world_size in WORLDS for parameter in exchanges(world_size)]


@pytest.fixture
def pool() -> ranks.RankPool:
    return ranks.pool(RANKS, "cuda")


# ---- what the CPU tests do


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("world_size", "direction", "case"), EXCHANGES)
def test_case(pool: ranks.RankPool, world_size: int, direction: str, case: Case, backend: str) -> None:
    ok(pool.run(test_exchange.run_case, MEMBERS[world_size], backend, "cuda", case, direction))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("names", "order", "final"), GROUP_FORMS)
def test_group(
    pool: ranks.RankPool,
    world_size: int,
    direction: str,
    names: tuple[str, ...],
    order: tuple[str, ...],
    final: bool,
    backend: str,
) -> None:
    members, table = MEMBERS[world_size], qkv(world_size)
    ok(pool.run(test_exchange.run_groups, members, backend, "cuda", direction, names, order, final, table))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(
    "run",
    [
        test_exchange.run_mixed_directions,
        test_exchange.run_wait_picks,
        test_exchange.run_growing,
        test_exchange.run_lazy_signs,
        test_exchange.run_odd_gradients,
        test_exchange.run_profiled,
        test_gate.run_bad_calls,
        test_gate.run_one_rank_corrects_itself,
        test_misuse.run_modified_input,
        test_misuse.run_closed,
        test_misuse.run_slow,
    ],
    ids=lambda run: run.__name__,
)
def test_shared(pool: ranks.RankPool, run: Callable[..., list[str] | None], world_size: int, backend: str) -> None:
    ok(pool.run(run, MEMBERS[world_size], backend, "cuda"))


@pytest.mark.parametrize("form", ["none", "name", "group", "mesh"])
def test_functions(pool: ranks.RankPool, form: str) -> None:
    ok(pool.run(test_exchange.run_functional, form, "cuda"))


@pytest.mark.parametrize(
    "backends", [*((backend, backend) for backend in ONE_SIDED), (ranks.PREFERRED_ON_CUDA, "c10d")], ids=str
)
def test_two_communicators_of_one_group(pool: ranks.RankPool, backends: tuple[str, str]) -> None:
    ok(pool.run(test_exchange.run_two_communicators, MEMBERS[2], backends, "cuda"))


@pytest.mark.skipif(RANKS < 4, reason="needs four CUDA devices, or one that ranks share")
@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_that_do_not_cover_the_world(pool: ranks.RankPool, backend: str) -> None:
    ok(pool.run(test_exchange.run_part_of_the_world, [(0, 2), (1, 3)], backend, "cuda"))


@pytest.mark.skipif(RANKS < 4, reason="needs four CUDA devices, or one that ranks share")
@pytest.mark.parametrize("names", [("dp", "ulysses"), ("ulysses", "tp")], ids=str)
def test_mesh_dimension(pool: ranks.RankPool, names: tuple[str, str]) -> None:
    ok(pool.run(test_exchange.run_mesh, names, "cuda"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("world_size", "direction", "case"), [p for p in GRADIENTS if p.values[0] in WORLDS])
def test_gradient(pool: ranks.RankPool, world_size: int, direction: str, case: Case, backend: str) -> None:
    ok(pool.run(test_exchange.run_gradient, MEMBERS[world_size], backend, "cuda", case, direction))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("needs", "used"), [(("q", "k", "v"), "all"), (("q", "k"), "all"), (("q", "k", "v"), "by_rank")]
)
def test_group_gradient(pool: ranks.RankPool, needs: tuple[str, ...], used: str, backend: str) -> None:
    ok(pool.run(test_exchange.run_group_gradient, MEMBERS[2], backend, "cuda", needs, used))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_heads", [8, 1])
def test_attention(pool: ranks.RankPool, kv_heads: int, backend: str) -> None:
    ok(pool.run(test_exchange.run_attention, MEMBERS[2], backend, "cuda", kv_heads))


# ---- decisions, disagreement, failure


def test_automatic_choice_is_one_sided(pool: ranks.RankPool) -> None:
    ok(pool.run(run_automatic, MEMBERS[2]))


def run_automatic(rank: int, world_size: int, members: tuple[int, ...]) -> list[str] | None:
    if rank not in members:
        return None
    comm = ranks.fresh_communicator(members, "auto", "cuda")
    problems = [] if comm.backend in ONE_SIDED else [f"{comm.backend}: {comm.reason}"]
    problems += works(comm, members, members.index(rank), "cuda")
    comm.close()
    return problems


@pytest.mark.parametrize(("disabled", "left"), [("symm_mem", "cuda_ipc"), ("symm_mem,cuda_ipc", "c10d")])
def test_backends_disabled_on_one_rank(pool: ranks.RankPool, disabled: str, left: str) -> None:
    answers = [a for a in pool.run(test_gate.run_disabled, MEMBERS[2], "cuda", disabled, 1) if a is not None]
    assert [(problems, backend) for problems, backend, _ in answers] == [([], left)] * 2
    assert len({reason for _, _, reason in answers}) == 1


def test_shm_refuses_cuda_tensors(pool: ranks.RankPool) -> None:
    ok(pool.run(test_gate.run_refused, MEMBERS[2], ["shm"], "cuda"))


@pytest.mark.parametrize("backend", ONE_SIDED)
@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch(pool: ranks.RankPool, name: str, backend: str) -> None:
    ok(pool.run(test_gate.run_mismatch, MEMBERS[2], backend, "cuda", name, 1))


# What was not exchanged before is compared before it moves, on every rank if it is new to all. Ranks that submit a
# different number of tensors meet in no collective: that is for the process group's own time-out.
@pytest.mark.parametrize("name", [name for name in MISMATCHES if name != "number"])
def test_mismatch_on_nccl(pool: ranks.RankPool, name: str) -> None:
    ok(pool.run(test_gate.run_mismatch, MEMBERS[2], "c10d", "cuda", name, 1, (False,)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MISUSES)
def test_misuses(pool: ranks.RankPool, name: str, backend: str) -> None:
    ok(pool.run(test_misuse.run_misuse, MEMBERS[2], backend, "cuda", name))


@pytest.mark.parametrize("backend", ONE_SIDED)
@pytest.mark.parametrize("how", ["exception", "bad argument", "close"])
def test_one_rank_fails_inside_a_group(pool: ranks.RankPool, how: str, backend: str) -> None:
    ok(pool.run(test_misuse.run_failure, MEMBERS[2], backend, "cuda", how))


@pytest.mark.parametrize("backend", ONE_SIDED)
@pytest.mark.parametrize("missed", ["first group", "a later group", "the last submission"])
def test_rank_that_is_late_beyond_the_timeout(pool: ranks.RankPool, missed: str, backend: str) -> None:
    ok(pool.run(test_misuse.run_absent, MEMBERS[2], backend, "cuda", missed))


@pytest.mark.parametrize("backend", ONE_SIDED)
def test_timeout_names_rank_tag_and_signal(pool: ranks.RankPool, backend: str) -> None:
    text = pool.run(test_misuse.run_timeout_message, MEMBERS[2], "cuda", backend)[0]
    assert "1" in text
    assert "READY" in text


@pytest.mark.parametrize("backend", ONE_SIDED)
def test_other_communicators_survive(pool: ranks.RankPool, backend: str) -> None:
    ok(pool.run(test_misuse.run_other_communicators_survive, MEMBERS[2], backend, "cuda"))


# ---- lifetime


@pytest.mark.parametrize("backend", ONE_SIDED)
def test_a_rank_that_closes_is_missed_at_once(pool: ranks.RankPool, backend: str) -> None:
    ok(pool.run(test_lifetime.run_closed_by_one, MEMBERS[2], backend, "cuda"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_communicators(pool: ranks.RankPool, backend: str) -> None:
    # The driver and NCCL keep threads and files of their own: that it works and ends is what is asked here.
    problems = pool.run(test_lifetime.run_many, MEMBERS[2], backend, "cuda", "close", 40, timeout_s=120.0)
    wrong = [p for answer in problems for p in answer or () if not p.startswith(("fds", "threads"))]
    assert not wrong


@pytest.mark.timeout(test_cycles.deadline_s(test_cycles.CYCLES) + 60.0)
@pytest.mark.parametrize("backend", BACKENDS)
def test_communicators_in_a_row(pool: ranks.RankPool, backend: str) -> None:
    count, deadline_s = test_cycles.CYCLES, test_cycles.deadline_s(test_cycles.CYCLES)
    answers = pool.run(test_cycles.run_cycles, MEMBERS[2], backend, "cuda", count, timeout_s=deadline_s)
    test_cycles.nothing_grown(answers, backend, count)


@pytest.mark.parametrize("backend", ONE_SIDED)
@pytest.mark.parametrize("how", ["nothing", "close", "destroy", "destroy, then close", "not waited for"])
def test_leaving_in_peace(how: str, backend: str) -> None:
    run = ranks.run_fresh(test_lifetime.leave, 2, backend, "cuda", how, device="cuda")
    assert [rank.status for rank in run.ranks] == [0, 0], run.ranks
    # NCCL has things to say about groups that are not destroyed; this package has not.
    assert not any(word in rank.stderr for rank in run.ranks for word in ("Traceback", "ulysses")), run.ranks
    assert run.leftovers == []


@pytest.mark.parametrize("backend", ONE_SIDED)
@pytest.mark.parametrize("how", ["raise", "one raises"])
def test_exception_in_the_middle_of_a_group(how: str, backend: str) -> None:
    run = ranks.run_fresh(test_lifetime.leave, 2, backend, "cuda", how, device="cuda")
    assert run.ranks[1].status == 1, run.ranks
    assert "in the middle of a group" in run.ranks[1].stderr
    assert run.leftovers == []


@pytest.mark.parametrize("backend", ONE_SIDED)
def test_killed_peer(backend: str) -> None:
    run = ranks.run_fresh(test_lifetime.lose_a_peer, 2, backend, "cuda", 10.0, True, device="cuda")
    assert run.ranks[0].status == 0, run.ranks
    assert "1" in run.ranks[0].stdout
    assert run.leftovers == []


# ---- skew


@pytest.mark.timeout(test_skew.deadline_s(SKEW_GROUPS) + 60.0)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_groups_in_a_row(pool: ranks.RankPool, world_size: int, backend: str) -> None:
    deadline_s = test_skew.deadline_s(SKEW_GROUPS)
    answers = pool.run(test_skew.run_skew, MEMBERS[world_size], backend, "cuda", SKEW_GROUPS, timeout_s=deadline_s)
    test_skew.all_right(answers, MEMBERS[world_size], backend, SKEW_GROUPS)


@pytest.mark.parametrize("backend", ONE_SIDED)
@pytest.mark.parametrize("handshake", ["ready", "done"])
def test_without_a_handshake_the_loop_finds_wrong_elements(pool: ranks.RankPool, handshake: str, backend: str) -> None:
    answers = pool.run(test_skew.run_skew, MEMBERS[2], backend, "cuda", 500, (handshake,), 5.0)
    assert sum(answer["wrong"] for answer in answers if answer is not None) > 0, answers


# ---- CUDA graphs


def submit_all(comm: Communicator, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    with comm.group(*TAGS) as group:
        for tag in test_skew.SUBMIT_ORDER:
            group.submit(inputs[tag], tag=tag)
        return group.wait()


def run_captured(rank: int, world_size: int, members: tuple[int, ...], backend: str, replays: int) -> list[str] | None:
    """A graph of two groups, replayed between eager groups of the same communicator; one rank late, in turn."""
    if rank not in members:
        return None
    me, p = members.index(rank), len(members)
    comm = ranks.fresh_communicator(members, backend, "cuda")
    table = test_skew.tables(p, "cuda")
    base = {tag: oracle.make_input(case, "scatter_heads", 0, me, "cuda") for tag, case in table.items()}
    wanted = {tag: oracle.expected(case, "scatter_heads", 0, me, "cuda") for tag, case in table.items()}
    first, second = ({tag: x.clone() for tag, x in base.items()} for _ in range(2))
    count = torch.zeros((), dtype=torch.int64, device="cuda")

    def compare(results: tuple[torch.Tensor, ...] | list[torch.Tensor], offset: int) -> None:
        for tag, result in zip(TAGS, results, strict=True):
            count.add_((result != wanted[tag] + offset).sum())

    # Captures need the targets and the kernels to be there.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        compare([result.clone() for result in submit_all(comm, first)], 0)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = [[result.clone() for result in submit_all(comm, inputs)] for inputs in (first, second)]
    rng = random.Random(7)
    for step in range(1, replays + 1):
        late, delay_s, on_device = rng.randrange(p), rng.uniform(0.0, 0.002), rng.random() < 0.5
        if me == late:
            if on_device:
                torch.cuda._sleep(int(delay_s * 1.7e9))
            else:
                time.sleep(delay_s)
        for tag in TAGS:
            torch.add(base[tag], step, out=first[tag])
            torch.add(base[tag], -step, out=second[tag])
        graph.replay()
        compare(captured[0], step)
        compare(captured[1], -step)
        compare(submit_all(comm, {tag: base[tag] + 1000 * step for tag in TAGS}), 1000 * step)
    torch.cuda.synchronize()
    comm.check()
    wrong = int(count)
    del graph, captured
    comm.close()
    return [f"{wrong} wrong elements"] if wrong else []


@pytest.mark.parametrize("backend", ONE_SIDED)
@pytest.mark.parametrize("world_size", WORLDS)
def test_captured_groups(pool: ranks.RankPool, world_size: int, backend: str) -> None:
    ok(pool.run(run_captured, MEMBERS[world_size], backend, 50, timeout_s=120.0))


def run_capture_of_a_new_shape(rank: int, world_size: int, members: tuple[int, ...], backend: str) -> list[str] | None:
    """Nothing is allocated inside a capture: an error that says what to do, and the communicator goes on."""
    if rank not in members:
        return None
    comm = ranks.fresh_communicator(members, backend, "cuda")
    problems: list[str | None] = list(works(comm, members, members.index(rank), "cuda"))
    x = torch.ones(1, 64, 2 * len(members), 64, device="cuda")
    torch.cuda.synchronize()

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"), comm.group("new") as group:
            group.submit(x, tag="new")
            group.wait()

    problems.append(refusal("the capture of a new shape", capture, (RuntimeError,), "once"))
    torch.cuda.synchronize()
    problems += works(comm, members, members.index(rank), "cuda")
    comm.close()
    return [problem for problem in problems if problem]


@pytest.mark.parametrize("backend", ONE_SIDED)
def test_capture_of_a_new_shape(pool: ranks.RankPool, backend: str) -> None:
    ok(pool.run(run_capture_of_a_new_shape, MEMBERS[2], backend))


# ---- loans


def run_loans(rank: int, world_size: int, members: tuple[int, ...], backend: str) -> list[str] | None:
    """A lent result holds until its tag's next group begins; from then on it cannot be used, nor can views of it."""
    if rank not in members:
        return None
    me, p = members.index(rank), len(members)
    comm = ranks.fresh_communicator(members, backend, "cuda")
    table = test_skew.tables(p, "cuda")
    x = {tag: oracle.make_input(case, "scatter_heads", 0, me, "cuda") for tag, case in table.items()}
    wanted = {tag: oracle.expected(case, "scatter_heads", 0, me, "cuda") for tag, case in table.items()}
    error = (RuntimeError,)
    problems: list[str | None] = []

    def exchange(*tags: str, named: bool = True) -> tuple[torch.Tensor, ...]:
        with comm.group(*(tags if named else ())) as group:
            for tag in tags:
                group.submit(x[tag] + 1, tag=tag)
            return group.wait()

    def ended(name: str, tensor: torch.Tensor, tag: str) -> None:
        for how, use in {
            "arithmetic": lambda: tensor + 1,
            "a copy to the host": lambda: tensor.cpu(),
            "an in-place write": lambda: tensor.zero_(),
            "a view's use": lambda: tensor[:, :1].sum(),
        }.items():
            problems.append(refusal(f"{how} of {name}", use, error, repr(tag)))

    def holds(name: str, tensor: torch.Tensor, tag: str) -> None:
        problem = oracle.difference(tensor, wanted[tag] + 1)
        problems.append(problem and f"{name}: {problem}")

    # A group that names its tags ends the loans of these tags.
    q, k = exchange("q", "k")
    view, kept = q[:, 1:], q.clone()
    holds("q", q, "q")
    exchange("k")
    holds("q after a group of k alone", q, "q")
    ended("k after the next group of k", k, "k")
    exchange("q")
    ended("q after the next group of q", q, "q")
    ended("a view of q", view, "q")
    holds("a clone of q", kept, "q")

    # One that names none ends them all.
    q, k = exchange("q", "k")
    exchange("v", named=False)
    ended("q after a group without names", q, "q")

    # Owned results: of functions, and where a gradient is needed.
    owned = comm.scatter_heads(x["q"] + 1)
    leaf = x["q"].float().requires_grad_()
    with comm.group("q") as group:
        group.submit(leaf, tag="q")
        (with_gradient,) = group.wait()
    exchange("q", "k", "v", named=False)
    comm.scatter_heads(x["q"])
    holds("an owned result", owned, "q")
    if not torch.equal(with_gradient.detach(), wanted["q"].float()):
        problems.append("a result with a gradient changed")

    # Growth ends the loan of the target that moves, a capture the loan of the target that it takes, close() all.
    (v,) = exchange("v")
    big = torch.zeros(1, 4096, 2 * p, 64, dtype=torch.int32, device="cuda")
    with comm.group("v") as group:
        group.submit(big, tag="v")
        group.wait()
    ended("v after its target has grown", v, "v")
    (k,) = exchange("k")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        exchange("k")
    graph.replay()
    torch.cuda.synchronize()
    ended("k after a capture took its target", k, "k")
    (q,) = exchange("q")
    torch.cuda.synchronize()
    del graph
    comm.close()
    ended("q after close", q, "q")
    return [problem for problem in problems if problem]


@pytest.mark.parametrize("backend", ONE_SIDED)
def test_loans(pool: ranks.RankPool, backend: str) -> None:
    ok(pool.run(run_loans, MEMBERS[2], backend))


# ---- memory


def run_memory(rank: int, world_size: int, members: tuple[int, ...], backend: str) -> list[str] | None:
    """The allocator's peak while a strided V travels: nothing beside the result, and no result where it is lent."""
    if rank not in members:
        return None
    comm = ranks.fresh_communicator(members, backend, "cuda")
    qkv_storage = torch.ones(1, 8192, 3, 16, 128, dtype=torch.bfloat16, device="cuda")
    v = qkv_storage[:, :, 2]
    v_bytes = v.numel() * v.element_size()

    def lent() -> torch.Tensor:
        with comm.group("v") as group:
            group.submit(v, tag="v")
            return group.wait()[0]

    problems = []
    for name, call, limit_bytes in [
        ("a group", lent, v_bytes // 8),
        ("scatter_heads", lambda: comm.scatter_heads(v), v_bytes + v_bytes // 8),
    ]:
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        peak_bytes = torch.cuda.max_memory_allocated() - before
        if peak_bytes > limit_bytes:
            problems.append(f"{name}: {peak_bytes} bytes on top, expected at most {limit_bytes} with a V of {v_bytes}")
        if not bool((result == 1).all()):
            problems.append(f"{name}: wrong result")
        del result
    comm.close()
    return problems


@pytest.mark.parametrize("backend", ONE_SIDED)
def test_a_strided_v_is_sent_without_a_copy(pool: ranks.RankPool, backend: str) -> None:
    ok(pool.run(run_memory, MEMBERS[2], backend))
