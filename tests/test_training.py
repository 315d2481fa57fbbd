"""A model trained over data-parallel ranks times Ulysses ranks by DDP, against dense training on one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import dense
import example_ranks
import pytest
import scalar_kernels  # noqa: F401
import torch
import torch.distributed as dist
from h3_block import H3, H3Block, H3Size
from rotary import rope_table
from sessions import random_noise, random_weights
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ulysses_op
from ulysses_op import Communicator

SIZE = H3Size(hidden=32, heads=4, head_dim=8, mlp=48)
TOKENS, BLOCKS, STEPS, TIME, RATE = 12, 2, 3, 0.5, 0.1
DATA, ULYSSES = 2, 2
CPU = torch.device("cpu")


def sample(step: int, replica: int) -> tuple[Tensor, Tensor]:
    """Input and wanted output, (1, TOKENS, hidden), of one data-parallel replica."""
    shape = (1, TOKENS, SIZE.hidden)
    return tuple(random_noise(shape, 100 * step + 10 * replica + i, CPU, torch.float32) for i in range(2))  # type: ignore[return-value]


def train_densely() -> dict[str, Tensor]:
    with torch.device("meta"):
        whole = H3(SIZE, BLOCKS, None)
    weights = {name: w.requires_grad_() for name, w in random_weights(whole, 0, CPU, torch.float32).items()}
    optimizer = torch.optim.SGD(weights.values(), RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for replica in range(DATA):
            x, wanted = sample(step, replica)
            loss = (dense.h3(weights, x, TIME, SIZE.heads) - wanted).square().mean()
            (loss / DATA).backward()
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


def run_training(rank: int, world_size: int, compiled: bool, checkpointed: bool, scaled: bool) -> dict[str, Any]:
    """The largest deviation of a weight, over the largest weight, from dense training, and whether all ranks agree."""
    torch.compiler.reset()
    mesh = init_device_mesh("cpu", (DATA, ULYSSES), mesh_dim_names=("data", "ulysses"))
    replica = mesh["data"].get_local_rank()
    with Communicator(mesh["ulysses"], backend="shm", timeout_s=40.0) as comm:
        model = H3(SIZE, BLOCKS, comm, schedule="plain" if compiled else "v_first")
        with torch.device("meta"):
            whole = H3(SIZE, BLOCKS, None)
        model.load_whole(random_weights(whole, 0, CPU, torch.float32))
        forward: Any = H3Block.forward
        if checkpointed:
            forward = partial(checkpoint, H3Block.forward, use_reentrant=False)
        model.run_block = ulysses_op.compile(forward, fullgraph=True) if compiled else forward
        rows = slice(comm.rank * TOKENS // ULYSSES, (comm.rank + 1) * TOKENS // ULYSSES)
        rope = rope_table(torch.arange(TOKENS)[rows], SIZE.head_dim)
        # Over all ranks: gradients of replicas are averaged, and so would be the shares of Ulysses ranks, which add up.
        trained = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(trained.parameters(), RATE)
        for step in range(STEPS):
            x, wanted = sample(step, replica)
            optimizer.zero_grad()
            out = trained(x[:, rows], rope, TIME)
            share = (out - wanted[:, rows]).square().sum() / wanted.numel()
            (share * ULYSSES if scaled else share).backward()
            optimizer.step()
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
    expected = train_densely()
    before = random_weights(whole, 0, CPU, torch.float32)
    worst = max(float((weights[name] - expected[name]).abs().max()) for name in expected)
    moved = max(float((before[name] - expected[name]).abs().max()) for name in expected)
    flat = torch.cat([weight.flatten() for weight in weights.values()])
    everyone = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(everyone, flat)
    return {"deviation": worst / moved, "alike": all(torch.equal(each, flat) for each in everyone)}


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_replicas_of_split_sequences_train_as_one_device_does(compiled: bool, checkpointed: bool) -> None:
    found = example_ranks.pool(DATA * ULYSSES, "cpu").run(run_training, compiled, checkpointed, True, timeout_s=250)
    for answer in found:
        assert answer["deviation"] <= 1e-5, found
        assert answer["alike"]


def test_without_the_factor_shares_are_averaged() -> None:
    found = example_ranks.pool(DATA * ULYSSES, "cpu").run(run_training, False, False, False)
    assert min(answer["deviation"] for answer in found) > 0.1
