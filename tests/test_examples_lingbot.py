"""LingBot's chunks, each with a cache behind it: dense results, caches, the schedule, and many runs with late ranks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dense
import example_ranks
import oracle
import pytest
import torch
import torch.distributed as dist
from example_ranks import PLACES, followed, near, recorded
from lingbot_block import LingBotSize
from sessions import LingBotSession, deviation, random_noise
from torch import Tensor

from ulysses_op import Communicator, ExchangeGroup, UlyssesError, onesided

# Window and sink end within chunks, and from the fifth chunk on there are tokens between them.
SIZE = LingBotSize(hidden=64, heads=8, head_dim=16, mlp=64, window=20, sink=3)
CHUNK, CHUNKS, BLOCKS, STEPS = 8, 6, 2, 2
RUNS, CONTROL_RUNS, NOISES = 200, 20, 8
CONTROLS = 10  # a signal that is lost for want of the other handshake ends one early
LONGEST_DELAY_S = 0.001

Delay = Callable[[], None]


class LateGroup(ExchangeGroup):
    delay: Delay

    def submit(self, *arguments: Any, **others: Any) -> None:
        self.delay()
        super().submit(*arguments, **others)

    def wait(self, *tags: str) -> tuple[Tensor, ...]:
        self.delay()
        return super().wait(*tags)


class LateCommunicator(Communicator):
    """Calls ``delay`` before whatever it does for its user."""

    delay: Delay

    def group(self, *tags: str) -> LateGroup:
        made = LateGroup(self, tags)
        made.delay = self.delay
        return made

    def gather_heads(self, x: Tensor, **plan: Any) -> Tensor:
        self.delay()
        return super().gather_heads(x, **plan)


def delays(rng: random.Random, device: str) -> Delay:
    """Now and then holds up the host, or on CUDA the current stream."""

    def delay() -> None:
        if rng.random() < 0.2:
            delay_s = rng.uniform(0.0, LONGEST_DELAY_S)
            if device == "cuda":
                torch.cuda._sleep(int(delay_s * 1.7e9))
            else:
                time.sleep(delay_s)

    return delay


def never() -> None:
    """A Delay of none."""


class AllGathered:
    """What a model needs of a communicator, by all-gathers of everything and slices of that."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._sent: dict[str, Tensor] = {}

    def group(self, *tags: str) -> AllGathered:
        self._tags = tags
        return self

    def __enter__(self) -> AllGathered:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, x: Tensor, tag: str) -> None:
        self._sent[tag] = torch.cat(self._gathered(x), 1).chunk(self.world_size, 2)[self.rank].contiguous()

    def wait(self) -> tuple[Tensor, ...]:
        return tuple(self._sent.pop(tag) for tag in self._tags)

    def gather_heads(self, x: Tensor) -> Tensor:
        return torch.cat(self._gathered(x), 2).chunk(self.world_size, 1)[self.rank].contiguous()

    def _gathered(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.world_size)]
        dist.all_gather(parts, x.contiguous())
        return parts


def make(comm: Any, place: torch.device, dtype: torch.dtype) -> LingBotSession:
    return LingBotSession(SIZE, BLOCKS, comm, place, dtype, chunk=CHUNK, num_chunks=CHUNKS, steps=STEPS)


def caches(session: LingBotSession) -> list[Tensor]:
    """Keys and values of every block."""
    return [x for block in session.model.blocks for x in (block.cache.k, block.cache.v)]


@dataclass
class Answer:
    """Of one rank: how far video and caches are from dense, and what happened on the way."""

    backend: str
    video: tuple[float, float]
    caches: list[tuple[float, float]]
    groups: int
    gathers: int
    schedule: list[str]
    cache_only: list[str]


def run_video(rank: int, world_size: int, device: str, backend: str, dtype: torch.dtype) -> Answer:
    place = example_ranks.place(device, rank)
    with LateCommunicator(backend=backend, timeout_s=40.0) as comm:
        assert isinstance(comm, LateCommunicator)
        late = random.Random(f"{world_size} {dtype}").randrange(world_size)
        comm.delay = delays(random.Random(rank), device) if rank == late else never
        comm.build(place)
        session = make(comm, place, dtype)
        noise = random_noise(session.shape, 1, place, dtype)
        with recorded() as record:
            video = session.denoise(session.own(noise))
        wanted = session.dense(noise)
        seen = dense.Seen()
        length = CHUNK * CHUNKS
        with torch.inference_mode():
            # A clean video's keys and values, of which the caches hold what the next chunk would attend to.
            dense.lingbot(session.weights, wanted, torch.zeros(length, device=place), SIZE.heads, session.mask, seen)
        held = [*range(SIZE.sink), *range(length - SIZE.window, length)]
        pairs = [pair for block in zip(seen.k, seen.v, strict=True) for pair in block]
        own = [x[:, held].chunk(world_size, 2)[rank] for x in pairs]
        cached = [deviation(x, like) for x, like in zip(caches(session), own, strict=True)]
        parts = ("v", "q", "norm_q", "k", "norm_k")
        block, x, rope = session.model.blocks[0], session.own(noise)[:, : CHUNK // world_size], session.ropes[0]
        with torch.inference_mode():
            with followed(block, parts, LateGroup) as schedule:
                block(x, rope)
            with followed(block, parts, LateGroup) as cache_only:
                block.fill_cache(x, rope)
        return Answer(
            comm.backend,
            deviation(video, session.own(wanted)),
            cached,
            sum(each.final for each in record if each.direction == "scatter_heads"),
            sum(each.direction == "gather_heads" for each in record),
            schedule,
            cache_only,
        )


@pytest.mark.parametrize(("device", "backend"), PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_chunks_with_a_cache_are_the_dense_video(
    world_size: int, dtype: torch.dtype, device: str, backend: str
) -> None:
    for answer in example_ranks.pool(world_size, device).run(run_video, device, backend, dtype):
        assert answer.backend == backend
        assert near([answer.video], dtype), answer.video
        assert near(answer.caches, dtype), answer.caches
        assert answer.groups == CHUNKS * (STEPS + 1) * BLOCKS
        assert answer.gathers == answer.groups - CHUNKS  # the last block of the pass that caches a chunk
        projected = ["q", "norm_q", "submit q", "k", "norm_k", "submit k", "wait"]
        assert answer.schedule == ["v", "submit v", *projected]
        assert answer.cache_only == ["v", "submit v", *projected[3:]]


def run_many(
    rank: int, world_size: int, device: str, backend: str, runs: int, seed: int = 0, skip: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Videos one after another, a rank late in each, against the same model whose exchanges are all-gathers: how many
    tensors differ in a bit."""
    place = example_ranks.place(device, rank)
    dtype = torch.float32
    plain = make(AllGathered(rank, world_size), place, dtype)
    noises = [plain.own(random_noise(plain.shape, seed, place, dtype)) for seed in range(NOISES)]
    wanted = [[plain.denoise(noise), *caches(plain)] for noise in noises]
    before, onesided._test_skip = onesided._test_skip, frozenset(skip)
    try:
        comm = LateCommunicator(backend=backend, timeout_s=2.0 if skip else 30.0).build(place)
    finally:
        onesided._test_skip = before
    assert isinstance(comm, LateCommunicator)
    session = make(comm, place, dtype)
    shared, own = random.Random(seed), random.Random(f"{rank} {seed}")
    mismatches, done = 0, 0
    error = None
    try:
        for _ in range(runs):
            number = shared.randrange(NOISES)
            comm.delay = delays(own, device) if shared.randrange(world_size) == rank else never
            results = [session.denoise(noises[number]), *caches(session)]
            mismatches += sum(bool(oracle.wrong_elements(*pair)) for pair in zip(results, wanted[number], strict=True))
            done += 1
    except UlyssesError as raised:
        if not skip:
            raise
        error = repr(raised)
    used = comm.backend
    comm.close()
    return {"backend": used, "runs": done, "mismatches": mismatches, "error": error}


@pytest.mark.parametrize(("device", "backend"), PLACES)
def test_many_videos_with_late_ranks(device: str, backend: str) -> None:
    answers = example_ranks.pool(2, device).run(run_many, device, backend, RUNS, timeout_s=200)
    assert answers == [{"backend": backend, "runs": RUNS, "mismatches": 0, "error": None}] * 2


@pytest.mark.parametrize(("device", "backend"), PLACES)
def test_without_ready_they_differ(device: str, backend: str) -> None:
    """A fast rank is in the next chunk, and writes what the slow one still reads."""
    pool = example_ranks.pool(2, device)
    for seed in range(CONTROLS):
        answers = pool.run(run_many, device, backend, CONTROL_RUNS, seed, ("ready",))
        if any(answer["mismatches"] for answer in answers):
            return
    raise AssertionError(answers)
