"""The benchmark as a command, and that it does not time what is wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import scalar_kernels  # noqa: F401
import torch
import torch.distributed as dist

from ulysses_op.__main__ import main
from ulysses_op.bench.block import norm_rope, rotate
from ulysses_op.bench.compiled import COMPILERS, compiled_table, print_compiled_table
from ulysses_op.bench.contenders import gather_by_pack, scatter_in_one_pack, scatter_in_one_pack_strided
from ulysses_op.bench.loops import LOOPS, Kind, Parts, Weights, make_loop
from ulysses_op.bench.measure import ALONE, Contender, Effort, Ranks, measure
from ulysses_op.bench.profiles import PROFILES, shape_of
from ulysses_op.bench.zero_cta import between


def bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ulysses_op", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, **environment})


def check_rows(table: dict[str, Any]) -> None:
    particular = {
        "host": ("c10d", "shm"),
        "ablation": ("the whole", "no communication"),
        "rows": ("in one row", "64 B, gathered"),
    }
    kinds = particular.get(table["what"], ("gloo", "shm"))
    assert all(any(kind in name for name in table["rows"]) for kind in kinds)
    for name, row in table["rows"].items():
        assert row[ALONE]["iterations"] == 2 and row[ALONE]["median_us"] > 0, name


def test_shapes_that_memory_is_too_small_for() -> None:
    """They are left out before anything of them is made: 1 TB a tensor, on all levels that CPUs run."""
    levels = ["exchange", "block", "compiled", "ablation", "contention", "rows", "host"]
    run = bench("--level", *levels, "model", "--shape", "1,50000000,40,128", "--device", "cpu")
    assert run.returncode == 2, run.stdout + run.stderr
    names = [*levels, "model h3", "model lingbot"]
    for name in names:
        assert f"left out: {name} (1, 50000000, 40, 128): 2 ranks need about " in run.stdout
    assert run.stdout.count("GB are available: take a smaller --shape") == len(names)


def test_tables(tmp_path: Path) -> None:
    """Of a small shape; the second one is left out and said to be. Nothing is compiled: that is for other tests."""
    path = tmp_path / "bench.json"
    shapes = ["--shape", "1,8,4,8", "1,8,3,8"]
    arguments = ["--device", "cpu", "--iterations", "2", "--warmups", "2", "--json", str(path)]
    levels = ["--level", "exchange", "block", "ablation", "contention", "rows", "model", "host"]
    run = bench(*levels, "--layers", "2", "--steps", "2", *shapes, *arguments, TORCHDYNAMO_DISABLE="1")
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(path.read_text())
    assert [table["what"] for table in found["tables"]] == [
        *("scatter of q, k, v", "gather of o"),
        *("attention block", "ablation", "contention", "rows", "model h3", "model lingbot", "host"),
    ]
    for table in found["tables"]:
        check_rows(table)
        assert all(f"\n{name}" in run.stdout for name in table.get("transfers", table["rows"]))
    assert found["facts"]["ranks"] == "2" and "torch" in found["facts"]
    assert len(found["left_out"]) == 9 and "other kinds of handshakes: they need GPUs" in found["left_out"]
    assert "left out: exchange (1, 8, 3, 8): H = 3 does not divide by 2 ranks" in run.stdout


def run_compiled(rank: int, world_size: int) -> dict[str, Any]:
    with torch.no_grad():
        together = Ranks(torch.device("cpu"), 120)
        table = compiled_table((1, 8, 4, 8), torch.float32, "identity", Effort(2, 2), together)
    if rank == 0:
        print_compiled_table(table)
    return table


def test_compiled_table() -> None:
    for table in ranks.pool(2).run(run_compiled, timeout_s=200):
        check_rows(table)
        assert set(COMPILERS) == {name[5:-1] for name in table["rows"] if name.startswith("shm (")}


@pytest.mark.parametrize("kind", LOOPS.values(), ids=LOOPS)
def test_blocks_of_loops_are_traced_whole(kind: Kind) -> None:
    """A step leaves nothing behind that changes the next one: what is run twice, and compiled, gives the same."""
    alone = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
    shape = (1, 8, 4, 8)
    loop = make_loop(kind, shape, torch.float32, 2, 2, alone)

    def block(x: torch.Tensor, weights: Weights, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        exchanges = (lambda fused, q, k: (q(), k(), fused[:, :, -1]), lambda o: o)
        return kind.block(x, weights, cos, sin, shape, Parts(norm_rope, rotate), exchanges)

    expected = loop.run(block)
    for run in (block, torch.compile(block, backend="eager", fullgraph=True)):
        torch.testing.assert_close(loop.run(run), expected)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_plot(tmp_path: Path) -> None:
    path = tmp_path / "bench.svg"
    run = bench("--device", "cpu", "--iterations", "2", "--shape", "1,8,4,8", "--plot", str(path))
    assert run.returncode == 0, run.stdout + run.stderr
    assert "<svg" in path.read_text() and "shm" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--json", "/nowhere/to/be/found.json"], "cannot be written"),
        (["--ranks", "3", "--shape", "1,8,4,8", "--device", "cpu"], "does not divide by 3 ranks"),
    ],
)
def test_what_cannot_run_is_told_in_a_sentence(arguments: list[str], says: str) -> None:
    run = bench(*arguments)
    assert run.returncode == 2 and says in run.stdout + run.stderr
    assert "Traceback" not in run.stderr


def run_between(rank: int, world_size: int) -> None:
    """What is packed into the buffer that is sent, and what is not there yet, as the process group exchanges it."""
    torch.manual_seed(rank)
    shape = (2, 6, 4, 8)
    x = torch.randn(shape)
    sent, received = torch.randn(2, 3 * x.numel())
    by = between(sent, received, lambda result, packed: dist.all_to_all_single(result, packed))
    for scatter, tensors in ((scatter_in_one_pack, (x, 2 * x, 3 * x)), (scatter_in_one_pack_strided, (x[:1], x[1:]))):
        for found, expected in zip(scatter(tensors, by), scatter(tensors), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(gather_by_pack(x, by), gather_by_pack(x), rtol=0, atol=0)
    with pytest.raises(ValueError, match="float32 is registered"):
        by.exchange(torch.zeros(2, 1, dtype=torch.float64))


def test_all_to_all_between_two_buffers() -> None:
    ranks.pool(2).run(run_between)


def run_wrong(rank: int, world_size: int) -> dict[str, Any]:
    """One contender is wrong on rank 1, one raises on rank 0, one is right."""
    together = Ranks(torch.device("cpu"), 60)

    def check(_: int, outputs: tuple[torch.Tensor, ...]) -> None:
        if not bool((outputs[0] == 1).all()):
            raise AssertionError("not ones")

    def raises(_: Any) -> tuple[torch.Tensor, ...]:
        if rank == 0:
            raise RuntimeError("out of luck")
        return (torch.ones(1),)

    contenders = [
        Contender("wrong", lambda _: (torch.full((1,), 1.0 + (rank == 1)),), check),
        Contender("raises", raises, check),
        Contender("right", lambda _: (torch.ones(1),), check),
    ]
    return measure(together, contenders, [None], Effort(2, 3))


def test_what_is_wrong_on_one_rank_is_not_timed() -> None:
    for found in ranks.pool(2).run(run_wrong):
        assert found["wrong"][ALONE] == {"reason": "rank 1: AssertionError: not ones", "failed": True}
        assert found["raises"][ALONE] == {"reason": "rank 0: RuntimeError: out of luck", "failed": True}
        assert found["right"][ALONE]["iterations"] == 3


def test_profiles_split_over_ranks() -> None:
    assert shape_of("h3-u2", 2) == (1, 9472, 56, 128)
    assert shape_of("h3-u2", 4) == (1, 4736, 56, 128)
    assert all(shape_of(name, 2) for name in PROFILES)
    with pytest.raises(ValueError, match="h3-u2 has 18944 tokens and 56 heads: 3 ranks do not divide both"):
        shape_of("h3-u2", 3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--shape", "1,2,3"], "is not four sizes"),
        (["--shape", "1,8,4,0"], "must be positive"),
        (["--iterations", "1"], "at least 2"),
        (["--profile", "none"], "invalid choice"),
        (["--budget", "-1"], "no positive number of seconds"),
        (["--timeout", "nan"], "no positive number of seconds"),
    ],
)
def test_arguments_that_do_not_fit(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2 and says in capsys.readouterr().err
