"""Denoising loops of several blocks and steps: with a process group's all-to-alls between permutes, with this package,
and without communication. Each of them eager (norm + RoPE compiled, this package's groups with V first by hand), and
with its blocks compiled, where they are written plainly.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ..compiling import compile as compile_exchanges
from .block import (
    BOUND,
    ONE_SIDED,
    Exchanges,
    by_group,
    by_packs,
    check_close,
    compiled_part,
    norm_rope,
    rotate,
    without_communication,
)
from .compiled import by_functional_collectives, by_functions
from .contenders import communicators, scatter_by_pack
from .loops import LOOPS, Parts, Weights, make_loop
from .measure import (
    ALONE,
    CAPTURED,
    Contender,
    Effort,
    Outputs,
    Ranks,
    format_table,
    measure,
    median_of,
    number,
    ratio,
)
from .profiles import Shape

EAGER, COMPILED = "eager", "blocks compiled"
TOLERANCE = 0.03  # of the norm: roundings of bfloat16 that differ between kernels add up over a loop, to about 0.01

RunBlock = Callable[[torch.Tensor, Weights, torch.Tensor, torch.Tensor], torch.Tensor]


def model_table(
    loop_name: str, shape: Shape, dtype: torch.dtype, blocks: int, steps: int, effort: Effort, ranks: Ranks
) -> dict[str, Any]:
    """All contenders of one loop and shape (B = 1). Each one's result is compared with the first one's."""
    ranks.progress(f"model {loop_name} {shape}")
    torch.compiler.reset()
    kind = LOOPS[loop_name]
    loop = make_loop(kind, shape, dtype, blocks, steps, ranks)
    process_group = "nccl" if ranks.on_cuda else "gloo"
    parts, parts_name = _compiled_parts(shape, dtype, ranks)

    def run_block(exchanges: Exchanges, parts: Parts) -> RunBlock:
        def run(x: torch.Tensor, weights: Weights, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            return kind.block(x, weights, cos, sin, shape, parts, exchanges)

        return run

    def contender(name: str, block: RunBlock) -> Contender:
        def run(_: Any) -> Outputs:
            return loop.run(block)

        return Contender(name, run)

    def eager(name: str, exchanges: Exchanges) -> Contender:
        return contender(f"{name}, {EAGER}", run_block(exchanges, parts))

    def compiled(name: str, compiler: Callable[..., Any], exchanges: Exchanges) -> Contender:
        block = compiler(run_block(exchanges, Parts(norm_rope, rotate)), fullgraph=True, dynamic=False)
        return contender(f"{name}, {COMPILED}", block)

    packs = by_packs(lambda tensors: tuple(map(scatter_by_pack, tensors)))
    contenders = [
        eager(process_group, packs),
        compiled(process_group, torch.compile, by_functional_collectives()),
    ]
    with ExitStack() as stack:
        for backend, communicator in communicators(stack, ranks, [ONE_SIDED[ranks.device.type]]).items():
            least = without_communication(communicator, shape, ranks.device)
            contenders += [
                eager(backend, by_group(communicator, lent=True)),
                compiled(backend, compile_exchanges, by_functions(communicator)),
                eager(BOUND, least),
                compiled(BOUND, compile_exchanges, least),
            ]
        expected = contenders[0].run(None)[0].float()
        for each in contenders:
            bound = each.name.startswith(BOUND)
            each.check = None if bound else check_close(each.name, expected, TOLERANCE)
        rows = measure(ranks, contenders, [None], effort, modes=(ALONE, CAPTURED))
    return {
        "what": f"model {loop_name}",
        "shape": shape,
        "blocks": blocks,
        "steps": steps,
        "parts": parts_name,
        "process_group": process_group,
        "rows": rows,
    }


def _compiled_parts(shape: Shape, dtype: torch.dtype, ranks: Ranks) -> tuple[Parts, str]:
    """Those of the blocks that are not compiled: through Inductor where that works, for the bytes that they move."""
    x = torch.zeros(1, *shape[1:], dtype=dtype, device=ranks.device)
    weight = torch.ones(shape[3], dtype=dtype, device=ranks.device)
    cos = sin = torch.zeros(shape[1], 1, shape[3] // 2, device=ranks.device)
    norm, name = compiled_part(norm_rope, (x, weight, cos, sin), "norm + RoPE", ranks)
    turn, _ = compiled_part(rotate, (x, cos, sin), "RoPE", ranks)
    return Parts(norm, turn), name


def print_model_table(table: dict[str, Any]) -> None:
    rows, steps = table["rows"], table["steps"]
    modes = [mode for mode in (ALONE, CAPTURED) if any(mode in result for result in rows.values())]

    def ms(name: str, mode: str, key: str = "median_us") -> float | None:
        us = median_of(rows.get(name, {}), mode, key)
        return None if us is None else us / steps / 1e3

    head = ["contender"]
    for mode in modes:
        head += [f"{mode} ms", "q1", "q3", f"x {table['process_group']}", "over bound"]
    lines = []
    for name in rows:
        style = name.split(", ")[-1]
        cells = [name]
        for mode in modes:
            found, least = ms(name, mode), ms(f"{BOUND}, {style}", mode)
            cells += [number(ms(name, mode, key), 2) for key in ("median_us", "q1_us", "q3_us")]
            cells.append(ratio(ms(f"{table['process_group']}, {style}", mode), found))
            cells.append("-" if found is None or least is None else f"{100 * (found / least - 1):+.1f} %")
        lines.append(cells)
    print(f"\n{table['what']}, (B, S_local, H, D) = {tuple(table['shape'])}, {table['blocks']} blocks, {steps} steps")
    print("ms: of a step. x ..., over bound: against the process group, and no communication, in the same style")
    print(f"eager: with norm + RoPE {table['parts']}")
    print(format_table(head, lines))
