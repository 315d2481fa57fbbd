"""Ways in which ranks can tell each other that buffers may be written, and that they were: the same copies between the
same two handshakes. Alone, and beside a product: when they are through, and how long the product takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch.nn.functional as F

from ..communicator import Communicator
from .block import make_inputs
from .contenders import all_to_all, communicators, exchange_one
from .contention import beside
from .measure import (
    ALONE,
    CAPTURED,
    QUEUED,
    Contender,
    Effort,
    Outputs,
    Ranks,
    format_table,
    measure,
    median_of,
    number,
)
from .profiles import Shape

PRODUCT = "the product alone"
_TIMEOUT_MS = 20_000
_READY, _DONE = 0, 1  # channels of a signal pad


def handshake_table(shape: Shape, dtype: torch.dtype, effort: Effort, ranks: Ranks) -> dict[str, Any]:
    """Of a few bytes, and of what each peer gets of ``shape``, densely. On GPUs with symmetric memory."""
    ranks.progress(f"handshakes {shape}")
    batch, seq_local, num_heads, head_dim = shape
    whole = batch * seq_local * num_heads // ranks.world_size * head_dim
    block = make_inputs(shape, dtype, ranks)
    side = torch.cuda.Stream()

    def product() -> torch.Tensor:
        return F.linear(block.x, block.qkv_weight)

    with ExitStack() as stack:
        contenders = []
        pairs = [Contender(PRODUCT, lambda _: (product(),))]
        for communicator in communicators(stack, ranks, ["symm_mem"]).values():
            for count in (8, whole):
                generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
                sent = torch.randn(ranks.world_size, count, dtype=dtype, device=ranks.device, generator=generator)
                check = partial(_check, all_to_all(sent), ranks.rank)
                kinds: dict[str, Callable[[Any], Outputs]] = {
                    "stream memory operations (symm_mem)": partial(_by_group, communicator, sent),
                    **dict(_by_hand(sent, ranks)),
                }
                size = f"{count * dtype.itemsize / 1e6:.1f} MB" if count > 1e6 else f"{count * dtype.itemsize} B"
                for kind, run in kinds.items():
                    name, transfer = f"{kind}, {size}", partial(run, None)
                    contenders.append(Contender(name, run, check))
                    pairs += [
                        Contender(f"{name}, beside a product", beside(transfer, product, side)),
                        Contender(f"a product beside {name}", beside(product, transfer, side)),
                    ]
        rows = measure(ranks, contenders, [None], effort)
        rows.update(measure(ranks, pairs, [None], effort, modes=(QUEUED,)))
    return {"what": "handshakes", "shape": shape, "rows": rows}


def _by_group(communicator: Communicator, sent: torch.Tensor, _: Any) -> Outputs:
    return (exchange_one(communicator, sent[None, None], own_slice=False)[0],)


def _by_hand(sent: torch.Tensor, ranks: Ranks) -> Iterator[tuple[str, Callable[[Any], Outputs]]]:
    """Both await signals with PyTorch's kernel that spins on the signal pad; one tells with such a kernel, too."""
    rank, peers = ranks.rank, [(ranks.rank + step) % ranks.world_size for step in range(1, ranks.world_size)]
    target = symmetric_memory.empty(sent.shape, dtype=sent.dtype, device=ranks.device)
    group: Any = dist.group.WORLD
    handle = symmetric_memory.rendezvous(target, group)
    remote = {peer: handle.get_buffer(peer, sent.shape, sent.dtype) for peer in peers}
    pads = {peer: handle.get_signal_pad(peer, dtype=torch.int32) for peer in peers}
    one = torch.ones(1, dtype=torch.int32, device=ranks.device)
    side = torch.cuda.Stream(priority=-1)

    def by_kernel(peer: int, channel: int) -> None:
        handle.put_signal(peer, channel, _TIMEOUT_MS)

    def by_copy(peer: int, channel: int) -> None:
        at = channel * ranks.world_size + rank
        pads[peer][at : at + 1].copy_(one)

    def shake_hands(tell: Callable[[int, int], None], channel: int) -> None:
        for peer in peers:
            tell(peer, channel)
        for peer in peers:
            handle.wait_signal(peer, channel, _TIMEOUT_MS)

    def run(tell: Callable[[int, int], None], _: Any) -> Outputs:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            shake_hands(tell, _READY)
            for peer in peers:
                remote[peer][rank].copy_(sent[peer])
            shake_hands(tell, _DONE)
        torch.cuda.current_stream().wait_stream(side)
        return (target,)

    yield "kernels that write and spin", partial(run, by_kernel)
    yield "flags carried by copies, a kernel that spins", partial(run, by_copy)


def _check(expected: torch.Tensor, rank: int, _: int, outputs: Outputs) -> None:
    for peer in range(len(expected)):
        if peer != rank and not torch.equal(outputs[0][peer].view_as(expected[peer]), expected[peer]):
            raise AssertionError(f"what rank {peer} sent did not arrive")


def print_handshake_table(table: dict[str, Any]) -> None:
    head = ["handshakes"]
    for mode in (ALONE, QUEUED, CAPTURED):
        head += [f"{mode} us", "q1", "q3"]
    lines = [
        [
            name,
            *(
                number(median_of(result, mode, key))
                for mode in (ALONE, QUEUED, CAPTURED)
                for key in ("median_us", "q1_us", "q3_us")
            ),
        ]
        for name, result in table["rows"].items()
    ]
    print(f"\ncopies to peers between two handshakes, (B, S_local, H, D) = {tuple(table['shape'])}, dense")
    print("beside: until what is named first is through; the other began with it, and nothing waits for it")
    print(format_table(head, lines))
