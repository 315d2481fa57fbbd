"""How Inductor lowers the ops.

NOTE [Every rank exchanges]: on a rank without tokens the results of an exchange may have no elements, and so nothing
that Inductor would keep it for, while the peers wait for it. So the functional exchanges count as having an effect.

NOTE [Sources live until the wait]: between a submission and its wait_ the input is still being read, which nothing in
the data says. Inductor gives a dead buffer's memory to the next one, so each wait_ takes what its submissions read as
operands. They have to be the very buffers: a value that is used twice may be materialized twice. So they are looked
up here, where buffers exist, and take the place of the graph's own sources, which are for passes over the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch.utils import _pytree as pytree

_OPS = torch.ops.ulysses_op
_SUBMIT = (_OPS.submit.default, _OPS.submit.uncaptured)


class _Exchange(ir.FallbackKernel):
    """See NOTE [Every rank exchanges]."""

    def has_side_effects(self) -> bool:
        return True


def _register_exchange(op: Any) -> None:
    @register_lowering(op, type_promotion_kind=None)
    def lower(*arguments: Any) -> Any:
        return pytree.tree_map_only(ir.IRNode, ir.TensorBox.create, _Exchange.create(op, *arguments))


def _register_wait(wait: Any) -> None:
    @register_lowering(wait, type_promotion_kind=None)
    def lower(targets: list[Any], sources: list[Any], communicator: str, tags: list[str]) -> Any:
        read = [_tensor_box(source) for target in targets for source in _sources_of(target)]
        sources = sources if len(read) < len(targets) else []
        result = ir.FallbackKernel.create(wait, targets, [*sources, *read], communicator, tags)
        return pytree.tree_map_only(ir.IRNode, ir.TensorBox.create, result)


for _packet in (_OPS.scatter_heads, _OPS.gather_heads):
    _register_exchange(_packet.default)
    _register_exchange(_packet.uncaptured)
_register_wait(_OPS.wait_.default)
_register_wait(_OPS.wait_.uncaptured)


def _sources_of(target: Any) -> list[Any]:
    """The buffers that the submission behind ``target`` reads."""
    kernel = target
    while isinstance(kernel, (ir.TensorBox, ir.StorageBox)):
        kernel = kernel.data
    if isinstance(kernel, ir.MultiOutput):
        kernel = kernel.inputs[0]
    submits = isinstance(kernel, ir.FallbackKernel) and kernel.op_overload in _SUBMIT
    return list(kernel.inputs) if submits else []


def _tensor_box(node: Any) -> Any:
    return ir.TensorBox(node) if isinstance(node, ir.BaseView) else ir.TensorBox.create(node)
