"""A model split over ranks together with what it is measured by: its whole weights, and the dense model from them.

Every rank draws the same weights and the same noise, and takes its own part of either.
"""

from __future__ import annotations

from collections.abc import Callable

import dense
import torch
import torch.distributed as dist
import torch.nn.functional as F
from h3_block import H3, H3Block, H3Size, Schedule
from lingbot_block import LingBot, LingBotSize
from rotary import rope_table
from torch import Tensor, nn

import ulysses_op
from ulysses_op import Communicator

AfterStep = Callable[[], None]
"""Called on all ranks after each denoising step, when no exchange is under way; what it raises ends the request."""


def nothing() -> None:
    """An AfterStep."""


class H3Session:
    """Denoises a whole sequence of ``tokens`` in ``steps`` steps. Rank r of ``comm`` holds the r-th part of its rows.

    compiled: the blocks are written in plain order, and scheduled by ulysses_op.compile; they share one graph.
    """

    def __init__(
        self,
        size: H3Size,
        num_blocks: int,
        comm: Communicator,
        device: torch.device,
        dtype: torch.dtype,
        *,
        tokens: int,
        steps: int,
        tensor: dist.ProcessGroup | None = None,
        compiled: bool = False,
        seed: int = 0,
    ) -> None:
        schedule: Schedule = "plain" if compiled else "v_first"
        self.size, self.steps = size, steps
        self.shape = (1, tokens, size.hidden)
        self.rows = part(tokens, comm)
        with torch.device("meta"):
            whole = H3(size, num_blocks, None)
        self.weights = random_weights(whole, seed, device, dtype)
        with torch.device(device):
            self.model = H3(size, num_blocks, comm, tensor, schedule).to(dtype)
        self.model.load_whole(self.weights)
        if compiled:
            self.model.run_block = ulysses_op.compile(H3Block.forward, fullgraph=True)
        positions = torch.arange(tokens, device=device)
        self.rope = rope_table(positions[self.rows], size.head_dim)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's rows of (B, tokens, hidden)."""
        return whole[:, self.rows]

    @torch.inference_mode()
    def denoise(self, noise: Tensor, after_step: AfterStep = nothing) -> Tensor:
        """From this rank's rows of the noise, (B, S_local, hidden), to those of the result."""
        x = noise
        for step in range(self.steps):
            x = x - self.model(x, self.rope, 1 - step / self.steps) / self.steps
            after_step()
        return x

    @torch.inference_mode()
    def dense(self, noise: Tensor) -> Tensor:
        """The same on the whole sequence, (B, tokens, hidden), by the dense model."""
        return dense.denoise_h3(self.weights, noise, self.steps, self.size.heads)


class LingBotSession:
    """Makes a video of ``num_chunks`` chunks of ``chunk`` tokens, each in ``steps`` steps and one pass that caches it.
    Rank r of ``comm`` holds the r-th part of each chunk's rows."""

    def __init__(
        self,
        size: LingBotSize,
        num_blocks: int,
        comm: Communicator,
        device: torch.device,
        dtype: torch.dtype,
        *,
        chunk: int,
        num_chunks: int,
        steps: int,
        seed: int = 0,
    ) -> None:
        self.size, self.steps, self.chunk = size, steps, chunk
        self.shape = (1, chunk * num_chunks, size.hidden)
        self.rows = part(chunk, comm)
        with torch.device(device):
            self.model = LingBot(size, num_blocks, comm).to(dtype)
        self.weights = random_weights(self.model, seed, device, dtype)
        self.model.load_state_dict(self.weights)
        positions = torch.arange(chunk * num_chunks, device=device)
        self.ropes = [rope_table(of_chunk, size.head_dim) for of_chunk in positions.split(chunk)]
        self.mask = dense.chunk_mask(chunk * num_chunks, chunk, size.window, size.sink, device)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's rows of (B, num_chunks x chunk, hidden), chunk by chunk: (B, num_chunks x S_local, hidden)."""
        return torch.cat([of_chunk[:, self.rows] for of_chunk in whole.split(self.chunk, 1)], 1)

    @torch.inference_mode()
    def denoise(self, noise: Tensor, after_step: AfterStep = nothing) -> Tensor:
        """From own() of the noise to own() of the video."""
        self.model.clear_caches()
        video = []
        for x, rope in zip(noise.chunk(len(self.ropes), 1), self.ropes, strict=True):
            for step in range(self.steps):
                x = x - self.model(x, rope, 1 - step / self.steps) / self.steps
                after_step()
            # Caches the chunk, and its last block gathers nothing. The next chunk begins at once.
            self.model.fill_caches(x, rope)
            video.append(x)
        return torch.cat(video, 1)

    @torch.inference_mode()
    def dense(self, noise: Tensor) -> Tensor:
        """The same video whole, by the dense model, which attends to all of it under a mask."""
        return dense.denoise_lingbot(self.weights, noise, self.steps, self.size.heads, self.chunk, self.mask)


Session = H3Session | LingBotSession


def part(length: int, comm: Communicator) -> slice:
    """This rank's rows of ``length``, which the ranks share evenly."""
    local, rest = divmod(length, comm.world_size)
    if rest:
        raise ValueError(f"{length} rows do not split evenly over {comm.world_size} ranks")
    return slice(comm.rank * local, (comm.rank + 1) * local)


def random_weights(model: nn.Module, seed: int, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights by the names and shapes of ``model``'s, no two alike, of a scale that keeps activations near one."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, like in model.state_dict().items():
        x = torch.randn(like.shape, generator=generator, device=device)
        if like.dim() == 2:
            x = x / like.shape[1] ** 0.5
        elif "norm" in name:
            x = 1 + 0.2 * x
        else:
            x = 0.2 * x
        weights[name] = x.to(dtype)
    return weights


def random_noise(shape: tuple[int, ...], seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The same on every rank."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def deviation(actual: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Largest difference over the largest value wanted, and the cosine of the angle between the two; NaN where a value
    is."""
    actual, wanted = actual.double().flatten(), wanted.double().flatten()
    error = (actual - wanted).abs().max() / wanted.abs().max()
    return error.item(), F.cosine_similarity(actual, wanted, dim=0).item()
