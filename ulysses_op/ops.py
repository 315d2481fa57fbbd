"""The exchange as torch.library ops, schema, kernel, fake and autograd side by side.

An op's arguments say everything that its fake, its backward, and a compiler may want to know; the string only finds the
communicator at run time. ``rank`` is -1 where nothing depends on it (equal heads, equal lengths), so that all ranks
compile the same graph. ``heads`` is start and stop of each rank's heads, flattened, or empty for the equal split;
``seq_lens`` each rank's length, or empty where all are equal.

``scatter_heads`` and ``gather_heads`` are functional. ``submit`` starts either of them, as ``tag`` of a group of
``tags``, which are submitted in this order; ``wait_`` completes the group. The tensors that submit returned hold the
results from wait_ on, and those submitted must not be written before it. ``name`` is that of the exchange in the
program: ranks that give one tag to different exchanges get an error. Without ``own_slice``, what a rank would send to
itself is left out of its result. Neither has a gradient.

``accumulate_mm_`` adds the product of two matrices to a third in place, and ``mm_into_`` writes it, with a bias of one
element a column where there is one, to another's memory: for products that are computed in parts.

The overload ``uncaptured`` of each does the same, and tells Inductor to leave it out of CUDA graphs.

NOTE [Replicated heads]: the backward of a scatter whose ranges overlap is a gather with ``replicas``, where the
copies of all ranks arrive side by side, followed by a sum in rank order. The backward of that gather scatters the
copies, which then partition their heads.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from . import registry
from .arguments import Asked
from .asynchronous import beside
from .checked_calls import note
from .communicator import Communicator
from .gradients import sum_replicas
from .layout import (
    HeadRanges,
    heads_do_not_split,
    length_does_not_fit,
    lengths_do_not_add_up,
    own_heads_do_not_fit,
    sequence_does_not_split,
    slot_ranges,
)
from .process_groups import resolve_group

_ARGUMENTS = "Tensor x, str communicator, int world_size, int rank, int[] heads, SymInt[] seq_lens"
_SUBMISSION = "bool replicas, str direction, str tag, str[] tags, str name, bool own_slice, bool lend"
_SCHEMAS = {
    "scatter_heads": f"({_ARGUMENTS}) -> Tensor",
    "gather_heads": f"({_ARGUMENTS}, bool replicas) -> Tensor",
    "submit": f"({_ARGUMENTS}, {_SUBMISSION}) -> Tensor",
    "wait_": "(Tensor(a!)[] targets, Tensor[] sources, str communicator, str[] tags) -> ()",
}
_OVERLOADS = {"": (), ".uncaptured": (torch.Tag.cudagraph_unsafe,)}

_library = torch.library.Library("ulysses_op", "DEF")
for _name, _schema in _SCHEMAS.items():
    _layout = torch.Tag.flexible_layout if _name == "wait_" else torch.Tag.needs_fixed_stride_order
    for _overload, _tags in _OVERLOADS.items():
        _library.define(f"{_name}{_overload}{_schema}", tags=(_layout, *_tags))


# Kernels.

# Tied to the live group: one that is destroyed and created again under the same name gets communicators of its own.
_of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, torch.device], Communicator]]
_of_group = weakref.WeakKeyDictionary()


def communicator_of(name: str, device: torch.device) -> Communicator:
    """The communicator with that name; or, for a process group's name, the one kept for it and ``device``.

    Raises RuntimeError for a communicator that is gone, ValueError for a name that is not known.
    """
    if "#" in name:
        found = registry.find(name)
        if found is None:
            raise RuntimeError(f"the communicator {name!r} is gone: keep a reference to it as long as it is used")
        return found
    of_name = _of_group.setdefault(resolve_group(name), {})
    if (name, device) not in of_name:
        of_name[name, device] = Communicator(name)
    return of_name[name, device]


def rank_of(name: str) -> int:
    """This rank's number among those of the communicator, or process group, of that name."""
    return resolve_group(name.partition("#")[0]).rank()


def ranks() -> list[tuple[str, int]]:
    """This process's rank in every process group, by the group's name."""
    return sorted((name, group.rank()) for group, name in distributed_c10d._world.pg_names.items() if group.size() > 0)


def known_backends() -> list[tuple[str, str]]:
    """The communicators that ops may name and that have decided on a backend, each with it."""
    kept = [(name, made) for of_name in _of_group.values() for (name, _), made in of_name.items()]
    named = [*kept, *registry.living()]
    decided = {name: made for name, made in named if made.known_backend is not None}
    return sorted((name, str(made.known_backend)) for name, made in decided.items())


def _run(
    x: torch.Tensor,
    name: str,
    world_size: int,
    direction: Any,
    heads: Sequence[int],
    seq_lens: Sequence[int],
    replicas: bool = False,
) -> torch.Tensor:
    communicator = communicator_of(name, x.device)
    _check_world_size(communicator, name, world_size)
    note(communicator, x)
    asked = _asked(direction, heads, seq_lens, replicas)
    return communicator._exchange([(f"{direction}()", x.detach(), asked)])[0]


def _asked(direction: Any, heads: Sequence[int], seq_lens: Sequence[int], replicas: bool) -> Asked:
    return direction, _pairs(heads) if heads else None, tuple(seq_lens) if seq_lens else None, replicas


def _check_world_size(communicator: Communicator, name: str, world_size: int) -> None:
    if communicator.world_size != world_size:
        raise RuntimeError(
            f"this code was compiled for {world_size} ranks, but the group of {name!r} now has "
            f"{communicator.world_size}: call torch.compiler.reset() and compile it again"
        )


def _check_no_gradient(op: str, tensors: Sequence[torch.Tensor]) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise RuntimeError(
            f"{op} has no gradient, and a tensor that it was given requires one: use scatter_heads, gather_heads or a "
            "group, or detach the tensor"
        )


def _scatter_kernel(
    x: torch.Tensor, communicator: str, world_size: int, rank: int, heads: Sequence[int], seq_lens: Sequence[int]
) -> torch.Tensor:
    return _run(x, communicator, world_size, "scatter_heads", heads, seq_lens)


def _gather_kernel(
    x: torch.Tensor,
    communicator: str,
    world_size: int,
    rank: int,
    heads: Sequence[int],
    seq_lens: Sequence[int],
    replicas: bool,
) -> torch.Tensor:
    return _run(x, communicator, world_size, "gather_heads", heads, seq_lens, replicas)


def _submit_kernel(
    x: torch.Tensor,
    communicator: str,
    world_size: int,
    rank: int,
    heads: Sequence[int],
    seq_lens: Sequence[int],
    replicas: bool,
    direction: Any,
    tag: str,
    tags: Sequence[str],
    name: str,
    own_slice: bool,
    lend: bool,
) -> torch.Tensor:
    if x.requires_grad:
        _check_no_gradient("submit", (x,))
    found = communicator_of(communicator, x.device)
    _check_world_size(found, communicator, world_size)
    note(found, x)
    asked = _asked(direction, heads, seq_lens, replicas)
    return beside(found).submit(x, asked, tag, tuple(tags), name, own_slice, lend)


def _wait_kernel(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], communicator: str, tags: Sequence[str]
) -> None:
    _check_no_gradient("wait_", (*targets, *sources))
    if len(targets) != len(tags):
        raise RuntimeError(f"wait_ was given {len(targets)} targets for the {len(tags)} tags {', '.join(tags)}")
    beside(communicator_of(communicator, targets[0].device)).wait(targets, tuple(tags))


# Fakes: shapes and strides from the arguments alone.


def _tell_inductor() -> None:
    """Register the lowerings, which code compiled without the pass needs too, before Inductor lowers a graph that it
    traces now; others are spared its import."""
    if "torch._inductor.lowering" in sys.modules:
        from . import inductor_lowering  # noqa: F401


def _scatter_fake(
    x: torch.Tensor, communicator: str, world_size: int, rank: int, heads: Sequence[int], seq_lens: Sequence[int]
) -> torch.Tensor:
    _tell_inductor()
    torch._check(x.dim() == 4, lambda: f"x must have 4 dimensions (B, S_local, H, D), got {x.dim()}")
    batch, seq_local, num_heads, head_dim = x.shape
    if heads:
        torch._check(num_heads == max(heads), lambda: f"heads reach to {max(heads)}, but x has H = {num_heads}")
        local: Any = heads[2 * rank + 1] - heads[2 * rank]
    else:
        torch._check(num_heads % world_size == 0, lambda: heads_do_not_split(num_heads, world_size))
        local = num_heads // world_size
    if seq_lens:
        torch._check(seq_local == seq_lens[rank], lambda: length_does_not_fit(seq_local, rank, seq_lens[rank]))
        seq_global: Any = sum(seq_lens)
    else:
        seq_global = seq_local * world_size
    return x.new_empty((batch, seq_global, local, head_dim))


def _gather_fake(
    x: torch.Tensor,
    communicator: str,
    world_size: int,
    rank: int,
    heads: Sequence[int],
    seq_lens: Sequence[int],
    replicas: bool,
) -> torch.Tensor:
    _tell_inductor()
    torch._check(x.dim() == 4, lambda: f"x must have 4 dimensions (B, S_global, H_local, D), got {x.dim()}")
    batch, seq_global, local, head_dim = x.shape
    if heads:
        own = (heads[2 * rank], heads[2 * rank + 1])
        torch._check(local == own[1] - own[0], lambda: own_heads_do_not_fit(local, rank, own))
        num_heads: Any = sum(heads[1::2]) - sum(heads[::2])
    else:
        num_heads = local * world_size
    if seq_lens:
        total = sum(seq_lens)
        torch._check(seq_global == total, lambda: lengths_do_not_add_up(seq_global, seq_lens))
        seq_local: Any = seq_lens[rank]
    else:
        torch._check(seq_global % world_size == 0, lambda: sequence_does_not_split(seq_global, world_size))
        seq_local = seq_global // world_size
    return x.new_empty((batch, seq_local, num_heads, head_dim))


def _submit_fake(
    x: torch.Tensor,
    communicator: str,
    world_size: int,
    rank: int,
    heads: Sequence[int],
    seq_lens: Sequence[int],
    replicas: bool,
    direction: str,
    tag: str,
    tags: Sequence[str],
    name: str,
    own_slice: bool,
    lend: bool,
) -> torch.Tensor:
    _check_no_gradient("submit", (x,))
    if direction == "scatter_heads":
        return _scatter_fake(x, communicator, world_size, rank, heads, seq_lens)
    return _gather_fake(x, communicator, world_size, rank, heads, seq_lens, replicas)


def _wait_fake(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], communicator: str, tags: Sequence[str]
) -> None:
    _check_no_gradient("wait_", (*targets, *sources))


for _name, _kernel, _fake in (
    ("scatter_heads", _scatter_kernel, _scatter_fake),
    ("gather_heads", _gather_kernel, _gather_fake),
    ("submit", _submit_kernel, _submit_fake),
    ("wait_", _wait_kernel, _wait_fake),
):
    for _overload in _OVERLOADS:
        _library.impl(f"{_name}{_overload}", _kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"ulysses_op::{_name}{_overload}", _fake, lib=_library)
        # For generated code: a dispatcher's call with so many arguments takes the host as long as all else of it.
        _op: Any = getattr(getattr(torch.ops.ulysses_op, _name), _overload.removeprefix(".") or "default")
        _op.python_kernel = _kernel


def _accumulate_mm(total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    torch.addmm(total, x, weight, out=total)


def _mm_into(out: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor) -> None:
    if bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(bias, x, weight, out=out)


for _name, _schema, _product in (
    ("accumulate_mm_", "(Tensor(a!) total, Tensor x, Tensor weight) -> ()", _accumulate_mm),
    ("mm_into_", "(Tensor(a!) out, Tensor? bias, Tensor x, Tensor weight) -> ()", _mm_into),
):
    _library.define(f"{_name}{_schema}", tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(_name, _product, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ulysses_op::{_name}", lambda *arguments: None, lib=_library)


# Gradients: each op is the other's backward.


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.arguments = inputs[1:6]
    ctx.communicator = registry.find(inputs[1])  # the graph needs it as long as it may run backward


def _scatter_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    communicator, world_size, rank, heads, seq_lens = ctx.arguments
    ranges = _pairs(heads)
    replicated = bool(heads) and sum(heads[1::2]) - sum(heads[::2]) > max(heads)
    parts = torch.ops.ulysses_op.gather_heads.default(
        gradient, communicator, world_size, rank, heads, seq_lens, replicated
    )
    return (sum_replicas(parts, ranges) if replicated else parts), None, None, None, None, None


def _gather_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    communicator, world_size, rank, heads, seq_lens = ctx.arguments
    slots = _flat(slot_ranges(_pairs(heads))) if heads else []  # the plan itself where it partitions the heads
    whole = torch.ops.ulysses_op.scatter_heads.default(gradient, communicator, world_size, rank, slots, seq_lens)
    return whole, None, None, None, None, None, None


for _overload in _OVERLOADS:
    for _name, _backward in (("scatter_heads", _scatter_backward), ("gather_heads", _gather_backward)):
        torch.library.register_autograd(f"ulysses_op::{_name}{_overload}", _backward, setup_context=_keep, lib=_library)


def _pairs(flat: Sequence[int]) -> HeadRanges:
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def _flat(ranges: Sequence[Sequence[int]]) -> list[int]:
    return [bound for pair in ranges for bound in pair]
