"""NCCL's all-to-all by copy engines, from 2.28 on: of a process group whose policy is to use no thread blocks, between
buffers that are registered with it as symmetric windows. Packs remain.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .contenders import AllToAll
from .device_timeline import COPY, KERNEL, record
from .measure import Ranks
from .profiles import Shape

NAME = "zero-CTA nccl"
_LEAST_NCCL = (2, 28)


def zero_cta(stack: ExitStack, ranks: Ranks, elements: int, dtype: torch.dtype) -> dict[str, AllToAll]:
    """The all-to-all of at most ``elements``, which ends with ``stack``, by its name; nothing where not all ranks can
    have it. NCCL may not keep to the policy: see :func:`in_force`. Collective.
    """
    if not ranks.on_cuda:
        return {}
    made: list[AllToAll] = []
    reason = ranks.attempt(_check_version) or ranks.attempt(lambda: made.append(_registered(stack, elements, dtype)))
    if reason:
        ranks.progress(f"  {NAME} is left out: {reason}")
        return {}
    return {NAME: made[0]}


def in_force(shape: Shape, dtype: torch.dtype, ranks: Ranks) -> str:
    """A sentence on whether q, k and v of such a shape go by copy engines, as a profile of one call shows it. For the
    end of a run: a profiler may leave the host slower. Collective.
    """
    with ExitStack() as stack:
        elements = 3 * math.prod(shape)
        made = zero_cta(stack, ranks, elements, dtype)
        if not made:
            return f"{NAME} {shape}: not looked at, as it could not be had again"
        packed = made[NAME].empty(torch.empty(0, dtype=dtype), (ranks.world_size, elements // ranks.world_size))
        against: list[str] = []
        failure = ranks.attempt(lambda: against.extend(_not_by_copies(made[NAME], packed, ranks)))
        if failure or ranks.any(bool(against)):
            return f"{NAME} {shape}: NOT in force: {failure or ', '.join(against) or 'on a peer'}"
        return f"{NAME} {shape}: in force: a profile shows copies to peers, and no kernel of NCCL's"


def between(
    sent: torch.Tensor, received: torch.Tensor, transfer: Callable[[torch.Tensor, torch.Tensor], None]
) -> AllToAll:
    """The all-to-all that ``transfer`` makes from the start of one buffer to that of another. What it returns is valid
    until the next one.
    """

    def empty(like: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        if like.dtype != sent.dtype:
            raise ValueError(f"{like.dtype} was given, {sent.dtype} is registered")
        return sent[: math.prod(sizes)].view(*sizes)

    def exchange(by_peer: torch.Tensor) -> torch.Tensor:
        if by_peer.data_ptr() != sent.data_ptr():
            by_peer = empty(by_peer, by_peer.shape).copy_(by_peer)
        result = received[: by_peer.numel()].view(by_peer.shape)
        transfer(result, by_peer)
        return result

    return AllToAll(empty, exchange)


def _check_version() -> None:
    version = torch.cuda.nccl.version()
    if version < _LEAST_NCCL:
        raise RuntimeError(f"NCCL {'.'.join(map(str, version))} has no collectives by copy engines")


def _registered(stack: ExitStack, elements: int, dtype: torch.dtype) -> AllToAll:
    group, device = _process_group(), torch.device("cuda", torch.cuda.current_device())
    backend = group._get_backend(device)
    # All memory there is, and from the group's own allocator, before it is registered: only that becomes windows.
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        sent, received = (torch.zeros(elements, dtype=dtype, device=device) for _ in range(2))
    torch.cuda.synchronize(device)
    backend.register_mem_pool(pool, symm=True)
    side = torch.cuda.Stream(device)

    def transfer(result: torch.Tensor, packed: torch.Tensor) -> None:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):  # NCCL before 2.29.7 cannot do it on the default stream
            dist.all_to_all_single(result, packed, group=group)
        current.wait_stream(side)

    def release() -> None:
        torch.cuda.synchronize(device)
        backend.deregister_mem_pool(pool)

    stack.callback(release)
    return between(sent, received, transfer)


@functools.cache
def _process_group() -> Any:
    """Of all ranks, one in a process: it ends with the default one."""
    nccl: Any = dist.ProcessGroupNCCL  # its stubs lack the policy
    options = nccl.Options()
    options.config.cta_policy = nccl.NCCL_CTA_POLICY_ZERO
    group = dist.new_group(backend="nccl", pg_options=options)
    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)  # windows need a communicator that is there
    return group


def _not_by_copies(by: AllToAll, packed: torch.Tensor, ranks: Ranks) -> list[str]:
    """What speaks against an exchange having gone by copy engines, as a profile shows it."""
    by.exchange(packed)
    with tempfile.TemporaryDirectory() as directory:
        spans = record(lambda: by.exchange(packed), ranks, Path(directory) / "trace.json")
    kernels = [span.name for span in spans if span.kind == KERNEL and "nccl" in span.name.lower()]
    copied = any(span.kind == COPY and "PtoP" in span.name for span in spans)
    return [*kernels[1:], *([] if copied else ["no copy to a peer was seen"])]  # the first one is the barrier's
