"""The model's boundary: hooks that split what comes in over the ranks and put together what goes out."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .plans import Plan, Split
from .streams import Streams

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from ...communicator import Communicator


def add_hooks(
    model: torch.nn.Module, plan: Plan, streams: Streams, communicator: Communicator
) -> list[RemovableHandle]:
    """Split and gather as ``plan`` says, in every forward of ``model`` until the handles are removed.

    Raises ValueError, with no hook left, for a plan that names modules or arguments which the model does not have.
    """
    inputs = [
        (module, _SplitInputs(name, module, splits, streams))
        for name, splits in plan.inputs.items()
        for module in modules_named(model, name)
    ]
    outputs = [
        (module, _SplitOutputs(name, splits, streams))
        for name, splits in plan.outputs.items()
        for module in modules_named(model, name)
    ]
    gathers = [
        (module, _GatherOutput(name, streams, communicator))
        for name in plan.gathers
        for module in modules_named(model, name)
    ]

    def forget(module: torch.nn.Module, args: Any) -> None:
        streams.clear()

    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in inputs]
    handles += [module.register_forward_hook(hook) for module, hook in outputs]
    handles += [module.register_forward_hook(hook) for module, hook in gathers]
    return [model.register_forward_pre_hook(forget, prepend=True), *handles]


def modules_named(model: torch.nn.Module, pattern: str) -> list[torch.nn.Module]:
    """The modules whose name is ``pattern``, in which ``*`` stands for any one part; ValueError if there are none."""
    matches = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")).fullmatch
    found = [module for name, module in model.named_modules() if matches(name)]
    if not found:
        raise ValueError(f"the plan names the module {pattern!r}, which {type(model).__name__} does not have")
    return found


class _SplitInputs:
    """A forward pre-hook."""

    def __init__(self, name: str, module: torch.nn.Module, splits: Any, streams: Streams) -> None:
        parameters = [key for key in inspect.signature(type(module).forward).parameters if key != "self"]
        for key in splits:
            if key not in parameters:
                raise ValueError(f"the plan splits {key!r} of {name!r}, whose forward takes {parameters}")
        self._splits = [(key, parameters.index(key), split) for key, split in splits.items()]
        self._streams = streams

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        positional, named = list(args), dict(kwargs)
        for key, index, split in self._splits:
            if key in named:
                named[key] = self._split(key, named[key], split)
            elif index < len(positional):
                positional[index] = self._split(key, positional[index], split)
        return tuple(positional), named

    def _split(self, key: str, value: Any, split: Split | Sequence[Split]) -> Any:
        if value is None:
            return None
        if isinstance(split, Split):
            if not isinstance(value, (list, tuple)):
                return _part(self._streams, value, split, key)
            split = [split] * len(value)
        return [
            _part(self._streams, x, one, f"{key}[{i}]") for i, (x, one) in enumerate(zip(value, split, strict=True))
        ]


class _SplitOutputs:
    """A forward hook."""

    def __init__(self, name: str, splits: Any, streams: Streams) -> None:
        self._name = name
        self._splits = splits
        self._streams = streams

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        parts = [output] if isinstance(output, torch.Tensor) else list(output)
        for index, split in self._splits.items():
            if index >= len(parts):
                raise ValueError(f"the plan splits output {index} of {self._name!r}, which has {len(parts)}")
            parts[index] = _part(self._streams, parts[index], split, None)
        return parts[0] if isinstance(output, torch.Tensor) else tuple(parts)


class _GatherOutput:
    """A forward hook."""

    def __init__(self, name: str, streams: Streams, communicator: Communicator) -> None:
        self._name = name
        self._streams = streams
        self._communicator = communicator

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or output.ndim != 3:
            found = f"{output.ndim} dimensions" if isinstance(output, torch.Tensor) else type(output).__name__
            raise ValueError(f"the output of {self._name!r} is to be gathered: (B, S, C) is needed, found {found}")
        lengths = self._streams.lengths_of_output(output.shape[1])
        if lengths is None:
            raise ValueError(
                f"the output of {self._name!r} is to be gathered, but with {output.shape[1]} tokens it is no part of "
                "what the plan has split"
            )
        return all_gather(self._streams.submitted(output, lengths), lengths, self._communicator)


def _part(streams: Streams, x: Any, split: Split, stream: str | None) -> Any:
    if x is None or (split.ndim is not None and x.ndim != split.ndim):
        return x
    if stream is not None and split.is_stream:
        streams.add(stream, x.shape[split.dim])
    # Blocks that are compiled one by one see the first one's input laid out as that of the others.
    return streams.part(x, split.dim).contiguous()


def all_gather(x: torch.Tensor, lengths: Sequence[int], communicator: Communicator) -> torch.Tensor:
    """(B, S_local, C) of each rank -> (B, S, C) on all of them. Its gradient is the own part of the output's, since
    every rank has the whole loss.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _AllGather.apply(x, lengths, communicator)
    return _gathered(x, lengths, communicator)


def _gathered(x: torch.Tensor, lengths: Sequence[int], communicator: Communicator) -> torch.Tensor:
    # One head that every rank gets: that scatter is an all-gather.
    to_all = [(0, 1)] * len(lengths)
    return communicator.scatter_heads(x.unsqueeze(2), heads=to_all, seq_lens=list(lengths)).squeeze(2)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lengths: Sequence[int], communicator: Communicator) -> torch.Tensor:
        ctx.begin, ctx.length = sum(lengths[: communicator.rank]), x.shape[1]
        return _gathered(x, lengths, communicator)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0].narrow(1, ctx.begin, ctx.length), None, None
