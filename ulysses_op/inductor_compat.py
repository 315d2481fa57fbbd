"""Parts of Inductor whose names differ between the supported versions of torch (2.11 to 2.14)."""

from __future__ import annotations

from typing import Any

from torch._inductor import custom_graph_pass, ir
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.dependencies import WeakDep

# 2.11 asks a scheduler pass to be a graph pass; later versions have a class of their own.
CustomSchedulerPass = getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)


def op_of(node: Any) -> Any:
    """The op that a scheduler node calls, None if it is no call of one."""
    kernel = getattr(node, "node", None)
    return kernel.op_overload if isinstance(kernel, ir.FallbackKernel) else None


def made_by(node: Any) -> str | None:
    """The buffer that a scheduler node takes one result out of, None if it does something else."""
    kernel = getattr(node, "node", None)
    if not isinstance(kernel, ir.MultiOutput):
        return None
    parent: Any = kernel.inputs[0]
    return str(parent.get_name())


def buffers_of(node: Any) -> list[str]:
    return list(node.get_buffer_names())


def weak_dependency(earlier: str, later: str) -> WeakDep:
    """Of the node that makes the buffer ``later`` on that which makes ``earlier``, an order without data."""
    return WeakDep(earlier, mutating_buf=later, is_fake=True)
