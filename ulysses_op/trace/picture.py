"""A step as a picture: a lane for each stream, whole, and close up where data travels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..bench.device_timeline import Span
from .timeline import ATTENTION, GROUPS, NORM, OTHER, OUTPUT, OWN, PEER, PROJECTION, ROLES, TENSORS, Step

_COLOURS = {
    PROJECTION: "#4477aa",
    NORM: "#66ccee",
    ATTENTION: "#228833",
    OUTPUT: "#aa7744",
    OTHER: "#bbbbbb",
    OWN: "#ccbb44",
    PEER: "#aa3377",
}
_EXPOSED = "#cc0000"
_HATCHED: dict[str, Any] = {"facecolor": "none", "edgecolor": "#777777", "hatch": "//////", "linewidth": 0}
_WIDTH_IN, _LANE_IN, _POINT_IN = 15.0, 0.62, 1 / 72
_FONT = 7.5
_BOX = 0.5  # of a lane's height


class Window(NamedTuple):
    """What a part of the picture shows; start, end in microseconds of the step."""

    title: str
    start: float
    end: float
    close_up: bool


def windows(step: Step) -> list[Window]:
    """The whole step, then what surrounds each group's copies, from READY to DONE."""
    shown = [Window("the whole step (us)", 0.0, step.us, False)]
    for index, group in enumerate(GROUPS):
        ready, done = step.handshakes[2 * index : 2 * index + 2]
        margin = max(0.12 * (done.end - ready.start), 5.0)
        start, end = max(0.0, ready.start - margin), min(step.us, done.end + margin)
        shown.append(Window(f"{', '.join(group)}, close up (us)", start, end, True))
    return shown


def lanes(step: Step) -> dict[int, str]:
    """Streams from top to bottom, and what they run."""
    found = {stream: f"compute\nstream {stream}" for stream in step.streams.compute}
    found[step.streams.peer] = f"to peers\nstream {step.streams.peer}"
    if step.streams.own is not None:
        found[step.streams.own] = f"own slices\nstream {step.streams.own}"
    return found


def draw(step: Step, title: str, paths: Sequence[Path]) -> None:
    """Draw into each of ``paths``, whose endings say the format.

    Raises ImportError where matplotlib is not installed, OSError for what cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parts, streams = windows(step), lanes(step)
    height = len(parts) * (len(streams) * _LANE_IN + 0.75) + 1.0
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": _FONT}):
        figure, axes = plt.subplots(len(parts), figsize=(_WIDTH_IN, height), squeeze=False)
        for axis, window in zip(axes[:, 0], parts, strict=True):
            _draw_window(axis, step, window, streams)
        present = [role for role in ROLES if role in step.roles]
        handles = [plt.Rectangle((0, 0), 1, 1, color=_COLOURS[role]) for role in present]
        handles.append(plt.Rectangle((0, 0), 1, 1, color=_EXPOSED))
        handles.append(plt.Rectangle((0, 0), 1, 1, **_HATCHED))
        labels = [*present, "no kernel hides the copy", "READY, DONE: at most (not recorded, inferred)"]
        figure.suptitle(title, fontsize=_FONT + 2, y=1 - 0.12 / height)
        figure.tight_layout(rect=(0, 0.32 / height, 1, 1 - 0.15 / height))
        figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False, fontsize=_FONT)
        try:
            for path in paths:
                figure.savefig(path, dpi=110)
        finally:
            plt.close(figure)


def _draw_window(axis: Any, step: Step, window: Window, streams: dict[int, str]) -> None:
    place = {stream: len(streams) - 1 - number for number, stream in enumerate(streams)}
    peer = place[step.streams.peer]
    for span, role in zip(step.spans, step.roles, strict=True):
        middle = place[span.stream]
        _box(axis, window, span.start, span.end, middle, facecolor=_COLOURS[role], edgecolor="white", linewidth=0.5)
        if role != PEER:
            text = f"{role}\n{span.end - span.start:.0f} us"
            _text_inside(axis, window, span, middle, [text, text.split()[-2]], _ink(role))
    for start, end in step.exposed():
        _box(axis, window, start, end, peer - _BOX / 2 + 0.04, height=0.08, facecolor=_EXPOSED, linewidth=0)
    for tensor in TENSORS:
        for span in step.copies[tensor]:
            texts = [f"{tensor}\n{span.end - span.start:.0f} us", tensor]
            inside = _text_inside(axis, window, span, peer, texts, _ink(PEER))
            if not inside and window.start <= (span.start + span.end) / 2 <= window.end:
                axis.text((span.start + span.end) / 2, peer + _BOX / 2, tensor, ha="center", va="bottom")
    for handshake in step.handshakes:
        _box(axis, window, handshake.start, handshake.end, peer, **_HATCHED)
        known = handshake.end if handshake.signal == "READY" else handshake.start
        if window.close_up and window.start <= known <= window.end:
            text = f" {handshake.signal} ≤ {handshake.end - handshake.start:.0f} us "
            side = "right" if handshake.signal == "READY" else "left"
            axis.text(known, peer - _BOX / 2 - 0.02, text, ha=side, va="top")
            axis.plot([known, known], [peer - _BOX / 2 - 0.15, peer + _BOX / 2], color="black", linewidth=1)
    axis.set_xlim(window.start, window.end)
    axis.set_ylim(-0.6, len(streams) - 0.4)
    axis.set_yticks(list(place.values()), [streams[stream] for stream in place])
    axis.set_title(window.title, fontsize=_FONT + 1, loc="left")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def _ink(role: str) -> str:
    return "black" if role in (NORM, OTHER, OWN) else "white"


def _box(
    axis: Any, window: Window, start: float, end: float, middle: float, height: float = _BOX, **style: Any
) -> None:
    """What the window shows of a box."""
    start, end = max(start, window.start), min(end, window.end)
    if start < end:
        axis.broken_barh([(start, end - start)], (middle - height / 2, height), **style)


def _text_inside(axis: Any, window: Window, span: Span, middle: float, texts: Sequence[str], colour: str) -> bool:
    """Write the first of ``texts`` that fits into what is shown of the box; whether one does."""
    start, end = max(span.start, window.start), min(span.end, window.end)
    us_an_inch = (window.end - window.start) / (_WIDTH_IN - 1.2)
    for text in texts:
        needed = max(map(len, text.splitlines())) * 0.6 * _FONT * _POINT_IN * us_an_inch
        if end - start > needed:
            axis.text((start + end) / 2, middle, text, ha="center", va="center", color=colour)
            return True
    return False
