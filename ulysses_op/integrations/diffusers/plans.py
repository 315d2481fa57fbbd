"""Which tensors of a model are split where: diffusers' context-parallel plans, and ours where it has none that does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Split:
    """One argument, or one output, of which each rank keeps its part.

    dim: the dimension to split; ndim: how many dimensions the tensor must have to be split at all, None for any.
    tokens: whether (B, S, C) are tokens of a sequence, not something that belongs to those of another argument.
    """

    dim: int
    ndim: int | None = None
    tokens: bool = True

    @property
    def is_stream(self) -> bool:
        """Whether these are tokens, (B, S, C), rather than something that belongs to them."""
        return self.tokens and self.dim == 1 and self.ndim == 3


@dataclass(frozen=True)
class Plan:
    """Where a model's sequence is split and put together. Modules are named as in ``named_modules()``, ``*`` standing
    for any one part of a name, ``""`` for the model.

    inputs: module, argument of its forward -> how it is split (a sequence of splits for an argument that is one, or
        one split for all that it has).
    outputs: module, index of its output -> how it is split.
    gathers: modules whose output (B, S_local, C) becomes (B, S, C).
    local: attention modules that need no exchange, since every rank has all of their keys and values.
    order: the token sequences, by the names of their arguments, as the model puts them side by side for a joint
        attention.

    Raises TypeError for anything else in these.
    """

    gathers: Sequence[str]
    inputs: Mapping[str, Mapping[str, Split | Sequence[Split]]] = field(default_factory=dict)
    outputs: Mapping[str, Mapping[int, Split]] = field(default_factory=dict)
    local: Sequence[str] = ()
    order: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("gathers", "local", "order"):
            names: Any = getattr(self, name)
            if isinstance(names, str) or not all(isinstance(one, str) for one in names or ()):
                raise TypeError(f"{name} of a plan is {names!r}: expected a sequence of names")
        for name in ("inputs", "outputs"):
            for module, splits in getattr(self, name).items():
                for key, split in splits.items():
                    several = name == "inputs" and isinstance(split, (list, tuple))
                    for one in split if several else (split,):
                        if not isinstance(one, Split):
                            raise TypeError(f"{name}[{module!r}][{key!r}] of a plan is {one!r}: expected a Split")


_TOKENS = Split(1, 3)
_TEXT_FIRST = ("encoder_hidden_states", "hidden_states")
_TEXT_LAST = ("hidden_states", "encoder_hidden_states")

_ORDERS = {
    "FluxTransformer2DModel": _TEXT_FIRST,
    "Flux2Transformer2DModel": _TEXT_FIRST,
    "QwenImageTransformer2DModel": _TEXT_FIRST,
}

_RESIDUALS = Split(1, 3, tokens=False)
# What diffusers' plans leave whole, though the model adds it to parts: residuals of a ControlNet.
_MORE_INPUTS = {
    "FluxTransformer2DModel": {
        "controlnet_block_samples": _RESIDUALS,
        "controlnet_single_block_samples": _RESIDUALS,
    },
    "QwenImageTransformer2DModel": {"controlnet_block_samples": _RESIDUALS},
}

# Attentions before the model's plan splits anything.
_LOCAL = {"MiniMaxH3Transformer3DModel": ("token_refiner.refiner_blocks.*.attn",)}

_PLANS = {
    # diffusers has no plan for it.
    "HunyuanVideoTransformer3DModel": Plan(
        inputs={"transformer_blocks.0": {"hidden_states": _TOKENS, "encoder_hidden_states": _TOKENS}},
        outputs={"rope": {0: Split(0, 2), 1: Split(0, 2)}},
        gathers=("proj_out",),
        order=_TEXT_LAST,
    ),
    # diffusers' plan splits the text, which its cross-attention then exchanges, and queries with it, in every block;
    # its mask stays a part. Every rank has the text: attn2 needs nothing of the others.
    "LTXVideoTransformer3DModel": Plan(
        inputs={"": {"hidden_states": _TOKENS}},
        outputs={"rope": {0: Split(1, 3), 1: Split(1, 3)}},
        gathers=("proj_out",),
        local=("transformer_blocks.*.attn2",),
    ),
}


def plan_of(model: Any, given: Plan | Mapping[str, Any] | None = None) -> Plan:
    """The plan for a diffusers model: what is given, else ours if it has one, else what its class states in
    ``_cp_plan``. ``given`` may be of the form of that, too.

    Raises ValueError for a model without any, and for variants that cannot be split; TypeError for what is no plan.
    """
    name = type(model).__name__
    if isinstance(given, Plan):
        return given
    if given is not None:
        return _from_stated(name, given)
    if name == "HunyuanVideoTransformer3DModel" and model.config.image_condition_type == "token_replace":
        raise ValueError(
            "HunyuanVideoTransformer3DModel with image_condition_type='token_replace' modulates the first frame's "
            "tokens apart, by their number, which a rank's part does not have: it cannot be split"
        )
    if name == "LTX2VideoTransformer3DModel":
        raise ValueError(
            "LTX2VideoTransformer3DModel attends from audio, which its plan leaves whole, to video, which it splits: "
            "it cannot be split"
        )
    if name in _PLANS:
        return _PLANS[name]
    stated = getattr(model, "_cp_plan", None)
    if not stated:
        raise ValueError(
            f"{name} has no context-parallel plan (_cp_plan): pass one, parallelize(..., plan=Plan(...)), with Plan "
            "and Split of ulysses_op.integrations.diffusers"
        )
    return _from_stated(name, stated)


def _from_stated(name: str, stated: Mapping[str, Any]) -> Plan:
    """A ``_cp_plan`` for models of the class ``name``, with what such plans do not tell."""
    plan = from_diffusers(stated, _ORDERS.get(name))
    inputs = dict(plan.inputs)
    if name in _MORE_INPUTS:
        inputs[""] = {**inputs.get("", {}), **_MORE_INPUTS[name]}
    return replace(plan, inputs=inputs, local=_LOCAL.get(name, ()))


def from_diffusers(stated: Mapping[str, Any], order: Sequence[str] | None = None) -> Plan:
    """A ``_cp_plan`` of diffusers as a :class:`Plan`.

    Raises TypeError for what is none, ValueError for an output that is gathered along another dimension than 1.
    """
    if not isinstance(stated, Mapping):
        raise TypeError(
            f"plan is {stated!r}: expected a Plan of ulysses_op.integrations.diffusers, or a dict as diffusers' models "
            "have it in _cp_plan"
        )
    inputs: dict[str, dict[str, Split | Sequence[Split]]] = {}
    outputs: dict[str, dict[int, Split]] = {}
    gathers: list[str] = []
    for module, entry in stated.items():
        if not isinstance(entry, Mapping):
            for output in entry if isinstance(entry, (list, tuple)) else (entry,):
                if not hasattr(output, "gather_dim"):
                    raise TypeError(
                        f"plan[{module!r}] is {output!r}: expected diffusers' ContextParallelOutput, or a dict of "
                        "ContextParallelInput"
                    )
                if output.gather_dim != 1:
                    raise ValueError(f"the output of {module!r} is gathered along {output.gather_dim}, 1 is supported")
            gathers.append(module)
            continue
        for key, split in entry.items():
            several = isinstance(split, (list, tuple)) and not isinstance(key, int)
            for part in split if several else (split,):
                if not hasattr(part, "split_dim"):
                    raise TypeError(f"plan[{module!r}][{key!r}] is {part!r}: expected diffusers' ContextParallelInput")
            if isinstance(key, int):
                outputs.setdefault(module, {})[key] = Split(split.split_dim, split.expected_dims)
            elif several:
                inputs.setdefault(module, {})[key] = [_split(part, key) for part in split]
            else:
                inputs.setdefault(module, {})[key] = _split(split, key)
    return Plan(gathers=gathers, inputs=inputs, outputs=outputs, order=order)


def _split(stated: Any, argument: str) -> Split:
    # Positions and rotary embeddings can have as many dimensions as tokens.
    return Split(stated.split_dim, stated.expected_dims, tokens="hidden_states" in argument)
