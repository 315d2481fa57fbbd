"""torch.compile with the exchanges of a model made asynchronous."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch._inductor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from . import (
    fx_narrow,
    fx_nodes,
    fx_order,
    fx_products,
    gradients,
    grouping,
    inductor_compat,
    inductor_lowering,
    inductor_order,
    layout,
    ops,
    own_parts,
    projections,
)
from .checked_calls import checked
from .inductor_compat import CustomSchedulerPass

_Model = TypeVar("_Model")
_MODULES = (
    *(fx_narrow, fx_nodes, fx_order, fx_products, gradients, grouping, inductor_compat, inductor_lowering),
    *(inductor_order, layout, ops, own_parts, projections),
)
_UUID = get_hash_for_files((__file__, *(str(module.__file__) for module in _MODULES)))

CUDA_GRAPHS = ("auto", "through", "around")


class GroupExchanges(inductor_compat.InferenceAwarePass):  # type: ignore[misc, valid-type]
    """Inductor's post-grad pass; runs the passes that were installed already first. ``reports`` tells what it did, a
    report for each graph that was compiled (and not served from a cache)."""

    def __init__(self, inner: Any = None, cuda_graphs: str = "auto", split_projections: bool = True) -> None:
        self.inner = inductor_compat.passes_of(inner)
        self.cuda_graphs = cuda_graphs
        self.split_projections = split_projections
        self.reports: list[grouping.Report] = []

    def __call__(self, graph: torch.fx.Graph, is_inference: bool = False) -> None:
        for inner in self.inner:
            inductor_compat.run_pass(inner, graph, is_inference)
        rank_of = ops.rank_of if self.split_projections else None
        self.reports.append(grouping.group_exchanges(graph, self._uncaptured, rank_of))

    def _uncaptured(self, communicator: str) -> bool:
        if self.cuda_graphs != "auto":
            return self.cuda_graphs == "around"
        return dict(ops.known_backends()).get(communicator) == "c10d"

    def uuid(self) -> Any:
        # Which communicators the pass finds on c10d shapes its result.
        around: Any = self.cuda_graphs
        if around == "auto":
            around = [name for name, backend in ops.known_backends() if backend == "c10d"]
        inner = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.inner]
        ranks = tuple(ops.ranks()) if self.split_projections else None  # projections are taken apart by rank
        return None if None in inner else (_UUID, around, ranks, *inner)


class KeepOrder(CustomSchedulerPass):  # type: ignore[misc, valid-type]
    """Inductor's pre-fusion pass; adds to the report that ``before`` made of the same graph. Has kernels called without
    the dispatcher, too.
    """

    def __init__(self, before: GroupExchanges) -> None:
        self.before = before

    def __call__(self, nodes: list[Any]) -> list[Any]:
        for node in nodes:
            inductor_compat.call_kernel(node)
        return inductor_order.keep_order(nodes, self.before.reports[-1] if self.before.reports else None)

    def uuid(self) -> Any:
        return _UUID


def compile_options(
    post_grad_custom_post_pass: Any = None, *, cuda_graphs: str = "auto", split_projections: bool = True
) -> dict[str, Any]:
    """Options for ``torch.compile(model, options=...)`` that install the pass.

    post_grad_custom_post_pass: a pass of your own to run before it; None takes the one that Inductor's configuration
    holds.
    cuda_graphs: where Inductor uses CUDA graphs, exchanges go "through" them, captured like any kernel, or the graphs
    are partitioned "around" them; "auto" goes around where the backend is known to be c10d when the code is compiled
    (the communicator has exchanged, or was built), else through.
    split_projections: large products before and behind exchanges may be computed in parts, so that data travels
    meanwhile, and what a rank keeps of the tensors that it scatters is computed last, in place. In half precision, sums
    behind a gather are then rounded once more, as torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction (or
    fp16) allows. Only where nothing else uses what is taken apart, as the backward would, and in static shapes.
    """
    import torch._inductor.config as config

    if cuda_graphs not in CUDA_GRAPHS:
        raise ValueError(f"cuda_graphs is {cuda_graphs!r}, expected one of {', '.join(CUDA_GRAPHS)}")
    inner: Any = post_grad_custom_post_pass or config.post_grad_custom_post_pass
    group = GroupExchanges(inner, cuda_graphs, split_projections)
    return {"post_grad_custom_post_pass": group, "_pre_fusion_custom_pass": KeepOrder(group)}


def compile(
    model: _Model,
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    cuda_graphs: str = "auto",
    split_projections: bool = True,
    **arguments: Any,
) -> _Model:
    """``torch.compile(model, mode=mode, options=options, **arguments)`` with the pass installed: exchanges that meet in
    one attention become one group, V's submission goes ahead of the work on Q and K, and one wait completes them. A
    call raises what has failed, since the calls before it, of the communicators that those used: also where they only
    replay CUDA graphs. Code that has exchanged in CUDA graphs is to be compiled again for another communicator. A call
    that is left by an exception in the middle of a group tells the peers at once, as a group's with-block does.

    cuda_graphs, split_projections: see :func:`compile_options`. Other backends than Inductor run the functional ops:
    right, without overlap.
    """
    if arguments.get("backend", "inductor") == "inductor":
        chosen = dict(options or {})
        settings: dict[str, Any] = {"cuda_graphs": cuda_graphs, "split_projections": split_projections}
        installed = compile_options(chosen.pop("post_grad_custom_post_pass", None), **settings)
        # torch.compile takes a mode or options, and a mode is options by name.
        by_mode = torch._inductor.list_mode_options(mode) if mode is not None else {}
        mode, options = None, {**by_mode, **chosen, **installed}
    compiled: Any = torch.compile(model, mode=mode, options=options, **arguments)  # type: ignore[call-overload]
    if compiled is model:  # torch.compile is switched off, and the model is the caller's own
        return model
    if isinstance(compiled, torch.nn.Module):
        compiled.forward = checked(compiled.forward)
    else:
        compiled = checked(compiled)
    result: _Model = compiled
    return result
