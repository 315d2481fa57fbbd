"""The examples' models in the life that a service has: moved away and back, beside each other, stopped by Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import example_ranks
import pytest
import ranks
import torch
from example_ranks import PLACES, near
from h3_block import H3Size
from lingbot_block import LingBotSize
from sessions import H3Session, LingBotSession, Session, deviation, random_noise
from torch import Tensor

from ulysses_op import Communicator

DENOISE = Path(__file__).parent.parent / "examples" / "denoise.py"
DTYPE = torch.float32
WORLD_SIZE = 2


def make(model: str, comm: Communicator, place: torch.device) -> Session:
    """Of other widths and head counts for each model."""
    if model == "h3":
        size = H3Size(hidden=48, heads=6, head_dim=16, mlp=64)
        return H3Session(size, 2, comm, place, DTYPE, tokens=20, steps=4)
    lingbot = LingBotSize(hidden=64, heads=4, head_dim=32, mlp=64, window=12, sink=2)
    return LingBotSession(lingbot, 2, comm, place, DTYPE, chunk=8, num_chunks=4, steps=2)


def noise_of(session: Session, seed: int, place: torch.device) -> Tensor:
    return random_noise(session.shape, seed, place, DTYPE)


def mapped() -> list[str]:
    """This process's mappings of memory that it shares with its peers."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "ulysses_op-" in line]


def move_away_and_back(model: torch.nn.Module, place: torch.device, left: list[Tensor]) -> None:
    """Off the device and on again. A CPU is no other device than the CPU: there, every tensor gets new memory, and what
    it had is spoilt, and ``left``."""
    model.to("cpu")
    if place.type == "cpu":

        def elsewhere(x: Tensor) -> Tensor:
            copied = x.clone()
            left.append(x.fill_(float("nan")))
            return copied

        with torch.inference_mode():  # caches were made in it
            model._apply(elsewhere)
    model.to(place)


def run_offload(rank: int, world_size: int, device: str, backend: str, model: str) -> dict[str, Any]:
    """Twice the same request; in the second one the model is moved away and back after each step."""
    place = example_ranks.place(device, rank)
    with Communicator(backend=backend, timeout_s=40.0) as comm:
        comm.build(place)
        session = make(model, comm, place)
        noise = noise_of(session, 1, place)
        first = session.denoise(session.own(noise))
        buffers = mapped()
        left: list[Tensor] = []
        again = session.denoise(session.own(noise), lambda: move_away_and_back(session.model, place, left))
        return {
            "backend": comm.backend,
            "new buffers": len(set(mapped()) - set(buffers)),
            "equal": torch.equal(first, again),
            "dense": near([deviation(first, session.own(session.dense(noise)))], DTYPE),
        }


@pytest.mark.parametrize(("device", "backend"), PLACES)
@pytest.mark.parametrize("model", ["h3", "lingbot"])
def test_offload_while_the_communicator_lives(model: str, device: str, backend: str) -> None:
    answers = example_ranks.pool(WORLD_SIZE, device).run(run_offload, device, backend, model)
    assert answers == [{"backend": backend, "new buffers": 0, "equal": True, "dense": True}] * WORLD_SIZE


def run_two_models(rank: int, world_size: int, device: str, backend: str, shared: bool) -> list[tuple[float, float]]:
    """A request of one model after each step of the other's: how far all results are from dense."""
    place = example_ranks.place(device, rank)
    comms = [Communicator(backend=backend, timeout_s=40.0).build(place) for _ in range(1 if shared else 2)]
    h3, lingbot = make("h3", comms[0], place), make("lingbot", comms[-1], place)
    assert [comm.backend for comm in comms] == [backend] * len(comms)
    found = []

    def between() -> None:
        noise = noise_of(h3, len(found), place)
        found.append((h3.denoise(h3.own(noise)), h3.own(h3.dense(noise))))

    noise = noise_of(lingbot, 1, place)
    found.append((lingbot.denoise(lingbot.own(noise), between), lingbot.own(lingbot.dense(noise))))
    for comm in comms:
        comm.close()
    return [deviation(*pair) for pair in found]


@pytest.mark.parametrize(("device", "backend"), PLACES)
@pytest.mark.parametrize("shared", [True, False], ids=["one communicator", "two communicators"])
def test_two_models_of_other_head_counts(shared: bool, device: str, backend: str) -> None:
    for found in example_ranks.pool(WORLD_SIZE, device).run(run_two_models, device, backend, shared):
        assert len(found) == 4 * 2 + 1
        assert near(found, DTYPE), found


# Ctrl-C.


def ranks_of(launcher: int) -> list[int]:
    """The processes of the ranks that ``launcher`` started, the first rank first."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    found = sorted(map(int, children))
    return [child for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.parametrize(("device", "backend"), PLACES)
@pytest.mark.parametrize(("model", "to"), [("h3", "all"), ("lingbot", "all"), ("lingbot", "the second rank")])
def test_interrupt(model: str, to: str, device: str, backend: str) -> None:
    """Ctrl-C, which a terminal sends to all of its foreground processes, or a signal to one rank: the service has
    answered requests, and ends in peace."""
    example_ranks.pool(WORLD_SIZE, device)  # skips where it cannot run
    before = ranks.shared_memory()
    command = [sys.executable, str(DENOISE), "--model", model, "--device", device, "--requests", "1000000"]
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as service:
        assert service.stdout is not None
        try:
            told = ""
            for line in service.stdout:
                told += line
                if line.startswith("request 1:"):
                    break
            time.sleep(0.05)  # somewhere in a step
            if to == "all":
                os.killpg(service.pid, signal.SIGINT)
            else:
                os.kill(ranks_of(service.pid)[1], signal.SIGINT)
            rest, complaints = service.communicate(timeout=60)
        finally:
            if service.poll() is None:
                os.killpg(service.pid, signal.SIGKILL)
    told += rest
    assert (service.returncode, complaints) == (0, ""), told
    assert f"{model} on {WORLD_SIZE} ranks on {device}, backend {backend}\n" in told
    assert re.search(r"\nrequest 1: .*: as good as dense\n", told)
    assert "NOT" not in told
    assert re.search(r"\nstopped after \d+ steps\n\Z", told)
    assert ranks.shared_memory_left_since(before) == []
