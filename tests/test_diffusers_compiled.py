"""Transformers of diffusers, split over ranks and compiled without a graph break, against themselves unsplit and
eager.
"""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
from test_diffusers import MEMBERS, check, deviation, run_model

pytest.importorskip("diffusers")

SIZE = (13, 2, 4)
COMPILE_DEADLINE_S = 240.0


def run(name: str, how: str) -> None:
    answers = ranks.pool(2).run(run_model, MEMBERS[2], name, SIZE, "cpu", "shm", how, timeout_s=COMPILE_DEADLINE_S)
    check(answers, 2)


@pytest.mark.parametrize("name", ["wan", "flux"])
def test_compiled_by_inductor_with_the_pass(name: str) -> None:
    run(name, "inductor")


@pytest.mark.parametrize("name", ["wan_image", "wan_by_token", "qwen", "qwen_without_mask", "hunyuan_video", "ltx"])
def test_compiled_as_one_graph(name: str) -> None:
    run(name, "aot_eager")


def test_blocks_share_what_is_compiled() -> None:
    run("wan", "blocks")


def run_lengths(rank: int, world_size: int) -> list[float]:
    """One compiled model, other lengths, turned on and off behind torch.compile's back."""
    import diffusers_models

    from ulysses_op.integrations.diffusers import parallelize

    torch._dynamo.reset()
    comm = ranks.communicator((0, 1), "shm")
    found = []
    with torch.no_grad():
        model, _ = diffusers_models.make("wan", 13, 2)
        called: Any = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
        for length, split in ((13, True), (16, True), (16, False), (13, True)):
            _, inputs = diffusers_models.make("wan", length, 2)
            dense = model(**inputs)[0]
            if split:
                with parallelize(model, comm):
                    found.append(deviation(called(**inputs)[0], dense))
            else:
                found.append(deviation(called(**inputs)[0], dense))
    return found


def test_compiled_model_follows_lengths_and_parallelize() -> None:
    for found in ranks.pool(2).run(run_lengths, timeout_s=COMPILE_DEADLINE_S):
        assert max(found) <= 1e-5, found


@pytest.mark.gpu
@pytest.mark.skipif(not ranks.DEVICES, reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["wan", "flux", "qwen", "hunyuan_video", "ltx"])
def test_compiled_on_gpus(name: str) -> None:
    backend = ranks.PREFERRED_ON_CUDA
    arguments = (MEMBERS[2], name, SIZE, "cuda", backend, "inductor")
    check(ranks.pool(2, "cuda").run(run_model, *arguments, timeout_s=COMPILE_DEADLINE_S), 2, backend)
