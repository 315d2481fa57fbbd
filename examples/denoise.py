"""A small denoising service on ranks, in the life that a service has: start, requests, offload, on again, stop.

    python examples/denoise.py --model h3                         # starts two ranks itself
    torchrun --standalone --nproc-per-node 2 examples/denoise.py --model lingbot

The model's weights go to the CPU and come back between two requests, while the communicator lives on with its buffers.
Every result is held against the dense model (dense.py). Ctrl-C stops all ranks after the step that they are in. On GPUs
blocks have their real widths, on the CPU they are small. ``--help`` lists what can be chosen.

exit status: 0 all results are as good as the dense model's, or it was stopped; 1 one is not; 2 it could not run
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from h3_block import H3Size
from interrupt import Interrupted, NotedInterrupt
from lingbot_block import LingBotSize
from sessions import AfterStep, H3Session, LingBotSession, Session, deviation, random_noise
from torch.distributed.device_mesh import init_device_mesh

from ulysses_op import Communicator
from ulysses_op.demo.case import all_ranks
from ulysses_op.launch import LaunchError, Placement, add_arguments, place, run

MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # over the largest value
MIN_COSINE = 0.999
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
BLOCKS = {"cpu": 4, "cuda": 2}
CHUNKS = 6
H3_SIZES = {"cpu": H3Size(hidden=96, heads=8, head_dim=16, mlp=192), "cuda": H3Size()}
H3_TOKENS = {"cpu": 48, "cuda": 18944}
LINGBOT_SIZES = {
    "cpu": LingBotSize(hidden=64, heads=8, head_dim=16, mlp=128, window=28, sink=5),
    "cuda": LingBotSize(),
}
LINGBOT_CHUNK = {"cpu": 16, "cuda": 6240}


def serve(device: torch.device, placement: Placement, options: argparse.Namespace) -> int:
    """What every rank runs."""

    def tell(text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)

    if placement.note:
        tell(placement.note)
    mesh = init_device_mesh(
        device.type,
        (dist.get_world_size() // options.tensor_parallel, options.tensor_parallel),
        mesh_dim_names=("ulysses", "tensor"),
    )
    tensor = mesh["tensor"].get_group() if options.tensor_parallel > 1 else None
    with NotedInterrupt() as interrupt, Communicator(mesh["ulysses"]) as comm:
        comm.build(device)
        session = start(device, comm, tensor, options)
        tell(f"{options.model} on {dist.get_world_size()} ranks on {device.type}, backend {comm.backend}")
        steps = 0

        def after_step() -> None:
            nonlocal steps
            steps += 1
            interrupt.raise_if_noted()

        held = True
        try:
            for request in range(options.requests):
                held &= answer(request, session, device, after_step, tell)
                if request + 1 < options.requests:
                    session.model.to("cpu")  # the memory is someone else's for a while
                    session.model.to(device)
        except Interrupted:
            tell(f"stopped after {steps} steps")
        comm.check()
    return 0 if held else 1


def start(
    device: torch.device, comm: Communicator, tensor: dist.ProcessGroup | None, options: argparse.Namespace
) -> Session:
    kind = device.type
    common = (BLOCKS[kind], comm, device, DTYPES[kind])
    if options.model == "h3":
        chosen = {"tokens": H3_TOKENS[kind], "steps": options.steps, "tensor": tensor, "compiled": options.compile}
        return H3Session(H3_SIZES[kind], *common, **chosen)
    return LingBotSession(
        LINGBOT_SIZES[kind], *common, chunk=LINGBOT_CHUNK[kind], num_chunks=CHUNKS, steps=options.steps
    )


def answer(
    request: int, session: Session, device: torch.device, after_step: AfterStep, tell: Callable[[str], None]
) -> bool:
    """Denoise once, and tell how far the result is from the dense model's; whether that is near enough. Collective."""
    dtype = DTYPES[device.type]
    noise = random_noise(session.shape, request, device, dtype)
    result = session.denoise(session.own(noise), after_step)
    everyone = all_ranks([*deviation(result, session.own(session.dense(noise)))])
    error, cosine = max(e for e, _ in everyone), min(c for _, c in everyone)
    held = all(e <= MAX_ERROR[dtype] and c > MIN_COSINE for e, c in everyone)  # a NaN does not
    verdict = "as good as dense" if held else "NOT as good as dense"
    tell(f"request {request}: deviates by {error:.1e} at most, cosine {cosine:.6f}: {verdict}")
    return held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--model", choices=("h3", "lingbot"), default="h3", help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=4, help="of a request, or of each chunk; default: %(default)s")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="RANKS", help="of h3; default: %(default)s")
    parser.add_argument("--compile", action="store_true", help="h3: leave the schedule to ulysses_op.compile")
    options = parser.parse_args()
    try:
        placement = place(options.ranks, options.device)
        if options.tensor_parallel < 1 or placement.world_size % options.tensor_parallel:
            raise LaunchError(f"{placement.world_size} ranks do not split into parts of {options.tensor_parallel}")
        if options.model != "h3" and (options.tensor_parallel > 1 or options.compile):
            raise LaunchError("--tensor-parallel and --compile are for h3")
        with NotedInterrupt():  # the ranks get it too, and end by themselves
            return run(serve, (placement, options), placement, options.timeout)
    except LaunchError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
