"""The H3 block on Ulysses and tensor-parallel meshes: dense results, what its exchanges deliver, and their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import dense
import events
import example_ranks
import pytest
import scalar_kernels  # noqa: F401
import torch
from example_ranks import PLACES, followed, near, recorded, role_of
from h3_block import H3Size
from sessions import H3Session, deviation, random_noise
from test_compositions import without_graph_caches
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from ulysses_op import Communicator

SIZE = H3Size(hidden=96, heads=8, head_dim=16, mlp=128)
TOKENS, BLOCKS, STEPS = 24, 4, 3
MESHES = [pytest.param(2, 1, id="U2"), pytest.param(4, 1, id="U4"), pytest.param(2, 2, id="TP2xU2")]
V_FIRST = [("v", False), ("q", False), ("k", True), ("o", True)]


@dataclass
class Answer:
    """Of one rank. ``ulysses`` are the ranks that it exchanges with. ``block`` and ``loop`` deviate from dense by that
    much, and so does each tensor that was ``exchanged``, before and behind. ``submitted`` are roles, and whether that
    completed a group. ``schedule`` is the first block's."""

    ulysses: tuple[int, ...]
    backends: tuple[str, ...]
    block: tuple[float, float]
    loop: tuple[float, float]
    submitted: list[tuple[str, bool]]
    received: list[str]
    exchanged: list[tuple[float, float]]
    schedule: list[str]
    graphs: int


def run_h3(
    rank: int,
    world_size: int,
    device: str,
    backend: str,
    ulysses: int,
    tensor: int,
    dtype: torch.dtype,
    compiled: bool,
) -> Answer:
    mesh = example_ranks.mesh(device, ulysses, tensor)
    place = example_ranks.place(device, rank)
    torch.compiler.reset()
    with Communicator(mesh["ulysses"], backend=backend, timeout_s=40.0) as comm:
        comm.build(place)
        parallel = mesh["tensor"].get_group() if tensor > 1 else None
        session = H3Session(
            SIZE, BLOCKS, comm, place, dtype, tokens=TOKENS, steps=STEPS, tensor=parallel, compiled=compiled
        )
        noise = random_noise(session.shape, 1, place, dtype)
        with torch.inference_mode():
            # Like what comes from another block: an inference tensor, dense in memory. Both are guarded.
            own = session.own(noise).clone(memory_format=torch.contiguous_format)
        block = session.model.blocks[0]
        counters.clear()
        with torch.inference_mode():
            if compiled:
                with without_graph_caches():
                    first, (code,) = run_and_get_code(session.model.run_block, block, own, session.rope)
                schedule = events.parse(code).events
            else:
                with followed(block, ("qkv", "norm_q", "norm_k")) as schedule:
                    first = session.model.run_block(block, own, session.rope)
            seen = dense.Seen()
            only_first = {name: w for name, w in session.weights.items() if name.startswith("blocks.0.")}
            only_first["time"] = torch.zeros_like(session.weights["time"])
            wanted = dense.h3(only_first, noise, 0.0, SIZE.heads, seen)
            of_block = deviation(first, session.own(wanted))
            seen = dense.Seen()
            dense.h3(session.weights, noise, 0.5, SIZE.heads, seen)
            with recorded() as record:
                session.model(own, session.rope, 0.5)
        submitted, received, exchanged = [], [], []
        part = SIZE.heads // tensor
        heads = slice(mesh.get_local_rank("tensor") * part, (mesh.get_local_rank("tensor") + 1) * part)
        for number, each in enumerate(record):
            local: dict[str, Any] = {}
            whole: dict[str, Any] = {}
            for role in "qkvo":
                x = getattr(seen, role)[number // len(V_FIRST)][:, :, heads]
                local[role] = x[:, session.rows]
                whole[role] = x.chunk(ulysses, 2)[comm.rank]
            there, back = (local, whole) if each.direction == "scatter_heads" else (whole, local)
            sent = {role: x[:, :, each.heads] for role, x in there.items()}
            sent_as, far = role_of(each.sent[:, :, each.heads], sent)
            received_as, further = role_of(each.received, back)
            submitted.append((sent_as, each.final))
            received.append(received_as)
            exchanged += [far, further]
        loop = deviation(session.denoise(own), session.own(session.dense(noise)))
        used = (comm, comm._companion) if compiled else (comm,)
        backends = tuple(each.known_backend for each in used)
    members = tuple(mesh["ulysses"].mesh.tolist())
    graphs = counters["stats"]["unique_graphs"]
    return Answer(members, backends, of_block, loop, submitted, received, exchanged, schedule, graphs)


def check(answers: list[Answer], backend: str, ulysses: int, tensor: int, dtype: torch.dtype) -> None:
    for rank, answer in enumerate(answers):
        assert answer.ulysses == tuple(range(rank % tensor, ulysses * tensor, tensor))
        assert set(answer.backends) == {backend}
        assert near([answer.block], dtype), answer.block
        assert near([answer.loop], dtype), answer.loop
        assert answer.submitted == V_FIRST * BLOCKS
        assert answer.received == [role for role, _ in answer.submitted]
        assert near(answer.exchanged, dtype), answer.exchanged


@pytest.mark.parametrize(("device", "backend"), PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("ulysses", "tensor"), MESHES)
def test_eager_schedule(ulysses: int, tensor: int, dtype: torch.dtype, device: str, backend: str) -> None:
    pool = example_ranks.pool(ulysses * tensor, device)
    answers = pool.run(run_h3, device, backend, ulysses, tensor, dtype, False)
    check(answers, backend, ulysses, tensor, dtype)
    for answer in answers:
        assert answer.schedule == ["qkv", "submit v", "norm_q", "submit q", "norm_k", "submit k", "wait"]


@pytest.mark.parametrize(("device", "backend"), PLACES)
@pytest.mark.parametrize(
    ("ulysses", "tensor", "dtype"),
    [
        pytest.param(2, 1, torch.bfloat16, id="U2-bf16"),
        pytest.param(4, 1, torch.float32, id="U4-fp32"),
        pytest.param(2, 2, torch.float32, id="TP2xU2-fp32"),
    ],
)
def test_compiled_schedule(ulysses: int, tensor: int, dtype: torch.dtype, device: str, backend: str) -> None:
    """Written in plain order, the block makes the same submissions, in all blocks from one graph."""
    pool = example_ranks.pool(ulysses * tensor, device)
    answers = pool.run(run_h3, device, backend, ulysses, tensor, dtype, True, timeout_s=250)
    check(answers, backend, ulysses, tensor, dtype)
    for answer in answers:
        assert answer.graphs == 1
        assert events.Wrapper("inference", answer.schedule).disorder() == []
        submits = [number for number, event in enumerate(answer.schedule) if event.startswith("submit")]
        assert len(submits) == len(V_FIRST)
        # V is sent as projected; the norms and RoPE of Q and K come behind it.
        assert answer.schedule[submits[0] - 1] == "mm"
        assert "kernel" in answer.schedule[submits[0] : submits[2]]
        assert answer.schedule.count("all_reduce_") == (2 if tensor > 1 else 0)
