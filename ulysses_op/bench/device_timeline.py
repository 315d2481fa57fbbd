"""What the device does when, by torch.profiler: its kernels and copies as intervals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from .measure import Ranks

KERNEL, COPY = "kernel", "gpu_memcpy"
_HEAD_START_CYCLES = 20_000_000  # about 10 ms: the host is ahead, slow as the profiler makes it
_BARRIER, _HEAD_START = "nccl", "spin_kernel"  # in the names of kernels that stand before a step


class Span(NamedTuple):
    """A kernel or a copy. start, end: microseconds. order: grows with the host's calls; 0 where that is not known."""

    kind: str
    name: str
    start: float
    end: float
    stream: int
    nbytes: int
    order: int = 0


def record(call: Callable[[], Any], ranks: Ranks, path: Path, steps: int = 1) -> list[Span]:
    """Profile ``steps`` calls, each begun by the ranks in step and with the host ahead; the device's spans.

    The Chrome trace is written to ``path``. Collective. See :func:`split_steps` for what belongs to which call.
    """
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for number in range(steps):
            if ranks.on_cuda:
                torch.cuda._sleep(_HEAD_START_CYCLES)
            ranks.in_step()
            with record_function(f"step {number}"):
                call()
            if ranks.on_cuda:
                torch.cuda.synchronize()
    profiled.export_chrome_trace(str(path))
    return read_spans(path)


def read_spans(path: Path) -> list[Span]:
    """The device's spans in a Chrome trace. Raises OSError, and ValueError for what is no such file."""
    try:
        trace = json.loads(path.read_text())
        return device_spans(trace["traceEvents"] if isinstance(trace, dict) else trace)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no Chrome trace: {type(error).__name__}: {error}") from error


def device_spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    """The kernels and copies among the events of a Chrome trace, by their start."""
    found = []
    for event in events:
        if event.get("cat") not in (KERNEL, COPY) or "dur" not in event:
            continue
        args, start = event.get("args", {}), float(event["ts"])
        stream = int(args.get("stream", event.get("tid", -1)))
        sizes = int(args.get("bytes", 0)), int(args.get("correlation", 0))
        found.append(Span(event["cat"], event["name"], start, start + float(event["dur"]), stream, *sizes))
    return sorted(found, key=lambda span: span.start)


def split_steps(spans: Iterable[Span]) -> list[list[Span]]:
    """What each step holds, in microseconds since its own first span's start.

    A step is what begins behind the kernel of one barrier and before that of the next. Barriers, and the kernels that
    give the host its head start, belong to none; so do spans before the first barrier.
    """
    ordered = sorted(spans, key=lambda span: span.start)
    barriers = [span for span in ordered if _is_barrier(span)]
    work = [span for span in ordered if not _is_barrier(span) and _HEAD_START not in span.name]
    steps = []
    for number, barrier in enumerate(barriers):
        until = barriers[number + 1].start if number + 1 < len(barriers) else float("inf")
        step = [span for span in work if barrier.end <= span.start < until]
        if step:
            origin = step[0].start
            steps.append([span._replace(start=span.start - origin, end=span.end - origin) for span in step])
    return steps


def _is_barrier(span: Span) -> bool:
    return span.kind == KERNEL and _BARRIER in span.name.lower()


def total(spans: Iterable[Span]) -> float:
    """How long at least one of them runs."""
    covered, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        covered += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return covered


def overlap(some: Iterable[Span], others: Iterable[Span]) -> float:
    """How long at least one of ``some`` and at least one of ``others`` run at once."""
    some, others = list(some), list(others)
    return total(some) + total(others) - total([*some, *others])
