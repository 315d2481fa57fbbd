"""The graph pass that makes functional exchanges asynchronous: submissions where their inputs are ready, one joint
wait.

It runs after AOTAutograd, on the graph that Inductor is about to lower. Scatters whose results meet (in attention)
become a group: V's submission behind V's projection, then those whose inputs take more work, the last one final, one
wait_ before the first use of any result. Gathers of the results of one node (attention, its backward) go in two groups:
the last one travels while the others are worked on. Any other exchange is a group of its own.

    before: mm, norm + RoPE of q and k, scatter_heads(q), scatter_heads(k), scatter_heads(v), attention
    after:  mm, submit(v), norm + RoPE of q and k, submit(q), submit(k), wait_, attention

The order follows from the graph's structure and the ops' arguments alone, so it is the same on every rank. Results are
owned here; inductor_order.py lends where it can.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from .fx_nodes import ancestors, descendants, is_heavy, is_view, write_inside
from .fx_order import Flight, reorder

logger = logging.getLogger(__name__)

_SCATTER = torch.ops.ulysses_op.scatter_heads.default
_GATHER = torch.ops.ulysses_op.gather_heads.default


@dataclass
class Group:
    """Exchanges that became one group, in the order of submission, as the names of their nodes; their tags; and which
    of those are lent, the others being copied out of the buffers that peers write."""

    members: list[str]
    communicator: str
    tags: list[str] = field(default_factory=list)
    lent: list[str] = field(default_factory=list)


@dataclass
class Report:
    """What the pass did to a graph. ``matched`` is the number of groups; ``left`` says of each exchange that stayed
    as it was why it did."""

    groups: list[Group] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    @property
    def matched(self) -> int:
        return len(self.groups)


def group_exchanges(graph: Graph, uncaptured: Callable[[str], bool] = lambda communicator: False) -> Report:
    """Rewrite ``graph`` in place; see above.

    uncaptured: of a communicator's name, whether its exchanges are to be left out of CUDA graphs.
    """
    report = Report()
    exchanges = [node for node in graph.nodes if node.target in (_SCATTER, _GATHER)]
    if not exchanges:
        return report
    write = write_inside(graph)
    if write is not None:
        report.left = {node.name: f"{write.name} writes in place in the same graph" for node in exchanges}
        for node in exchanges:
            if uncaptured(node.args[1]):
                node.target = _overload(node.target, True)
            logger.info("left alone: %s: %s", node.name, report.left[node.name])
        return report
    flights = []
    for members in _in_order_of_dependency(_scatter_groups(graph) + _gather_groups(exchanges)):
        communicator = str(members[0].args[1])
        report.groups.append(Group([member.name for member in members], communicator))
        flights.append(_rewrite(graph, members, uncaptured(communicator)))
    reorder(graph, flights)
    _assign_tags(graph, flights, report)
    graph.lint()
    for group in report.groups:
        logger.info("one group: %s", ", ".join(group.members))
    return report


# What belongs together.


def _scatter_groups(graph: Graph) -> list[list[Node]]:
    """Scatters of one communicator whose results meet in a node, or meet what came from such a meeting."""
    groups: list[list[Node]] = []
    pending: list[Node] = []
    latest: dict[Any, tuple[list[Node], int]] = {}  # by communicator: its last group, and where that one first met
    position = {node: index for index, node in enumerate(graph.nodes)}
    derived: dict[Node, frozenset[Node]] = {}  # the scatters of these two that a value comes from

    def close(members: list[Node], met_at: int) -> None:
        for member in members:
            pending.remove(member)
        groups.append(members)
        latest[members[0].args[1]] = (groups[-1], met_at)

    for node in graph.nodes:
        live = {*pending, *(member for members, _ in latest.values() for member in members)}
        sources = frozenset[Node]().union(*(derived.get(used, frozenset()) for used in node.all_input_nodes)) & live
        waiting = [member for member in pending if member in sources]
        for communicator in {member.args[1] for member in waiting}:
            mine = [member for member in waiting if member.args[1] == communicator]
            earlier, met_at = latest.get(communicator, ([], -1))
            if node.target in (_SCATTER, _GATHER):
                for member in mine:  # it needs their results, so it is none of their group
                    close([member], position[node])
            elif len(mine) > 1:
                close(mine, position[node])
            elif sources.intersection(earlier) and position[mine[0]] < met_at:
                pending.remove(mine[0])
                earlier.append(mine[0])
        derived[node] = frozenset((node,)) if node.target is _SCATTER else sources
        if node.target is _SCATTER:
            pending.append(node)
    return groups + [[member] for member in pending]


def _gather_groups(exchanges: Sequence[Node]) -> list[list[Node]]:
    """Gathers of results of one node. Where they are worked on apart, the last of them is a group of its own."""
    siblings: dict[Any, list[Node]] = {}
    order: dict[Node, int] = {}
    for node in exchanges[0].graph.nodes:
        order[node] = len(order)
    for node in exchanges:
        if node.target is _GATHER:
            source = max((used for used in ancestors([node]) if is_heavy(used)), key=order.__getitem__, default=None)
            siblings.setdefault((node.args[1], source), []).append(node)
    groups = []
    for members in siblings.values():
        work = dict(zip(members, _own_work(members, descendants), strict=True))
        members = sorted(members, key=lambda member: -work[member])
        if len(members) > 1 and work[members[0]] > 0:
            groups += [members[:-1], members[-1:]]
        else:
            groups.append(members)
    return groups


def _own_work(members: Sequence[Node], closure: Callable[[list[Node]], set[Node]]) -> list[int]:
    """How many nodes that cost something each member alone comes from, or leads to."""
    closures = [closure([member]) for member in members]
    counts = []
    for index, own in enumerate(closures):
        others = set[Node]().union(*(other for i, other in enumerate(closures) if i != index))
        counts.append(sum(not is_view(node) for node in own - others))
    return counts


def _in_order_of_dependency(groups: list[list[Node]]) -> list[list[Node]]:
    """Groups behind those whose results they need; program order among others. Groups that need each other are taken
    apart.
    """
    position = {node: index for index, node in enumerate(groups[0][0].graph.nodes)}
    needed = [ancestors(members) for members in groups]
    left = sorted(range(len(groups)), key=lambda index: min(map(position.__getitem__, groups[index])))
    order: list[list[Node]] = []
    while left:
        for index in left:
            if not any(needed[index].intersection(groups[other]) for other in left if other != index):
                left.remove(index)
                order.append(_by_readiness(groups[index]))
                break
        else:
            apart = [[member] for index in left for member in groups[index]]
            return order + sorted(apart, key=lambda members: position[members[0]])
    return order


def _by_readiness(members: list[Node]) -> list[Node]:
    """Scatters whose inputs take the least work of their own come first. Gathers are in order already."""
    if members[0].target is _GATHER:
        return members
    program = sorted(members, key=list(members[0].graph.nodes).index)
    work = dict(zip(program, _own_work(program, ancestors), strict=True))
    return sorted(program, key=lambda member: work[member])


# What they become.


def _overload(op: Any, uncaptured: bool) -> Any:
    packet = op.overloadpacket
    return packet.uncaptured if uncaptured else packet.default


def _rewrite(graph: Graph, members: Sequence[Node], uncaptured: bool) -> Flight:
    """Put submissions and a wait_ in place of functional exchanges."""
    submit_op = _overload(torch.ops.ulysses_op.submit.default, uncaptured)
    wait_op = _overload(torch.ops.ulysses_op.wait_.default, uncaptured)
    submits = []
    for index, member in enumerate(members):
        x, communicator, world_size, rank, heads, seq_lens, *replicas = member.args
        direction = "scatter_heads" if member.target is _SCATTER else "gather_heads"
        exchange = (x, communicator, world_size, rank, heads, seq_lens, bool(replicas and replicas[0]))
        with graph.inserting_before(member):
            submit = graph.call_function(submit_op, (*exchange, direction, "", index == len(members) - 1, False))
        submit.meta.update(member.meta)
        submits.append(submit)
    last = max(members, key=list(graph.nodes).index)
    with graph.inserting_after(last):
        wait = graph.call_function(wait_op, (submits, [], members[0].args[1], []))
    wait.meta["val"] = None
    for member, submit in zip(members, submits, strict=True):
        member.replace_all_uses_with(submit)
        graph.erase_node(member)
    return Flight(submits, wait)


def _assign_tags(graph: Graph, flights: Sequence[Flight], report: Report) -> None:
    """Tags, and so targets, are shared by groups of which one is waited for before the other begins."""
    groups = {id(flight): group for flight, group in zip(flights, report.groups, strict=True)}
    by_submit = {submit: flight for flight in flights for submit in flight.submits}
    by_wait = {flight.wait: flight for flight in flights}
    in_use: dict[Any, set[str]] = {}
    for node in graph.nodes:
        if node in by_submit:
            flight = by_submit[node]
            taken = in_use.setdefault(node.args[1], set())
            tag = next(tag for tag in map(str, range(len(taken) + 1)) if tag not in taken)
            taken.add(tag)
            node.update_arg(8, tag)
            groups[id(flight)].tags.append(tag)
        elif node in by_wait:
            group = groups[id(by_wait[node])]
            node.update_arg(3, list(group.tags))
            in_use[node.args[2]] -= set(group.tags)
