"""What a submission is, found by what it depends on: whatever differs leads to another step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ranks
import torch

from ulysses_op import Communicator
from ulysses_op.layout import scatter_exchange
from ulysses_op.loans import Lent
from ulysses_op.steps import LENT, OWNED, Step, Steps, key_of

ASKED = ("scatter_heads", None, None, False)
HEADS = ((0, 1), (1, 4))


def of(x: torch.Tensor, tag: str | None = "q", asked: Any = ASKED, final: bool = False, terms: Any = LENT) -> Any:
    return key_of(x, tag, asked, final, terms)


def test_whatever_a_submission_depends_on_tells_it_apart() -> None:
    x = torch.zeros(1, 6, 4, 8)
    z = torch.zeros(1, 6, 4, 8, dtype=torch.complex64)
    keys = [
        of(x),
        of(x, tag="k"),
        of(x, tag=None),
        of(x, asked=("gather_heads", None, None, False)),
        of(x, asked=("scatter_heads", HEADS, None, False)),
        of(x, asked=("scatter_heads", None, (6, 2), False)),
        of(x, asked=("gather_heads", None, None, True)),
        of(x, asked=scatter_exchange(x.shape, 2, 0)),
        of(x, final=True),
        of(x, terms=OWNED),
        of(x, terms=(False, False, "")),
        of(x, terms=(False, True, "name")),
        of(torch.zeros(1, 5, 4, 8)),
        of(torch.zeros(1, 6, 8, 8)[:, :, ::2]),
        of(x.to(torch.bfloat16)),
        of(x.to("meta")),
        of(torch.nn.Parameter(x, requires_grad=False)),
        of(x.clone().requires_grad_()),
        of(z),
        of(z.conj()),
        of(z.conj().imag),
        of(z.imag),
    ]
    for (i, one), (j, other) in itertools.combinations(enumerate(keys), 2):
        assert one != other, (i, j)
    with torch.no_grad():
        assert of(x.clone().requires_grad_()) == of(x)
    assert of(torch.ones(1, 6, 4, 8)) == of(x)


def test_steps_know_those_before_them() -> None:
    x = torch.zeros(1, 6, 4, 8)
    exchange = scatter_exchange(x.shape, 2, 0)
    v = Step(("q", "v"), (), "v", exchange, x.clone().requires_grad_(), False, LENT)
    q = Step(("q", "v"), v.path, "q", exchange, x, False, LENT)
    assert (v.first, v.final, v.owned, v.gradients) == (True, False, True, True)
    assert (q.first, q.final, q.owned, q.differentiable, q.gradients) == (False, True, False, False, True)
    assert q.submitted == ("v", "q")
    results = [x, x.clone()]
    for tags, wanted in (((), (1, 0)), (("v",), (0,)), (("v", "q"), (0, 1))):
        for _ in range(2):
            picked = q.picker_of(tags)(results)
            assert isinstance(picked, tuple) and [id(one) for one in picked] == [id(results[i]) for i in wanted]
    wrong: Any = (("q", "w"), ("w",), (["q", "v"],))
    for tags in wrong:
        with pytest.raises(RuntimeError, match="not submitted"):
            q.picker_of(tags)
    assert len({v.digest, q.digest, v.done, q.done, v.ready(False), v.ready(True)}) == 6


def test_steps_are_bounded_in_number() -> None:
    steps = Steps(3)
    assert steps.first(("a",)) is steps.first(("a",)) is not steps.first(("b",))
    x = torch.zeros(1, 6, 4, 8)
    step = Step((), (), "q", scatter_exchange(x.shape, 2, 0), x, False, LENT)
    for number in range(5000):
        steps.add(steps.first(()), number, step)
    assert len(steps.first(())) <= 1024
    first = steps.first(("a",))
    for number in range(5000):
        steps.first((str(number),))
    assert steps.first(("a",)) is not first


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the tensor": lambda lent: lent,
    "a view": lambda lent: lent[1:],
    "its data": lambda lent: lent.data,
    "its storage": lambda lent: lent.untyped_storage(),
    "what autograd saved": lambda lent: (torch.ones(4, 8, requires_grad=True) * lent).grad_fn,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_whoever_holds_what_was_lent_is_seen(holder: str) -> None:
    memory = torch.zeros(4, 8)

    class OnMemory:
        def at(self, address: int) -> tuple[torch.Tensor, torch.UntypedStorage]:
            storage: Any = torch._C._construct_storage_from_data_pointer(address, memory.device, memory.nbytes)
            return torch.empty(0).set_(storage, 0, (4, 8), (8, 1)), storage

    shaped: Any = OnMemory()
    lent = Lent(shaped, memory.data_ptr())
    for _ in range(3):
        assert lent.unused()
        held = HOLDERS[holder](lent.tensor.data)
        assert not lent.unused()
        del held
    assert lent.unused()


class Lengths:
    """Equal to itself whatever it holds."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __iter__(self) -> Any:
        return iter(self.lengths)


def run_plans_that_change(rank: int, world_size: int) -> dict[str, Any]:
    """What a rank gets where a plan is written between two groups, and what it is told of plans that are refused."""
    with Communicator(backend="shm", timeout_s=20) as comm:

        def gathered(lengths: Any, **others: Any) -> Any:
            with comm.group("o") as group:
                group.submit(torch.ones(1, 10, 1, 2), direction="gather_heads", seq_lens=lengths, **others)
                return group.wait()[0].shape[1]

        tensor, many, own = torch.tensor([4, 6]), [4, 6], Lengths(4, 6)
        found = {"first": [gathered(each) for each in (tensor, many, own, (4, 6))]}
        tensor.copy_(torch.tensor([3, 7]))
        many[:], own.lengths = (3, 7), (3, 7)
        found["second"] = [gathered(each) for each in (tensor, many, own, (3, 7), (np.int64(3), np.int64(7)))]
        found["refused"] = []
        for lengths in ((4.0, 6.0), (np.float64(4), np.float64(6)), (4 + 0j, 6), torch.tensor([4.0, 6.0])):
            with pytest.raises(TypeError, match="a sequence of whole numbers is needed"):
                gathered(lengths)
            found["refused"].append(True)
        found["final"] = gathered((4, 6), final=[])
    return found


def test_plans_are_looked_up_by_what_they_say_now() -> None:
    for rank, found in enumerate(ranks.pool(2).run(run_plans_that_change)):
        assert found["first"] == [(4, 6)[rank]] * 4
        assert found["second"] == [(3, 7)[rank]] * 5
        assert len(found["refused"]) == 4
        assert found["final"] == (4, 6)[rank]
