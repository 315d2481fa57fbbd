"""What the tables of faults share: rank processes of which one, mostly the last, is lost at one step of the protocol;
what each of the others was told, and whether they can go on.

`check` runs a case and judges it; with ULYSSES_OP_TEST_FAULT_TABLE=path each adds a line to that file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import ranks
import torch
import torch.distributed as dist

import ulysses_op
from ulysses_op import Communicator, UlyssesError
from ulysses_op.rendezvous import Channel
from ulysses_op.torch_compat import Shaped

ALL = bool(os.environ.get("ULYSSES_OP_TEST_ALL_FAULTS"))
TABLE_VARIABLE = "ULYSSES_OP_TEST_FAULT_TABLE"
# Long enough for what a rank does between two meetings: on CUDA it maps memory, too.
TIMEOUT_S = {"cpu": 1.0, "cuda": 3.0}
# What an error may take beyond the time-out here: a rank does not get a core at once.
SLACK_S = 15.0
DEADLINE_S = 60.0
TAGS = ("v", "q")
MAX_TARGETS = len(TAGS)  # a third tag evicts one
GROWN = {"cpu": 20_000, "cuda": 400_000}  # more than what is allocated for a few
PAUSE_S = 0.5  # of the victim's device, in the middle of a captured group


@dataclass(frozen=True)
class Case:
    device: str
    backend: str
    world_size: int
    step: str
    fault: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.world_size}-{self.step}-{self.fault}"


@dataclass
class Told:
    """What one rank tells of a case. ``error`` is its error's name, or "nothing"."""

    error: str
    text: str
    took_s: float
    closed_s: float
    right: bool
    again: str  # the backend of the communicator that was made afterwards


# ---- faults


def end() -> None:
    os._exit(0)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise ArithmeticError("unwell")


def write_out_of_bounds() -> None:
    """The whole CUDA context is lost, whatever its streams are at."""
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.stream(torch.cuda.Stream()):
        Shaped((1,), torch.float32, device).at(4096)[0].fill_(1.0)


def assert_on_device() -> None:
    table, index = torch.zeros(1, device="cuda"), torch.full((1,), 1000, device="cuda")
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        table[index]


FAULTS: dict[str, Callable[[], None]] = {
    "killed": kill,
    "ends": end,
    "stopped": stop,
    "stopped, goes on": stop,
    "raises": fail,
}
DEVICE_FAULTS: dict[str, Callable[[], None]] = {
    "writes out of bounds": write_out_of_bounds,
    "asserts on the device": assert_on_device,
}


# ---- steps


@dataclass(frozen=True)
class Step:
    """In front of which call of which object which rank is lost, at the call of that count; what the ranks do."""

    owner: str = ""
    call: str = ""
    count: int = 1
    tags: tuple[str, ...] = TAGS
    grows: bool = False
    scene: str = "groups"
    victim: int = -1


STEPS = {
    "before READY": Step("engine", "submit"),
    "between submissions": Step("engine", "submit", 2),
    "before DONE": Step("engine", "finish"),
    "in wait": Step("engine", "deliver"),
    "in the rendezvous of a new tag": Step("engine", "_compare", tags=("v", "other")),
    # The second meeting of a rendezvous tells that memory was made, the third that it was mapped.
    "with memory made": Step("channel", "all_gather", 2, tags=("v", "other")),
    "with memory mapped": Step("channel", "all_gather", 3, tags=("v", "other")),
    # Of another communicator. At the first meeting rank 0 has made the memory that all will share.
    "in a build, rank 0 first": Step("build", "all_gather", scene="build", victim=0),
    "in a build, first meeting": Step("build", "all_gather", scene="build"),
    "in a build, second meeting": Step("build", "all_gather", 2, scene="build"),
    "in a build, fourth meeting": Step("build", "all_gather", 4, scene="build"),
    "before a first target": Step("mapping", "allocate", tags=("other", "v")),
    "before a target grows": Step("engine", "_quiesce", grows=True),
    "in an eviction": Step("mapping", "release", tags=("v", "other")),
}
GRAPH_STEPS = {
    "in a capture": Step("engine", "submit", 2, scene="capture"),
    "instead of a replay": Step(scene="instead of a replay"),
    "in a replay": Step(scene="in a replay"),
    "instead of a replay by Inductor": Step(scene="instead of a replay by Inductor"),
}
ALL_FAULTS = {**FAULTS, **DEVICE_FAULTS}
ALL_STEPS = {**STEPS, **GRAPH_STEPS}


def victim_of(case: Case) -> int:
    return ALL_STEPS[case.step].victim % case.world_size


def chosen(
    steps: Iterable[str], faults: Iterable[str], a_step: int, whole: Collection[str] = ()
) -> list[tuple[str, str]]:
    """Pairs of a step and a fault: all of them where all are asked for, and for the steps of ``whole``; else
    ``a_step`` faults a step, in turn.
    """
    every, pairs = list(faults), []
    for number, step in enumerate(steps):
        count = len(every) if ALL or step in whole else a_step
        pairs += [(step, every[(number * a_step + i) % len(every)]) for i in range(count)]
    return pairs


# ---- inside a rank


def inputs(comm: Communicator, length: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part, and what it has after an exchange."""
    world, rank = comm.world_size, comm.rank
    whole = torch.arange(length * 2 * world, dtype=torch.float32, device=device).view(1, length, 2 * world, 1)
    x = [whole + 1000 * peer for peer in range(world)]
    return x[rank], torch.cat(x, 1)[:, :, 2 * rank : 2 * rank + 2].contiguous()


def exchange(comm: Communicator, tags: tuple[str, ...], length: int, device: str) -> bool:
    """A group of ``tags``; whether its results are right."""
    x, wanted = inputs(comm, length, device)
    with comm.group(*tags) as group:
        for tag in tags:
            group.submit(x, tag=tag)
        right = all(torch.equal(result, wanted) for result in group.wait())
    comm.check()  # behind the last reader: what peers have written since one gave up is void
    return right


def arm(comm: Communicator, step: Step, fault: Callable[[], None]) -> None:
    engine: Any = comm._engine
    owner = {
        "build": Channel,
        "channel": engine._channel,
        "engine": engine,
        "mapping": engine._targets._mapping,
    }[step.owner]
    call, left = getattr(owner, step.call), [step.count]

    def armed(*arguments: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            fault()
        return call(*arguments, **more)

    setattr(owner, step.call, armed)


class Captured:
    """A group in a CUDA graph. The victim's device pauses between its submissions."""

    def __init__(self, comm: Communicator, pauses: bool) -> None:
        self._comm = comm
        self._graph = torch.cuda.CUDAGraph()
        x, self._wanted = inputs(comm, 3, "cuda")
        torch.cuda._sleep(1000)  # loaded before the capture
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"), comm.group(*TAGS) as group:
            for tag in TAGS:
                if pauses and tag == TAGS[1]:
                    torch.cuda._sleep(int(PAUSE_S * 1.7e9))
                group.submit(x, tag=tag)
            self._kept = [result.clone() for result in group.wait()]
        self._x = x  # replays read it

    def replay(self) -> None:
        self._graph.replay()

    def right(self) -> bool:
        torch.cuda.synchronize()
        self._comm.check()
        return all(torch.equal(kept, self._wanted) for kept in self._kept)


class Compiled:
    """The same by compiled code, whose next call tells of what has failed."""

    def __init__(self, comm: Communicator, pauses: bool) -> None:
        self._x, self._wanted = inputs(comm, 3, "cuda")
        self._call = ulysses_op.compile(lambda x: comm.scatter_heads(x) + 0, mode="reduce-overhead", fullgraph=True)
        for _ in range(3):  # compiled, captured, replayed
            self.replay()

    def replay(self) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            self._result = self._call(self._x)

    def right(self) -> bool:
        torch.cuda.synchronize()
        found = self._result.clone()
        self.replay()
        return torch.equal(found, self._wanted)


def play(comm: Communicator, case: Case, fault: Callable[[], None] | None) -> Callable[[], bool]:
    """Brings the ranks up to the fault. The rest, from the fault on, is what is returned: whether results are right."""
    step = ALL_STEPS[case.step]
    length = GROWN[case.device] if step.grows else 3
    if fault and step.call:
        arm(comm, step, fault)

    def groups() -> bool:
        # Twice: a rank that is lost in its wait has sent all that the others need of that group.
        return all([exchange(comm, step.tags, length, case.device) for _ in range(2)])

    def build() -> bool:
        with Communicator(backend=case.backend, timeout_s=TIMEOUT_S[case.device]) as another:
            another.build(ranks.device_of(case.device))
            return exchange(another, TAGS, 3, case.device)

    def capture() -> bool:
        captured = Captured(comm, False)
        captured.replay()
        return captured.right()

    if "replay" not in step.scene:
        return {"groups": groups, "build": build, "capture": capture}[step.scene]
    kind: type[Captured | Compiled] = Compiled if "Inductor" in step.scene else Captured
    captured = kind(comm, bool(fault) and step.scene == "in a replay")
    captured.replay()
    assert captured.right()

    def replays() -> bool:
        right = True
        for number in range(2):
            if fault and number == 0 and step.scene.startswith("instead of a replay"):
                fault()
            captured.replay()
            if fault and number == 0 and step.scene == "in a replay":
                time.sleep(PAUSE_S / 5)
                fault()
            right &= captured.right()
        return right

    return replays


def cause(error: BaseException) -> BaseException:
    """The error that counts, where one on the way out has replaced it: a capture that was left does that."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, (UlyssesError, ArithmeticError)):
        found = found.__cause__ or found.__context__
    return found or error


def computes(device: str) -> bool:
    """Whether this rank's device allocates and computes."""
    a = torch.full((256, 256), 2.0, device=device)
    many = torch.ones((64 if device == "cuda" else 1) << 20, dtype=torch.uint8, device=device)
    return bool(((a @ a) == 1024).all()) and int(many.sum(dtype=torch.int64)) == many.numel()


def join(rank: int, case: Case, store_at: str) -> None:
    """Makes this process a rank of the case, on its device; ranks may share one, so the process group is Gloo's."""
    ranks._die_with_parent()
    faulthandler.dump_traceback_later(DEADLINE_S - 5.0)  # where it hangs, if it does
    if case.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    ranks.join_world(rank, case.world_size, store_at, "cpu")


def live(rank: int, case: Case, store_at: str, answers: Connection) -> None:
    """One rank of a case."""
    join(rank, case, store_at)
    timeout_s = TIMEOUT_S[case.device]
    others = [other for other in range(case.world_size) if other != victim_of(case)]
    rest = dist.new_group(others)
    right = computes(case.device)  # what it takes long to load is loaded before anybody is timed
    ranks.meet(dist.group.WORLD)
    device = ranks.device_of(case.device)
    comm = Communicator(backend=case.backend, timeout_s=timeout_s, max_targets=MAX_TARGETS)
    comm.build(device)
    right &= all([exchange(comm, TAGS, 3, case.device) for _ in range(2)])
    ranks.meet(dist.group.WORLD)  # what a rank receives is void when a faster one fails in the next group
    rest_of_it = play(comm, case, None if rank in others else ALL_FAULTS[case.fault])
    ranks.meet(dist.group.WORLD)
    start = time.monotonic()
    name, text = "nothing", ""
    try:
        right &= rest_of_it()
    except (RuntimeError, ArithmeticError) as error:
        name, text = type(cause(error)).__name__, str(cause(error))
    took_s = time.monotonic() - start
    with contextlib.suppress(RuntimeError):
        comm.close()
    closed_s = time.monotonic() - start - took_s
    again = ""
    if rank in others:
        del rest_of_it
        if case.device == "cuda":
            torch.cuda.set_stream(torch.cuda.default_stream())  # a capture that was left leaves its own
        right &= computes(case.device)
        # One rank alone takes what there is.
        backend = case.backend if len(others) > 1 else "auto"
        with Communicator(rest, backend=backend, timeout_s=timeout_s + SLACK_S) as made:
            made.build(device)
            right &= exchange(made, TAGS, 4, case.device)
            again = made.backend
    answers.send(Told(name, text, took_s, closed_s, right, again))
    sys.stderr.flush()
    os._exit(0)  # what destructors of the process group say of the lost peer is none of this package's business


# ---- in the test process


def forkserver() -> Any:
    """Starts processes that have imported already; nothing that it imports touches a device."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "ulysses_op", "ranks", "fault_table"])
    return context


def run(case: Case, victim: int, target: Callable[..., None] = live) -> tuple[list[Told | None], list[int | None]]:
    """What each rank, a process of ``target``, told, None if it ended without, and the exit statuses. Ends every
    process that it started.
    """
    context = forkserver()
    deadline = time.monotonic() + DEADLINE_S
    processes: list[Any] = []
    answers: list[Connection] = []
    with tempfile.TemporaryDirectory() as directory:
        try:
            for rank in range(case.world_size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=target, args=(rank, case, f"{directory}/store", theirs))
                process.start()
                theirs.close()
                processes.append(process)
                answers.append(ours)
            told: dict[int, Told | None] = {}
            for rank in sorted(range(case.world_size), key=lambda rank: rank == victim):  # the victim at last
                if rank == victim and case.fault == "stopped, goes on":
                    os.kill(processes[rank].pid, signal.SIGCONT)
                elif rank == victim and case.fault == "stopped":
                    processes[rank].kill()
                told[rank] = received(rank, answers[rank], deadline)
            for process in processes:
                process.join(10.0)
            codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.join(10.0)
    return [told[rank] for rank in range(case.world_size)], codes


def received(rank: int, answer: Connection, deadline: float) -> Told | None:
    if not answer.poll(max(0.0, deadline - time.monotonic())):
        raise TimeoutError(f"rank {rank} hangs")
    try:
        told: Told = answer.recv()
    except EOFError:
        return None
    return told


def check(case: Case) -> None:
    """Runs a case and judges it."""
    before = ranks.shared_memory()
    victim, timeout_s = victim_of(case), TIMEOUT_S[case.device]
    told, codes = run(case, victim)
    note(case, told)
    for rank in range(case.world_size):
        if rank == victim:
            continue
        survivor = told[rank]
        assert survivor is not None, f"rank {rank} ended without an answer, with status {codes[rank]}"
        assert survivor.error in ("PeerTimeoutError", "PeerAbortError"), survivor
        # A rank that a loaded machine held up for as long is named beside it.
        assert re.search(rf"rank(\(s\))? \[?(\d+, )*{victim}\b", survivor.text), survivor
        assert survivor.took_s <= timeout_s + SLACK_S, survivor
        assert survivor.closed_s <= SLACK_S, survivor
        assert survivor.right, survivor
        # Who can tell does, and an end is seen, but in a build: nobody waits for the time-out then.
        early = ALL_STEPS[case.step].scene == "build"
        if case.fault == "raises" and "replay" not in case.step and not early:
            assert survivor.error == "PeerAbortError", survivor
        elif case.fault in ("killed", "ends") and case.device == "cpu" and not early:
            assert "ended" in survivor.text, survivor
    lost = told[victim]
    if case.fault in ("killed", "ends", "stopped"):
        assert lost is None, lost
    elif case.fault == "raises":
        assert lost is not None and (lost.error, lost.text) == ("ArithmeticError", "unwell"), lost
    elif case.fault == "stopped, goes on":
        assert lost is not None and lost.error in ("PeerAbortError", "PeerTimeoutError"), lost
    else:
        assert lost is not None and lost.error != "nothing", lost
    assert [code for rank, code in enumerate(codes) if rank != victim] == [0] * (case.world_size - 1)
    assert codes[victim] == (-signal.SIGKILL if case.fault in ("killed", "stopped") else 0)
    assert ranks.shared_memory_left_since(before) == []


def note(case: Case, told: Sequence[Told | None]) -> None:
    """A line for the table that ULYSSES_OP_TEST_FAULT_TABLE names, if it does."""
    path = os.environ.get(TABLE_VARIABLE)
    if path is None:
        return
    cells = [
        f"rank {rank}: "
        + (
            f"{one.error} after {one.took_s:.2f} s, closed in {one.closed_s:.2f} s"
            + (f", then {'right' if one.right else 'WRONG'} on {one.again}" if one.again else "")
            if one
            else "-"
        )
        for rank, one in enumerate(told)
    ]
    with open(path, "a") as table:
        table.write(" | ".join([case.backend, str(case.world_size), case.step, case.fault, *cells]) + "\n")
