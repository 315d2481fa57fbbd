"""A training step of an attention block whose sequence is split over ranks, against the same step unsplit.

    python examples/attention_block.py                         # starts two ranks itself
    torchrun --standalone --nproc-per-node 2 examples/attention_block.py

The block is ulysses_op/demo/block.py: fused QKV projection, RMSNorm and 3-D RoPE of q and k, attention, projection.
It sees a video clip, cut into patches; ranks without GPUs take a smaller one. ``--help`` lists the sizes.
"""

from __future__ import annotations

import argparse
import copy
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

import ulysses_op
from ulysses_op.demo.block import AttentionBlock, rope_table
from ulysses_op.demo.case import Size, all_ranks, compare, split_rows
from ulysses_op.demo.clip import moving_scene, patch_tokens
from ulysses_op.demo.main import MAX_ABS_ERROR, MIN_COSINE, add_size_arguments, size_of
from ulysses_op.launch import LaunchError, Placement, add_arguments, place, run


def train_step(device: torch.device, placement: Placement, size: Size) -> int:
    """What every rank runs. All hold the same weights; each holds its own rows of the sequence."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    grid = size.grid
    tokens = patch_tokens(moving_scene(*grid.clip_shape, device), grid, size.hidden).to(size.dtype)  # (1, S, hidden)
    wanted = tokens.roll(-grid.height * grid.width, 1)  # the next patch in time, at the same place
    rope = rope_table(grid, size.head_dim, device)
    torch.manual_seed(0)
    block = AttentionBlock(size.hidden, size.num_heads).to(device, size.dtype)
    unsplit = copy.deepcopy(block)

    # The split step. The sequence need not divide by the ranks: every rank knows the lengths of all.
    seq_lens = split_rows(grid.seq_len, world_size)
    start = sum(seq_lens[:rank])
    rows = slice(start, start + seq_lens[rank])
    with ulysses_op.Communicator() as comm:
        comm.build(device)
        output = block(tokens[:, rows], rope[rows], comm, seq_lens)
        loss = F.mse_loss(output, wanted[:, rows], reduction="sum") / wanted.numel()
        loss.backward()  # the exchanges run the other way
        if device.type == "cuda":
            torch.cuda.synchronize()
        comm.check()
        backend = comm.backend
    # Each rank has seen its own rows: the gradients of the weights add up, as in data parallelism.
    for parameter in block.parameters():
        dist.all_reduce(parameter.grad)

    # The same step on the whole sequence, without an exchange.
    reference = unsplit(tokens, rope)
    F.mse_loss(reference, wanted).backward()

    error, cosine = compare(output.detach(), reference.detach()[:, rows])
    _, cosine_of_gradients = compare(gradients(block), gradients(unsplit))
    everyone = all_ranks([error, cosine, cosine_of_gradients])
    held = all(e <= MAX_ABS_ERROR[size.dtype] and c > MIN_COSINE and g > MIN_COSINE for e, c, g in everyone)
    if rank == 0:
        print(f"{world_size} ranks on {device.type}, backend {backend}, {seq_lens} rows of the sequence")
        if placement.note:
            print(placement.note)
        for other, (e, c, g) in enumerate(everyone):
            print(f"rank {other}: output differs by {e:.1e} at most, cosine {c:.6f}; gradients: cosine {g:.6f}")
        print("as good as unsplit" if held else "NOT as good as unsplit")
    return 0 if held else 1


def gradients(block: AttentionBlock) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in block.parameters() if parameter.grad is not None])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    add_size_arguments(parser)
    options = parser.parse_args()
    try:
        placement = place(options.ranks, options.device)
        return run(train_step, (placement, size_of(options, placement.device_type)), placement, options.timeout)
    except LaunchError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
