"""The order of a graph whose exchanges are submitted and waited for.

NOTE [Order]: group by group, each submission is placed as soon as what it needs is there. Behind a group's last
submission comes the work that the program has before it and that neither what is placed nor the next group needs: it
runs while the data travels. A wait_ is placed when the first use of a result is, and then behind everything else that
this use needs. So nothing is put off for longer than until the next group, and the order follows from the graph alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from torch.fx import Graph, Node

from .fx_nodes import keeps_its_turn, writes


@dataclass
class Flight:
    """A group's submissions, in order, and the wait_ that completes it."""

    submits: list[Node]
    wait: Node


def reorder(graph: Graph, flights: Sequence[Flight]) -> None:
    """Rearrange the nodes of ``graph``; ``flights`` are ordered by dependency. See NOTE [Order]."""
    _Order(graph, flights).rearrange()


class _Order:
    def __init__(self, graph: Graph, flights: Sequence[Flight]) -> None:
        self.nodes = list(graph.nodes)
        self.flights = flights
        self.position = {node: index for index, node in enumerate(self.nodes)}
        self.waits = {flight.wait: index for index, flight in enumerate(flights, 1)}
        self.needs = {node: list(node.all_input_nodes) for node in self.nodes}
        for flight in flights:
            for user in {user for submit in flight.submits for user in submit.users} - {flight.wait}:
                self.needs[user].append(flight.wait)
        # What writes to the inputs at the end comes behind whatever reads them.
        self.last = [node for node in self.nodes if node.op == "output" or (writes(node) and node not in self.waits)]
        turns = [node for node in self.nodes if keeps_its_turn(node) and node not in self.waits]
        for earlier, node in pairwise(node for node in turns if node not in self.last):
            self.needs[node].append(earlier)
        self.order: dict[Node, None] = {}
        self.ranks: dict[Node, int] = {}

    def rearrange(self) -> None:
        last = set(self.last)
        for node in self.nodes:
            if node.op == "placeholder":
                self.order[node] = None
        for index, flight in enumerate(self.flights, 1):
            for submit in flight.submits:
                self._place([submit])
            before = max(self.position[submit] for submit in flight.submits)
            self.ranks.clear()
            elsewhere = self.order.keys() | last | self._later(self.flights[index:])
            idle = [node for node in self.nodes[:before] if node not in elsewhere]
            self._place([node for node in idle if self._rank(node) == 0])
        self._place([node for node in self.nodes if node not in last])
        for node in self.last:
            self._place([node])
        for earlier, node in pairwise(self.order):
            earlier.append(node)

    def _later(self, flights: Sequence[Flight]) -> set[Node]:
        """What keeps the order that it has as part of ``flights``: their submissions, and what these need if they are
        next and need no wait.
        """
        submits = [submit for flight in flights for submit in flight.submits]
        free = takewhile(lambda flight: not any(self._rank(submit) for submit in flight.submits), flights)
        return {*submits, *self._missing([submit for flight in free for submit in flight.submits])}

    def _place(self, nodes: Sequence[Node]) -> None:
        """Place ``nodes`` and what they need, what needs the fewest waits first, each wait as late as possible."""
        missing = self._missing(nodes)
        self.ranks.clear()
        for node in sorted(missing, key=lambda node: (self._rank(node), node not in self.waits, self.position[node])):
            self.order[node] = None

    def _missing(self, nodes: Sequence[Node]) -> list[Node]:
        found: dict[Node, None] = {}
        stack = list(nodes)
        while stack:
            node = stack.pop()
            if node not in found and node not in self.order:
                found[node] = None
                stack.extend(self.needs[node])
        return list(found)

    def _rank(self, node: Node) -> int:
        """The last of the waits that ``node`` needs and that is not placed yet, counted from 1; 0 if it needs none."""
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self.ranks or top in self.order:
                stack.pop()
                continue
            unknown = [used for used in self.needs[top] if used not in self.ranks and used not in self.order]
            if unknown:
                stack.extend(unknown)
                continue
            stack.pop()
            needed = (self.ranks[used] for used in self.needs[top] if used in self.ranks)
            self.ranks[top] = max(self.waits.get(top, 0), max(needed, default=0))
        return self.ranks.get(node, 0)
