"""What a communicator remembers of its last groups, and writes down when it fails."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch

import ulysses_op
from ulysses_op.flight_record import LENGTH


def exchange(comm: ulysses_op.Communicator, number: int) -> None:
    x = torch.full((1, 2 + number % 3, 4, 1), float(number))
    with comm.group("v", "q") as group:
        group.submit(x.bfloat16(), tag="v")
        group.submit(x, tag="q")
        group.wait()


def run_record(rank: int, world_size: int, backend: str) -> dict[str, Any]:
    with ranks.fresh_communicator((0, 1), backend) as comm:
        assert comm.flight_record()["groups"] == []
        before = time.time()
        for number in range(LENGTH + 3):
            exchange(comm, number)
        x = torch.zeros(1, 2, 4, 1)
        kept = weakref.ref(x)
        comm.scatter_heads(x)
        del x
        gc.collect()
        assert kept() is None
        record = comm.flight_record()
        assert record == json.loads(json.dumps(record))
        for group in record["groups"]:
            times = [group[key] for key in ("begun", "complete", "delivered")]
            assert before <= times[0] <= times[1] <= times[2] <= time.time()
        return record


@pytest.mark.parametrize("backend", ["shm", "c10d"])
def test_the_last_groups_are_kept(backend: str) -> None:
    for rank, record in enumerate(ranks.pool(2).run(run_record, backend)):
        assert (record["rank"], record["world_size"], record["backend"]) == (rank, 2, backend)
        assert record["failure"] is None
        groups = record["groups"]
        assert [group["number"] for group in groups] == list(range(5, LENGTH + 5))
        last = groups[-2]  # number LENGTH + 2, counted from 0
        assert (last["tags"], last["captured"]) == (["v", "q"], False)
        of_v = last["submissions"][0]
        length = 2 + (LENGTH + 2) % 3
        assert of_v == {
            "tag": "v",
            "direction": "scatter_heads",
            "dtype": "bfloat16",
            "batch": 1,
            "num_heads": 4,
            "head_dim": 1,
            "heads": [[0, 2], [2, 4]],
            "seq_lens": [length, length],
            "differentiable": False,
            "final": False,
        }
        assert [s["final"] for s in last["submissions"]] == [False, True]


def run_failure(rank: int, world_size: int, directory: str) -> str:
    """Rank 1 leaves its third group in the middle."""
    with ranks.environment(ULYSSES_OP_FLIGHT_RECORD=directory):
        comm = ranks.fresh_communicator((0, 1), "shm")
        try:
            for number in range(2):
                exchange(comm, number)
            ranks.meet(ranks.group_of((0, 1)))  # what a rank receives is void when a faster one fails in the next group
            with comm.group("v", "q") as group:
                group.submit(torch.zeros(1, 2, 4, 1, dtype=torch.bfloat16), tag="v")
                if rank == 1:
                    raise ArithmeticError("no q today")
                group.submit(torch.zeros(1, 2, 4, 1), tag="q")
                group.wait()
        except (ArithmeticError, ulysses_op.PeerAbortError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            comm.close()
    return "nothing"


def test_a_failure_is_written_down_on_all_ranks(tmp_path: Path) -> None:
    told = ranks.pool(2).run(run_failure, str(tmp_path))
    written = {record["rank"]: record for record in map(json.loads, (p.read_text() for p in tmp_path.glob("*.json")))}
    assert sorted(written) == [0, 1]
    for rank, record in written.items():
        assert record["failure"] == told[rank]
        open_group = record["groups"][-1]
        assert open_group["number"] == 3
        assert open_group["delivered"] is None
    assert "no q today" in told[0] and "no q today" in told[1]
    assert [s["tag"] for s in written[1]["groups"][-1]["submissions"]] == ["v"]
    assert written[1]["groups"][-1]["complete"] is None


def test_the_directory_is_made_and_where_it_cannot_be_the_error_is_the_same(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "too"
    assert "no q today" in ranks.pool(2).run(run_failure, str(missing))[0]
    assert len(list(missing.iterdir())) == 2
    file = tmp_path / "file"
    file.touch()
    assert "no q today" in ranks.pool(2).run(run_failure, str(file))[0]


def run_ops(rank: int, world_size: int) -> tuple[int, list[str]]:
    """The record of a communicator whose groups are those of compiled code."""
    with ranks.fresh_communicator((0, 1), "shm") as comm:
        where = (*comm._where[:2], -1)
        x = torch.zeros(1, 2, 4, 1)
        plan: list[int] = []
        submission = (*where, plan, plan, False, "scatter_heads", "0", ["0"], "", True, False)
        target = torch.ops.ulysses_op.submit(x, *submission)
        torch.ops.ulysses_op.wait_([target], [x], where[0], ["0"])
        record = comm.flight_record()
        return len(record["groups"]), [s["tag"] for group in record["compiled_groups"] for s in group["submissions"]]


def test_groups_of_compiled_code_are_kept_too() -> None:
    assert ranks.pool(2).run(run_ops) == [(0, ["0"])] * 2


def run_signalled(rank: int, world_size: int, directory: str) -> list[Any]:
    """Rank 0 is stuck in a wait for rank 1, and is asked by a signal where it is."""
    found: list[Any] = []
    with ranks.fresh_communicator((0, 1), "shm") as comm:
        exchange(comm, 0)
        if rank == 0:

            def tell(number: int, frame: object) -> None:
                found.extend(ulysses_op.dump_flight_records(directory))

            before = signal.signal(signal.SIGUSR1, tell)
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        else:
            time.sleep(2.5)
        exchange(comm, 3)
        if rank == 0:
            signal.signal(signal.SIGUSR1, before)
        return [record for record in map(json.loads, (Path(p).read_text() for p in found)) if record["groups"]]


def test_a_rank_that_waits_tells_where_it_is(tmp_path: Path) -> None:
    records, none = ranks.pool(2).run(run_signalled, str(tmp_path))
    assert none == []
    groups = [record["groups"][-1] for record in records if record["groups"][-1]["delivered"] is None]
    assert len(groups) == 1, records
    assert groups[0]["number"] == 2
    assert groups[0]["complete"] is not None
