"""The zoo under torch.compile on real ranks: right results, and the order of the generated code, with the pass and
without it, also where the scheduler does its worst.

What the code does stands in tests/expected: zoo.txt is torch 2.13's, and a file for another version holds what that
does otherwise. After a change that is meant to alter it,

    EXPECTTEST_ACCEPT=1 make test TESTS=tests/test_zoo.py

writes it anew for the torch at hand, 2.13 first; read the diff.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import expecttest
import numpy as np
import pytest
import ranks
import scalar_kernels  # noqa: F401
import torch
import torch._functorch.config as functorch_config
from blocks import BLOCKS, Block, Dense, Sharded, build, is_learned, is_shared, make_inputs, own_inputs, own_part
from events import Schedule, Wrapper, groups_of, parse, schedule
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import ulysses_op
from ulysses_op import compiling, fx_products, inductor_order

# Of values around one, in single precision; what is misplaced is off by about as much as that.
TOLERANCE = 1e-5
SEEDS = (0, 1, 2, 0)
SKEW_S = 0.01

PLAIN, PASS, ADVERSE = "torch.compile", "with the pass", ", adverse order"
VARIANTS = (PLAIN, PASS, PASS + ADVERSE)
# Without the scheduler's part of the pass, and without what that does for the first submission.
GRAPH_ALONE, NO_FIRST = f"{PASS}, graph alone", f"{PASS}, none first"
ONE_CALL = "ulysses_op.compile"
# Every product that can be taken apart is.
IN_PARTS = f"{PASS}, projections in parts"


def adversary(nodes: list[Any]) -> list[Any]:
    """A legal order for Inductor's scheduler in which exchanges start as late as they can, the first of a group last
    of all, and are waited for at once."""
    producers = {name: node for node in nodes for name in node.get_buffer_names()}
    position = {node: index for index, node in enumerate(nodes)}
    missing = {
        node: {producers[dependency.name] for dependency in node.unmet_dependencies if dependency.name in producers}
        - {node}
        for node in nodes
    }
    users: dict[Any, list[Any]] = {node: [] for node in nodes}
    for node, needed in missing.items():
        for producer in needed:
            users[producer].append(node)

    def late(node: Any) -> tuple[bool, int]:
        op = str(getattr(node.node, "op_overload", ""))
        starts = op.startswith("ulysses_op.") and "wait_" not in op
        return starts, -position[node] if starts else position[node]

    order = []
    ready = [node for node in nodes if not missing[node]]
    while ready:
        node = min(ready, key=late)
        ready.remove(node)
        order.append(node)
        for user in users[node]:
            missing[user].discard(node)
            if not missing[user]:
                ready.append(user)
    assert len(order) == len(nodes)
    return order


schedules: list[Schedule] = []


def note(nodes: list[Any]) -> list[Any]:
    schedules.append(schedule(nodes))
    return nodes


def inductor_options(adverse: bool) -> dict[str, Any]:
    """Notes the scheduler's order, the worst one where ``adverse``. Graphs are compiled
    anew, while a kernel that was compiled before, for another rank too, is not."""
    return {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [*([adversary] if adverse else []), note],
        "fx_graph_cache": False,
    }


# On a rank.


@dataclass
class Outcome:
    """What became of a block under one way to run it. Distances are of outputs and gradients, over all inputs."""

    from_dense: float = 0.0
    """Of what this rank has to itself; ``shares`` are the rest."""
    from_first: float = 0.0
    """Between the first run and another on the same inputs."""
    from_plain: float = 0.0
    """From the code compiled without the pass."""
    shares: list[np.ndarray] = field(default_factory=list)
    """This rank's part of the gradients that add up over the ranks, for each input."""
    wrappers: list[Wrapper] = field(default_factory=list)
    schedules: list[Schedule] = field(default_factory=list)
    groups: list[list[list[str]]] = field(default_factory=list)
    """In each graph, as the pass reports them, the names of their members."""
    in_parts: list[int] = field(default_factory=list)
    own_last: list[int] = field(default_factory=list)
    """In each graph, how many products were taken apart."""
    error: str = ""


Found = tuple[list[Tensor], list[Tensor]]
"""What a rank has a part of to itself, outputs and gradients; and gradients that the ranks' shares add up to."""


def run(block: Block, function: Callable[..., Any], inputs: list[Tensor], grad: bool) -> Found:
    leaves = [
        x.detach().clone().requires_grad_(grad and is_learned(name))
        for name, x in zip(block.inputs, inputs, strict=True)
    ]
    with torch.set_grad_enabled(grad):
        outputs = function(*leaves)
    if not grad:
        return list(outputs), []
    named = [(name, x) for name, x in zip(block.inputs, leaves, strict=True) if x.requires_grad]
    own = [x for name, x in named if not is_shared(name)]
    shared = [*(x for name, x in named if is_shared(name)), *block.parameters()]
    # Of half the sum of squares, which the ranks' parts add up to.
    found = torch.autograd.grad(outputs, [*own, *shared], [x.detach() for x in outputs])
    return [*(x.detach() for x in outputs), *found[: len(own)]], list(found[len(own) :])


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference, relative to the size of the tensor it is in; infinity where something is not a number
    or not of the shape it should have."""
    largest = 0.0
    for x, y in zip(found, wanted, strict=True):
        if x.shape != y.shape:
            return math.inf
        if x.numel():
            difference = ((x - y).abs().max() / y.abs().max().clamp(min=1.0)).item()
            largest = max(largest, math.inf if math.isnan(difference) else difference)
    return largest


def everything(found: Found) -> list[Tensor]:
    return [*found[0], *found[1]]


def flat(tensors: list[Tensor]) -> np.ndarray:
    return torch.cat([x.flatten() for x in tensors]).numpy() if tensors else np.zeros(0)


def attempt(call: Callable[[], Found]) -> Found | Exception:
    try:
        return call()
    except Exception as error:
        return error


@contextlib.contextmanager
def as_in(variant: str) -> Iterator[None]:
    """What the variant NO_FIRST does without, and IN_PARTS does with more."""
    kept = inductor_order._earlier_submissions_first, fx_products.min_part
    if variant.startswith(NO_FIRST):
        inductor_order._earlier_submissions_first = lambda graph, group, each: None
    if variant.startswith(IN_PARTS):
        fx_products.min_part = 0
    try:
        yield
    finally:
        inductor_order._earlier_submissions_first, fx_products.min_part = kept


def examine(
    rank: int, world_size: int, name: str, mode: str, backend: str, variants: tuple[str, ...]
) -> dict[str, Outcome]:
    """Runs the block whole, split and eager, and compiled in each way of ``variants``."""
    block = build(name)
    grad = mode == "training"
    inputs = {seed: make_inputs(block, world_size, seed) for seed in SEEDS}
    dense = {seed: run(block, functools.partial(block, Dense()), x, grad) for seed, x in inputs.items()}
    found = {"dense": Outcome(shares=[flat(dense[seed][1]) for seed in SEEDS])}
    plain: list[Found] = []
    for variant in ("eager", *variants):
        outcome = found[variant] = Outcome()
        communicator = ulysses_op.Communicator(backend=backend, timeout_s=60)
        function: Callable[..., Any] = functools.partial(block, Sharded(communicator, block, rank, world_size))
        options: dict[str, Any] = {}
        if variant != "eager":
            options = inductor_options(variant.endswith(ADVERSE))
            if variant.startswith(PASS):
                options |= compiling.compile_options()
            if variant.startswith(GRAPH_ALONE):
                del options["_pre_fusion_custom_pass"]
            schedules.clear()
            torch.compiler.reset()
            compile_ = compiling.compile if variant == ONE_CALL else torch.compile
            function = compile_(function, fullgraph=True, dynamic=False, options=options)
        results: list[Found] = []
        try:
            for turn, seed in enumerate(SEEDS):
                x = own_inputs(block, rank, world_size, inputs[seed])
                if turn % world_size == rank:  # the others' exchanges have begun and wait for this rank
                    time.sleep(SKEW_S)
                call = functools.partial(run, block, function, x, grad)
                if turn > 0 or variant == "eager":
                    results.append(call())
                else:
                    # Which loses the code when it is left by an exception.
                    with functorch_config.patch(enable_autograd_cache=False), as_in(variant):
                        result, code = run_and_get_code(attempt, call)
                    outcome.wrappers = [parse(text) for text in code]
                    outcome.schedules = list(schedules)
                    if isinstance(result, Exception):
                        raise result
                    results.append(result)
            for seed, (own, shared) in zip(SEEDS, results, strict=True):  # what later runs must have left alone
                wanted = own_part(block, rank, world_size, dense[seed][0])
                outcome.from_dense = max(outcome.from_dense, distance(own, wanted))
                outcome.shares.append(flat(shared))
            outcome.from_first = distance(everything(results[-1]), everything(results[0]))
            if variant == PLAIN:
                plain = results
            for result, without_pass in zip(results, plain, strict=False):
                outcome.from_plain = max(outcome.from_plain, distance(everything(result), everything(without_pass)))
            communicator.close()
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"
            with contextlib.suppress(Exception):
                communicator.close()
        if variant.startswith(PASS):
            reports = options["post_grad_custom_post_pass"].reports
            outcome.groups = [[group.members for group in report.groups] for report in reports]
            outcome.in_parts = [sum(len(group.split) for group in report.groups) for report in reports]
            outcome.own_last = [sum(len(group.own_last) for group in report.groups) for report in reports]
    return found


# In the test process.


@functools.cache
def answers(world_size: int, name: str, mode: str, backend: str, variants: tuple[str, ...]) -> list[dict[str, Outcome]]:
    """Of each rank. One call serves all tests of a case."""
    pool = ranks.pool(world_size)
    found = pool.run(examine, name, mode, backend, variants, timeout_s=250)
    if any("Timeout" in outcome.error for of_rank in found for outcome in of_rank.values()):
        pool.close()  # some rank is behind the others, for good
    return found


def compiled(name: str, mode: str) -> list[dict[str, Outcome]]:
    return answers(2, name, mode, "shm", VARIANTS)


def check_results(found: list[dict[str, Outcome]], variant: str, exact: bool) -> None:
    outcomes = [of_rank[variant] for of_rank in found]
    assert [outcome.error for outcome in outcomes] == [""] * len(found)
    tolerance = 0.0 if exact else TOLERANCE
    assert max(outcome.from_dense for outcome in outcomes) <= tolerance
    for total, *shares in zip(found[0]["dense"].shares, *(outcome.shares for outcome in outcomes), strict=True):
        np.testing.assert_allclose(sum(shares), total, rtol=0, atol=tolerance * np.abs(total).max(initial=1.0))
    # To the last bit.
    assert max(outcome.from_first for outcome in outcomes) == 0
    assert max(outcome.from_plain for outcome in outcomes) == 0


# Of a norm and a rotary embedding on CPUs, where halves are put together in memory: mean, two halves, and the whole.
KERNELS_OF_A_PART = 4


def check_order(found: list[dict[str, Outcome]], variant: str, block: type[Block]) -> None:
    """V leaves first and nothing that it does not need runs ahead of it; one wait_ completes a group, behind all other
    work of its first use. The scheduler is held to that for the first submission and for kernels of libraries; what it
    fuses otherwise, and where that runs, is its own choice, and on file where it has no adversary."""
    has_tokens = [all(shares) for shares in zip(*block().lengths(len(found)).values(), strict=True)]
    for rank, of_rank in enumerate(found):
        outcome, plain = of_rank[variant], of_rank[PLAIN]
        sizes = (block.groups, block.backward)[: len(plain.schedules)]
        graphs = zip(sizes, outcome.groups, outcome.wrappers, outcome.schedules, strict=True)
        for wanted, reported, wrapper, nodes in graphs:
            assert wrapper.disorder() == []
            assert not {"scatter_heads", "gather_heads"}.intersection(wrapper.events)
            assert tuple(map(len, groups_of(wrapper.events))) == tuple(map(len, reported)) == wanted
            if has_tokens[rank]:  # where there is nothing to compute, no operand tells what needs what
                assert nodes.overtaking(every=not variant.endswith(ADVERSE)) == []
                assert nodes.hasty() == []
                assert nodes.idling() == []
        forward, *backward = (nodes.kernels for nodes in outcome.schedules)
        forward_plain, *backward_plain = (nodes.kernels for nodes in plain.schedules)
        assert forward <= forward_plain + KERNELS_OF_A_PART * outcome.own_last[0]
        more = len(block.more_kernels) + KERNELS_OF_A_PART * sum(outcome.own_last[1:])
        assert sum(backward) <= sum(backward_plain) + more


CASES = [(name, mode) for name, block in BLOCKS.items() for mode in block.modes]
NOT_TRAINED = [(name, "training") for name, block in BLOCKS.items() if "training" not in block.modes]
# Where shapes or groups differ most from those of two ranks.
CASES_OF_FOUR = [
    *((name, "training") for name in ("GroupedQueries", "MultiQuery", "Uneven", "EmptyShard")),
    ("GroupedQueries", "inference"),
]

# Where projections differ most: fused, of two widths, of two sequences, of a rank without tokens, of several layers.
CASES_IN_PARTS = [
    *((name, "inference") for name in ("FusedQKV", "GroupedQueries", "SelfAndCrossAttention", "EmptyShard")),
    *(("FourLayers", "inference"), ("Checkpointed", "training")),
]

# Every test named here fails, and is to leave this table with the fix.
BY_SIZE = "without the pass, Inductor orders exchanges by their sizes, which are not the same on all ranks"
KNOWN: dict[tuple[str, str, str], str] = {("plain", "GroupedQueries", "training"): BY_SIZE}


def cases(test: str, table: list[tuple[str, str]]) -> list[Any]:
    marked = []
    for name, mode in table:
        marks: list[Any] = []
        if (test, name, mode) in KNOWN:
            marks = [pytest.mark.xfail(reason=KNOWN[test, name, mode], strict=True)]
        marked.append(pytest.param(name, mode, id=f"{name}-{mode}", marks=marks))
    return marked


@pytest.mark.parametrize(("name", "mode"), cases("results", CASES))
def test_results(name: str, mode: str) -> None:
    found = compiled(name, mode)
    check_results(found, "eager", BLOCKS[name].exact)
    check_results(found, PASS, BLOCKS[name].exact)


@pytest.mark.parametrize(("name", "mode"), cases("plain", CASES))
def test_results_without_the_pass(name: str, mode: str) -> None:
    check_results(compiled(name, mode), PLAIN, BLOCKS[name].exact)


def test_results_without_the_pass_hold_against_the_scheduler() -> None:
    check_results(answers(2, "FusedQKV", "training", "shm", (PLAIN + ADVERSE,)), PLAIN + ADVERSE, False)


@pytest.mark.parametrize(("name", "mode"), cases("order", CASES))
def test_v_leaves_first_and_one_wait_completes_a_group(name: str, mode: str) -> None:
    check_order(compiled(name, mode), PASS, BLOCKS[name])


@pytest.mark.parametrize(("name", "mode"), cases("adverse", CASES))
def test_order_and_results_hold_against_the_scheduler(name: str, mode: str) -> None:
    found = compiled(name, mode)
    check_order(found, PASS + ADVERSE, BLOCKS[name])
    check_results(found, PASS + ADVERSE, BLOCKS[name].exact)


def test_the_order_is_lost_where_nothing_keeps_it() -> None:
    """So the tests above would see it: the adverse order of what the pass has put in order in the graph."""
    block = BLOCKS["LargeQueryBranch"]
    variants = [variant + ADVERSE for variant in (GRAPH_ALONE, NO_FIRST)]
    found = answers(2, block.__name__, "inference", "shm", (PLAIN, *variants))
    for variant in variants:
        with pytest.raises(AssertionError):
            check_order(found, variant, block)
    reversed_, behind = ([text.split() for text in found[0][variant].wrappers[0].events] for variant in variants)
    # V leaves last of all, or K before Q where torch keeps the first in its place; V first, but behind the work on Q.
    order = ["0", "2", "1"] if VERSION == "2.14" else ["2", "1", "0"]
    assert [words[2] for words in reversed_ if words[0] == "submit"] == [*order, "0"]
    assert [words[0] for words in behind][:7] == ["mm", "kernel", "mm", "kernel", "mm", "kernel", "submit"]
    check_results(found, NO_FIRST + ADVERSE, block.exact)


@pytest.mark.parametrize(("name", "mode"), cases("same", CASES))
def test_all_ranks_run_the_same_code(name: str, mode: str) -> None:
    """Where their shapes differ, the same exchanges at least, with the pass; and those of the same names."""
    found = compiled(name, mode)
    for variant in (PASS, PASS + ADVERSE):
        assert all(of_rank[variant].groups == found[0][variant].groups for of_rank in found), variant
    alike = BLOCKS[name]().is_alike(2)
    for variant in VARIANTS if alike else (PASS, PASS + ADVERSE):
        codes = [[wrapper.events for wrapper in of_rank[variant].wrappers] for of_rank in found]
        if not alike:
            codes = [[[text for text in graph if is_exchange(text)] for graph in code] for code in codes]
        assert all(code == codes[0] for code in codes), variant


def is_exchange(text: str) -> bool:
    return text.split()[0] in ("scatter_heads", "gather_heads", "submit", "wait_")


@pytest.mark.parametrize(("name", "mode"), cases("trained", NOT_TRAINED))
def test_gradients_of_the_others(name: str, mode: str) -> None:
    found = answers(2, name, mode, "shm", (ONE_CALL,))
    check_results(found, "eager", BLOCKS[name].exact)
    check_results(found, ONE_CALL, BLOCKS[name].exact)


@pytest.mark.parametrize(("name", "mode"), cases("four", CASES_OF_FOUR))
def test_four_ranks(name: str, mode: str) -> None:
    found = answers(4, name, mode, "shm", (ONE_CALL,))
    check_results(found, ONE_CALL, BLOCKS[name].exact)


@pytest.mark.parametrize(
    ("name", "mode"),
    cases("parts", CASES_IN_PARTS),
)
def test_projections_in_parts(name: str, mode: str) -> None:
    """Products before and behind the exchanges, taken apart however small they are."""
    found = answers(2, name, mode, "shm", (IN_PARTS,))
    check_results(found, IN_PARTS, exact=False)
    assert sum(found[0][IN_PARTS].in_parts) > 0
    for of_rank in found:  # a rank without tokens has nothing to take apart
        for wrapper in of_rank[IN_PARTS].wrappers:
            assert wrapper.disorder() == []


@pytest.mark.parametrize("backend", ["shm", "c10d"])
def test_projections_in_parts_of_four_ranks(backend: str) -> None:
    found = answers(4, "GroupedQueries", "inference", backend, (IN_PARTS,))
    check_results(found, IN_PARTS, exact=False)
    codes = [of_rank[IN_PARTS].wrappers[0].events for of_rank in found]
    # The own heads are at an end, or others on both sides of them; and they are multiplied while the others travel.
    assert [code.count("accumulate_mm_") for code in codes] == [1, 2, 2, 1]
    for code in codes:
        assert code[-code[::-1].index("wait_ 0") - 2] == "mm"


@pytest.mark.parametrize("name", ["SelfAndCrossAttention", "MultiQuery", "Uneven"])
def test_c10d(name: str) -> None:
    found = answers(2, name, "training", "c10d", (ONE_CALL,))
    check_results(found, ONE_CALL, BLOCKS[name].exact)


# What the code does, on file.

VERSION = ".".join(torch.__version__.split(".")[:2])
BASE_VERSION = "2.13"
BASE = Path(__file__).parent / "expected" / "zoo.txt"
OTHER = BASE.with_name(f"zoo-torch-{VERSION}.txt")
HEADER = """\
The events of the zoo's generated code for CPUs on rank 0 of two, {}. A line ends with each attention.
Written by: EXPECTTEST_ACCEPT=1 make test TESTS=tests/test_zoo.py"""


def describe(title: str, outcomes: dict[str, Outcome]) -> str:
    lines = [title]
    seen: dict[str, str] = {}
    for variant in VARIANTS:
        texts = [line for wrapper in outcomes[variant].wrappers for line in paragraph(wrapper)]
        same = seen.setdefault("\n".join(texts), variant)
        lines += [f"  {variant}", *(texts if same == variant else [f"    the same as {same}"])]
    return "\n".join(lines)


def paragraph(wrapper: Wrapper) -> list[str]:
    lines: list[list[str]] = [[]]
    for text in wrapper.events:
        lines[-1].append(text)
        if text.startswith("attention"):
            lines.append([])
    return [f"    {wrapper.kind}", *(f"      {', '.join(line)}" for line in lines if line)]


def read(path: Path) -> dict[str, str]:
    sections = path.read_text().strip().split("\n\n")[1:] if path.exists() else []
    return {section.split("\n", 1)[0]: section for section in sections}


def accept(title: str, found: str) -> None:
    path = BASE if VERSION == BASE_VERSION else OTHER
    sections = {**read(path), title: found}
    if path == OTHER and read(BASE).get(title) == found:
        del sections[title]
    titles = [f"{name}, {mode}" for name, mode in CASES]
    which = f"torch {VERSION}" if path == BASE else f"where torch {VERSION} differs from {BASE_VERSION}"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n\n".join([HEADER.format(which), *(sections[x] for x in titles if x in sections)]) + "\n")
    if not sections:
        path.unlink()


@pytest.mark.parametrize(("name", "mode"), cases("expected", CASES))
def test_expected_events(name: str, mode: str) -> None:
    title = f"{name}, {mode}"
    outcomes = compiled(name, mode)[0]
    assert outcomes[PASS].error == ""
    found = describe(title, outcomes)
    if expecttest.ACCEPT:
        accept(title, found)
    expected = {**read(BASE), **read(OTHER)}
    assert found == expected.get(title), "if this is meant, see the top of this file"
