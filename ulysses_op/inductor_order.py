"""Keeps the graph pass's order through Inductor's scheduler, which reorders by its own measures, and lends targets
where the buffers show that nothing uses them any more when peers write them next.

All dependencies that are added go from what Inductor created earlier to what it created later, as data does, so they
close no cycle. They are weak: they order nodes, and carry no data.

NOTE [Earlier submissions]: nothing in the data says that Q's and K's norms have to wait for V's submission, so passes
for peak memory, or for fewer CUDA graph partitions, may put it last. A dependency from the first submission of a group
to the kernels that only later submissions need says it, and prevents no fusion among them. Where the data is so much
that its projection was taken apart, Q has not to wait for K either: K's norm becomes a kernel of its own; except where
a product comes last, which hides Q's transfer and K's alike.

NOTE [Lending]: READY, which opens a target to the peers, stands behind everything that this rank has enqueued before
the group's first submission. So a result may be the target itself if each of its readers comes before the next group
that has the target, and if it leaves the graph in no output. Readers are looked for here, where buffers exist: a
pointwise node of the graph may be computed again in each kernel that uses it, wherever that is. A lent buffer's memory
is none that Inductor may give to another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch._inductor.virtualized import V

from .grouping import Report, logger
from .inductor_compat import arguments_of, buffers_of, made_by, op_of, weak_dependency

_OPS = torch.ops.ulysses_op
_SUBMIT = (_OPS.submit.default, _OPS.submit.uncaptured)
_WAIT = (_OPS.wait_.default, _OPS.wait_.uncaptured)
_FUNCTIONAL = (
    *(_OPS.scatter_heads.default, _OPS.scatter_heads.uncaptured),
    *(_OPS.gather_heads.default, _OPS.gather_heads.uncaptured),
)
_MM_INTO = _OPS.mm_into_.default
_COMMUNICATOR, _DIRECTION, _TAG, _TAGS = 1, 7, 8, 9  # among a submission's arguments


def keep_order(nodes: list[Any], report: Report | None) -> list[Any]:
    """Add dependencies to the scheduler's nodes and lend targets; the nodes in an order that obeys."""
    graph = _Nodes(nodes)
    exchanges = [node for node in graph.nodes if op_of(node) in (*_SUBMIT, *_WAIT, *_FUNCTIONAL)]
    if not exchanges:
        return nodes
    # Ranks whose measures differ would otherwise exchange in different orders.
    for earlier, later in pairwise(exchanges):
        graph.order(earlier, later)
    groups, uses = _groups(exchanges), _Uses(graph.nodes)
    for index, group in enumerate(groups):
        each = _is_split(report, index) and not _multiplies_last(graph, group)
        _earlier_submissions_first(graph, group, each)
        _keep_between(graph, group)
        _own_parts_last(graph, group, uses)
    _lend(graph, groups, uses, report)
    scheduler = V.graph.scheduler
    scheduler.nodes = nodes = scheduler.topological_sort_schedule(nodes)
    scheduler.compute_ancestors()  # fusion asks them whether it would close a cycle
    return nodes


class _Nodes:
    """The scheduler's nodes in the order of their creation."""

    def __init__(self, nodes: Sequence[Any]) -> None:
        self.nodes = sorted(nodes, key=_created)

    def order(self, earlier: Any, later: Any) -> None:
        if _created(earlier) < _created(later) and earlier.get_name() not in later.ancestors:
            later.add_fake_dep(weak_dependency(buffers_of(earlier)[0]))

    def between(self, first: Any, last: Any) -> list[Any]:
        return [node for node in self.nodes if _created(first) < _created(node) < _created(last)]


def _created(node: Any) -> int:
    # In a subgraph the names begin with its name.
    return min(int(name.rpartition("op")[2]) for name in node.get_operation_names())


class _Group:
    def __init__(self, submits: list[Any]) -> None:
        self.submits = submits
        self.wait: Any = None


def _groups(exchanges: Sequence[Any]) -> list[_Group]:
    """The groups in the order of their first submission; those whose wait_ is not in the graph are left out."""
    groups: list[_Group] = []
    open_groups: dict[str, _Group] = {}
    for node in exchanges:
        if op_of(node) in _SUBMIT:
            arguments = arguments_of(node)
            communicator, tag, tags = (arguments[index] for index in (_COMMUNICATOR, _TAG, _TAGS))
            group = open_groups.get(communicator)
            if group is None:
                group = open_groups[communicator] = _Group([])
                groups.append(group)
            group.submits.append(node)
            if tag == tags[-1]:
                del open_groups[communicator]
        elif op_of(node) in _WAIT:
            for group in groups:
                if group.wait is None and group.submits[0].get_name() in node.ancestors:
                    group.wait = node
    return [group for group in groups if group.wait is not None]


def _is_split(report: Report | None, index: int) -> bool:
    return report is not None and index < len(report.groups) and bool(report.groups[index].split)


def _multiplies_last(graph: _Nodes, group: _Group) -> bool:
    return any(op_of(node) is _MM_INTO for node in graph.between(group.submits[-1], group.wait))


def _earlier_submissions_first(graph: _Nodes, group: _Group, each: bool) -> None:
    """See NOTE [Earlier submissions]."""
    for index, submit in enumerate(group.submits[:-1] if each else group.submits[:1], 1):
        needed_later = set[str]().union(*(later.ancestors for later in group.submits[index:]))
        for node in graph.nodes:
            name = node.get_name()
            if name in needed_later and name not in submit.ancestors and submit.get_name() not in node.ancestors:
                graph.order(submit, node)


def _keep_between(graph: _Nodes, group: _Group) -> None:
    """Kernels that are never fused stay where they run while the group's data travels."""
    last = group.submits[-1]
    for node in graph.between(last, group.wait):
        ours = op_of(node) in (*_SUBMIT, *_WAIT) or made_by(node) is not None
        if node.is_extern() and not ours and node.get_name() not in last.ancestors:
            graph.order(last, node)
            graph.order(node, group.wait)


def _own_parts_last(graph: _Nodes, group: _Group, uses: _Uses) -> None:
    """What this rank writes into the group's results by itself is computed behind the last submission."""
    last, between = group.submits[-1], graph.between(group.submits[-1], group.wait)
    results = {name for submit in group.submits for name in uses.names(submit)}
    writers = [node for node in between if results.intersection(uses.written_by(node))]
    needed = set[str]().union(*(node.ancestors for node in writers)) | {node.get_name() for node in writers}
    for node in between:
        if node.get_name() in needed and node.get_name() not in last.ancestors:
            graph.order(last, node)


def _lend(graph: _Nodes, groups: Sequence[_Group], uses: _Uses, report: Report | None) -> None:
    """See NOTE [Lending]."""
    lent: list[str] = []
    for index, group in enumerate(groups):
        for submit in group.submits:
            target = _target(submit)
            again = [
                later.submits[0]
                for later in groups[index + 1 :]
                if any(_target(other) == target for other in later.submits)
            ]
            readers = uses.of(submit, group.wait)
            if readers is None or (again and any(_created(reader) >= _created(again[0]) for reader in readers)):
                continue
            if again:
                for reader in readers:
                    graph.order(reader, again[0])
            submit.node.constant_args = (*submit.node.constant_args[:-1], True)  # its last argument, ``lend``
            V.graph.never_reuse_buffers.update(uses.names(submit))
            lent.append(arguments_of(submit)[_TAG])
            if report is not None and index < len(report.groups):
                report.groups[index].lent.append(lent[-1])
    logger.info("lent: %s", ", ".join(lent) or "nothing")


def _target(submit: Any) -> tuple[Any, ...]:
    """What two submissions share if they use the same target."""
    arguments = arguments_of(submit)
    return (*(arguments[i] for i in (_COMMUNICATOR, _DIRECTION, _TAG)), submit.node.inputs[0].get_dtype())


class _Uses:
    """Who reads or writes the memory of a buffer, and which buffers leave the graph."""

    def __init__(self, nodes: Iterable[Any]) -> None:
        self.real = V.graph.scheduler.mutation_real_name
        self.outputs = {self.real.get(name, name) for name in V.graph.get_output_names()}
        self.nodes_of: dict[str, list[Any]] = {}
        self.aliased: set[str] = set()
        self.made: dict[str, list[Any]] = {}
        for node in nodes:
            for name in {self.real.get(read.name, read.name) for read in node.read_writes.reads}:
                self.nodes_of.setdefault(name, []).append(node)
            parent = made_by(node)
            if parent is not None:
                self.made.setdefault(parent, []).append(node)
            if op_of(node) not in _WAIT and parent is None:
                for output in node.get_outputs():
                    self.aliased.update(self.real.get(name, name) for name in output.get_aliases())

    def names(self, submit: Any) -> set[str]:
        """The buffers that are the submission's result."""
        own = buffers_of(submit)
        return {*own, *(name for buffer in own for made in self.made.get(buffer, ()) for name in buffers_of(made))}

    def written_by(self, node: Any) -> set[str]:
        """The buffers that are not the node's own, and that it writes to."""
        written = (name for output in node.get_outputs() for name in output.get_mutations())
        return {self.real.get(name, name) for name in written}

    def of(self, submit: Any, wait: Any) -> list[Any] | None:
        """The nodes that use the result, other than its own wait_; None where others may without being seen."""
        names = self.names(submit)
        if names & self.outputs or names & self.aliased:
            return None
        parts = {id(made) for name in names for made in self.made.get(name, ())}
        found = {id(node): node for name in names for node in self.nodes_of.get(name, ())}
        return [node for key, node in found.items() if key not in parts and node is not wait]
