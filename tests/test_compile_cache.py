"""Compiled code that Inductor has on disk, in processes that find it there: served where nothing that shapes it has
changed, and right wherever it is served.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from test_compile_lengths import DIM, HEADS, Block, check, part, run, sequence
from torch._dynamo.utils import counters

import ulysses_op

LENGTH = 6
PACKAGE = Path(ulysses_op.__file__).parent
Told = dict[str, Any]


# On a rank.


def train(rank: int, world_size: int, block: Block, comm: Any) -> Told:
    """A compiled block's outputs and gradients are right; how the caches served them."""
    torch.compiler.reset()
    counters.clear()
    compiled = ulysses_op.compile(block, fullgraph=True, dynamic=False, options={"cpp.simdlen": 1})
    lengths = (LENGTH,) * world_size
    for seed in range(2):
        whole = sequence((2, lengths), seed)
        found = run(lambda x: compiled(x, comm), part(whole, lengths, rank), True)
        check(found, [part(wanted, lengths, rank) for wanted in run(block, whole, True)])
    return served()


def served() -> Told:
    """Of the graphs since the counters were cleared: how many each cache had, and had not."""
    found = {}
    for name, group, prefix in (("aot", "aot_autograd", "autograd_cache"), ("fx", "inductor", "fxgraph_cache")):
        found[name] = [counters[group][f"{prefix}_{what}"] for what in ("hit", "miss", "bypass")]
    return found


ALL_SERVED = {"aot": [1, 0, 0], "fx": [2, 0, 0]}  # of a forward and a backward graph


def exchange(rank: int, world_size: int, created: list[str], used: list[str]) -> None:
    """Communicators in the order in which they are ``created``, and code for those ``used``."""
    comms = {backend: ulysses_op.Communicator(backend=backend, timeout_s=30) for backend in created}
    told = []
    for backend in used:
        one = train(rank, world_size, Block(), comms[backend])
        told.append({**one, "name": comms[backend]._where[0]})
    backends = {backend: comm.known_backend for backend, comm in comms.items()}
    print(json.dumps({"package": ulysses_op.__file__, "codes": told, "backends": backends}))
    for comm in comms.values():
        comm.close()


def edit(rank: int, world_size: int, created: list[str]) -> None:
    """Edits this process's own copy of the package, file by file, and looks whether code compiled before is served."""
    from torch._inductor.custom_graph_pass import get_hash_for_files

    from ulysses_op import compiling

    comms = {backend: ulysses_op.Communicator(backend=backend, timeout_s=30) for backend in created}
    comm = comms["shm"]
    told: Told = {"package": ulysses_op.__file__, "unedited": train(rank, world_size, Block(), comm)}
    told["unedited"]["name"] = comm._where[0]
    told["backends"] = {backend: one.known_backend for backend, one in comms.items()}
    x = torch.randn(1, LENGTH, HEADS, DIM)
    executed: set[str] = set()
    with noting(executed) if rank == 0 else contextlib.nullcontext():
        run(compiling.compile(functools.partial(all_kinds, comm=comm), fullgraph=True, dynamic=False), x, True)
    told["executed"] = sorted(executed)

    def infer(cuda_graphs: str = "auto") -> bool:
        """Whether a cache had the code. A graph for inference is there once it is compiled."""
        get_hash_for_files.cache_clear()
        importlib.reload(compiling)  # it reads the files
        torch.compiler.reset()
        counters.clear()
        run(compiling.compile(comm.scatter_heads, fullgraph=True, dynamic=False, cuda_graphs=cuda_graphs), x, False)
        ranks.meet(dist.group.WORLD)
        assert all(sum(counts) == 1 and counts[2] == 0 for counts in served().values()), served()
        return any(counts[0] for counts in served().values())

    told["first"], told["second"] = infer(), infer()
    told["cuda_graphs"] = {setting: [infer(setting), infer(setting)] for setting in ("through", "around")}
    told["edited"] = {}
    for name in sorted(SHAPING):
        if rank == 0:
            with open(Path(ulysses_op.__file__).with_name(name), "a") as file:
                file.write("# an edit\n")
        ranks.meet(dist.group.WORLD)
        told["edited"][name] = infer()
    print(json.dumps(told))
    for one in comms.values():
        one.close()


def all_kinds(x: torch.Tensor, comm: Any) -> torch.Tensor:
    """A group of two and a group of one, both ways, and heads that are replicated."""
    plan = ulysses_op.head_plan(HEADS, 1, comm.world_size)
    q, k = comm.scatter_heads(x, heads=plan.q), comm.scatter_heads(x[:, :, :1], heads=plan.kv)
    return comm.gather_heads(q * k, heads=plan.q)


@contextlib.contextmanager
def noting(files: set[str]) -> Iterator[None]:
    """Notes the package's files whose functions run, but for what the kernels of the ops run."""
    ops = ulysses_op.ops
    kernels = {f.__code__ for f in (ops._scatter_kernel, ops._gather_kernel, ops._submit_kernel, ops._wait_kernel)}

    def note(frame: FrameType | None, event: str, argument: object) -> None:
        if event != "call" or frame is None or not frame.f_code.co_filename.startswith(f"{PACKAGE}{os.sep}"):
            return
        name = Path(frame.f_code.co_filename).name
        while frame is not None:
            if frame.f_code in kernels:
                return
            frame = frame.f_back
        files.add(name)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


# In the test process.


def fresh(function: Any, world_size: int, *arguments: Any, cache: Path, package: Path = PACKAGE) -> list[Told]:
    """What each of ``world_size`` new processes tells, with that directory of caches and that copy of the package."""
    path = os.pathsep.join(filter(None, (str(package.parent), os.environ.get("PYTHONPATH"))))
    # Workers to compile with would take longer to start than there is to compile.
    env = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": path}
    ended = ranks.run_fresh(function, world_size, *arguments, env=env, timeout_s=250)
    for one in ended.ranks:
        assert one.status == 0, one.stderr
    told = [json.loads(one.stdout.splitlines()[-1]) for one in ended.ranks]
    assert {one["package"] for one in told} == {str(package / "__init__.py")}
    return told


def copied(to: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(PACKAGE, to / "ulysses_op", ignore=ignored))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


BOTH = ["shm", "c10d"]


@pytest.fixture(scope="module")
def first(cache: Path) -> list[Told]:
    """The processes that find nothing, and leave their code for all others."""
    return fresh(exchange, 2, BOTH, BOTH, cache=cache)


def compiled_anew(told: list[Told], code: int) -> bool:
    """Whether a rank did. The other ranks may have come late enough to be served its code."""
    return any(one["codes"][code]["aot"][1] for one in told)


@pytest.fixture(scope="module")
def four(first: list[Told], cache: Path) -> list[Told]:
    """The same at another world size, where the default process group has the same name."""
    return fresh(exchange, 4, BOTH, ["shm"], cache=cache)


def test_code_for_another_world_size_is_not_served(first: list[Told], four: list[Told]) -> None:
    assert compiled_anew(four, 0)
    for one in four:
        assert one["backends"]["shm"] == "shm"
        assert one["codes"][0]["name"] == first[0]["codes"][0]["name"]


def test_a_second_process_is_served_both_graphs(first: list[Told], four: list[Told], cache: Path) -> None:
    assert compiled_anew(first, 0) and compiled_anew(first, 1)
    for one in fresh(exchange, 2, BOTH, BOTH, cache=cache):
        assert one["backends"] == {"shm": "shm", "c10d": "c10d"}
        for code, before in zip(one["codes"], first[0]["codes"], strict=True):
            assert code == {**ALL_SERVED, "name": before["name"]}


def test_another_lowering_is_not_served_what_the_old_one_made(first: list[Told], cache: Path, tmp_path: Path) -> None:
    package = copied(tmp_path)
    with open(package / "inductor_lowering.py", "a") as file:
        file.write("# an edit\n")
    told = fresh(exchange, 2, BOTH, ["shm"], cache=cache, package=package)
    assert compiled_anew(told, 0)


# What runs while a graph is made and does not shape it: communicators tell their backends, which are in the key; the
# call that has it made is checked.
NOT_SHAPING = {"checked_calls.py", "communicator.py", "registry.py"}
SHAPING = {
    *(
        "compiling.py",
        "fx_narrow.py",
        "fx_nodes.py",
        "fx_order.py",
        "fx_products.py",
        "grouping.py",
        "inductor_compat.py",
    ),
    *("inductor_lowering.py", "inductor_order.py", "ops.py", "own_parts.py", "gradients.py", "layout.py"),
    "projections.py",
}


@pytest.fixture(scope="module")
def edited(first: list[Told], cache: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    """From processes with a copy of the package, and with their communicators in another order."""
    return fresh(edit, 2, BOTH[::-1], cache=cache, package=copied(tmp_path_factory.mktemp("package")))


def test_code_finds_its_communicator_among_those_of_its_process(first: list[Told], edited: list[Told]) -> None:
    """Names count communicators, so that here one has the name that another had when the code was compiled."""
    for one in edited:
        assert one["unedited"] == {**ALL_SERVED, "name": first[0]["codes"][1]["name"]}
        assert one["backends"] == {"shm": "shm", "c10d": None}


def test_files_that_run_while_a_graph_is_made_are_known(edited: list[Told]) -> None:
    assert set(edited[0]["executed"]) == SHAPING | NOT_SHAPING


@pytest.mark.parametrize("name", sorted(SHAPING))
def test_an_edit_of_what_shapes_a_graph_is_not_served_the_old_one(edited: list[Told], name: str) -> None:
    assert all(one["second"] for one in edited)  # as it is without an edit
    assert not all(one["edited"][name] for one in edited)


@pytest.mark.parametrize("setting", ["through", "around"])
def test_another_setting_for_cuda_graphs_is_not_served_the_same_code(edited: list[Told], setting: str) -> None:
    assert not all(one["cuda_graphs"][setting][0] for one in edited)
    assert all(one["cuda_graphs"][setting][1] for one in edited)
