"""Tables as bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .measure import ALONE, CAPTURED, QUEUED, median_of


def plot(tables: Sequence[dict[str, Any]], facts: dict[str, str], path: str) -> None:
    """Draw the medians of each table, the quartiles as whiskers, into ``path``.

    Raises ImportError where matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    heights = [len(table["rows"]) for table in tables]
    if not heights:
        return
    sizes = {"height_ratios": heights}
    figure, axes = plt.subplots(
        len(tables), figsize=(10, 1.2 + 0.35 * sum(heights) + 0.8 * len(heights)), squeeze=False, gridspec_kw=sizes
    )
    for axis, table in zip(axes[:, 0], tables, strict=True):
        rows = table["rows"]
        modes = [mode for mode in (ALONE, QUEUED, CAPTURED) if any(median_of(row, mode) for row in rows.values())]
        width = 0.8 / max(1, len(modes))
        for index, mode in enumerate(modes):
            found = [(place, row[mode]) for place, row in enumerate(rows.values()) if median_of(row, mode)]
            medians = [summary["median_us"] for _, summary in found]
            spread = [
                [summary["median_us"] - summary["q1_us"] for _, summary in found],
                [summary["q3_us"] - summary["median_us"] for _, summary in found],
            ]
            places = [place + index * width for place, _ in found]
            axis.barh(places, medians, height=width, xerr=spread, label=mode, error_kw={"elinewidth": 1})
        axis.set_yticks([place + (len(modes) - 1) * width / 2 for place in range(len(rows))], list(rows))
        axis.invert_yaxis()
        shape = table["shape"]
        named = shape if isinstance(shape, str) else f"(B, S_local, H, D) = {tuple(shape)}"
        axis.set_title(f"{table['what']}, {named}", fontsize=10, loc="left")
        axis.set_xlabel("us")
        axis.legend(fontsize=8)
    figure.suptitle(", ".join(facts[name] for name in ("devices", "torch", "date") if name in facts), fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
