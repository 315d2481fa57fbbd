"""The attention block as one compiled graph, its exchanges written in the order q, k, v: as they stand, moved by the
pass, by NCCL's all-to-all between permutes, and left out. Then what the device does when in one call of it.

torchrun --standalone --nproc-per-node 2 benchmarks/compiled.py [--shapes 1,9472,28,128]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from block import (
    BOUND,
    Exchanges,
    Inputs,
    Shape,
    Thunk,
    block,
    check_close,
    make_inputs,
    norm_rope,
    print_block_table,
    without_communication,
)
from contenders import by_peer, communicators, label
from measure import Contender, Outputs, Ranks, format_table, measure, provenance
from torch.distributed._functional_collectives import all_to_all_single
from torch.profiler import ProfilerActivity, profile

import ulysses_op

DEFAULT_SHAPES: list[Shape] = [(1, 9472, 28, 128), (1, 3120, 40, 128)]
PASS, WHOLE, PLAIN = "ulysses_op.compile", "the same, projections whole", "torch.compile"
COMPILERS: dict[str, Callable[..., Any]] = {
    PLAIN: torch.compile,
    WHOLE: partial(ulysses_op.compile, split_projections=False),
    PASS: ulysses_op.compile,
}
HEAD_START_CYCLES = 4_000_000  # about 2 ms: the host is ahead


def by_functions(communicator: ulysses_op.Communicator) -> Exchanges:
    def scatter(fused: torch.Tensor, q: Thunk, k: Thunk) -> tuple[torch.Tensor, ...]:
        exchange = communicator.scatter_heads
        return exchange(q()), exchange(k()), exchange(fused[:, :, 2])

    return scatter, communicator.gather_heads


def by_functional_collectives() -> Exchanges:
    """What torch.compile can trace of the usual way: three all-to-alls between permutes, and one on the way back."""
    group = dist.group.WORLD

    def exchange(packed: torch.Tensor) -> torch.Tensor:
        return all_to_all_single(packed.contiguous(), None, None, group)

    def scatter(fused: torch.Tensor, q: Thunk, k: Thunk) -> tuple[torch.Tensor, ...]:
        packs = (by_peer(q()), by_peer(k()), by_peer(fused[:, :, 2]))
        return tuple(exchange(pack).transpose(0, 1).flatten(1, 2) for pack in packs)

    def gather(o: torch.Tensor) -> torch.Tensor:
        sent = o.unflatten(1, (dist.get_world_size(), -1)).transpose(0, 1)
        return exchange(sent).permute(1, 2, 0, 3, 4).flatten(2, 3)

    return scatter, gather


def contender(name: str, compiler: Callable[..., Any], shape: Shape, exchanges: Exchanges) -> Contender:
    def run(inputs: Inputs) -> Outputs:
        return block(inputs, shape, norm_rope, exchanges)

    return Contender(name, compiler(run, fullgraph=True, dynamic=False))


def tables(shape: Shape, args: argparse.Namespace, ranks: Ranks) -> None:
    ranks.progress(f"compiled block {shape}")
    torch.compiler.reset()
    inputs = make_inputs(shape, torch.bfloat16, ranks)
    nccl = contender(f"nccl, functional collectives, {PLAIN}", torch.compile, shape, by_functional_collectives())
    contenders = [nccl]
    with ExitStack() as stack:
        made = communicators(stack, ranks, ["symm_mem", "c10d"])
        for backend, communicator in made.items():
            for name, compiler in COMPILERS.items():
                contenders.append(contender(label(backend, name), compiler, shape, by_functions(communicator)))
        least = without_communication(made["symm_mem"], shape, ranks.device)
        contenders.append(contender(BOUND, ulysses_op.compile, shape, least))
        expected = nccl.run(inputs)[0].float()
        for each in contenders:
            each.check = check_close(each.name, expected) if each.name != BOUND else None
        rows = measure(ranks, contenders, [inputs], args.warmups, args.iterations)
        seen = [each for each in contenders if "symm_mem" in each.name]
        spans = {each.name: timeline(partial(each.run, inputs), ranks) for each in seen}
    if ranks.rank == 0:
        print_block_table({"shape": shape, "norm": "compiled with all else", "rows": rows})
        for name, found in spans.items():
            print_timeline(name, found)


class Span(NamedTuple):
    """Microseconds since the first span's start."""

    kind: str
    name: str
    start: float
    end: float
    stream: int
    nbytes: int


def timeline(call: Callable[[], Any], ranks: Ranks) -> list[Span]:
    """What the device does in one call, the ranks in step and the host ahead."""
    for _ in range(2):  # captured groups have kept their targets: others come up
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        torch.cuda._sleep(HEAD_START_CYCLES)
        ranks.in_step()
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [
        Span(e["cat"], e["name"], e["ts"], e["ts"] + e["dur"], e["args"]["stream"], e["args"].get("bytes", 0))
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy")
    ]
    begin = max(span.end for span in found if "nccl" in span.name)  # what puts the ranks in step
    found = sorted((span for span in found if span.start >= begin), key=lambda span: span.start)
    origin = found[0].start
    return [span._replace(start=span.start - origin, end=span.end - origin) for span in found]


def print_timeline(name: str, spans: list[Span]) -> None:
    attention = next(i for i, s in enumerate(spans) if any(x in s.name.lower() for x in ("flash", "fmha", "sdpa")))
    work = [span for span in spans[:attention] if span.name.startswith("triton")]
    copies = [span for span in spans[:attention] if span.kind == "gpu_memcpy" and span.nbytes > 1024]
    print(f"\none call, {name}")
    rows = [
        [span.name[:48], f"{span.start:.0f}", f"{span.end - span.start:.0f}", str(span.stream), str(span.nbytes or "")]
        for span in spans
    ]
    print(format_table(["what", "start us", "us", "stream", "bytes"], rows))
    both = overlap(work, copies)
    print(f"norm + RoPE {total(work):.0f} us, copies {total(copies):.0f} us, of which at once {both:.0f} us")
    print(f"attention begins at {spans[attention].start:.0f} us")


def total(spans: list[Span]) -> float:
    """How long at least one of them runs."""
    covered, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        covered += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return covered


def overlap(some: list[Span], others: list[Span]) -> float:
    return total(some) + total(others) - total([*some, *others])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=DEFAULT_SHAPES, type=lambda x: tuple(map(int, x.split(","))))
    parser.add_argument("--warmups", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--budget-s", type=float, default=180.0, help="what is left then is skipped (default 180)")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(f"run it with torchrun:\n{__doc__}")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=datetime.timedelta(seconds=90))
    ranks = Ranks(device, args.budget_s)
    facts = provenance(device)
    if ranks.rank == 0:
        print("\n".join(f"{name}: {text}" for name, text in facts.items()))
    with torch.no_grad():
        for shape in args.shapes:
            tables(shape, args, ranks)
    ranks.any(False)  # nobody leaves while others still need it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
