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
    except (IndexError, RuntimeError) as error:
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
        "module, exchanging": told(lambda: compiled["used"](x, True)),
        "function": told(lambda: as_function(x, False)),
        "check": told(used.check),
        "unchecked": told(lambda: unchecked(x, False)),
        "other": told(lambda: compiled["other"](x, False)),
    }
    used.close()
    found["closed"] = told(lambda: compiled["used"](x, True))
    models["used"].comm = other
    found["with another"] = told(lambda: compiled["used"](x, True))
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
        exchanging = found.pop("module, exchanging")
        if what == "compiled code":  # these ops run on the communicator's own groups, which are well
            assert exchanging == "nothing"
        else:
            assert exchanging.startswith("BrokenCommunicatorError: ") and "unwell" in exchanging, exchanging
        for name in ("function", "check"):
            text = found.pop(name)
            assert text.startswith("BrokenCommunicatorError: ") and "unwell" in text, (name, text)
        assert "is closed" in found.pop("closed")
        told_once = ("module, again", "unchecked", "other", "with another")
        assert found == dict.fromkeys(told_once, "nothing")


def run_left(rank: int, world_size: int) -> list[str]:
    """Compiled code that the last rank leaves by an exception: behind its last submission, then before it."""
    torch.compiler.reset()
    comm = ulysses_op.Communicator(timeout_s=30)
    name = comm._where[0]
    submit, wait_ = torch.ops.ulysses_op.submit.default, torch.ops.ulysses_op.wait_.default

    def exchange(x: torch.Tensor, before: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
        arguments: Any = (name, world_size, -1, [], [], False, "scatter_heads")
        v = submit(x, *arguments, "v", ["v", "q"], "", True, True)
        y = x.index_select(0, before)
        q = submit(y, *arguments, "q", ["v", "q"], "", True, True)
        z = x.index_select(0, behind)
        wait_([v, q], [x, y], name, ["v", "q"])
        return v + q + z.sum()

    compiled = ulysses_op.compile(exchange, backend="eager", fullgraph=True)
    x, well, unwell = torch.ones(1, 2, world_size, 4), torch.tensor([0]), torch.tensor([7])
    wanted = 2 + x.sum()
    assert (compiled(x, well, well) == wanted).all()
    last = rank == world_size - 1
    found = [told(lambda: compiled(x, well, unwell if last else well))]
    assert (compiled(x, well, well) == wanted).all()
    ranks.meet(dist.group.WORLD)
    found.append(told(lambda: compiled(x, unwell if last else well, well)))
    ranks.meet(dist.group.WORLD)  # nobody calls again, or closes, before all have been told
    comm.close()
    return [text.partition(":")[0] if last else text for text in found]


def test_peers_of_a_call_that_is_left_are_told() -> None:
    *others, last = ranks.pool(3).run(run_left)
    assert last == ["IndexError", "IndexError"]
    for found in others:
        assert found[0] == "nothing"
        assert found[1].startswith("PeerAbortError: ") and "rank 2: IndexError" in found[1], found


def linear() -> torch.nn.Linear:
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.ones_(model.weight)
    return model


def test_where_compilation_is_switched_off_the_model_is_left_alone() -> None:
    model = linear()
    assert ulysses_op.compile(model, disable=True) is model
    assert "forward" not in vars(model)


def again(model: Any) -> Any:
    return ulysses_op.compile(model, backend="eager")


def once(model: Any) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("outer", [again, once])
@pytest.mark.parametrize("inner", [again, once])
def test_what_is_compiled_can_be_compiled_again(inner: Callable[[Any], Any], outer: Callable[[Any], Any]) -> None:
    torch.compiler.reset()
    x = torch.ones(1, 2)
    assert outer(inner(lambda x: x + 1))(x).tolist() == [[2, 2]]
    assert outer(inner(linear()))(x).tolist() == [[2, 2]]
