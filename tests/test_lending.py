"""Results of compiled exchanges that are the buffers which peers write: bitwise those of eager code, with every buffer
full of NaN before each write and one rank late, and wrong as soon as the readers are not looked at.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator

import pytest
import ranks
import scalar_kernels  # noqa: F401
import torch
import torch._inductor.config as inductor_config

import ulysses_op
from ulysses_op import inductor_order

LENGTH = 16
# Of the groups in the order of run_exact's code. The first two results leave the graph, the last one does too.
LENT = [[], ["0"], ["0", "1"], []]


@contextlib.contextmanager
def lending_everything(really: bool) -> Iterator[None]:
    """What the scheduler pass does without its proof."""
    proof = inductor_order._Uses.of
    if really:
        inductor_order._Uses.of = lambda self, submit, wait: []  # type: ignore[method-assign]
    try:
        yield
    finally:
        inductor_order._Uses.of = proof  # type: ignore[method-assign]


def run_exact(
    rank: int,
    world_size: int,
    backend: str,
    device: str,
    cuda_graphs: bool,
    calls: int,
    unproved: bool = False,
    length: int = LENGTH,
) -> tuple[str, int, list[list[str]]]:
    """The backend, how many elements differ from eager code, and which tags of each group were lent."""
    with ranks.environment(ULYSSES_OP_POISON_TARGETS="1"), lending_everything(unproved):
        comm = ulysses_op.Communicator(backend=backend, timeout_s=20)
        comm.build(device)

        def model(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            a, b = comm.scatter_heads(x), comm.scatter_heads(y)
            once = comm.gather_heads(a + b)
            c, d = comm.scatter_heads(once * 2), comm.scatter_heads(once + y)
            return comm.gather_heads(c - d), a.clone(), b

        torch.compiler.reset()
        installed = ulysses_op.compile_options()
        compiled = torch.compile(model, fullgraph=True, options={"triton.cudagraphs": cuda_graphs, **installed})
        generator = torch.Generator(device).manual_seed(rank)
        rng = random.Random(9)
        wrong = 0
        with torch.no_grad(), inductor_config.patch(force_disable_caches=True):
            for _ in range(calls):
                x, y = (torch.randn(2, length, 4, 8, generator=generator, device=device) for _ in range(2))
                if rng.randrange(world_size) == rank:
                    if device == "cuda":
                        torch.cuda._sleep(int(rng.uniform(0, 1e6)))
                    else:
                        time.sleep(rng.uniform(0, 0.002))
                got, wanted = compiled(x, y), model(x, y)
                wrong += sum(int((g != w).sum()) for g, w in zip(got, wanted, strict=True))
        lent = [group.lent for group in installed["post_grad_custom_post_pass"].reports[0].groups]
        found = comm.backend
        comm.close()
    return found, wrong, lent


@pytest.mark.parametrize("backend", ["shm", "c10d"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_bitwise_as_eager(world_size: int, backend: str) -> None:
    calls = 200 if backend == "shm" else 50  # four ranks on two cores take their time in a process group
    answers = ranks.pool(world_size).run(run_exact, backend, "cpu", False, calls, timeout_s=240)
    assert answers == [(backend, 0, LENT)] * world_size


def test_lending_without_proof_is_found() -> None:
    for backend, wrong, _ in ranks.pool(2).run(run_exact, "shm", "cpu", False, 3, True, timeout_s=240):
        assert backend == "shm"
        assert wrong > 0
