"""Keeps the graph pass's order through Inductor's scheduler, which reorders by its own measures.

NOTE [First submission]: nothing in the data says that Q's and K's norms have to wait for V's submission, so passes for
peak memory, or for fewer CUDA graph partitions, may put it last. A weak dependency, without data, from the first
submission of a group to the kernels that only later submissions need says it, and prevents no fusion among them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.dependencies import WeakDep
from torch._inductor.virtualized import V

_SUBMIT = torch.ops.ulysses_op.submit.default
_WAIT = torch.ops.ulysses_op.wait_.default


def keep_order(nodes: list[Any]) -> list[Any]:
    """Add the weak dependencies to the scheduler's nodes; the nodes in an order that obeys them."""
    groups = _groups(nodes)
    position = {node: index for index, node in enumerate(nodes)}
    for submits in groups:
        first, later = submits[0], submits[1:]
        buffer = next(iter(first.get_buffer_names()))
        needed_later = set[str]().union(*(submit.ancestors for submit in later))
        for node in nodes:
            name = node.get_name()
            if name not in needed_later or name in first.ancestors or first.get_name() in node.ancestors:
                continue
            # All dependencies agree with the order of the list, so those of several groups close no cycle.
            if position[node] < position[first]:
                continue
            node.add_fake_dep(WeakDep(buffer, mutating_buf=next(iter(node.get_buffer_names())), is_fake=True))
    if groups:
        scheduler = V.graph.scheduler
        nodes = scheduler.topological_sort_schedule(nodes)
        scheduler.nodes = nodes
        scheduler.compute_ancestors()  # fusion asks them whether it would close a cycle
    return nodes


def _groups(nodes: list[Any]) -> list[list[Any]]:
    """The submissions of each group, in their order. A submission is final where its last argument says so."""
    groups: list[list[Any]] = []
    open_groups: dict[str, list[Any]] = {}  # by communicator, the first of the arguments that are no tensors
    for node in nodes:
        kernel = getattr(node, "node", None)
        if not isinstance(kernel, ir.FallbackKernel) or kernel.op_overload is not _SUBMIT:
            continue
        communicator, final = kernel.constant_args[0], kernel.constant_args[-1]
        open_groups.setdefault(communicator, []).append(node)
        if final:
            groups.append(open_groups.pop(communicator))
    return groups
