"""What ulysses_op.compile returns raises what has failed since the calls before, also where a call runs no op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

import ulysses_op


class Model(torch.nn.Module):
    def __init__(self, comm: ulysses_op.Communicator) -> None:
        super().__init__()
        self.comm = comm

    def forward(self, x: torch.Tensor, exchanges: bool) -> torch.Tensor:
        return self.comm.scatter_heads(x) if exchanges else x + 1


def told(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def run_failure(rank: int, world_size: int, what: str) -> dict[str, str]:
    """Ranks that call compiled code of their own; then the last one gives up its exchanges of compiled code, or of
    groups; what the others are told by calls that exchange nothing.
    """
    torch.compiler.reset()
    used, other = (ulysses_op.Communicator(timeout_s=20) for _ in range(2))
    models = {"used": Model(used), "other": Model(other)}
    compiled = {name: ulysses_op.compile(model, backend="eager") for name, model in models.items()}
    unchecked = torch.compile(models["used"], backend="eager")
    as_function = ulysses_op.compile(lambda x, exchanges: models["used"](x, exchanges), backend="eager")
    x = torch.ones(1, 2, world_size, 4)
    for call in (*compiled.values(), as_function, unchecked):
        call(x, True)
        assert torch.equal(call(x, False), x + 1)
    with used.group("v") as group:
        group.submit(x, tag="v")
        group.wait()
    run_op(used, x)
    ranks.meet(dist.group.WORLD)
    victim = used._companion if what == "compiled code" else used
    assert victim is not None
    if rank == world_size - 1:
        victim._break(ArithmeticError("unwell"))
    ranks.meet(dist.group.WORLD)
    found = {
        "module": told(lambda: compiled["used"](x, False)),
        "module, again": told(lambda: compiled["used"](x, False)),
        "function": told(lambda: as_function(x, False)),
        "check": told(used.check),
        "unchecked": told(lambda: unchecked(x, False)),
        "other": told(lambda: compiled["other"](x, False)),
    }
    used.close()
    found["closed"] = told(lambda: compiled["used"](x, False))
    other.close()
    return found


def run_op(comm: ulysses_op.Communicator, x: torch.Tensor) -> None:
    """A group as the pass makes it, which runs beside the communicator's own."""
    name, world_size, _ = comm._where
    ops = torch.ops.ulysses_op
    target = ops.submit.default(x, name, world_size, -1, [], [], False, "scatter_heads", "0", ["0"], "", True, True)
    ops.wait_.default([target], [x], name, ["0"])


@pytest.mark.parametrize("what", ["compiled code", "groups"])
def test_a_failure_between_calls_is_raised_by_the_next(what: str) -> None:
    *others, _ = ranks.pool(3).run(run_failure, what)
    for found in others:
        first = found.pop("module")
        assert first.startswith("PeerAbortError: rank ") and "rank 2: ArithmeticError: unwell" in first, found
        for name in ("module, again", "function", "check"):
            text = found.pop(name)
            assert text.startswith("BrokenCommunicatorError: ") and "unwell" in text, (name, text)
        assert "is closed" in found.pop("closed")
        assert found == {"unchecked": "nothing", "other": "nothing"}
