"""The demonstration's block split over ranks, and its checks, which must fail where an exchange is wrong."""

from __future__ import annotations

import contextlib
import io
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch

from ulysses_op.demo.block import rope_table, rotate
from ulysses_op.demo.case import Case, RecordingCommunicator, Size, compare, delivered_exactly, split_rows
from ulysses_op.demo.clip import Grid, moving_scene, patch_tokens
from ulysses_op.demo.main import demonstrate
from ulysses_op.launch import Placement
from ulysses_op.onesided import OneSidedEngine

EXAMPLE = Path(__file__).parent.parent / "examples" / "attention_block.py"
EVEN = Size(Grid(2, 4, 6), 128, 4, torch.float32)
UNEVEN = Size(Grid(3, 5, 7), 240, 10, torch.float32)  # over 4 ranks neither the 105 rows nor the 10 heads divide


def run_split(rank: int, world_size: int, size: Size, backend: str) -> dict[str, Any]:
    case = Case(size, rank, world_size, torch.device("cpu"))
    with torch.inference_mode(), RecordingCommunicator(backend=backend, timeout_s=30.0) as comm:
        assert isinstance(comm, RecordingCommunicator)
        comm.record = []
        output = case.run_split(comm)
        error, cosine = compare(output, case.run_unsplit()[:, case.rows])
        exact = {exchanged.tag: delivered_exactly(exchanged, case) for exchanged in comm.record}
    return {"rows": output.shape[1], "error": error, "cosine": cosine, "exact": exact}


@pytest.mark.parametrize("backend", ["shm", "c10d"])
@pytest.mark.parametrize("size", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_split_block_is_the_block(world_size: int, size: Size, backend: str) -> None:
    found = ranks.pool(world_size).run(run_split, size, backend)
    assert [rank["rows"] for rank in found] == split_rows(size.grid.seq_len, world_size)
    for rank in found:
        assert rank["exact"] == {"q": True, "k": True, "v": True, "o": True}
        assert rank["error"] <= 1e-5
        assert rank["cosine"] > 0.999999


def demonstrate_wrongly(rank: int, world_size: int, how: str) -> tuple[int, str]:
    deliver = OneSidedEngine.deliver

    def deliver_wrongly(engine: OneSidedEngine, group: Any) -> list[torch.Tensor]:
        results = deliver(engine, group)
        tags = [submission.step.tag for submission in group.submissions]
        if how == "swap q and k" and "q" in tags:
            q, k = tags.index("q"), tags.index("k")
            results[q], results[k] = results[k], results[q]
        if how == "one bit of v" and "v" in tags and rank == 1:
            results[tags.index("v")].view(torch.int32)[0, 3, 0, 0] ^= 1
        if how == "rows of the output" and "v" not in tags:
            results[0] = results[0].roll(1, 1)
        if how == "NaN" and "v" in tags and rank == 0:
            results[tags.index("v")][0, 0, 0, 0] = math.nan
        return results

    told = io.StringIO()
    OneSidedEngine.deliver = deliver_wrongly  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stdout(told):
            status = demonstrate(torch.device("cpu"), Placement(world_size, "cpu"), EVEN, "shm")
    finally:
        OneSidedEngine.deliver = deliver  # type: ignore[method-assign]
    return status, told.getvalue()


@pytest.mark.parametrize(
    "how, exchange, parity_fails",
    [
        ("nothing", "q, k, v, o bitwise right on all ranks", False),
        ("swap q and k", "WRONG for q on rank 0, k on rank 0, q on rank 1, k on rank 1", True),
        ("one bit of v", "WRONG for v on rank 1", False),
        ("rows of the output", "WRONG for o on rank 0, o on rank 1", True),
        ("NaN", "WRONG for v on rank 0", True),
    ],
)
def test_checks_fail_where_an_exchange_is_wrong(how: str, exchange: str, parity_fails: bool) -> None:
    found = ranks.pool(2).run(demonstrate_wrongly, how)
    told = found[0][1]
    failed = how != "nothing"
    assert [status for status, _ in found] == [int(failed)] * 2
    assert f"exchange   first: {exchange}\n" in told
    assert ("first: WRONG: largest error" in told) == parity_fails
    assert told.endswith("FAILED\n" if failed else "everything held on all ranks\n")


def test_example() -> None:
    command = [
        sys.executable,
        str(EXAMPLE),
        "--device",
        "cpu",
        "--grid",
        "3",
        "5",
        "7",
        "--hidden",
        "128",
        "--heads",
        "4",
    ]
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[53, 52] rows" in done.stdout
    assert done.stdout.endswith("as good as unsplit\n")
    assert "NOT" not in done.stdout


def test_rope_rotates_each_axis_by_its_share() -> None:
    grid = Grid(3, 4, 5)
    table = rope_table(grid, 128)
    assert table.shape == (60, 1, 64)
    frame, row, column = 2, 1, 3
    angles = []
    for position, dim in ((frame, 44), (row, 42), (column, 42)):
        angles += [position * 10000.0 ** (-2 * i / dim) for i in range(dim // 2)]
    expected = torch.tensor([complex(math.cos(angle), math.sin(angle)) for angle in angles])
    torch.testing.assert_close(table[(frame * 4 + row) * 5 + column, 0], expected)


def test_rope_makes_scores_depend_on_distance_alone() -> None:
    grid = Grid(3, 4, 5)
    q, k = torch.randn(2, 64, generator=torch.Generator().manual_seed(2)).expand(60, 1, 2, 64).unbind(2)
    table = rope_table(grid, 64)
    score = (rotate(q[None], table)[0, :, 0] @ rotate(k[None], table)[0, :, 0].T).view(*grid, *grid)
    torch.testing.assert_close(score[1, 2, 3, 0, 1, 1], score[2, 3, 4, 1, 2, 2])
    assert not torch.allclose(score[1, 2, 3, 0, 1, 1], score[1, 2, 3, 0, 1, 2])


def test_clip_moves_and_is_the_same_each_time() -> None:
    clip = moving_scene(9, 32, 48)
    assert clip.shape == (9, 32, 48, 3)
    assert clip.abs().max() <= 1
    assert torch.equal(clip, moving_scene(9, 32, 48))
    assert all(not torch.equal(clip[i], clip[i + 1]) for i in range(8))


def test_tokens_are_patches_in_order() -> None:
    grid = Grid(3, 2, 4)
    clip = moving_scene(*grid.clip_shape)
    tokens = patch_tokens(clip, grid, 32)
    assert tokens.shape == (1, grid.seq_len, 32)
    clip[7, 20, 50] += (
        1  # frames 5 to 8 are the third patch in time; rows 16 to 31 the second; columns 48 to 63 the fourth
    )
    changed = (patch_tokens(clip, grid, 32) != tokens).any(2)[0]
    assert changed.nonzero().flatten().tolist() == [(2 * 2 + 1) * 4 + 3]


def test_split_rows() -> None:
    assert split_rows(105, 4) == [27, 26, 26, 26]
    assert split_rows(1950, 2) == [975, 975]
    assert split_rows(1, 3) == [1, 0, 0]


def test_compare_does_not_pass_a_nan() -> None:
    error, cosine = compare(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]))
    assert math.isnan(error) and math.isnan(cosine)
