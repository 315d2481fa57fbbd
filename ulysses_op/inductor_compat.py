"""Parts of Inductor whose names differ between the supported versions of torch (2.11 to 2.14)."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import custom_graph_pass, ir
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.dependencies import WeakDep
from torch._inductor.virtualized import V

# 2.11 and 2.12 ask a scheduler pass to be a graph pass; later versions have a class of their own.
CustomSchedulerPass = getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)

# Since 2.12; told whether the graph is for inference.
_InferenceAwarePass = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
InferenceAwarePass = _InferenceAwarePass or CustomGraphPass


def passes_of(setting: Any) -> tuple[Any, ...]:
    """The graph passes in one of Inductor's settings: since 2.13 it may hold several."""
    if isinstance(setting, (list, tuple)):
        return tuple(setting)
    return () if setting is None else (setting,)


def run_pass(graph_pass: Any, graph: Any, is_inference: bool) -> None:
    if _InferenceAwarePass is not None and isinstance(graph_pass, _InferenceAwarePass):
        graph_pass(graph, is_inference)
    else:
        graph_pass(graph)


def op_of(node: Any) -> Any:
    """The op that a scheduler node calls, None if it is no call of one."""
    kernel = getattr(node, "node", None)
    return kernel.op_overload if isinstance(kernel, ir.FallbackKernel) else None


def call_kernel(node: Any) -> None:
    """Have generated Python call the kernel of one of this package's ops, not the op, where a scheduler node does."""
    op = op_of(node)
    own = isinstance(op, torch._ops.OpOverload) and op.namespace == "ulysses_op"
    if own and hasattr(op, "python_kernel") and not V.graph.cpp_wrapper:
        node.node.python_kernel_name = f"torch.ops.{op}.python_kernel"


def arguments_of(node: Any) -> list[Any]:
    """The arguments of the op that a scheduler node calls, buffers in place of tensors."""
    arguments, _ = node.node.unflatten_args(node.node.inputs, node.node.constant_args)
    return list(arguments)


def made_by(node: Any) -> str | None:
    """The buffer that a scheduler node takes one result out of, None if it does something else."""
    kernel = getattr(node, "node", None)
    if not isinstance(kernel, ir.MultiOutput):
        return None
    parent: Any = kernel.inputs[0]
    return str(parent.get_name())


def buffers_of(node: Any) -> list[str]:
    return list(node.get_buffer_names())


def weak_dependency(earlier: str) -> WeakDep:
    """On the node that makes the buffer ``earlier``, an order without data. Inductor may drop one that names a buffer
    which the dependent node writes to in place, and looks that up: this names one that it does not write.
    """
    return WeakDep(earlier, mutating_buf=earlier, is_fake=True)
