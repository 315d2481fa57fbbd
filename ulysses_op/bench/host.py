"""What a group costs the host: groups in a row, few enough for the device never to hold the host up. CPU tensors are
exchanged by the host itself, so there the figure is that of the whole exchange."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from ..communicator import Communicator
from .contenders import communicators, gather_group, scatter_group
from .exchange import BACKENDS, make_inputs
from .measure import ALONE, Effort, Ranks, Samples, format_table, median_of, number
from .profiles import Shape

GROUPS = 48  # in a row: fewer than a communicator lets be in flight


def host_table(shape: Shape, dtype: torch.dtype, effort: Effort, ranks: Ranks) -> dict[str, Any]:
    """By backend and kind of group, microseconds until the calls of one group have returned, the slower rank's."""
    ranks.progress(f"host {shape}")
    inputs = make_inputs(shape, dtype, ranks, 0)
    rows: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        for backend, communicator in communicators(stack, ranks, BACKENDS[ranks.device.type]).items():
            kinds: dict[str, Callable[[], Any]] = {
                "q, k, v in a group": partial(scatter_group, communicator, inputs.q, inputs.k, inputs.v),
                "o in a group": partial(gather_group, communicator, inputs.o),
                "q, k, v through the ops": partial(through_ops, communicator, inputs.q, inputs.k, inputs.v),
            }
            for kind, call in kinds.items():
                rows[f"{backend}, {kind}"] = {ALONE: _time(call, effort, ranks)}
    return {"what": "host", "shape": shape, "groups in a row": GROUPS, "rows": rows}


def through_ops(communicator: Communicator, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """As compiled code calls them."""
    submit: Any = torch.ops.ulysses_op.submit.default
    wait: Any = torch.ops.ulysses_op.wait_.default
    tags = ["v", "q", "k"]
    name, world_size, _ = communicator._where
    targets = [
        submit.python_kernel(x, name, world_size, -1, [], [], False, "scatter_heads", tag, tags, "", True, True)
        for tag, x in zip(tags, (v, q, k), strict=True)
    ]
    wait.python_kernel(targets, [v, q, k], name, tags)


def _time(call: Callable[[], Any], effort: Effort, ranks: Ranks) -> dict[str, Any]:
    samples = Samples()
    for turn in range(sum(effort)):
        _settle(ranks)
        start = time.perf_counter()
        for _ in range(GROUPS):
            call()
        if turn >= effort.warmups:
            samples.us.append((time.perf_counter() - start) / GROUPS * 1e6)
    _settle(ranks)
    samples.us = samples.host_us = ranks.maximum(samples.us)
    return samples.summary()


def _settle(ranks: Ranks) -> None:
    if ranks.on_cuda:
        torch.cuda.synchronize()
    ranks.any(False)


def print_host_table(table: dict[str, Any]) -> None:
    lines = [
        [name, *(number(median_of(row, ALONE, key), 1) for key in ("median_us", "q1_us", "q3_us"))]
        for name, row in table["rows"].items()
    ]
    print(f"\nhost, a group of {table['groups in a row']} in a row, (B, S_local, H, D) = {tuple(table['shape'])}")
    print(format_table(["group", "us", "q1", "q3"], lines))
