"""Times contenders in turn, so that whatever drifts meanwhile hits all of them alike, and prints what came out."""

from __future__ import annotations

import datetime
import gc
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import __version__

ALONE, QUEUED, CAPTURED = "alone", "queued", "captured"
"""How an iteration begins. Alone: with nothing queued, so that the host's time counts where it is the longer one.
Queued: with the host so far ahead that only the device counts. Captured: as a replay of a CUDA graph, equally ahead."""

_HEAD_START_CYCLES = 4_000_000  # about 2 ms
_SETTLE_S = 1e-3  # more than a collective of 8 bytes takes to end on all ranks
_ROUNDS_A_LOOK = 10  # rounds between two looks at the budget


Outputs = tuple[torch.Tensor, ...]
Thunk = Callable[[], torch.Tensor]


class Effort(NamedTuple):
    """Rounds of all contenders before those that count, and those."""

    warmups: int = 10
    iterations: int = 50


@dataclass
class Contender:
    """One way to do the work.

    run: takes an input set and returns its outputs, which are valid until it runs again.
    check: takes the number of an input set and the outputs, and raises if these are wrong; None has nothing checked.
    not_captured: why it is not tried in CUDA graphs, where it is not.
    """

    name: str
    run: Callable[[Any], Outputs]
    check: Callable[[int, Outputs], None] | None = None
    not_captured: str = ""


@dataclass
class Samples:
    """Microseconds of each iteration, the maximum over the ranks; ``host_us`` is what the calls take to return."""

    us: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        q1, median, q3 = quartiles(self.us)
        host_median = statistics.median(self.host_us)
        return {
            "median_us": median,
            "q1_us": q1,
            "q3_us": q3,
            "host_median_us": host_median,
            "iterations": len(self.us),
            "us": self.us,
        }


class Ranks:
    """What the ranks do together around the measurements. Every method is collective."""

    def __init__(self, device: torch.device, budget_s: float) -> None:
        self.device = device
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.on_cuda = device.type == "cuda"
        self._deadline = time.monotonic() + budget_s
        self._token = torch.zeros(1, device=device)  # of the all-reduce that is a barrier

    def in_step(self) -> None:
        """No rank gets past this before all have reached it: on CUDA the current stream, not the host.

        On the CPU the ranks, which share a clock, agree on an instant: they leave a collective one after the other.
        """
        if self.on_cuda:
            dist.all_reduce(self._token)
            return
        start = self.maximum([time.perf_counter() + _SETTLE_S])[0]
        while time.perf_counter() < start:
            pass

    def maximum(self, values: Sequence[float]) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64)
        if len(tensor):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def any(self, value: bool) -> bool:
        return self.maximum([float(value)])[0] > 0

    def attempt(self, call: Callable[[], Any]) -> str:
        """Why ``call`` failed on any rank; empty if it did not."""
        error = ""
        try:
            call()
        except Exception as failure:
            error = f"rank {self.rank}: {type(failure).__name__}: {failure}"
        if not self.any(bool(error)):
            return ""
        errors: list[Any] = [None] * self.world_size
        dist.all_gather_object(errors, error)
        return "; ".join(filter(None, errors))

    def over_budget(self) -> bool:
        return self.any(time.monotonic() > self._deadline)

    def time(self, call: Callable[[], Any], head_start: bool) -> tuple[float, float]:
        """(microseconds of ``call`` on this rank, microseconds until it returned)."""
        if not self.on_cuda:
            self.in_step()
            start = time.perf_counter()
            call()
            us = (time.perf_counter() - start) * 1e6
            return us, us
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if head_start:
            torch.cuda._sleep(_HEAD_START_CYCLES)
        self.in_step()
        begin.record()
        start = time.perf_counter()
        call()
        host_us = (time.perf_counter() - start) * 1e6
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3, host_us

    def progress(self, text: str) -> None:
        if self.rank == 0:
            print(f"[{datetime.datetime.now():%H:%M:%S}] {text}", file=sys.stderr, flush=True)


class Replay:
    """A contender's work on one input set, captured in a CUDA graph; a call replays it."""

    def __init__(self, contender: Contender, inputs: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self.outputs = contender.run(inputs)

    def __call__(self) -> Outputs:
        self._graph.replay()
        return self.outputs


def measure(
    ranks: Ranks,
    contenders: Sequence[Contender],
    sets: Sequence[Any],
    effort: Effort,
    modes: Collection[str] = (ALONE, QUEUED, CAPTURED),
) -> dict[str, dict[str, Any]]:
    """Check, then time every contender, in those of ``modes`` that the device has. Returns, by name and mode, a
    summary, or the ``reason`` why there is none.

    A contender that raises or whose outputs are wrong is ``failed``, and left out on all ranks.
    """
    results: dict[str, dict[str, Any]] = {contender.name: {} for contender in contenders}
    sound = []
    for contender in contenders:
        reason = _check(ranks, contender, sets)
        if reason:
            results[contender.name][ALONE] = {"reason": reason, "failed": True}
            ranks.progress(f"  {contender.name} failed: {reason}")
        else:
            sound.append(contender)

    calls: dict[str, Callable[[int], Any]] = {contender.name: partial(_run, contender, sets) for contender in sound}
    for mode in (ALONE, QUEUED) if ranks.on_cuda else (ALONE,):
        if mode in modes:
            _round_robin(ranks, calls, len(sets), mode, effort, results)
    if ranks.on_cuda and CAPTURED in modes and not ranks.over_budget():
        replays: dict[str, Callable[[int], Outputs]] = {}
        for contender in sound:
            of_sets: list[Replay] = []
            reason = _capture(ranks, contender, sets, of_sets)
            if reason:
                results[contender.name][CAPTURED] = {"reason": reason}
                ranks.progress(f"  {contender.name} is not captured: {reason}")
            else:
                replays[contender.name] = partial(_replay, of_sets)
        _round_robin(ranks, replays, len(sets), CAPTURED, effort, results)
        torch.cuda.synchronize()
    return results


def _run(contender: Contender, sets: Sequence[Any], index: int) -> Outputs:
    return contender.run(sets[index])


def _replay(replays: Sequence[Replay], index: int) -> Outputs:
    return replays[index]()


def _check(ranks: Ranks, contender: Contender, sets: Sequence[Any]) -> str:
    """Why the contender cannot be measured, or nothing. Agreed after each run, so that no rank is left alone in one."""

    def once(index: int) -> None:
        outputs = contender.run(sets[index])
        if contender.check is not None:
            contender.check(index, outputs)

    reasons = (ranks.attempt(partial(once, index)) for index in range(len(sets)))
    return next((reason for reason in reasons if reason), "")


def _capture(ranks: Ranks, contender: Contender, sets: Sequence[Any], replays: list[Replay]) -> str:
    """Append one replay for each input set. Returns the reason why that cannot be done, else nothing."""

    def check(index: int) -> None:
        if contender.check is not None:
            # Whatever an earlier run left there: only what the replay writes counts.
            for output in replays[index].outputs:
                output.zero_()
            contender.check(index, replays[index]())

    def capture(inputs: Any) -> None:
        replays.append(Replay(contender, inputs))

    if contender.not_captured:
        return contender.not_captured
    for index, inputs in enumerate(sets):
        # A captured group keeps the targets that it finds, so each capture needs an eager run of its own.
        reason = ranks.attempt(partial(contender.run, inputs))
        if not reason:
            torch.cuda.synchronize()
            reason = ranks.attempt(partial(capture, inputs)) or ranks.attempt(partial(check, index))
        if reason:
            return reason
    return ""


def _round_robin(
    ranks: Ranks,
    calls: dict[str, Callable[[int], Any]],
    num_sets: int,
    mode: str,
    effort: Effort,
    results: dict[str, dict[str, Any]],
) -> None:
    samples = {name: Samples() for name in calls}
    gc.disable()
    try:
        for number in range(sum(effort)):
            if number % _ROUNDS_A_LOOK == 0:
                gc.collect()
                if ranks.over_budget():
                    break
            for position, (name, call) in enumerate(calls.items()):
                # Neighbours take different sets: no one finds its inputs in a cache because the one before read them.
                index = (number + position) % num_sets
                us, host_us = ranks.time(partial(call, index), head_start=mode != ALONE)
                if number >= effort.warmups:
                    samples[name].us.append(us)
                    samples[name].host_us.append(host_us)
    finally:
        gc.enable()
    for name, sample in samples.items():
        sample.us = ranks.maximum(sample.us)
        sample.host_us = ranks.maximum(sample.host_us)
        results[name][mode] = sample.summary() if len(sample.us) > 1 else {"reason": "the budget was used up"}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return q1, median, q3


def median_of(result: dict[str, dict[str, Any]], mode: str, key: str = "median_us") -> float | None:
    return result.get(mode, {}).get(key)


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first to the left, the others to the right."""
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        return "  ".join([first, *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]).rstrip()

    return "\n".join([line(head), "-" * (sum(widths) + 2 * (len(widths) - 1)), *map(line, rows)])


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def ratio(numerator: float | None, denominator: float | None) -> str:
    return "-" if numerator is None or denominator is None else f"{numerator / denominator:.2f}x"


def provenance(device: torch.device, command: str) -> dict[str, str]:
    """Everything that a reader needs to know about a run besides its arguments."""
    facts = {
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
        "command": command,
        "ranks": str(dist.get_world_size()),
        "ulysses_op": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, torch.cuda.get_device_name(device))
        facts["devices"] = ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))
        facts["driver"] = _driver_version()
        facts["CUDA"] = str(torch.version.cuda)
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    else:
        facts["cores"] = str(len(os.sched_getaffinity(0)))
        facts["threads per rank"] = str(torch.get_num_threads())
    return facts


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
