"""The commands as users start them, and the launcher below them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

from ulysses_op import __version__, doctor, launch
from ulysses_op.__main__ import COMMANDS, main
from ulysses_op.demo.case import Size
from ulysses_op.demo.clip import Grid
from ulysses_op.demo.main import demonstrate
from ulysses_op.onesided import OneSidedEngine

SMALL = ("--grid", "3", "5", "7", "--hidden", "128", "--heads", "4")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *doctor.VARIABLES)


def python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env={**inherited, **environ}, capture_output=True, text=True, timeout=240)


def command(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "ulysses_op", *arguments, "--device", "cpu", **environ)


def test_demo_as_it_comes() -> None:
    done = command("demo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "backend    shm: all 2 ranks can run it" in done.stdout
    assert "17 frames of 416x240: 5 x 15 x 26 patches, sequence of 1950" in done.stdout
    assert "q, k, v (1, 975, 8, 64) -> (1, 1950, 4, 64)" in done.stdout
    assert done.stdout.count("q, k, v, o bitwise right on all ranks") == 2
    assert "largest error" in done.stdout and "cosine 1.000000" in done.stdout
    # 975 rows, 4 heads of 64, 4 bytes: three tensors of them to the peer, and as much of the output.
    assert "sends 2.995 MB of them, and 0.998 MB of the output" in done.stdout
    assert done.stdout.rstrip().endswith("everything held on all ranks")


def test_demo_under_torchrun_with_uneven_shares() -> None:
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ulysses_op")
    done = python(*run, "demo", "--device", "cpu", "--backend", "c10d", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "backend    c10d: asked for" in done.stdout
    assert "rank 1     q, k, v (1, 52, 4, 32) -> (1, 105, 2, 32)" in done.stdout
    assert done.stdout.count("everything held on all ranks") == 1  # one rank tells


def demonstrate_on(rank: int, world_size: int, backend: str) -> tuple[int, str]:
    size = Size(Grid(2, 4, 6), 128, 4, torch.float32)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        status = demonstrate(torch.device("cpu"), launch.Placement(world_size, "cpu"), size, backend)
    return status, told.getvalue()


def test_demo_on_a_backend_that_cannot_run() -> None:
    found = ranks.pool(2).run(demonstrate_on, "symm_mem")
    assert [status for status, _ in found] == [2, 2]
    assert "not run: backend 'symm_mem' cannot run: rank 0: the tensors are on cpu" in found[0][1]
    assert found[1][1] == ""  # one rank tells


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (("--ranks", "0"), "ranks is 0"),
        (("--hidden", "100", "--heads", "3"), "hidden 100 must be a multiple of twice the heads, 3"),
        (("--grid", "0", "5", "7"), "must be positive"),
    ],
)
def test_demo_of_a_size_that_cannot_be(
    arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--device", "cpu", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_doctor() -> None:
    done = command("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split(None, 1) for line in done.stdout.splitlines() if line.strip()]
    told = {line[0]: line[1] for line in lines if len(line) == 2}
    assert told["ulysses_op"].startswith(__version__)
    assert told["torch"] == torch.__version__
    assert told["shm"] == "in use, exchange bitwise right on all ranks"
    assert told["c10d"] == "usable, exchange bitwise right on all ranks"
    assert told["symm_mem"] == "refused: rank 0, 1: the tensors are on cpu, symm_mem is for CUDA tensors"
    assert done.stdout.count("shares host memory with rank(s) 0, 1") == 2
    assert "ULYSSES_OP_DISABLE        not set" in done.stdout
    assert told["verdict"] == "ranks write straight into each other's memory"


def test_doctor_of_one_rank() -> None:
    done = command("doctor", "--ranks", "1", ULYSSES_OP_POISON_TARGETS="1", ULYSSES_OP_FLIGHT_RECORD="/tmp")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict         one rank exchanges with nobody" in done.stdout
    assert "ULYSSES_OP_POISON_TARGETS '1'" in done.stdout and "ULYSSES_OP_FLIGHT_RECORD  '/tmp'" in done.stdout


def test_doctor_when_only_the_fallback_is_left() -> None:
    done = command("doctor", "--json", ULYSSES_OP_DISABLE="shm")
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["status"] == 1
    assert report["backend"] == "c10d"
    assert "shm refused (rank 0: disabled by ULYSSES_OP_DISABLE)" in report["reason"]
    assert report["backends"]["shm"] == {
        "state": "refused",
        "exchange": "",
        "reason": "rank 0, 1: disabled by ULYSSES_OP_DISABLE",
    }
    assert report["backends"]["c10d"] == {"state": "in use", "exchange": "right", "reason": ""}
    assert [rank["variables"] for rank in report["ranks"]] == [{"ULYSSES_OP_DISABLE": "shm"}] * 2


def examine(rank: int, world_size: int, environ: dict[str, str], wrong: bool = False) -> tuple[int, str]:
    """The doctor's status and report; with ``wrong``, rank 1 gets an element of each exchange wrong."""
    deliver = OneSidedEngine.deliver

    def deliver_wrongly(engine: OneSidedEngine, group: Any) -> list[torch.Tensor]:
        results = deliver(engine, group)
        if rank == 1:
            results[-1][0, 0, 0, 0] += 1
        return results

    with ranks.environment(**environ), contextlib.redirect_stdout(io.StringIO()) as told:
        OneSidedEngine.deliver = deliver_wrongly if wrong else deliver  # type: ignore[method-assign]
        try:
            status = doctor.examine(torch.device("cpu"), launch.Placement(world_size, "cpu"), False)
        finally:
            OneSidedEngine.deliver = deliver  # type: ignore[method-assign]
    return status, told.getvalue()


@pytest.mark.parametrize(
    "environ, complaint",
    [
        ({"ULYSSES_OP_DISABLE": "shm,c10d"}, "nothing: no backend can run"),
        ({"ULYSSES_OP_DISABLE": "smh"}, "nothing: rank 0: ULYSSES_OP_DISABLE names ['smh']"),
        ({"ULYSSES_OP_TIMEOUT_S": "-1"}, "nothing: rank 0: timeout_s is -1.0"),
    ],
)
def test_doctor_when_nothing_works(environ: dict[str, str], complaint: str) -> None:
    found = ranks.pool(2).run(examine, environ)
    assert [status for status, _ in found] == [2, 2]
    assert f"in use          {complaint}" in found[0][1]


def test_doctor_finds_a_wrong_exchange() -> None:
    found = ranks.pool(2).run(examine, {}, True)
    assert [status for status, _ in found] == [2, 2]
    told = found[0][1]
    assert " failed, exchange WRONG: rank 1 did not get what its peers sent\n" in told
    assert " usable, exchange bitwise right on all ranks\n" in told
    assert "in use          shm: all 2 ranks can run it" in told


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices are needed")
def test_demo_and_doctor_on_gpus() -> None:
    done = python("-m", "ulysses_op", "demo", "--device", "cuda")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "49 frames of 832x480: 13 x 30 x 52 patches, sequence of 20280" in done.stdout
    assert "times as long as on" in done.stdout
    done = python("-m", "ulysses_op", "doctor", "--device", "cuda", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["backend"] in ("symm_mem", "cuda_ipc")
    assert [rank["reaches"] for rank in report["ranks"]] == [{"1": "yes"}, {"0": "yes"}]


def test_commands_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert __version__ in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert told.startswith(f"usage: python -m ulysses_op {name} ")
    assert "--timeout SECONDS" in told


# The launcher.


def misbehave(device: torch.device, how: str) -> int:
    rank = dist.get_rank()
    if rank == 1:
        if how == "raise":
            raise KeyError("rank 1 is unwell")
        if how == "die":
            os._exit(7)
        if how == "be killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stay":
            time.sleep(1000)
    elif how in ("raise", "die", "be killed"):
        dist.all_reduce(torch.zeros(1))
    return 3 * rank


@pytest.mark.parametrize(
    "how, first",
    [
        ("raise", "KeyError: 'rank 1 is unwell'"),
        ("die", "ended with exit code 7, without a word"),
        ("be killed", "was killed (SIGKILL, out of memory?), without a word"),
        ("stay", "did not end within 12 s"),
    ],
)
def test_launch_tells_which_rank_failed_first(how: str, first: str) -> None:
    placement = launch.place(2, "cpu")
    with pytest.raises(launch.LaunchError) as failed:
        launch.run(misbehave, (how,), placement, 12.0 if how == "stay" else 60.0)
    _, _, report = str(failed.value).partition("\n--- ")
    assert report.startswith("rank 1")
    assert first in report.partition("\n--- ")[0]


def test_launch_returns_the_largest_status() -> None:
    assert launch.run(misbehave, ("",), launch.place(2, "cpu"), 60.0) == 3


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes torch state a number of CUDA devices; no launcher's environment is around."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def state(devices: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)

    return state


@pytest.mark.parametrize(
    "devices, ranks, device, expected",
    [
        (0, None, None, (2, "cpu")),
        (1, None, None, (2, "cpu")),
        (1, 1, None, (1, "cuda")),
        (2, None, None, (2, "cuda")),
        (4, 3, None, (3, "cuda")),
        (2, 4, None, (4, "cpu")),
        (2, None, "cpu", (2, "cpu")),
    ],
)
def test_place(host: Any, devices: int, ranks: int | None, device: str | None, expected: tuple[int, str]) -> None:
    host(devices)
    placement = launch.place(ranks, device)
    assert (placement.world_size, placement.device_type) == expected
    assert bool(placement.note) == (expected[1] == "cpu" and device is None)


def test_place_says_why_one_device_is_not_enough(host: Any) -> None:
    host(1)
    assert launch.place().note == ("the ranks run on the CPU: 2 ranks need a CUDA device each, and this host has 1")
    with pytest.raises(launch.LaunchError, match="device is 'cuda', but 2 ranks need a CUDA device each"):
        launch.place(device_type="cuda")
    assert launch.place(device_type="cuda", may_share=True) == launch.Placement(
        2, "cuda", "2 ranks share 1 CUDA device(s)", True
    )
    assert launch.place(may_share=True).device_type == "cpu"


def test_place_under_torchrun(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    host(2)
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert launch.place() == launch.Placement(4, "cuda")
    with pytest.raises(launch.LaunchError, match="torchrun started 4"):
        launch.place(2)
