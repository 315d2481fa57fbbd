"""What a step of the attention block did on one device, and how much of each copy to a peer its kernels hid.

Measured, from the profiler's trace: where kernels and copies begin and end, on which streams, by what names. Inferred:

* which copy is which: a stream runs its copies in the order of submission, which is v, q, k, and o on the way back;
* what a kernel is for: products and attention by their names, and by whether they begin before q, k and v have left;
* READY and DONE: stream memory operations, of which the profiler records nothing. READY of a group is over when its
  first copy begins, and began no earlier than the work ended that it stands behind; DONE begins when the last copy
  ends, and is over before the next work on a stream of kernels begins. Those bounds are what is told.

A kernel is compute whatever it does, also one that only moves data; a copy is not, on any stream. Own slices, which
multiprocessors copy, are told apart: what runs beside them waits for nothing, but they are of the exchange themselves.
Microseconds.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..bench.device_timeline import COPY, KERNEL, Span, overlap, split_steps, total

GROUPS = (("v", "q", "k"), ("o",))
"""Tensors in the order in which they are submitted, by the group that they travel in."""
TENSORS = tuple(tensor for group in GROUPS for tensor in group)

PROJECTION, NORM, ATTENTION, OUTPUT = "QKV projection", "norm + RoPE", "attention", "output projection"
OTHER, OWN, PEER = "other", "own slices", "copies to peers"
ROLES = (PROJECTION, NORM, ATTENTION, OUTPUT, OTHER, OWN, PEER)

_WITHIN_DEVICES = re.compile("PtoP|P2P|DtoD|D2D", re.IGNORECASE)
_BETWEEN_DEVICES = re.compile("PtoP|P2P", re.IGNORECASE)
_ATTENTION = re.compile("flash|fmha|sdpa|attention", re.IGNORECASE)
_PRODUCT = re.compile("gemm|nvjet|xmma|cutlass|cublas|splitk|triton_tem.*mm", re.IGNORECASE)


class TimelineError(ValueError):
    """The spans are not those of such a block; the message says what is missing."""


class Streams(NamedTuple):
    """By what they run: copies to peers, the rank's own slices (None where no such copy is seen), kernels."""

    peer: int
    own: int | None
    compute: tuple[int, ...]


class Handshake(NamedTuple):
    """start, end: bounds, see above."""

    signal: str
    start: float
    end: float


class Cover(NamedTuple):
    """us: how long copies ran; hidden_us: how long of that at least one kernel ran on the same device; own_us: how long
    no kernel did, but an own slice was copied.
    """

    us: float
    hidden_us: float
    own_us: float

    @property
    def exposed_us(self) -> float:
        return max(0.0, self.us - self.hidden_us)


@dataclass(frozen=True)
class Step:
    """One step, from its first span's start on.

    copies: to the peers, one each or more, by tensor. roles: of each of ``spans``.
    """

    spans: list[Span]
    roles: list[str]
    streams: Streams
    copies: dict[str, list[Span]]
    handshakes: list[Handshake]

    @property
    def us(self) -> float:
        return max(span.end for span in self.spans)

    @property
    def idle_us(self) -> float:
        """How long neither a kernel nor a copy ran."""
        return self.us - total(self.spans)

    @property
    def compute(self) -> list[Span]:
        return [span for span in self.spans if span.kind == KERNEL]

    def cover(self, *tensors: str) -> Cover:
        copies = [span for tensor in tensors for span in self.copies[tensor]]
        own = [span for span, role in zip(self.spans, self.roles, strict=True) if role == OWN]
        hidden_us = max(0.0, overlap(copies, self.compute))
        return Cover(total(copies), hidden_us, max(0.0, overlap(copies, [*self.compute, *own]) - hidden_us))

    def exposed(self) -> list[tuple[float, float]]:
        """Where a copy to a peer runs and no kernel does, as (start, end)."""
        edges = sorted({edge for span in self.spans for edge in (span.start, span.end)})
        copies = [span for tensor in TENSORS for span in self.copies[tensor]]
        found: list[tuple[float, float]] = []
        for start, end in itertools.pairwise(edges):
            middle = (start + end) / 2
            if not _runs(copies, middle) or _runs(self.compute, middle):
                continue
            if found and found[-1][1] == start:
                start = found.pop()[0]
            found.append((start, end))
        return found


class Row(NamedTuple):
    """Medians over steps, in microseconds; hidden: the part of all steps' copies that was hidden, from 0 to 1; or_own:
    that was hidden, or beside an own slice.
    """

    what: str
    us: float
    hidden_us: float
    exposed_us: float
    own_us: float
    hidden: float
    or_own: float


def read_steps(spans: Sequence[Span], discard_first: bool = True) -> list[Step]:
    """The steps between barriers (see :func:`split_steps`), the first left out where there are more: it is the
    profiler's own warm-up.

    Raises TimelineError where there is none, or one does not hold the copies of a block.
    """
    if not spans:
        raise TimelineError("the trace holds nothing that a GPU did")
    steps = split_steps(spans)
    if not steps:
        raise TimelineError("the trace holds no NCCL kernel with work behind it: that is what begins a step")
    if discard_first and len(steps) > 1:
        steps = steps[1:]
    return [read_step(step, find_streams(step)) for step in steps]


def find_streams(spans: Sequence[Span]) -> Streams:
    """Tell the streams of a step apart. Raises TimelineError where none carries copies to peers.

    Copies between devices have a name of their own on most versions. Where they do not, of the streams without kernels
    the one that the host gave a copy first is theirs: a submission's own slice comes behind its copies to peers.
    """
    compute = {span.stream for span in spans if span.kind == KERNEL}
    copies = [s for s in spans if s.kind == COPY and _WITHIN_DEVICES.search(s.name) and s.stream not in compute]
    between = Counter(span.stream for span in copies if _BETWEEN_DEVICES.search(span.name))
    if not copies:
        raise TimelineError("no stream holds copies and no kernels: the exchanges did not run on copy engines")
    first = min(copies, key=lambda span: (span.order, span.stream)).stream
    peer = between.most_common(1)[0][0] if between else first
    own = Counter(span.stream for span in copies if span.stream != peer).most_common(1)
    return Streams(peer, own[0][0] if own else None, tuple(sorted(compute)))


def read_step(spans: Sequence[Span], streams: Streams) -> Step:
    """Raises TimelineError where the copies to peers are not as many for each of v, q, k and o."""
    shown = sorted(
        (s for s in spans if s.stream in (streams.peer, streams.own) or s.stream in streams.compute),
        key=lambda span: span.start,
    )
    travelling = [span for span in shown if span.stream == streams.peer]
    each, rest = divmod(len(travelling), len(TENSORS))
    if rest or not each:
        counted = f"{len(travelling)} copies to peers on stream {streams.peer}"
        raise TimelineError(f"{counted}: expected as many for each of {', '.join(TENSORS)}")
    copies = {tensor: travelling[i * each : (i + 1) * each] for i, tensor in enumerate(TENSORS)}
    left = copies[GROUPS[0][-1]][-1].end
    roles = [_role(span, streams, left) for span in shown]
    others = [span for span in shown if span.stream in streams.compute]
    handshakes = []
    for group in GROUPS:
        first, last = copies[group[0]][0].start, copies[group[-1]][-1].end
        before = max((span.end for span in others if span.end <= first), default=0.0)
        after = min((span.start for span in others if span.start >= last), default=max(span.end for span in shown))
        handshakes += [Handshake("READY", before, first), Handshake("DONE", last, after)]
    return Step(shown, roles, streams, copies, handshakes)


def _role(span: Span, streams: Streams, left: float) -> str:
    """left: when q, k and v have left, in the time of the span."""
    if span.stream == streams.peer:
        return PEER
    if span.kind == COPY:
        return OWN if span.stream == streams.own else OTHER
    if _ATTENTION.search(span.name):
        return ATTENTION
    before = span.start < left
    if _PRODUCT.search(span.name):
        return PROJECTION if before else OUTPUT
    return NORM if before else OTHER


def _runs(spans: Sequence[Span], instant: float) -> bool:
    return any(span.start <= instant < span.end for span in spans)


def middle_step(steps: Sequence[Step]) -> Step:
    """The one that takes the median time, the longer of two."""
    return sorted(steps, key=lambda step: step.us)[len(steps) // 2]


def summarise(steps: Sequence[Step]) -> list[Row]:
    """A row for each tensor's copies, and one for all: copies that run at once count once."""
    rows = []
    for what, tensors in [*((tensor, (tensor,)) for tensor in TENSORS), ("all", TENSORS)]:
        covers = [step.cover(*tensors) for step in steps]
        us, hidden_us, exposed_us, own_us = (
            statistics.median(getattr(cover, name) for cover in covers)
            for name in ("us", "hidden_us", "exposed_us", "own_us")
        )
        travelled = sum(cover.us for cover in covers)
        hidden = sum(cover.hidden_us for cover in covers) / travelled if travelled else 1.0
        beside_own = sum(cover.own_us for cover in covers) / travelled if travelled else 0.0
        rows.append(Row(what, us, hidden_us, exposed_us, own_us, hidden, hidden + beside_own))
    return rows
