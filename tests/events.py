"""What Inductor makes of a graph, as a list of events that does not depend on names or on torch's version.

`parse` reads the generated wrapper, which is Python for C++ kernels as for Triton's. `schedule` reads the scheduler's
nodes, which tell what needs what, and are one each where the C++ wrapper has one kernel for several.

The events: "mm", "bmm" and so on for products of a library; "kernel" for a generated kernel; "attention",
"attention_backward"; "scatter_heads", "gather_heads"; "submit scatter 0", with "final" and "lent" where they apply;
"wait_ 0 1 2", with "?" for a target that is not that tag's own; another op's name. An op's overloads are one event.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ulysses_op.inductor_compat import arguments_of

# What an event says of a submission's arguments; those before may be symbolic.
_TOLD = ("direction", "tag", "tags", "lend")
# Products under one name, whatever they add.
_EXTERN = {"addmm": "mm", "baddbmm": "bmm"}
_VIEWS = ("reinterpret_tensor", "torch.as_strided", "alloc_from_pool")


def groups_of(events: Sequence[str]) -> list[list[int]]:
    """The positions of each group's submissions."""
    found: list[list[int]] = [[]]
    for position, text in enumerate(events):
        if text.startswith("submit "):
            found[-1].append(position)
            if "final" in text.split():
                found.append([])
    return found if found[-1] else found[:-1]


@dataclass(frozen=True)
class Wrapper:
    """The calls of one graph's code; ``kind`` is "inference", "forward" or "backward"."""

    kind: str
    events: list[str]

    def disorder(self) -> list[str]:
        """Where groups are not in order: their submissions one after another, the last one final, then one wait_ for
        their tags, which are not submitted again before it. Groups may overlap otherwise."""
        found = []
        members: list[tuple[str, str]] = []  # direction and tag of the group whose final submission is to come
        flying: list[list[tuple[str, str]]] = []
        for position, text in enumerate(self.events):
            kind, *words = text.split()
            if kind == "submit":
                member = words[0], words[1]
                if member in [*members, *(other for group in flying for other in group)]:
                    found.append(f"{text} ({position}) while that tag is under way")
                members.append(member)
                if "final" in words:
                    flying.append(members)
                    members = []
            elif kind == "wait_":
                complete = [group for group in flying if [tag for _, tag in group] == words]
                if complete:
                    flying.remove(complete[0])
                else:
                    found.append(f"{text} ({position}) for no group that is under way")
        for group in [*flying, *([members] if members else [])]:
            found.append(f"no wait_ for {', '.join(' '.join(member) for member in group)}")
        return found


@dataclass(frozen=True)
class Schedule:
    """The scheduler's order. ``needs`` has for each event the positions of those that its operands come from, through
    others too."""

    events: list[str]
    needs: list[frozenset[int]]

    @property
    def kernels(self) -> int:
        return self.events.count("kernel")

    def overtaking(self, every: bool) -> list[str]:
        """Work ahead of a submission that neither it nor an earlier one of its group needs, while a later one does:
        none where V leaves first. Of the first submission, any work; of the others if ``every``, libraries' kernels:
        projections, behind which Q need not wait."""
        found = []
        for group in groups_of(self.events):
            for count in range(1, len(group) if every else 2):
                submit = group[count - 1]
                needed = self._needs_of(group[count:]) - self._needs_of(group[:count])
                ahead = (position for position in sorted(needed) if position < submit)
                found += [self._ahead(p, submit) for p in ahead if count == 1 or self.events[p] != "kernel"]
        return found

    def hasty(self) -> list[str]:
        """Groups of scatters whose first submission is not the one that needs the least."""
        found = []
        for first, *later in groups_of(self.events):
            least = min((len(self.needs[submit]) for submit in later), default=len(self.needs[first]))
            if self.events[first].startswith("submit scatter") and len(self.needs[first]) > least:
                found.append(f"{self.events[first]} ({first}) needs {len(self.needs[first])} events, another {least}")
        return found

    def idling(self) -> list[str]:
        """Kernels of libraries that could run while data travels and do not: ahead of a submission that does not need
        them, with nothing under way; or behind a wait_ and ahead of its first use, and needing neither."""
        found = []
        flying: set[int] = set()
        waits: list[int] = []  # those whose results nothing has used yet
        for position, text in enumerate(self.events):
            if text.startswith("submit "):
                flying.add(position)
            elif text.startswith("wait_"):
                flying -= self.needs[position]
                waits.append(position)
            elif text != "kernel":
                used = self.needs[position].intersection(waits)
                if waits and not used:
                    found.append(f"{text} ({position}) behind {self.events[waits[0]]} ({waits[0]})")
                following = (later for later in range(position, len(self.events)) if self._submits(later))
                submit = next(following, None)
                if not flying and submit is not None and position not in self.needs[submit]:
                    found.append(self._ahead(position, submit))
            waits = [wait for wait in waits if wait not in self.needs[position]]
        return found

    def _submits(self, position: int) -> bool:
        return self.events[position].startswith("submit ")

    def _needs_of(self, positions: Sequence[int]) -> frozenset[int]:
        return frozenset[int]().union(*(self.needs[position] for position in positions))

    def _ahead(self, position: int, submit: int) -> str:
        return f"{self.events[position]} ({position}) before {self.events[submit]} ({submit})"


# The generated code.


def parse(code: str) -> Wrapper:
    """The wrapper of one graph, as torch._inductor.utils.run_and_get_code returns it."""
    kind = re.search(r"AOT ID: \['\w*_([a-z]+)'\]", code)
    reader = _Reader(ast.parse(code))
    return Wrapper(kind[1] if kind else "", reader.events)


@dataclass
class _Reader:
    module: ast.Module
    events: list[str] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    """By the name of a buffer, of the submission that fills it."""

    def __post_init__(self) -> None:
        self.functions = {node.name: node for node in ast.walk(self.module) if isinstance(node, ast.FunctionDef)}
        self.kernels = {
            ast.unparse(node.targets[0])
            for node in self.module.body
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("async_compile.")
        }
        self._read(self.functions["call"].body)

    def _read(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, ast.Assign):
                tag = self._evaluate(statement.value)
                for target in statement.targets:
                    self.tags[ast.unparse(target)] = tag
            elif isinstance(statement, ast.Expr):
                self._evaluate(statement.value)
            elif isinstance(statement, (ast.With, ast.If, ast.For, ast.While)):
                self._read(statement.body)

    def _evaluate(self, value: ast.expr) -> str:
        """Notes what ``value`` calls; the tag of the submission whose result it is, or a view of."""
        if not isinstance(value, ast.Call):
            return self.tags.get(ast.unparse(value), "?")
        name = ast.unparse(value.func)
        if name in _VIEWS:
            return self._evaluate(value.args[0])
        if partition := re.fullmatch(r"self\.partitions\[(\d+)\]", name):
            self._read(self.functions[f"partition_{partition[1]}"].body)
        elif name.removesuffix(".run") in self.kernels:
            self.events.append("kernel")
        elif name.startswith("extern_kernels."):
            self.events.append(_named(name.removeprefix("extern_kernels.")))
        elif name.startswith(("torch.ops.", "aten.")):
            return self._call(name.removeprefix("torch.ops."), value)
        return "?"

    def _call(self, name: str, call: ast.Call) -> str:
        _, op, *_ = name.split(".")
        if op.endswith("_rng_state"):  # a higher-order op around an attention that might drop
            (op,) = (ast.unparse(x).split(".")[3] for x in call.args if isinstance(x, ast.Attribute))
        if op == "submit":
            arguments = _by_name(op, call)
            constants = {name: ast.literal_eval(arguments[name]) for name in _TOLD}
            self.events.append(_submission(**constants))
            return str(constants["tag"])
        if op == "wait_":
            arguments = _by_name(op, call)
            assert isinstance(arguments["targets"], ast.List)
            targets = [self._evaluate(target) for target in arguments["targets"].elts]
            tags = ast.literal_eval(arguments["tags"])
            own = (tag if target == tag else "?" for target, tag in zip(targets, tags, strict=True))
            self.events.append(" ".join(("wait_", *own)))
        else:
            self.events.append(_named(op))
        return "?"


def _names(op: str) -> list[str]:
    return [argument.name for argument in getattr(torch.ops.ulysses_op, op).default._schema.arguments]


def _by_name(op: str, call: ast.Call) -> dict[str, ast.expr]:
    given = dict(zip(_names(op), call.args, strict=False))
    return {**given, **{str(keyword.arg): keyword.value for keyword in call.keywords}}


def _submission(direction: str, tag: str, tags: Sequence[str], lend: bool) -> str:
    words = ["submit", direction.removesuffix("_heads"), tag]
    return " ".join(words + ["final"] * (tag == tags[-1]) + ["lent"] * lend)


def _named(op: str) -> str:
    if op.startswith("_scaled_dot_product"):
        return "attention_backward" if "_backward" in op else "attention"
    return _EXTERN.get(op, op)


# The scheduler.


def schedule(nodes: Sequence[Any]) -> Schedule:
    """The nodes of Inductor's scheduler in the order that they have. Their fake dependencies, which only keep an order,
    are not needs."""
    found = Schedule([], [])
    made: dict[str, frozenset[int]] = {}  # by the name of a buffer, the events that its content comes from
    for node in nodes:
        dependencies = (d.name for d in node.unmet_dependencies if type(d).__name__ != "WeakDep")
        needs = frozenset[int]().union(*(made.get(name, frozenset()) for name in dependencies))
        text = _scheduled(node)
        if text is not None:
            found.events.append(text)
            found.needs.append(needs)
            needs |= {len(found.events) - 1}
        made.update(dict.fromkeys(node.get_buffer_names(), needs))
    return found


def _scheduled(node: Any) -> str | None:
    """None for a node that calls nothing."""
    from torch._inductor import ir, scheduler

    if isinstance(node, (scheduler.FusedSchedulerNode, scheduler.SchedulerNode)):
        return "kernel"
    if isinstance(node, scheduler.NopKernelSchedulerNode) or isinstance(node.node, ir.MultiOutput):
        return None
    op = getattr(node.node, "op_overload", None)
    if op is None:
        return _named(str(node.node.get_kernel_name()).split(".")[-1])
    name = str(op).split(".")[1] if "." in str(op) else str(op)
    if name != "submit":
        return _named(name)
    arguments = dict(zip(_names(name), arguments_of(node), strict=True))
    return _submission(**{name: arguments[name] for name in _TOLD})
