"""What is read from a Chrome trace, on traces made by hand; the command as far as it goes without GPUs."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import scalar_kernels  # noqa: F401
import torch

from ulysses_op import fx_products
from ulysses_op.__main__ import main
from ulysses_op.bench.device_timeline import Span, device_spans, overlap, read_spans, record, split_steps, total
from ulysses_op.bench.measure import Ranks
from ulysses_op.communicator import Communicator
from ulysses_op.trace import main as command
from ulysses_op.trace import picture
from ulysses_op.trace.timeline import (
    ATTENTION,
    NORM,
    OTHER,
    OUTPUT,
    OWN,
    PEER,
    PROJECTION,
    Handshake,
    Step,
    Streams,
    TimelineError,
    middle_step,
    read_steps,
    summarise,
)

COMPUTE, OWN_SLICES, TO_PEERS, COLLECTIVES = 7, 20, 21, 30  # streams; the peers' is not the first of the two
PEER_NAME, OWN_NAME = "Memcpy PtoP (Device -> Device)", "Memcpy DtoD (Device -> Device)"

Event = dict[str, Any]


def kernel(name: str, start: float, end: float, stream: int = COMPUTE) -> Event:
    args = {"device": 0, "stream": stream, "correlation": 0}
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": start,
        "dur": end - start,
        "args": args,
    }


def copy(start: float, end: float, order: int, stream: int = TO_PEERS, name: str = PEER_NAME) -> Event:
    args = {"stream": stream, "bytes": 4096, "correlation": order}
    return {
        "ph": "X",
        "cat": "gpu_memcpy",
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": start,
        "dur": end - start,
        "args": args,
    }


def step_events(origin: float = 0.0, peer_name: str = PEER_NAME, peers: int = 1, stretch: float = 0.0) -> list[Event]:
    """A step that begins at ``origin``, behind its barrier. v is hidden; q for half of its 80 us, by norm + RoPE of k;
    k is not; o is, by the product of the own heads. Each of several peers gets a part of such a copy.

    stretch: how much longer the last product takes.
    """

    def to_peers(start: float, end: float, order: int) -> list[Event]:
        each = (end - start) / peers
        return [copy(start + each * i, start + each * (i + 1), order, name=peer_name) for i in range(peers)]

    events = [
        kernel("at::cuda::(anonymous namespace)::spin_kernel(long)", -900, -20),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", -20, -2, COLLECTIVES),
        kernel("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT", 0, 100),
        kernel("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT", 101, 300),
        *to_peers(110, 150, 1),
        copy(250, 300, 2, OWN_SLICES, OWN_NAME),
        kernel("triton_red_fused__to_copy_add_cat_mean_mul_pow_rsqrt", 300, 340),
        kernel("triton_red_fused__to_copy_add_cat_mean_mul_pow_rsqrt", 341, 400),
        *to_peers(360, 440, 3),
        copy(360, 380, 4, OWN_SLICES, OWN_NAME),
        *to_peers(440, 500, 5),
        copy(440, 470, 6, OWN_SLICES, OWN_NAME),
        kernel("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 510, 900),
        kernel("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", 902, 1000),
        *to_peers(905, 945, 7),
        copy(1001, 1004, 8, COMPUTE, OWN_NAME),
        kernel("void cutlass::Kernel2<cutlass_80_tensorop_bf16>", 1005, 1100 + stretch),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 5000, "args": {}},
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    ]
    return [{**event, "ts": event["ts"] + origin} if "ts" in event else event for event in events]


def steps_of(*events: list[Event]) -> list[Step]:
    return read_steps(device_spans(event for each in events for event in each))


def write_trace(path: Path, events: list[Event]) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


@pytest.mark.parametrize("peers", [1, 2])
@pytest.mark.parametrize("peer_name", [PEER_NAME, OWN_NAME, "Memcpy P2P"])
def test_what_is_hidden_of_each_copy(peer_name: str, peers: int) -> None:
    """However copies to peers are called; in times as far from zero as the profiler's."""
    (step,) = steps_of(step_events(1.8e9, peer_name, peers))
    assert step.streams == Streams(TO_PEERS, OWN_SLICES, (COMPUTE,))
    assert [len(step.copies[tensor]) for tensor in "vqko"] == [peers] * 4
    expected = {"v": (40, 40, 0), "q": (80, 40, 0), "k": (60, 0, 30), "o": (40, 40, 0)}
    assert {tensor: tuple(round(us, 3) for us in step.cover(tensor)) for tensor in "vqko"} == expected
    assert step.cover(*"vqko") == pytest.approx((220, 120, 30), abs=1e-3)
    assert [tuple(round(edge, 3) for edge in each) for each in step.exposed()] == [(400, 500)]
    assert step.us == pytest.approx(1100, abs=1e-3)
    # 300 to 340 and so on have no gap; without anything: 100 to 101, 340 to 341, 500 to 510, 900 to 902, and behind.
    assert step.idle_us == pytest.approx(1 + 1 + 10 + 2 + 1 + 1, abs=1e-3)


def test_what_is_inferred() -> None:
    (step,) = steps_of(step_events())
    assert step.roles == [
        *(PROJECTION, PROJECTION, PEER, OWN, NORM, NORM, PEER, OWN, PEER, OWN),
        *(ATTENTION, OUTPUT, PEER, OTHER, OUTPUT),
    ]
    assert step.handshakes == [
        *(Handshake("READY", 100, 110), Handshake("DONE", 500, 510)),
        *(Handshake("READY", 900, 905), Handshake("DONE", 945, 1001)),
    ]


def test_kernels_on_two_streams_count_once() -> None:
    beside = [kernel("a", 420, 460, 8), kernel("b", 450, 480, 9), kernel("c", 120, 140, 8)]
    (step,) = steps_of([*step_events(), *beside])
    assert step.streams.compute == (COMPUTE, 8, 9)
    assert step.cover("k") == (60, 40, 0)  # 440 to 480
    assert step.cover("q") == (80, 60, 0)  # to 400, and from 420
    assert step.cover("v") == (40, 40, 0)


def test_copies_hide_nothing() -> None:
    """Own slices, and copies on a stream of kernels, run beside k: it is as exposed as without. Of own slices alone it
    is told, once where there are several.
    """
    (step,) = steps_of([*step_events(), copy(441, 499, 9, COMPUTE, OWN_NAME), copy(460, 480, 9, OWN_SLICES, OWN_NAME)])
    assert step.cover("k") == (60, 0, 40)
    assert len(step.copies["k"]) == 1


@pytest.mark.parametrize(
    "other",
    [
        copy(1, 2, 0, 19, "Memcpy DtoH (Device -> Pinned)"),
        copy(1, 2, 0, COMPUTE, OWN_NAME),
    ],
)
def test_other_copies_that_the_host_asked_for_first(other: Event) -> None:
    """Of two streams of copies alone that are called alike, the one to peers is told by the host's order."""
    (step,) = steps_of([*step_events(peer_name=OWN_NAME), other])
    assert step.streams == Streams(TO_PEERS, OWN_SLICES, (COMPUTE,))


def test_the_name_tells_where_the_order_is_not_known() -> None:
    events = step_events()
    for event in events:
        event.get("args", {}).pop("correlation", None)
    (step,) = steps_of(events)
    assert step.streams == Streams(TO_PEERS, OWN_SLICES, (COMPUTE,))


def test_without_own_slices() -> None:
    events = [event for event in step_events() if event.get("tid") != OWN_SLICES]
    (step,) = steps_of(events)
    assert step.streams == Streams(TO_PEERS, None, (COMPUTE,))
    assert OWN_SLICES not in picture.lanes(step)


def test_several_steps() -> None:
    """Of four, in any order in the file, the first is left out; a spin or a barrier is in none."""
    late = [step_events(10_000.0 * number, stretch=stretch) for number, stretch in enumerate([700, 30, 10, 20])]
    steps = steps_of(*reversed(late))
    assert [step.us for step in steps] == [1130, 1110, 1120]
    assert middle_step(steps).us == 1120
    rows = {row.what: row[1:] for row in summarise(steps)}
    assert rows["q"] == (80, 40, 40, 0, 0.5, 0.5)
    assert rows["k"] == (60, 0, 60, 30, 0, 0.5)
    assert rows["all"] == (220, 120, 100, 30, pytest.approx(120 / 220), pytest.approx(150 / 220))
    assert len(steps_of(late[0])) == 1  # nothing else to tell of


def test_the_hidden_part_is_that_of_all_steps() -> None:
    """The median of three steps, of which one hides all of k, is that of the others."""
    covered = [*step_events(30_000), kernel("late", 30_440, 30_500, 8)]
    rows = {
        row.what: row for row in summarise(steps_of(step_events(), step_events(10_000), step_events(20_000), covered))
    }
    assert rows["k"] == ("k", 60, 0, 60, 30, pytest.approx(1 / 3), pytest.approx(2 / 3))


def without(drop: Callable[[Event], bool]) -> list[Event]:
    return [event for event in step_events() if not drop(event)]


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([], "nothing that a GPU did"),
        (without(lambda event: "nccl" in event["name"]), "no NCCL kernel with work behind it"),
        (without(lambda event: event.get("cat") == "gpu_memcpy"), "did not run on copy engines"),
        (
            without(lambda event: event.get("ts") == 440),
            "3 copies to peers on stream 21: expected as many for each of v",
        ),
    ],
)
def test_what_is_no_block(events: list[Event], says: str) -> None:
    with pytest.raises(TimelineError, match=says):
        steps_of(events)


def test_arithmetic_of_spans() -> None:
    def spans(*edges: tuple[float, float]) -> list[Span]:
        return [Span("kernel", "", start, end, 0, 0) for start, end in edges]

    assert total(spans((5, 7), (0, 2), (1, 3), (1, 2))) == 5
    assert total([]) == 0
    assert overlap(spans((0, 10)), spans((2, 4), (3, 5), (9, 12))) == 4
    assert overlap(spans((0, 1)), spans((1, 2))) == 0
    assert overlap(iter(spans((0, 4))), iter(spans((1, 2)))) == 1
    assert split_steps(spans((0, 1))) == []


# The picture.


def test_windows_show_each_group_from_ready_to_done() -> None:
    (step,) = steps_of(step_events())
    whole, scattered, gathered = picture.windows(step)
    assert (whole.start, whole.end) == (0, 1100)
    assert scattered.title == "v, q, k, close up (us)" and scattered.start < 100 and 510 < scattered.end < 900
    assert gathered.title == "o, close up (us)" and 510 < gathered.start < 900 and 1001 < gathered.end <= 1100
    assert list(picture.lanes(step)) == [COMPUTE, TO_PEERS, OWN_SLICES]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_picture(tmp_path: Path) -> None:
    (step,) = steps_of(step_events())
    svg, png = tmp_path / "step.svg", tmp_path / "step.png"
    picture.draw(step, "a block, rank 1", [svg, png])
    drawn = svg.read_text()
    for label in ("a block, rank 1", PROJECTION, NORM, ATTENTION, OUTPUT, OWN, "stream 7", "stream 20", "stream 21"):
        assert f">{label}<" in drawn, label
    for label in ("v", "q", "k", "o", "40 us", "80 us", "60 us", "READY ≤ 10 us", "DONE ≤ 56 us"):
        assert f">{label}<" in drawn or f"> {label} <" in drawn, label
    assert png.read_bytes().startswith(b"\x89PNG")


# The command.


def test_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "block-rank0.json", [*step_events(), *step_events(10_000), *step_events(20_000)])
    assert main(["trace", "--read", str(path), "--out", str(tmp_path / "new" / "folder")]) == 0
    told = capsys.readouterr().out
    assert "block-rank0\nsteps: 2, the middle one 1100 us, of which nothing ran for 16 us\n" in told
    rows = {line.split()[0]: line.split()[1:] for line in told.splitlines() if line}
    assert rows["v"] == ["40.0", "40.0", "0.0", "0.0", "100", "%", "100", "%"]
    assert rows["q"] == ["80.0", "40.0", "40.0", "0.0", "50", "%", "50", "%"]
    assert rows["k"] == ["60.0", "0.0", "60.0", "30.0", "0", "%", "50", "%"]
    assert rows["o"] == ["40.0", "40.0", "0.0", "0.0", "100", "%", "100", "%"]
    assert rows["all"] == ["220.0", "120.0", "100.0", "30.0", "55", "%", "68", "%"]
    drawn = sorted(each.name for each in (tmp_path / "new" / "folder").iterdir())
    if importlib.util.find_spec("matplotlib") is None:
        assert drawn == [] and "no picture: matplotlib is not installed" in told
    else:
        assert drawn == ["block-rank0.png", "block-rank0.svg"] and "no picture" not in told


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "is no Chrome trace: KeyError"),
        ("[1]", "is no Chrome trace: AttributeError"),
        ("no JSON", "is no Chrome trace: JSONDecodeError"),
        ('{"traceEvents": []}', "nothing that a GPU did"),
    ],
)
def test_read_what_is_no_trace(text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The others are read all the same."""
    path, good = tmp_path / "bad.json", write_trace(tmp_path / "good.json", step_events())
    path.write_text(text)
    assert main(["trace", "--read", str(path), str(good), "--out", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert says in told.err and "bad.json" in told.err
    assert "\ngood\nsteps: 1" in told.out


def test_read_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing, good = tmp_path / "missing.json", write_trace(tmp_path / "good.json", step_events())
    assert main(["trace", "--read", str(good), str(missing), "--out", str(tmp_path / "folder")]) == 2
    told = capsys.readouterr()
    assert told.err == f"trace: no such file: {missing}\n" and told.out == ""
    assert list(tmp_path.iterdir()) == [good]


def test_without_gpus_nothing_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["trace", "--out", str(tmp_path / "folder")]
    assert main([*arguments, "--device", "cpu"]) == 2
    assert "what GPUs do is recorded here, and device is 'cpu'" in capsys.readouterr().err
    assert main(arguments) == 2
    assert "and the ranks run on the CPU: " in capsys.readouterr().err
    assert main([*arguments, "--device", "cuda"]) == 2
    assert "device is 'cuda', but " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_one_rank_has_no_peer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert main(["trace", "--out", str(tmp_path), "--ranks", "1"]) == 2
    assert "one rank has no peer" in capsys.readouterr().err


def test_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    trace = write_trace(tmp_path / "good.json", step_events())
    assert main(["trace", "--read", str(trace), "--out", str(tmp_path / "file" / "folder")]) == 2
    assert "cannot be written to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mode", "fast"], "invalid choice"),
        (["--steps", "0"], "at least 1"),
        (["--warmups", "none"], "invalid number value"),
        (["--shape", "1,2,3"], "is not four sizes"),
        (["--timeout", "0"], "no positive number of seconds"),
    ],
)
def test_arguments_that_do_not_fit(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["trace", *arguments])
    assert caught.value.code == 2 and says in capsys.readouterr().err


# What ranks do, on CPUs.


def options(folder: Path, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_parser(parser)
    return parser.parse_args(["--out", str(folder), "--steps", "2", "--warmups", "1", "--timeout", "120", *arguments])


def run_trace(rank: int, world_size: int, folder: Path, arguments: tuple[str, ...], backend: str) -> tuple[int, str]:
    """The command's status and what it prints, on a backend for CPUs."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as told:
        patch.setattr(command, "BACKENDS", (backend,))
        status = command.trace(torch.device("cpu"), options(folder, *arguments), "trace")
    return status, told.getvalue()


def test_a_profiler_that_sees_no_device(tmp_path: Path) -> None:
    """The real one, where there is none: the trace is written, its being empty told."""
    shape = ("--mode", "eager", "--shape", "1,8,4,8")
    (status, told), (other, nothing) = ranks.pool(2).run(run_trace, tmp_path, shape, "shm", timeout_s=120)
    assert (status, other, nothing) == (1, 1, "")
    assert "left out: eager (1, 8, 4, 8): rank 0: TimelineError: the trace holds nothing that a GPU did; rank 1" in told
    for rank in range(2):
        path = tmp_path / f"eager-1x8x4x8-rank{rank}.json"
        assert read_spans(path) == []
        names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
        assert {"step 0", "step 1", "step 2", "aten::linear"} <= names and "step 3" not in names


def test_what_is_left_out(tmp_path: Path) -> None:
    shapes = ("--shape", "1,8,3,8", "2,8,4,8")
    for status, told in ranks.pool(2).run(run_trace, tmp_path, shapes, "shm"):
        assert status == 2
        if told:
            assert "left out: (1, 8, 3, 8): H = 3 does not divide by 2 ranks" in told
            assert "left out: (2, 8, 4, 8): the blocks take B = 1" in told
    (status, told), _ = ranks.pool(2).run(run_trace, tmp_path, shapes, "symm_mem")
    assert status == 2 and "left out: everything: the ranks can run none of symm_mem" in told


def run_recorded(rank: int, world_size: int, folder: Path) -> tuple[int, str, list[list[str]]]:
    """Both modes, with the hand-made trace in place of the profiler's: status, what is printed, and the tensors in the
    order in which a step submits them, by the names that the groups give them."""
    submitted: list[str] = []
    orders: list[list[str]] = []
    submit = Communicator._submit

    def spy(self: Communicator, group: Any, x: Any, step: Any) -> Any:
        submitted.append(step.name or step.tag)  # its name in the program, where it is compiled
        return submit(self, group, x, step)

    def fake(call: Callable[[], Any], together: Ranks, path: Path, steps: int) -> None:
        assert steps == 3
        submitted.clear()
        call()
        orders.append(list(submitted))
        write_trace(path, [event for number in range(steps) for event in step_events(10_000 * number)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "_submit", spy)
        patch.setattr(command, "record", fake)
        patch.setattr(fx_products, "min_part", 0)
        status, told = run_trace(rank, world_size, folder, ("--shape", "1,8,4,8"), "shm")
    return status, told, orders


def test_both_modes(tmp_path: Path) -> None:
    """The order of submission, by which copies are told apart, is v, q, k, o: the compiled block scatters q, k, v in
    the program, and its exchanges are named by that.
    """
    found = ranks.pool(2).run(run_recorded, tmp_path, timeout_s=200)
    for status, _, orders in found:
        assert status == 0
        assert orders == [["v", "q", "k", "o"], ["scatter_heads_2", "scatter_heads", "scatter_heads_1", "gather_heads"]]
    told = found[0][1]
    for mode in ("eager", "compiled"):
        for rank in range(2):
            title = f"\n{mode}, (B, S_local, H, D) = (1, 8, 4, 8), shm, rank {rank}\n"
            assert f"{title}steps: 2, the middle one 1100 us" in told
    assert told.count("\nq      80.0") == told.count("\nall   220.0") == 4
    assert found[1][1] == ""


def test_record_counts_its_steps(tmp_path: Path) -> None:
    assert ranks.pool(2).run(run_record, tmp_path) == [(3, True)] * 2


def run_record(rank: int, world_size: int, folder: Path) -> tuple[int, bool]:
    calls: list[None] = []
    path = folder / f"{rank}.json"
    record(lambda: calls.append(None), Ranks(torch.device("cpu"), 60), path, 3)
    return len(calls), path.exists()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices are needed")
def test_on_gpus(tmp_path: Path) -> None:
    arguments = ["--shape", "1,4096,24,128", "--steps", "2", "--ranks", "2", "--out", str(tmp_path)]
    run = [sys.executable, "-m", "ulysses_op", "trace", *arguments]
    done = subprocess.run(run, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\nsteps: 2, ") == 4
    for mode in ("eager", "compiled"):
        for rank in range(2):
            steps = read_steps(read_spans(tmp_path / f"{mode}-1x4096x24x128-rank{rank}.json"))
            for step in steps:
                nbytes = [[span.nbytes for span in step.copies[tensor]] for tensor in "vqko"]
                assert nbytes == [[4096 * 12 * 128 * 2]] * 4
                assert ATTENTION in step.roles and PROJECTION in step.roles and OUTPUT in step.roles
                assert step.cover("v").hidden_us > 0 and step.cover("k").us > 0
