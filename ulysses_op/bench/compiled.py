"""The attention block as one compiled graph, its exchanges written in the order q, k, v: as they stand, moved by the
pass, by NCCL's all-to-all between permutes, and left out. Then what the device does when in one call of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single

from ..communicator import Communicator
from ..compiling import compile as compile_exchanges
from .block import (
    ATTENTIONS,
    BOUND,
    ONE_SIDED,
    Exchanges,
    Inputs,
    block,
    by_way,
    check_close,
    compiled_norm,
    make_inputs,
    norm_rope,
    print_block_table,
    without_communication,
)
from .contenders import by_peer, communicators, label
from .device_timeline import COPY, Span, overlap, record, split_steps, total
from .measure import Contender, Effort, Outputs, Ranks, Thunk, format_table, measure
from .other_packages import Way, fast_ulysses, ways
from .profiles import Shape

PASS, WHOLE, PLAIN = "ulysses_op.compile", "the same, projections whole", "torch.compile"
COMPILERS: dict[str, Callable[..., Any]] = {
    PLAIN: torch.compile,
    WHOLE: partial(compile_exchanges, split_projections=False),
    PASS: compile_exchanges,
}


def by_functions(communicator: Communicator) -> Exchanges:
    def scatter(fused: torch.Tensor, q: Thunk, k: Thunk) -> tuple[torch.Tensor, ...]:
        exchange = communicator.scatter_heads
        return exchange(q()), exchange(k()), exchange(fused[:, :, -1])

    return scatter, communicator.gather_heads


def by_functional_collectives() -> Exchanges:
    """What torch.compile can trace of the usual way: three all-to-alls between permutes, and one on the way back."""
    group: Any = dist.group.WORLD

    def exchange(packed: torch.Tensor) -> torch.Tensor:
        return all_to_all_single(packed.contiguous(), None, None, group)

    def scatter(fused: torch.Tensor, q: Thunk, k: Thunk) -> tuple[torch.Tensor, ...]:
        packs = (by_peer(q()), by_peer(k()), by_peer(fused[:, :, -1]))
        return tuple(exchange(pack).transpose(0, 1).flatten(1, 2) for pack in packs)

    def gather(o: torch.Tensor) -> torch.Tensor:
        sent = o.unflatten(1, (dist.get_world_size(), -1)).transpose(0, 1)
        return exchange(sent).permute(1, 2, 0, 3, 4).flatten(2, 3)

    return scatter, gather


def compiled_table(shape: Shape, dtype: torch.dtype, attention: str, effort: Effort, ranks: Ranks) -> dict[str, Any]:
    """All contenders of one shape (B = 1), and on CUDA the device's timeline of those of the one-sided backend."""
    ranks.progress(f"compiled block {shape}")
    torch.compiler.reset()
    inputs = make_inputs(shape, dtype, ranks)
    one_sided = ONE_SIDED[ranks.device.type]

    def contender(name: str, compiler: Callable[..., Any], exchanges: Exchanges) -> Contender:
        def run(inputs: Inputs) -> Outputs:
            return block(inputs, shape, norm_rope, exchanges, ATTENTIONS[attention])

        return Contender(name, compiler(run, fullgraph=True, dynamic=False))

    process_group = "nccl" if ranks.on_cuda else "gloo"
    collectives = f"{process_group}, functional collectives, {PLAIN}"
    contenders = [contender(collectives, torch.compile, by_functional_collectives())]
    with ExitStack() as stack:
        made = communicators(stack, ranks, [one_sided, "c10d"])
        for backend, communicator in made.items():
            for name, compiler in COMPILERS.items():
                contenders.append(contender(label(backend, name), compiler, by_functions(communicator)))
        if (other := fast_ulysses(stack, ranks)) is not None:
            norm, _ = compiled_norm(inputs, shape, ranks)

            def by_hand(way: Way, inputs: Inputs) -> Outputs:
                return block(inputs, shape, norm, by_way(way), ATTENTIONS[attention])

            for way in ways(other, shape, dtype, ranks):
                run = partial(by_hand, way)
                contenders.append(Contender(f"{way.name}, by hand", run, not_captured=way.not_captured))
        if one_sided in made:
            least = without_communication(made[one_sided], shape, ranks.device)
            contenders.append(contender(BOUND, compile_exchanges, least))
        expected = contenders[0].run(inputs)[0].float()
        for each in contenders:
            each.check = check_close(each.name, expected) if each.name != BOUND else None
        rows = measure(ranks, contenders, [inputs], effort)
        seen = [each for each in contenders if one_sided in each.name and ranks.on_cuda]
        spans = {each.name: timeline(partial(each.run, inputs), ranks) for each in seen}
    return {
        "what": "compiled block",
        "shape": shape,
        "attention": attention,
        "norm": "compiled with all else",
        "rows": rows,
        "timelines": spans,
    }


def print_compiled_table(table: dict[str, Any]) -> None:
    print_block_table(table)
    for name, found in table["timelines"].items():
        print_timeline(name, found)


def timeline(call: Callable[[], Any], ranks: Ranks) -> list[Span]:
    """What the device does in one call, the ranks in step and the host ahead."""
    for _ in range(2):  # captured groups have kept their targets: others come up
        call()
    torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        spans = record(call, ranks, Path(directory) / "trace.json")
    return split_steps(spans)[-1]


def print_timeline(name: str, spans: list[Span]) -> None:
    attention = next(i for i, s in enumerate(spans) if any(x in s.name.lower() for x in ("flash", "fmha", "sdpa")))
    work = [span for span in spans[:attention] if span.name.startswith("triton")]
    copies = [span for span in spans[:attention] if span.kind == COPY and span.nbytes > 1024]
    print(f"\none call, {name}")
    rows = [
        [span.name[:48], f"{span.start:.0f}", f"{span.end - span.start:.0f}", str(span.stream), str(span.nbytes or "")]
        for span in spans
    ]
    print(format_table(["what", "start us", "us", "stream", "bytes"], rows))
    both = overlap(work, copies)
    print(f"norm + RoPE {total(work):.0f} us, copies {total(copies):.0f} us, of which at once {both:.0f} us")
    print(f"attention begins at {spans[attention].start:.0f} us")
