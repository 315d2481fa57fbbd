"""One call that turns Ulysses on in a transformer of diffusers, and one that turns it off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch

from ...communicator import Communicator
from ...process_groups import GroupLike
from .attention import Backend, ParallelConfig, UlyssesAttention
from .boundary import add_hooks, modules_named
from .plans import Plan, plan_of
from .streams import Streams


def parallelize(
    transformer: torch.nn.Module,
    group: GroupLike | Communicator = None,
    *,
    plan: Plan | Mapping[str, Any] | None = None,
) -> Parallelized:
    """Split the sequence of a diffusers transformer over the ranks of ``group``, from its next forward on.

    All ranks call the model, or the pipeline around it, with the same inputs, and all get the whole output. Inside,
    each has its part of the tokens, also where they do not divide; self-attention, and joint attention over text and
    image, exchange heads for sequence, values first; cross-attention to text that all ranks have stays local. Call it
    before torch.compile, and after ``set_attention_backend``, whose backend it then uses. Gradients of weights are
    each rank's share, to be summed over the ranks.

    transformer: a model with a context-parallel plan of its own, or HunyuanVideo. What changes of it are hooks, and
        attributes of its attention processors.
    group: what :class:`ulysses_op.Communicator` takes, or a communicator, which several models may share.
    plan: another plan than the model's: a :class:`Plan`, or a dict as diffusers' models have it in ``_cp_plan``.

    Returns a handle whose ``remove()`` gives the model back as it was. Raises ValueError for a model that cannot be
    split, for one that is split already, and for one with diffusers' FirstBlockCache, whose ranks would decide
    differently; TypeError for what is no model (a pipeline, say) or no plan.
    """
    given: Any = transformer
    if not isinstance(given, torch.nn.Module):
        what = f"this is a {type(given).__name__}"
        if isinstance(getattr(given, "transformer", None), torch.nn.Module):
            raise TypeError(f"{what}: pass its transformer, parallelize(pipe.transformer)")
        raise TypeError(f"{what}: a transformer of diffusers, a torch.nn.Module, is needed")
    if getattr(transformer, "_parallel_config", None) is not None or any(
        getattr(module, "_parallel_config", None) is not None for module in _processors(transformer)
    ):
        raise ValueError(f"{type(transformer).__name__} is split already: remove() the other one first")
    if isinstance(transformer, torch._dynamo.OptimizedModule):
        raise ValueError("this is what torch.compile returned: give parallelize() the model, before torch.compile")
    plan = plan_of(transformer, plan)
    _refuse_caches(transformer, _blocks(transformer))
    owned = not isinstance(group, Communicator)
    communicator = group if isinstance(group, Communicator) else Communicator(group)
    streams = Streams(communicator.world_size, communicator.rank, plan.order)
    return Parallelized(transformer, plan, streams, communicator, owned)


class Parallelized:
    """A transformer whose sequence is split; a context manager that ends it. Made by :func:`parallelize`."""

    def __init__(
        self, transformer: torch.nn.Module, plan: Plan, streams: Streams, communicator: Communicator, owned: bool
    ) -> None:
        #: What the exchanges go through: its ``backend`` and ``reason`` tell how.
        self.communicator = communicator
        self._name = type(transformer).__name__
        self._undo: list[Callable[[], object]] = [communicator.close] if owned else []
        try:
            for handle in add_hooks(transformer, plan, streams, communicator):
                self._undo.append(handle.remove)
            self._replace_attention(transformer, plan, UlyssesAttention(communicator, streams))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Give the model back as it was, and close the communicator if parallelize() made it. Idempotent; local."""
        while self._undo:
            self._undo.pop()()

    def __repr__(self) -> str:
        return f"Parallelized({self._name}, {self.communicator if self._undo else 'removed'})"

    def __enter__(self) -> Parallelized:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _replace_attention(self, transformer: torch.nn.Module, plan: Plan, exchanged: UlyssesAttention) -> None:
        local = {id(module) for pattern in plan.local for module in modules_named(transformer, pattern)}
        # Of the model alone: blocks that are compiled one by one share what is compiled only if their hooks are alike.
        self._undo.append(transformer.register_forward_hook(exchanged.end_forward, always_call=True).remove)
        config = ParallelConfig()
        backends: dict[Any, Backend] = {}
        uses = Counter(id(processor) for processor in _processors(transformer))
        found: list[tuple[Any, Any]] = []
        for module in transformer.modules():
            processor: Any = getattr(module, "processor", None)
            if id(module) in local or not hasattr(processor, "_parallel_config"):
                continue
            if uses[id(processor)] > 1 and not isinstance(processor, torch.nn.Module):
                processor = self._copy_processor(module)  # of this attention alone: another may be local
            inner = processor._attention_backend
            if inner not in backends:
                backends[inner] = Backend(exchanged, inner)
                self._undo.append(backends[inner].remove)
            self._set(processor, "_attention_backend", backends[inner].name)
            self._set(processor, "_parallel_config", config)
            found.append((module, processor))
            self._undo += [handle.remove for handle in exchanged.add_hooks(module)]
        if not found:
            raise ValueError(f"{type(transformer).__name__} has no attention that goes through diffusers' dispatch")

        blocks = _blocks(transformer)

        def check(module: torch.nn.Module, args: Any) -> None:
            _refuse_caches(module, blocks)
            # An attention without the exchange would run over a rank's own tokens, and nobody would be told.
            for attention, processor in found:
                if attention.processor is not processor or processor._parallel_config is not config:
                    raise ValueError(
                        f"{type(attention).__name__} of {type(module).__name__} was given another processor, or "
                        "another way to split it, after parallelize(): load adapters and set processors before, or "
                        "remove() and call parallelize() again"
                    )

        self._undo.append(transformer.register_forward_pre_hook(check, prepend=True).remove)

    def _copy_processor(self, module: Any) -> Any:
        """Give ``module`` a processor of its own until remove(), unless it has got another one by then."""
        shared, own = module.processor, copy(module.processor)

        def undo() -> None:
            if module.processor is own:
                module.processor = shared

        module.processor = own
        self._undo.append(undo)
        return own

    def _set(self, holder: Any, name: str, value: Any) -> None:
        """Set an attribute of an instance until remove()."""
        had = name in vars(holder)
        before = getattr(holder, name)
        setattr(holder, name, value)
        self._undo.append(lambda: setattr(holder, name, before) if had else delattr(holder, name))


def _processors(transformer: torch.nn.Module) -> list[Any]:
    return [module.processor for module in transformer.modules() if hasattr(module, "processor")]


def _blocks(transformer: torch.nn.Module) -> list[torch.nn.Module]:
    return [block for blocks in transformer.children() if isinstance(blocks, torch.nn.ModuleList) for block in blocks]


def _refuse_caches(transformer: torch.nn.Module, blocks: list[torch.nn.Module]) -> None:
    """Raise ValueError where blocks are skipped by what a rank sees of its own tokens: one rank would, another not."""
    for block in blocks:
        registry = getattr(block, "_diffusers_hook", None)
        if registry is not None and "fbc_leader_block_hook" in registry.hooks:
            raise ValueError(
                f"{type(transformer).__name__} has diffusers' FirstBlockCache, which skips blocks by a rank's own "
                "tokens, so that ranks decide differently: disable_cache() before parallelize()"
            )
