"""The models of h3_block.py and lingbot_block.py on one device, from the same weights: what split ones must agree with.

Plain PyTorch that shares no code with them: attention over all heads and the whole sequence, no cache, no exchange.
Weights are dictionaries with the names that the models give them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]


@dataclass
class Seen:
    """What attention took and gave in each block, (B, S, H, D): q and k normed and rotated."""

    q: list[Tensor] = field(default_factory=list)
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    o: list[Tensor] = field(default_factory=list)


def h3(weights: Weights, x: Tensor, t: float, heads: int, seen: Seen | None = None) -> Tensor:
    """The velocity of the whole sequence x, (B, S, hidden), at time ``t``."""
    positions = torch.arange(x.shape[1], device=x.device)
    x = x + t * weights["time"]
    for w in blocks(weights):
        y = rms_norm(x, w["norm_attention.weight"])
        q, k, v = (y @ part.T for part in w["qkv.weight"].chunk(3))
        q, k, v = (part.unflatten(-1, (heads, -1)) for part in (q, k, v))
        q = turn(rms_norm(q, w["norm_q.weight"]), positions)
        k = turn(rms_norm(k, w["norm_k.weight"]), positions)
        o = attention(q, k, v, None, seen)
        x = x + o.flatten(2) @ w["out.weight"].T
        x = x + F.gelu(rms_norm(x, w["norm_mlp.weight"]) @ w["up.weight"].T) @ w["down.weight"].T
    return x


def lingbot(weights: Weights, x: Tensor, t: Tensor, heads: int, mask: Tensor, seen: Seen | None = None) -> Tensor:
    """The velocities of a whole video x, (B, S, hidden), whose tokens are at times ``t``, (S,). ``mask``, (S, S), says
    which row attends to which column: see :func:`chunk_mask`."""
    positions = torch.arange(x.shape[1], device=x.device)
    x = x + t[:, None].type_as(x) * weights["time"]
    for w in blocks(weights):
        y = rms_norm(x, w["norm_attention.weight"])
        q, k, v = (F.linear(y, w[f"{name}.weight"], w[f"{name}.bias"]) for name in "qkv")
        q, k = rms_norm(q, w["norm_q.weight"]), rms_norm(k, w["norm_k.weight"])
        q, k, v = (part.unflatten(-1, (heads, -1)) for part in (q, k, v))
        q, k = turn(q, positions), turn(k, positions)
        o = attention(q, k, v, mask, seen)
        x = x + F.linear(o.flatten(2), w["out.weight"], w["out.bias"])
        y = F.linear(rms_norm(x, w["norm_mlp.weight"]), w["up.weight"], w["up.bias"])
        x = x + F.linear(F.gelu(y, approximate="tanh"), w["down.weight"], w["down.bias"])
    return x


def chunk_mask(length: int, chunk: int, window: int, sink: int, device: torch.device | str = "cpu") -> Tensor:
    """(S, S): a token attends to all of its chunk, and before that to the last ``window`` tokens and the first
    ``sink``."""
    at = torch.arange(length, device=device)
    begin = (at // chunk * chunk)[:, None]
    return (at < begin + chunk) & ((at >= begin - window) | (at < sink))


def denoise_h3(weights: Weights, noise: Tensor, steps: int, heads: int) -> Tensor:
    """From noise, (B, S, hidden), to what it becomes in ``steps`` steps."""
    x = noise
    for step in range(steps):
        x = x - h3(weights, x, 1 - step / steps, heads) / steps
    return x


def denoise_lingbot(weights: Weights, noise: Tensor, steps: int, heads: int, chunk: int, mask: Tensor) -> Tensor:
    """The same for a video that is made chunk by chunk, the tokens before a chunk being clean, at time 0."""
    video = noise.clone()
    for begin in range(0, video.shape[1], chunk):
        end = begin + chunk
        for step in range(steps):
            t = torch.zeros(end, device=video.device)
            t[begin:] = 1 - step / steps
            velocity = lingbot(weights, video[:, :end], t, heads, mask[:end, :end])
            video[:, begin:end] -= velocity[:, begin:] / steps
    return video


def blocks(weights: Weights) -> list[dict[str, Tensor]]:
    """The weights of each block, by their names within it."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, weight in weights.items():
        if name.startswith("blocks."):
            _, number, rest = name.split(".", 2)
            found.setdefault(int(number), {})[rest] = weight
    return [found[number] for number in sorted(found)]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    y = x.float()
    return (y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.float()).type_as(x)


def turn(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE as a product of complex numbers: dimensions i and i + D / 2 of a head are one."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() / 10000.0 ** (torch.arange(half, device=x.device).double() / half)
    numbers = torch.complex(x[..., :half].double(), x[..., half:].double())
    numbers = numbers * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((numbers.real, numbers.imag), -1).type_as(x)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seen: Seen | None) -> Tensor:
    """(B, S, H, D) of each, and of the result."""
    o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask).transpose(1, 2)
    if seen is not None:
        for name, x in zip("qkvo", (q, k, v, o), strict=True):
            getattr(seen, name).append(x)
    return o
