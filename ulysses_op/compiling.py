"""torch.compile with the exchanges of a model made asynchronous."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from . import grouping, inductor_lowering, inductor_order, ops
from .inductor_compat import CustomSchedulerPass

_Model = TypeVar("_Model")
_UUID = get_hash_for_files(
    (grouping.__file__, inductor_lowering.__file__, inductor_order.__file__, ops.__file__, __file__)
)


class GroupExchanges(CustomGraphPass):
    """Inductor's post-grad pass; runs a pass that was installed already first. ``reports`` tells what it did, a
    report for each graph that was compiled (and not served from a cache)."""

    def __init__(self, inner: Callable[[torch.fx.Graph], None] | None = None) -> None:
        self.inner = inner
        self.reports: list[grouping.Report] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        if self.inner is not None:
            self.inner(graph)
        self.reports.append(grouping.group_exchanges(graph))

    def uuid(self) -> Any:
        if self.inner is None:
            return _UUID
        inner = self.inner.uuid() if isinstance(self.inner, CustomGraphPass) else None
        return None if inner is None else (_UUID, inner)


class KeepOrder(CustomSchedulerPass):  # type: ignore[misc, valid-type]
    """Inductor's pre-fusion pass."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        return inductor_order.keep_order(nodes)

    def uuid(self) -> Any:
        return _UUID


def compile_options(post_grad_custom_post_pass: Any = None) -> dict[str, Any]:
    """Options for ``torch.compile(model, options=...)`` that install the pass.

    post_grad_custom_post_pass: a pass of your own to run before it; None takes the one that Inductor's configuration
    holds.
    """
    import torch._inductor.config as config

    inner: Any = post_grad_custom_post_pass or config.post_grad_custom_post_pass
    return {"post_grad_custom_post_pass": GroupExchanges(inner), "_pre_fusion_custom_pass": KeepOrder()}


def compile(model: _Model, *, options: dict[str, Any] | None = None, **arguments: Any) -> _Model:
    """``torch.compile(model, options=options, **arguments)`` with the pass installed: exchanges that meet in one
    attention become one group, V's submission goes ahead of the work on Q and K, and one wait completes them.
    """
    merged = {**compile_options((options or {}).get("post_grad_custom_post_pass")), **_without_pass(options or {})}
    return torch.compile(model, options=merged, **arguments)  # type: ignore[call-overload]


def _without_pass(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "post_grad_custom_post_pass"}
