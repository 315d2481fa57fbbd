"""A transformer of diffusers at its real size, with random weights: split by diffusers' own context parallelism, and by
this package.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ..communicator import Communicator
from ..compiling import compile_options
from .measure import ALONE, Contender, Effort, Outputs, Ranks, format_table, measure, median_of, number, ratio

OWN, THEIRS = "ulysses_op", "diffusers ContextParallel"
COSINE = 0.999


class Model(NamedTuple):
    """``build`` makes the transformer, of ``layers`` layers if given, ``inputs`` its arguments on a device."""

    build: Callable[[int | None], Any]
    inputs: Callable[[torch.device], dict[str, Any]]


def _wan(layers: int | None) -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(num_layers=layers or 40)


def _wan_inputs(device: torch.device) -> dict[str, Any]:
    """81 frames of 480 x 832: 32,760 tokens."""
    return {
        "hidden_states": _random(device, 1, 16, 21, 60, 104),
        "timestep": torch.full((1,), 500, device=device),
        "encoder_hidden_states": _random(device, 1, 512, 4096),
    }


def _flux(layers: int | None) -> Any:
    from diffusers import FluxTransformer2DModel

    double, single = (19, 38) if layers is None else (layers, 2 * layers)
    return FluxTransformer2DModel(num_layers=double, num_single_layers=single, guidance_embeds=True)


def _flux_inputs(device: torch.device) -> dict[str, Any]:
    """1024 x 1024: 4,096 tokens, and 512 of text."""
    rows = torch.arange(4096, device=device)
    positions = torch.stack([torch.zeros_like(rows), rows // 64, rows % 64], 1).to(torch.bfloat16)
    return {
        "hidden_states": _random(device, 1, 4096, 64),
        "encoder_hidden_states": _random(device, 1, 512, 4096),
        "pooled_projections": _random(device, 1, 768),
        "timestep": torch.full((1,), 0.5, device=device, dtype=torch.bfloat16),
        "guidance": torch.full((1,), 3.5, device=device, dtype=torch.bfloat16),
        "img_ids": positions,
        "txt_ids": torch.zeros(512, 3, device=device, dtype=torch.bfloat16),
    }


MODELS = {"wan-14b": Model(_wan, _wan_inputs), "flux-12b": Model(_flux, _flux_inputs)}


def diffusers_table(name: str, layers: int | None, effort: Effort, ranks: Ranks) -> dict[str, Any]:
    """Forwards of one model in bfloat16. Contenders share the weights; the model unsplit gives the wanted output."""
    from diffusers import ContextParallelConfig

    from ..integrations.diffusers import parallelize

    ranks.progress(f"diffusers {name}")
    torch.compiler.reset()
    model = MODELS[name]
    dense = _materialized(model.build, layers, ranks.device)
    inputs = {**model.inputs(ranks.device), "return_dict": False}
    expected = dense(**inputs)[0].clone()

    communicator = Communicator()
    contenders = []
    for compiled in (False, True):
        theirs, own = (copy.deepcopy(dense, {id(weight): weight for weight in dense.parameters()}) for _ in range(2))
        theirs.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ranks.world_size))
        parallelize(own, communicator)
        pair: list[tuple[str, Any]] = [(THEIRS, theirs), (OWN, own)]
        for title, split in pair:
            if compiled:
                if split is own:
                    split.compile_repeated_blocks(fullgraph=True, options=compile_options())
                else:  # whose hooks break the graph
                    split.compile_repeated_blocks()
            label = f"{title}, {'blocks compiled' if compiled else 'eager'}"
            contenders.append(Contender(label, partial(_forward, split), partial(_check, label, expected)))
    backend = communicator.backend
    try:
        rows = measure(ranks, contenders, [inputs], effort, modes=(ALONE,))
    finally:
        communicator.close()
    return {
        "what": "diffusers",
        "shape": name,
        "layers": layers or "all",
        "backend": backend,
        "rows": rows,
    }


def print_diffusers_table(table: dict[str, Any]) -> None:
    print(f"\ndiffusers {table['shape']}, layers: {table['layers']}, one forward, {OWN} on {table['backend']}")
    lines = []
    for name, result in table["rows"].items():
        base = table["rows"][name.replace(OWN, THEIRS)]
        lines.append(
            [
                name,
                *(number(median_of(result, ALONE, key)) for key in ("median_us", "q1_us", "q3_us")),
                ratio(median_of(base, ALONE), median_of(result, ALONE)),
                number(median_of(result, ALONE, "host_median_us")),
            ]
        )
    print(format_table(["", "us", "q1", "q3", "x diffusers", "host us"], lines))


def _materialized(build: Callable[[int | None], Any], layers: int | None, device: torch.device) -> Any:
    """The model on the device, the same weights on all ranks, scaled so that activations keep their size."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = build(layers).eval()
    finally:
        torch.set_default_dtype(default)
    model = model.to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    return model


def _forward(model: torch.nn.Module, inputs: dict[str, Any]) -> Outputs:
    return (model(**inputs)[0],)


def _check(label: str, expected: torch.Tensor, index: int, outputs: Outputs) -> None:
    found, wanted = outputs[0].double().flatten(), expected.double().flatten()
    cosine = float(torch.dot(found, wanted) / (found.norm() * wanted.norm()))
    if not cosine > COSINE:
        raise AssertionError(
            f"{label}: cosine {cosine:.6f} to the unsplit model's output, more than {COSINE} is wanted"
        )


def _random(device: torch.device, *shape: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
