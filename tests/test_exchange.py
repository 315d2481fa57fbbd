"""Every exchange against the oracle, bit by bit, on real ranks.

The functions without a test_ prefix run on the ranks; test_gpu runs them again with device="cuda".
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import oracle
import pytest
import ranks
import torch
import torch.distributed as dist
from cases import Case, cases, even, qkv, uneven

import ulysses_op

MEMBERS = {2: (0, 1), 3: (0, 1, 2), 4: (0, 1, 2, 3)}
BACKENDS = ("shm", "c10d")
DIRECTIONS = ("scatter_heads", "gather_heads")
REPEATS = 3


def exchanges(world_size: int) -> list[Any]:
    """(world size, direction, case) of the table; a replicated plan has no forward gather."""
    return [
        pytest.param(world_size, direction, case, id=f"{case.name}-{direction}-{world_size}")
        for direction, case in itertools.product(DIRECTIONS, cases(world_size))
        if direction == "scatter_heads" or not case.replicated
    ]


def ok(answers: list[Any]) -> None:
    """The ranks answer with what is wrong, a list of sentences, or None where they stayed idle."""
    wrong = [f"rank {rank}: {problem}" for rank, answer in enumerate(answers) for problem in answer or ()]
    assert not wrong, "\n".join(wrong)
    assert any(answer is not None for answer in answers)


def one_rank_late(rng: random.Random, me: int, world_size: int) -> None:
    """Delays one rank, the same in the eyes of all that share `rng`'s seed."""
    late, delay_s = rng.randrange(world_size), rng.uniform(0.0, 0.004)
    if me == late:
        time.sleep(delay_s)


def run_case(
    rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str, case: Case, direction: str
) -> list[str] | None:
    if rank not in members:
        return None
    me = members.index(rank)
    comm = ranks.communicator(members, backend, device)
    rng = random.Random(f"{case.name} {direction}")
    problems, results = [], []
    for seed in range(REPEATS):
        x = oracle.make_input(case, direction, seed, me, device)
        one_rank_late(rng, me, len(members))
        result = getattr(comm, direction)(x, **case.arguments)
        # The caller owns the result and may use it at once; the input is only read.
        x_after = oracle.difference(x, oracle.make_input(case, direction, seed, me, device))
        if x_after:
            problems.append(f"seed {seed}: the input changed: {x_after}")
        if not result.is_contiguous():
            problems.append(f"seed {seed}: strides {result.stride()}")
        results.append(result)
    # Compared only now: an owned result outlives the exchanges behind it.
    for seed, result in enumerate(results):
        problem = oracle.difference(result, oracle.expected(case, direction, seed, me, device))
        if problem:
            problems.append(f"seed {seed}: {problem}")
    if comm.backend != backend:
        problems.append(f"backend {comm.backend!r} ({comm.reason}), expected {backend!r}")
    return problems


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("world_size", "direction", "case"), [*exchanges(2), *exchanges(3), *exchanges(4)])
def test_case(pool: ranks.RankPool, world_size: int, direction: str, case: Case, backend: str) -> None:
    ok(pool.run(run_case, MEMBERS[world_size], backend, "cpu", case, direction))


def run_head_counts(
    rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str, names: tuple[str, ...]
) -> list[str] | None:
    """Cases one after another on one communicator: no head count is remembered for the next."""
    if rank not in members:
        return None
    table = {case.name: case for case in cases(len(members))}
    problems = []
    for name, direction in itertools.product(names, DIRECTIONS):
        found = run_case(rank, world_size, members, backend, device, table[name], direction)
        problems += [f"{name}: {problem}" for problem in found or ()]
    return problems


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_one_head_count_after_another(pool: ranks.RankPool, world_size: int, backend: str) -> None:
    names = ("seven_heads", "twenty_heads", "three_heads", "seven_heads", "local_heads_below_world", "twenty_heads")
    ok(pool.run(run_head_counts, MEMBERS[world_size], backend, "cpu", names))


def run_lazy_signs(rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str) -> list[str] | None:
    """Tensors whose conjugation or negation is only a note on the view; complex numbers may also be refused."""
    if rank not in members:
        return None
    me, p = members.index(rank), len(members)
    comm = ranks.communicator(members, backend, device)
    generator = torch.Generator().manual_seed(1)
    shards = [torch.randn(1, 3, p, 2, 2, generator=generator).to(device) for _ in range(p)]
    problems = []
    for name, view in {
        "plain": lambda x: torch.view_as_complex(x),
        "conjugate": lambda x: torch.view_as_complex(x).conj(),
        "negative": lambda x: torch._neg_view(x[..., 0].contiguous()),
        "imaginary part of a conjugate": lambda x: torch.view_as_complex(x).conj().imag,
    }.items():
        try:
            result = comm.scatter_heads(view(shards[me]))
        except (TypeError, ValueError):
            if name in ("plain", "conjugate"):
                continue
            raise
        if not torch.equal(result, torch.cat([view(x) for x in shards], 1)[:, :, me : me + 1]):
            problems.append(name)
    return problems


@pytest.mark.parametrize("backend", BACKENDS)
def test_lazy_signs(pool: ranks.RankPool, backend: str) -> None:
    ok(pool.run(run_lazy_signs, MEMBERS[2], backend, "cpu"))


# ---- groups


def check_group(
    results: tuple[torch.Tensor, ...],
    names: tuple[str, ...],
    table: dict[str, Case],
    direction: str,
    seed: int,
    me: int,
) -> list[str]:
    problems = []
    if len(results) != len(names):
        return [f"{len(results)} results for {names}"]
    for name, result in zip(names, results, strict=True):
        wanted = oracle.expected(table[name], direction, seed, me, result.device.type)
        problem = oracle.difference(result, wanted)
        if problem:
            problems.append(f"seed {seed}, tag {name}: {problem}")
    return problems


def run_groups(
    rank: int,
    world_size: int,
    members: tuple[int, ...],
    backend: str,
    device: str,
    direction: str,
    names: tuple[str, ...],
    order: tuple[str, ...],
    final: bool,
    table: dict[str, Case],
) -> list[str] | None:
    """Groups of q, k, v: `names` as the group names them (none: it does not), submitted in `order`."""
    if rank not in members:
        return None
    me = members.index(rank)
    comm = ranks.communicator(members, backend, device)
    rng = random.Random(f"{direction} {order}")
    problems, kept = [], []
    for seed in range(REPEATS):
        with comm.group(*names) as group:
            for tag in order:
                one_rank_late(rng, me, len(members))
                case = table[tag]
                x = oracle.make_input(case, direction, seed, me, device)
                last = final and tag == order[-1]
                group.submit(x, tag=tag, direction=direction, final=last, **case.arguments)
            one_rank_late(rng, me, len(members))
            results = group.wait()
            problems += check_group(results, names or order, table, direction, seed, me)
        kept.append(results)
    if device == "cpu":
        for seed, results in enumerate(kept):
            problems += [f"later: {p}" for p in check_group(results, names or order, table, direction, seed, me)]
    if comm.backend != backend:
        problems.append(f"backend {comm.backend!r} ({comm.reason}), expected {backend!r}")
    return problems


GROUP_FORMS = [
    pytest.param(("q", "k", "v"), ("v", "q", "k"), True, id="named-vqk-final"),
    pytest.param(("q", "k", "v"), ("v", "q", "k"), False, id="named-vqk"),
    pytest.param(("k", "v", "q"), ("q", "k", "v"), True, id="named_kvq-qkv-final"),
    pytest.param((), ("v", "q", "k"), True, id="unnamed-vqk-final"),
    pytest.param((), ("q", "v", "k"), False, id="unnamed-qvk"),
    pytest.param(("q",), ("q",), True, id="single"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("names", "order", "final"), GROUP_FORMS)
def test_group(
    pool: ranks.RankPool, world_size: int, names: tuple[str, ...], order: tuple[str, ...], final: bool, backend: str
) -> None:
    table = qkv(world_size)
    ok(pool.run(run_groups, MEMBERS[world_size], backend, "cpu", "scatter_heads", names, order, final, table))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["contiguous", "transposed_d", "expanded_batch", "mixed_by_rank"])
def test_group_of_any_layout(pool: ranks.RankPool, layout: str, backend: str) -> None:
    table = qkv(3, layout=layout)
    ok(pool.run(run_groups, MEMBERS[3], backend, "cpu", "scatter_heads", ("q", "k", "v"), ("v", "q", "k"), True, table))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_group_of_gathers(pool: ranks.RankPool, world_size: int, backend: str) -> None:
    table = qkv(world_size)
    ok(
        pool.run(
            run_groups,
            MEMBERS[world_size],
            backend,
            "cpu",
            "gather_heads",
            ("q", "k", "v"),
            ("v", "q", "k"),
            True,
            table,
        )
    )


def joint_attention(world_size: int) -> dict[str, Case]:
    """Image and text tokens of one attention as tags of their own, in different dtypes, text with an empty shard."""
    image: dict[str, Any] = {"seq": tuple(8 - rank for rank in range(world_size)), "counts": (2,) * world_size, "d": 16}
    text: dict[str, Any] = {"seq": (1,) * (world_size - 1) + (0,), "counts": (2,) * world_size, "d": 16}
    return {
        "image_q": uneven("image_q", dtype=torch.bfloat16, slot=1, **image),
        "image_k": uneven("image_k", dtype=torch.float32, slot=2, **image),
        "text_q": uneven("text_q", dtype=torch.bfloat16, slot=3, **text),
        "text_k": uneven("text_k", dtype=torch.uint8, slot=4, **text),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_group_of_dtypes_and_lengths(pool: ranks.RankPool, world_size: int, backend: str) -> None:
    table = joint_attention(world_size)
    names = tuple(table)
    order = tuple(reversed(names))
    ok(pool.run(run_groups, MEMBERS[world_size], backend, "cpu", "scatter_heads", names, order, True, table))


def run_mixed_directions(
    rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str
) -> list[str] | None:
    """One layer's way back and the next one's scatter in one group."""
    if rank not in members:
        return None
    me = members.index(rank)
    comm = ranks.communicator(members, backend, device)
    p = len(members)
    back = even("back", p, b=2, d=16, dtype=torch.bfloat16, slot=1)
    there = even("there", p, b=2, d=4, h=3 * p, dtype=torch.float32, slot=2)
    problems = []
    for seed in range(REPEATS):
        with comm.group("back", "there") as group:
            group.submit(oracle.make_input(there, "scatter_heads", seed, me, device), tag="there")
            x = oracle.make_input(back, "gather_heads", seed, me, device)
            group.submit(x, tag="back", direction="gather_heads", final=True)
            gathered, scattered = group.wait()
            problems += check_group((gathered,), ("back",), {"back": back}, "gather_heads", seed, me)
            problems += check_group((scattered,), ("there",), {"there": there}, "scatter_heads", seed, me)
    return problems


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_group_of_both_directions(pool: ranks.RankPool, world_size: int, backend: str) -> None:
    ok(pool.run(run_mixed_directions, MEMBERS[world_size], backend, "cpu"))


def run_wait_picks(rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str) -> list[str] | None:
    if rank not in members:
        return None
    me = members.index(rank)
    comm = ranks.communicator(members, backend, device)
    table = qkv(len(members))
    problems = []
    for seed, picked in enumerate([("k", "q"), ("v", "k", "q"), ("q", "v")]):
        with comm.group("q", "k", "v") as group:
            for tag in ("v", "q", "k"):
                x = oracle.make_input(table[tag], "scatter_heads", seed, me, device)
                group.submit(x, tag=tag, **table[tag].arguments)
            problems += check_group(group.wait(*picked), picked, table, "scatter_heads", seed, me)
    return problems


@pytest.mark.parametrize("backend", BACKENDS)
def test_wait_picks_tags(pool: ranks.RankPool, backend: str) -> None:
    ok(pool.run(run_wait_picks, MEMBERS[3], backend, "cpu"))


def run_growing(rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str) -> list[str] | None:
    """More tags than targets, and lengths that grow and shrink: growth and eviction between groups and inside them."""
    if rank not in members:
        return None
    me, p = members.index(rank), len(members)
    comm = ranks.fresh_communicator(members, backend, device, max_targets=3)
    tags = "abcde"
    problems, kept = [], []
    for seed, length in enumerate([3, 5, 2, 100, 1, 150, 300]):
        for named in (False, True):
            chosen = [tags[(seed + i) % len(tags)] for i in range(3)]
            table = {tag: even(tag, p, s=length + tags.index(tag), b=2, slot=tags.index(tag)) for tag in chosen}
            with comm.group(*(table if named else ())) as group:
                for tag, case in table.items():
                    group.submit(oracle.make_input(case, "scatter_heads", seed, me, device), tag=tag)
                results = group.wait()
                problems += check_group(results, tuple(table), table, "scatter_heads", seed, me)
            kept.append((seed, results, table))
        case = even("single", p, s=length, d=3)
        result = comm.scatter_heads(oracle.make_input(case, "scatter_heads", seed, me, device))
        problems += check_group((result,), ("single",), {"single": case}, "scatter_heads", seed, me)
    if device == "cpu":
        for seed, results, table in kept:
            problems += check_group(results, tuple(table), table, "scatter_heads", seed, me)
    comm.close()
    return problems


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_growth_and_eviction(pool: ranks.RankPool, world_size: int, backend: str) -> None:
    ok(pool.run(run_growing, MEMBERS[world_size], backend, "cpu"))


# ---- which ranks


def run_functional(rank: int, world_size: int, form: str, device: str) -> list[str]:
    """The functions of the package: the whole world by None, name and group, a part of it by group and mesh."""
    members = tuple(range(world_size))
    group: Any = None
    if form == "name":
        group = ranks.group_of(members).group_name
    elif form == "group":
        group = ranks.group_of(members)
    elif form == "mesh":
        group = dist.device_mesh.init_device_mesh(device, (world_size,), mesh_dim_names=("ulysses",))
    problems = []
    case = uneven(
        "functional", seq=tuple(2 + r for r in members), counts=tuple(1 + r for r in members), layout="fused_qkv"
    )
    for seed, direction in itertools.product(range(REPEATS), DIRECTIONS):
        function = getattr(ulysses_op, direction)
        x = oracle.make_input(case, direction, seed, rank, device)
        result = function(x, group, heads=case.ranges, seq_lens=case.seq)
        problem = oracle.difference(result, oracle.expected(case, direction, seed, rank, device))
        if problem:
            problems.append(f"{direction}, seed {seed}: {problem}")
    return problems


@pytest.mark.parametrize("form", ["none", "name", "group", "mesh"])
def test_functions(pool: ranks.RankPool, form: str) -> None:
    ok(pool.run(run_functional, form, "cpu"))


def run_part_of_the_world(
    rank: int, world_size: int, parts: list[tuple[int, ...]], backend: str, device: str
) -> list[str]:
    """Groups that do not cover the world, at work at the same time."""
    problems = []
    for members in parts:
        if rank in members:
            for case in (even("part", len(members), b=2, dtype=torch.bfloat16), *cases(len(members))[:4]):
                for direction in DIRECTIONS:
                    problems += run_case(rank, world_size, members, backend, device, case, direction) or []
    return problems


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parts", [[(0, 2)], [(0, 2), (1, 3)], [(0, 1, 2), (1, 3)]], ids=str)
def test_groups_that_do_not_cover_the_world(pool: ranks.RankPool, parts: list[tuple[int, ...]], backend: str) -> None:
    ok(pool.run(run_part_of_the_world, parts, backend, "cpu"))


def run_mesh(rank: int, world_size: int, names: tuple[str, str], device: str) -> list[str]:
    """The "ulysses" dimension of a two-dimensional mesh, by functions and by a communicator, forward and backward."""
    mesh = dist.device_mesh.init_device_mesh(device, (2, world_size // 2), mesh_dim_names=names)
    ulysses = mesh["ulysses"]
    me = ulysses.get_local_rank()
    p = ulysses.size()
    problems = []
    for kind in (torch.bfloat16, torch.float32):
        case = even("mesh", p, b=2, dtype=kind, slot=rank % 2 if names[0] == "ulysses" else rank // 2)
        x = oracle.make_input(case, "scatter_heads", 0, me, device)
        wanted = oracle.expected(case, "scatter_heads", 0, me, device)
        with ulysses_op.Communicator(ulysses) as comm:
            for result in (ulysses_op.scatter_heads(x, ulysses), comm.scatter_heads(x)):
                problem = oracle.difference(result, wanted)
                if problem:
                    problems.append(problem)
            for result in (ulysses_op.gather_heads(wanted, ulysses), comm.gather_heads(wanted)):
                problem = oracle.difference(result, x)
                if problem:
                    problems.append(f"there and back: {problem}")
    try:
        ulysses_op.scatter_heads(x, mesh)
        problems.append("a two-dimensional mesh was accepted")
    except (TypeError, ValueError):
        pass
    return problems


@pytest.mark.parametrize("names", [("dp", "ulysses"), ("ulysses", "tp")], ids=str)
def test_mesh_dimension(pool: ranks.RankPool, names: tuple[str, str]) -> None:
    ok(pool.run(run_mesh, names, "cpu"))


def run_two_communicators(
    rank: int, world_size: int, members: tuple[int, ...], backends: tuple[str, str], device: str
) -> list[str] | None:
    """Two communicators of one group: whole exchanges and groups of one between the steps of the other's group."""
    if rank not in members:
        return None
    me, p = members.index(rank), len(members)
    first, second = (ranks.fresh_communicator(members, backend, device) for backend in backends)
    table = qkv(p)
    other = even("other", p, b=2, dtype=torch.bfloat16, slot=5)
    problems = []
    for seed in range(10):
        with first.group("q", "k", "v") as group:
            for tag in ("v", "q", "k"):
                x = oracle.make_input(table[tag], "scatter_heads", seed, me, device)
                group.submit(x, tag=tag, **table[tag].arguments)
                x = oracle.make_input(other, "scatter_heads", seed, me, device)
                with second.group() as inner:
                    inner.submit(x, tag=tag, final=True)
                    (there,) = inner.wait()
                    back = second.gather_heads(there)
                    problem = oracle.difference(back, x)
                    if problem:
                        problems.append(f"seed {seed}: {problem}")
            problems += check_group(group.wait(), ("q", "k", "v"), table, "scatter_heads", seed, me)
    first.close()
    problem = oracle.difference(second.gather_heads(second.scatter_heads(x)), x)
    second.close()
    return problems + ([f"after the other's close: {problem}"] if problem else [])


@pytest.mark.parametrize("backends", [("shm", "shm"), ("shm", "c10d"), ("c10d", "c10d")], ids=str)
def test_two_communicators_of_one_group(pool: ranks.RankPool, backends: tuple[str, str]) -> None:
    ok(pool.run(run_two_communicators, MEMBERS[3], backends, "cpu"))


def run_profiled(rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str) -> list[str] | None:
    from torch.profiler import ProfilerActivity, profile

    if rank not in members:
        return None
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    table = qkv(len(members))
    problems = []
    with profile(activities=activities, record_shapes=True, profile_memory=True, with_stack=True):
        for case in cases(len(members))[:3]:
            problems += run_case(rank, world_size, members, backend, device, case, "scatter_heads") or []
        names, order = ("q", "k", "v"), ("v", "q", "k")
        problems += (
            run_groups(rank, world_size, members, backend, device, "scatter_heads", names, order, True, table) or []
        )
    return problems


@pytest.mark.parametrize("backend", BACKENDS)
def test_profiled(pool: ranks.RankPool, backend: str) -> None:
    ok(pool.run(run_profiled, MEMBERS[2], backend, "cpu"))


# ---- gradients


def weights(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, device: str, seed: int, rank: int) -> torch.Tensor:
    """Gradients that differ everywhere and whose sums over ranks are exact in float32: quarters up to 16."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randint(-64, 65, tuple(shape), generator=generator) / 4).to(dtype).to(device)


def dense_gradient(case: Case, direction: str, seed: int, me: int, device: str) -> torch.Tensor:
    """The gradient of rank `me`'s input when all ranks' outputs get `weights`, in float64 by autograd of all inputs."""
    shapes = [case.input_shape(direction, r) for r in range(case.world_size)]
    leaves = [torch.zeros(shape, dtype=torch.float64, device=device, requires_grad=True) for shape in shapes]
    outputs = [oracle.reshard(leaves, case, direction, r) for r in range(case.world_size)]
    grads = [weights(y.shape, case.dtype, device, seed, r).double() for r, y in enumerate(outputs)]
    (gradient,) = torch.autograd.grad(outputs, [leaves[me]], grads)
    return gradient.to(case.dtype)


def run_gradient(
    rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str, case: Case, direction: str
) -> list[str] | None:
    if rank not in members:
        return None
    me = members.index(rank)
    comm = ranks.communicator(members, backend, device)
    rng = random.Random(case.name)
    problems, gradients = [], []
    for seed in range(REPEATS):
        x = oracle.make_input(case, direction, seed, me, device).requires_grad_()
        one_rank_late(rng, me, len(members))
        y = getattr(comm, direction)(x, **case.arguments)
        problem = oracle.difference(y.detach(), oracle.expected(case, direction, seed, me, device))
        if problem:
            problems.append(f"seed {seed}, forward: {problem}")
        one_rank_late(rng, me, len(members))
        y.backward(weights(y.shape, case.dtype, device, seed, me))
        gradients.append(x.grad)
    for seed, gradient in enumerate(gradients):
        wanted = dense_gradient(case, direction, seed, me, device)
        if gradient is None or gradient.shape != wanted.shape or not torch.equal(gradient, wanted):
            problems.append(f"seed {seed}: gradient\n{gradient}\nexpected\n{wanted}")
    return problems


def gradient_cases(world_size: int) -> list[Case]:
    p = world_size
    names = {"gqa_28_7_q", "gqa_28_7_kv", "one_kv_head", "two_kv_heads", "overlapping_heads", "seq_and_heads"}
    names |= {
        "three_heads",
        "seq_3",
        "batch",
        "layout_fused_qkv",
        "layout_transposed_d",
        "dtype_float64",
        "dtype_float16",
    }
    table = [case for case in cases(p) if case.name in names]
    if p == 2:
        table.append(uneven("h3_p2_s8_d2", seq=(4, 4), counts=(2, 1), d=2))
    return table


GRADIENTS = [
    pytest.param(p, direction, case, id=f"{case.name}-{direction}-{p}")
    for p in (2, 3, 4)
    for direction, case in itertools.product(DIRECTIONS, gradient_cases(p))
    if direction == "scatter_heads" or not case.replicated
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("world_size", "direction", "case"), GRADIENTS)
def test_gradient(pool: ranks.RankPool, world_size: int, direction: str, case: Case, backend: str) -> None:
    ok(pool.run(run_gradient, MEMBERS[world_size], backend, "cpu", case, direction))


def run_replica_sum(
    rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str
) -> list[str] | None:
    """256 + 1 + 1 + 0 is 258 in float32, and 256 where bfloat16 rounds on the way."""
    if rank not in members:
        return None
    me = members.index(rank)
    comm = ranks.communicator(members, backend, device)
    problems = []
    for big in range(len(members)):
        x = torch.zeros(1, 2, 1, 4, dtype=torch.bfloat16, device=device, requires_grad=True)
        y = comm.scatter_heads(x, heads=((0, 1),) * len(members))
        value = 256.0 if me == big else float(me != (big + 1) % len(members))
        y.backward(torch.full_like(y, value))
        if x.grad is None or not torch.equal(x.grad, torch.full_like(x, 258.0)):
            problems.append(f"256 on rank {big}: {x.grad}")
    return problems


@pytest.mark.parametrize("backend", BACKENDS)
def test_replicas_are_summed_in_float32(pool: ranks.RankPool, backend: str) -> None:
    ok(pool.run(run_replica_sum, MEMBERS[4], backend, "cpu"))


def run_odd_gradients(
    rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str
) -> list[str] | None:
    """Incoming gradients that are expanded or transposed, gradients of gradients, and an exchange inside no_grad."""
    if rank not in members:
        return None
    me, p = members.index(rank), len(members)
    comm = ranks.communicator(members, backend, device)
    problems = []

    x = torch.zeros(2, 3, 2 * p, 4, device=device, requires_grad=True)
    comm.scatter_heads(x).sum().backward()
    if x.grad is None or not torch.equal(x.grad, torch.ones_like(x)):
        problems.append(f"expanded gradient: {x.grad}")

    case = even("transposed", p, b=2, s=3, h=2 * p, d=4)
    x = oracle.make_input(case, "scatter_heads", 0, me, device).requires_grad_()
    y = comm.scatter_heads(x)
    y.backward(weights(y.shape, case.dtype, device, 0, me).transpose(1, 3).contiguous().transpose(1, 3))
    if x.grad is None or not torch.equal(x.grad, dense_gradient(case, "scatter_heads", 0, me, device)):
        problems.append(f"transposed gradient: {x.grad}")

    # y = x in another place: d/dx of sum(u * d/dx sum(y ** 3)) is 6 x u.
    x = weights((2, 3, 2 * p, 4), torch.float64, device, 1, me).requires_grad_()
    u = weights(x.shape, torch.float64, device, 2, me)
    (first,) = torch.autograd.grad(comm.scatter_heads(x).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first * u).sum(), x)
    if not torch.equal(first.detach(), 3 * x.detach() ** 2) or not torch.equal(second, 6 * x.detach() * u):
        problems.append("gradient of the gradient")

    with torch.no_grad():
        if comm.scatter_heads(x).requires_grad:
            problems.append("a result under no_grad requires grad")
    if comm.scatter_heads(x.detach().int()).requires_grad:
        problems.append("a result of integers requires grad")
    return problems


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_unusual_gradients(pool: ranks.RankPool, world_size: int, backend: str) -> None:
    ok(pool.run(run_odd_gradients, MEMBERS[world_size], backend, "cpu"))


def run_group_gradient(
    rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str, needs: tuple[str, ...], used: str
) -> list[str] | None:
    """Gradients through a group of q, k, v. `needs` names what requires grad, `used` what the loss looks at."""
    if rank not in members:
        return None
    me = members.index(rank)
    comm = ranks.communicator(members, backend, device)
    table = qkv(len(members), dtype=torch.float32)
    rng = random.Random(used)
    names = ("q", "k", "v")
    looks_at: list[tuple[str, ...]] = {
        "all": [names] * 4,
        "q": [("q",)] * 4,
        "by_rank": [("q",), ("k", "v"), ("v",), names],
    }[used]
    problems = []
    for seed in range(REPEATS):
        inputs = {tag: oracle.make_input(table[tag], "scatter_heads", seed, me, device) for tag in names}
        for tag in needs:
            inputs[tag].requires_grad_()
        with comm.group(*names) as group:
            for tag in ("v", "q", "k"):
                one_rank_late(rng, me, len(members))
                group.submit(inputs[tag], tag=tag, final=tag == "k", **table[tag].arguments)
            results = dict(zip(names, group.wait(), strict=True))
        outputs = [results[tag] for tag in names if tag in looks_at[me] and results[tag].requires_grad]
        if not outputs:
            # Every rank takes part in the backward group, whatever its loss looks at.
            outputs = [results[needs[0]]]
        torch.autograd.backward(outputs, [weights(y.shape, y.dtype, device, seed, me) for y in outputs])
        problems += check_group(tuple(r.detach() for r in results.values()), names, table, "scatter_heads", seed, me)
        for tag in names:
            gradient = inputs[tag].grad
            if tag not in needs:
                if gradient is not None:
                    problems.append(f"seed {seed}: {tag} has a gradient that nobody asked for")
                continue
            case = table[tag]
            wanted = torch.zeros(case.input_shape("scatter_heads", me), device=device)
            for peer in range(len(members)):
                seen = [t for t in names if t in looks_at[peer] and t in needs] or [needs[0]]
                if tag in seen:
                    shape = (case.batch, sum(case.seq), case.ranges[peer][1] - case.ranges[peer][0], case.head_dim)
                    part = weights(shape, case.dtype, device, seed, peer)
                    start = sum(case.seq[:me])
                    wanted[:, :, case.ranges[peer][0] : case.ranges[peer][1]] += part[:, start : start + case.seq[me]]
            if gradient is None or not torch.equal(gradient, wanted):
                problems.append(f"seed {seed}, tag {tag}: gradient\n{gradient}\nexpected\n{wanted}")
    return problems


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    ("needs", "used"),
    [(("q", "k", "v"), "all"), (("q", "k"), "all"), (("q", "k", "v"), "q"), (("q", "k", "v"), "by_rank")],
)
def test_group_gradient(pool: ranks.RankPool, world_size: int, needs: tuple[str, ...], used: str, backend: str) -> None:
    ok(pool.run(run_group_gradient, MEMBERS[world_size], backend, "cpu", needs, used))


def run_attention(
    rank: int, world_size: int, members: tuple[int, ...], backend: str, device: str, kv_heads: int
) -> list[str] | None:
    """A whole attention with its gradients against the same on one process; a second sequence's keys do not travel."""
    if rank not in members:
        return None
    me, p = members.index(rank), len(members)
    comm = ranks.communicator(members, backend, device)
    heads, d, text_len = 8, 4, 3
    seq = tuple(3 + (r + 1) % 2 for r in range(p))
    plan = ulysses_op.head_plan(heads, kv_heads, p)
    generator = torch.Generator().manual_seed(7)

    def full(length: int, count: int) -> torch.Tensor:
        return torch.randn(2, length, count, d, dtype=torch.float64, generator=generator).to(device)

    q, k, v = (full(sum(seq), count) for count in (heads, kv_heads, kv_heads))
    text_k, text_v = full(text_len, kv_heads), full(text_len, kv_heads)
    grad = full(sum(seq), heads)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        repeat = q.shape[2] // max(1, k.shape[2])
        k, v = (t.repeat_interleave(repeat, 2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    full_leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    whole = attend(full_leaves[0], torch.cat([full_leaves[1], text_k], 1), torch.cat([full_leaves[2], text_v], 1))
    whole.backward(grad)

    own = slice(sum(seq[:me]), sum(seq[: me + 1]))
    leaves = [t[:, own].clone().requires_grad_() for t in (q, k, v)]
    with comm.group("q", "k", "v") as group:
        group.submit(leaves[2], tag="v", heads=plan.kv, seq_lens=seq)
        group.submit(leaves[0], tag="q", heads=plan.q, seq_lens=seq)
        group.submit(leaves[1], tag="k", heads=plan.kv, seq_lens=seq, final=True)
        q_local, k_local, v_local = group.wait()
    kv = slice(*plan.kv[me])
    # The text's keys are whole on every rank: no exchange, each rank takes its heads.
    local = attend(q_local, torch.cat([k_local, text_k[:, :, kv]], 1), torch.cat([v_local, text_v[:, :, kv]], 1))
    out = comm.gather_heads(local, heads=plan.q, seq_lens=seq)
    out.backward(grad[:, own])

    problems = []
    pairs = [(out.detach(), whole.detach()), *((x.grad, y.grad) for x, y in zip(leaves, full_leaves, strict=True))]
    for name, (actual, wanted) in zip(("out", "dq", "dk", "dv"), pairs, strict=True):
        if not torch.allclose(actual, wanted[:, own], rtol=1e-9, atol=1e-12):
            problems.append(f"{name}: off by up to {(actual - wanted[:, own]).abs().max()}")
    return problems


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
def test_attention(pool: ranks.RankPool, world_size: int, kv_heads: int, backend: str) -> None:
    ok(pool.run(run_attention, MEMBERS[world_size], backend, "cpu", kv_heads))
