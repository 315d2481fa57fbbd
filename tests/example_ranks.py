"""What the tests of the examples share: where they run, and what passed through the exchanges there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
from sessions import deviation
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ulysses_op import Communicator, ExchangeGroup

MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # over the largest value
MIN_COSINE = {torch.float32: 0.999999, torch.bfloat16: 0.999}

# Parameters "device" and "backend".
PLACES = [
    pytest.param("cpu", "shm", id="shm"),
    pytest.param("cuda", ranks.PREFERRED_ON_CUDA, marks=pytest.mark.gpu, id=ranks.PREFERRED_ON_CUDA),
]


def pool(world_size: int, device: str) -> ranks.RankPool:
    """A rank a device, or all on the only one; skips the test where the machine has too few."""
    if device == "cuda" and world_size > ranks.DEVICES and not ranks.SHARED_DEVICE:
        pytest.skip(f"needs {world_size} CUDA devices or one that ranks share, this machine has {ranks.DEVICES}")
    return ranks.pool(world_size, device)


def place(device: str, rank: int) -> torch.device:
    """Inside a rank: its device."""
    return torch.device(device, rank % ranks.DEVICES) if device == "cuda" else torch.device(device)


@functools.cache
def mesh(device: str, ulysses: int, tensor: int) -> DeviceMesh:
    """Inside a rank: of all ranks, those that differ in the last digit being tensor parallel."""
    return init_device_mesh(device, (ulysses, tensor), mesh_dim_names=("ulysses", "tensor"))


def near(pairs: list[tuple[float, float]], dtype: torch.dtype) -> bool:
    """Whether all of what sessions.deviation returned is small. A NaN is not."""
    return all(error <= MAX_ERROR[dtype] and cosine >= MIN_COSINE[dtype] for error, cosine in pairs)


@dataclass
class Exchanged:
    """One submission: what a rank gave, of which ``heads`` mean something, and what it got."""

    direction: str
    final: bool
    sent: Tensor
    heads: list[int]
    received: Tensor | None = None


@contextlib.contextmanager
def recorded() -> Iterator[list[Exchanged]]:
    """Everything that this process submits, in this order: in groups, one by one, or from compiled code."""
    record: list[Exchanged] = []
    of_group: dict[int, list[Exchanged]] = {}
    submit, wait = Communicator._submit, Communicator._wait

    def recording_submit(self: Communicator, group: Any, x: Tensor, step: Any) -> Any:
        exchange, heads = step.exchange, list(range(x.shape[2]))
        if exchange.direction == "scatter_heads" and not step.own_slice:  # the own ones are written where they belong
            start, stop = exchange.heads[self.rank]
            del heads[start:stop]
        made = Exchanged(exchange.direction, step.final, x.clone(), heads)
        submission = submit(self, group, x, step)
        record.append(made)
        of_group.setdefault(id(group), []).append(made)
        return submission

    def recording_wait(self: Communicator, group: Any, tags: Any) -> tuple[Tensor, ...]:
        order = group.submitted
        results = wait(self, group, tags)
        mine = of_group.pop(id(group))
        for tag, result in zip(tags or group.tags or order, results, strict=True):
            mine[order.index(tag)].received = result.clone()  # results may be lent
        return results

    with (
        mock.patch.object(Communicator, "_submit", recording_submit),
        mock.patch.object(Communicator, "_wait", recording_wait),
    ):
        yield record


@contextlib.contextmanager
def followed(
    block: nn.Module, parts: tuple[str, ...], kind: type[ExchangeGroup] = ExchangeGroup
) -> Iterator[list[str]]:
    """In the order in which they happen: the named ``parts`` of a block computed, submissions and waits of groups."""
    schedule: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: schedule.append(name)

    submit, wait = kind.submit, kind.wait

    def following_submit(self: ExchangeGroup, x: Tensor, tag: str) -> None:
        schedule.append(f"submit {tag}")
        submit(self, x, tag=tag)

    def following_wait(self: ExchangeGroup) -> tuple[Tensor, ...]:
        schedule.append("wait")
        return wait(self)

    with (
        contextlib.ExitStack() as hooks,
        mock.patch.object(kind, "submit", following_submit),
        mock.patch.object(kind, "wait", following_wait),
    ):
        for name in parts:
            hooks.callback(getattr(block, name).register_forward_hook(note(name)).remove)
        yield schedule


def role_of(x: Tensor, candidates: dict[str, Tensor]) -> tuple[str, tuple[float, float]]:
    """Which of ``candidates`` x is nearest to, and how far from it."""
    found = {name: deviation(x, like) for name, like in candidates.items() if like.shape == x.shape}
    name = max(found, key=lambda name: found[name][1])
    return name, found[name]
