"""The graph pass that makes functional exchanges asynchronous: submissions where their inputs are ready, one joint
wait.

It runs after AOTAutograd, on the graph that Inductor is about to lower. Exchanges of one communicator whose results
meet in one node (attention) become a group: V's submission behind V's projection, then those whose inputs take more
work, the last one final, then one ``wait_`` before the first use of any result.

    before: mm, norm + RoPE of q and k, scatter_heads(q), scatter_heads(k), scatter_heads(v), attention
    after:  mm, submit(v), norm + RoPE of q and k, submit(q), submit(k), wait_, attention

Results are owned by the graph, as those of the functional ops are. The order follows from the graph's structure and the
ops' arguments alone, so it is the same on every rank.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, Node

logger = logging.getLogger(__name__)

_SCATTER = torch.ops.ulysses_op.scatter_heads.default
_SUBMIT = torch.ops.ulysses_op.submit.default
_WAIT = torch.ops.ulysses_op.wait_.default


@dataclass
class Group:
    """Exchanges that became one group, in the order of submission, as the names of their nodes."""

    members: list[str]
    consumer: str


@dataclass
class Report:
    """What the pass did to a graph. ``matched`` is the number of groups; ``left`` says of each exchange that stayed
    as it was why it did."""

    groups: list[Group] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    @property
    def matched(self) -> int:
        return len(self.groups)


def group_exchanges(graph: Graph) -> Report:
    """Rewrite ``graph`` in place; see above."""
    report = Report()
    found = _find(graph, report)
    if found and (mutation := _mutation_inside(graph)) is not None:
        for members, _ in found:
            report.left.update({member.name: f"{mutation.name} writes in place before it" for member in members})
        found = []
    after: dict[Node, Node] = {}  # a node that uses results, and the wait_ that it has to follow
    waits = []
    for members, consumer in found:
        members = _by_readiness(members)
        report.groups.append(Group([member.name for member in members], consumer.name))
        waits.append(_rewrite(graph, members, after))
    if waits:
        _reorder(graph, waits, after)
        graph.lint()
    for name, why in report.left.items():
        logger.info("left alone: %s: %s", name, why)
    for group in report.groups:
        logger.info("grouped for %s: %s", group.consumer, ", ".join(group.members))
    return report


def _find(graph: Graph, report: Report) -> list[tuple[list[Node], Node]]:
    """Groups in program order, each with the node in which results of two of its members first meet."""
    groups: list[tuple[list[Node], Node]] = []
    pending: dict[Any, list[Node]] = {}
    derived: dict[Node, frozenset[Node]] = {}  # the pending exchanges that a node's value comes from

    def close(communicator: Any, consumer: Node | None, why: str) -> None:
        members = pending.pop(communicator)
        if consumer is not None and len(members) > 1:
            groups.append((members, consumer))
        else:
            report.left.update({member.name: why for member in members})

    for node in graph.nodes:
        sources = frozenset[Node]().union(*(derived.get(used, frozenset()) for used in node.all_input_nodes))
        for communicator in {source.args[1] for source in sources}:
            mine = [member for member in pending.get(communicator, ()) if member in sources]
            if len(mine) > 1:
                close(communicator, node, "no other exchange meets its result")
            elif mine and node.target is _SCATTER:
                close(communicator, None, "another exchange needs its result")
        live = {member for members in pending.values() for member in members}
        derived[node] = sources & live
        if node.target is _SCATTER:
            pending.setdefault(node.args[1], []).append(node)
            derived[node] = frozenset((node,))
    for communicator in list(pending):
        close(communicator, None, "its result meets no other exchange's")
    return groups


def _mutation_inside(graph: Graph) -> Node | None:
    """A node that writes to memory other nodes read, and is not part of the graph's final copies to its inputs."""
    tail = True
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if not _writes(node):
            tail = False
        elif not (tail and node.target is torch.ops.aten.copy_.default):
            return node
    return None


def _writes(node: Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name() == "triton_kernel_wrapper_mutation"
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        used = stack.pop()
        if used not in found:
            found.add(used)
            stack.extend(used.all_input_nodes)
    return found


def _is_view(node: Node) -> bool:
    if node.op != "call_function":
        return True
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target.is_view)


def _by_readiness(members: Sequence[Node]) -> list[Node]:
    """The members whose inputs take the least work of their own first; program order breaks ties."""
    ancestors = [_ancestors(member) for member in members]

    def own_work(index: int) -> int:
        others = set[Node]().union(*(a for other, a in enumerate(ancestors) if other != index))
        return sum(not _is_view(node) for node in ancestors[index] - others)

    order = sorted(range(len(members)), key=lambda index: (own_work(index), index))
    return [members[index] for index in order]


def _rewrite(graph: Graph, members: Sequence[Node], after: dict[Node, Node]) -> Node:
    """Put submissions and a wait_ in place of functional exchanges; the wait_."""
    submits = []
    for tag, member in enumerate(members):
        with graph.inserting_before(member):
            arguments = (*member.args, "scatter_heads", str(tag), tag == len(members) - 1)
            submit = graph.call_function(_SUBMIT, arguments)
        submit.meta.update(member.meta)
        submits.append(submit)
    with graph.inserting_after(members[-1]):
        wait = graph.call_function(_WAIT, (submits, [], members[0].args[1]))
    wait.meta["val"] = None
    for member, submit in zip(members, submits, strict=True):
        for user in list(member.users):
            if user is not wait:
                after[user] = wait
        member.replace_all_uses_with(submit, delete_user_cb=lambda user: user is not wait)
        graph.erase_node(member)
    return wait


def _reorder(graph: Graph, waits: Sequence[Node], after: dict[Node, Node]) -> None:
    """Each submission, in its order, as soon as what it needs is there; everything else where it was, behind what it
    needs.
    """
    original = list(graph.nodes)
    position = {node: index for index, node in enumerate(original)}
    order: list[Node] = []
    placed: set[Node] = set()

    def needs(node: Node) -> list[Node]:
        used: Iterable[Node] = node.all_input_nodes
        return sorted({*used, *([after[node]] if node in after else [])} - placed, key=position.__getitem__)

    def place(node: Node) -> None:
        stack = [node]
        while stack:
            top = stack[-1]
            missing = needs(top)
            if missing:
                stack.append(missing[0])
                continue
            stack.pop()
            if top not in placed:
                placed.add(top)
                order.append(top)

    for node in original:
        if node.op == "placeholder":
            place(node)
    for wait in waits:
        submits: Any = wait.args[0]
        for submit in submits:
            place(submit)
        place(wait)
    for node in original:
        place(node)
    for before, node in pairwise(order):
        before.append(node)
