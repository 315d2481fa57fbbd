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

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from .fx_nodes import ancestors, costs, descendants, is_heavy, write_inside
from .fx_order import Flight, reorder
from .own_parts import compute_own_parts_last
from .projections import split_output_projections, split_projections

logger = logging.getLogger(__name__)

_SCATTER = torch.ops.ulysses_op.scatter_heads.default
_GATHER = torch.ops.ulysses_op.gather_heads.default


@dataclass
class Group:
    """Exchanges that became one group, in the order of submission, as the names of their nodes; their tags; which of
    those are lent, the others being copied out of the buffers that peers write; the projections that were taken apart
    around it; and what is computed in two parts, this rank's own one last and in place."""

    members: list[str]
    communicator: str
    tags: list[str] = field(default_factory=list)
    lent: list[str] = field(default_factory=list)
    split: list[str] = field(default_factory=list)
    own_last: list[str] = field(default_factory=list)


@dataclass
class Report:
    """What the pass did to a graph. ``matched`` is the number of groups; ``left`` says of each exchange that stayed
    as it was why it did."""

    groups: list[Group] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    @property
    def matched(self) -> int:
        return len(self.groups)


def group_exchanges(
    graph: Graph,
    uncaptured: Callable[[str], bool] = lambda communicator: False,
    rank_of: Callable[[str], int] | None = None,
) -> Report:
    """Rewrite ``graph`` in place; see above.

    uncaptured: of a communicator's name, whether its exchanges are to be left out of CUDA graphs.
    rank_of: of a communicator's name, this rank's number in its group; None leaves projections whole.
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
    split = split_projections(graph, flights) if rank_of is not None else []
    reorder(graph, flights)
    own_last: list[list[str]] = []
    if rank_of is not None:
        split += split_output_projections(graph, flights, rank_of)
        own_last = compute_own_parts_last(graph, flights, rank_of)
    for names, group in zip(split, 2 * report.groups, strict=False):
        group.split += names
    for names, group in zip(own_last, report.groups, strict=False):
        group.own_last = names
    _assign_tags(graph, flights, report)
    graph.lint()
    for group in report.groups:
        logger.info("one group: %s", ", ".join(group.members))
        for name in group.split:
            logger.info("computed in parts: %s", name)
        for name in group.own_last:
            logger.info("own part last: %s", name)
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
    position = {node: index for index, node in enumerate(exchanges[0].graph.nodes)}
    for node in exchanges:
        if node.target is _GATHER:
            siblings.setdefault((node.args[1], _source(node, position)), []).append(node)
    groups = []
    for members in siblings.values():
        work = dict(zip(members, _own_work(members, descendants), strict=True))
        members = sorted(members, key=lambda member: -work[member])
        if len(members) > 1 and work[members[0]] > 0:
            groups += [members[:-1], members[-1:]]
        else:
            groups.append(members)
    return groups


def _source(gather: Node, position: dict[Node, int]) -> Node | None:
    """The last kernel of its own that a gather's input comes from; None for a scatter."""
    if gather.target is not _GATHER:
        return None
    return max((used for used in ancestors([gather]) if is_heavy(used)), key=position.__getitem__, default=None)


def _own_work(members: Sequence[Node], closure: Callable[[list[Node]], set[Node]]) -> list[int]:
    """How many nodes that cost something each member alone comes from, or leads to."""
    closures = [closure([member]) for member in members]
    counts = []
    for index, own in enumerate(closures):
        others = set[Node]().union(*(other for i, other in enumerate(closures) if i != index))
        counts.append(sum(costs(node) for node in own - others))
    return counts


def _in_order_of_dependency(groups: list[list[Node]]) -> list[list[Node]]:
    """Groups behind those whose results they need; program order among others. Groups that need each other are taken
    apart.
    """
    position = {node: index for index, node in enumerate(groups[0][0].graph.nodes)}
    needed = [ancestors(members) for members in groups]
    # A gather's place is that of what it gathers from: those that travel first come first.
    place = [min(position[_source(m, position) or m] for m in members) for members in groups]
    left = sorted(range(len(groups)), key=place.__getitem__)
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
    """Put submissions and a wait_ in place of functional exchanges. What is submitted has its last use in the wait_:
    Inductor lets ops write in place to a value that is not used behind them.
    """
    submit_op = _overload(torch.ops.ulysses_op.submit.default, uncaptured)
    wait_op = _overload(torch.ops.ulysses_op.wait_.default, uncaptured)
    submits, sources = [], [member.args[0] for member in members]
    for member in members:
        x, communicator, world_size, rank, heads, seq_lens, *replicas = member.args
        direction = "scatter_heads" if member.target is _SCATTER else "gather_heads"
        exchange = (x, communicator, world_size, rank, heads, seq_lens, bool(replicas and replicas[0]))
        with graph.inserting_before(member):
            submit = graph.call_function(submit_op, (*exchange, direction, "", [], member.name, True, False))
        submit.meta.update(member.meta)
        submits.append(submit)
    last = max(members, key=list(graph.nodes).index)
    with graph.inserting_after(last):
        # By name: torch.cond's lowering (2.12 to 2.14) takes a positional argument that is written for one tensor.
        arguments: dict[str, Any] = {
            "targets": submits,
            "sources": sources,
            "communicator": members[0].args[1],
            "tags": [],
        }
        wait = graph.call_function(wait_op, (), arguments)
    wait.meta["val"] = None
    for member, submit in zip(members, submits, strict=True):
        member.replace_all_uses_with(submit)
        graph.erase_node(member)
    return Flight(submits, wait)


def _assign_tags(graph: Graph, flights: Sequence[Flight], report: Report) -> None:
    """Tags, and so targets, are shared by groups of which one is waited for before the other begins."""
    groups = {flight.submits[0]: (flight, group) for flight, group in zip(flights, report.groups, strict=True)}
    ending = {flight.wait: group for flight, group in zip(flights, report.groups, strict=True)}
    in_use: dict[str, set[str]] = {}
    for node in graph.nodes:
        if node in groups:
            flight, group = groups[node]
            taken = in_use.setdefault(group.communicator, set())
            free = (tag for tag in map(str, itertools.count()) if tag not in taken)
            group.tags = list(itertools.islice(free, len(flight.submits)))
            taken.update(group.tags)
            for submit, tag in zip(flight.submits, group.tags, strict=True):
                submit.update_arg(8, tag)
                submit.update_arg(9, group.tags)
            flight.wait.update_kwarg("tags", group.tags)
        elif node in ending:
            in_use[ending[node].communicator] -= set(ending[node].tags)
