"""A short synthetic video, cut into the patches that a video transformer attends over."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

PATCH = 16  # pixels of a patch, in height and in width
PATCH_FRAMES = 4  # frames of a patch; the first patch in time holds one frame only, repeated


class Grid(NamedTuple):
    """Patches of a clip in time, height and width. The sequence runs through width first, then height, then time."""

    frames: int
    height: int
    width: int

    @property
    def seq_len(self) -> int:
        return self.frames * self.height * self.width

    @property
    def clip_shape(self) -> tuple[int, int, int]:
        """Frames, height and width of the clip in pixels."""
        return PATCH_FRAMES * (self.frames - 1) + 1, PATCH * self.height, PATCH * self.width


def moving_scene(frames: int, height: int, width: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """A disc and a box that move over a drifting gradient, the same on every call.

    Returns (frames, height, width, 3), RGB in [-1, 1], float32.
    """
    t = torch.arange(frames, device=device)[:, None, None] / 16
    y = torch.linspace(-1, 1, height, device=device)[None, :, None]
    x = torch.linspace(-1, 1, width, device=device)[None, None, :] * (width / height)
    gradient = [torch.sin(2 * x + 3 * t) + 0 * y, torch.cos(3 * y - 2 * t) + 0 * x, torch.sin(x + 2 * y + t)]
    disc = (x - torch.cos(2 * t)) ** 2 + (y - 0.5 * torch.sin(3 * t)) ** 2 < 0.1
    box = ((x + torch.sin(t)).abs() < 0.4) & ((y - 0.4 * torch.cos(t)).abs() < 0.25)
    scene = torch.stack(gradient, -1)
    scene = torch.where(disc[..., None], scene.new_tensor([0.9, 0.7, -0.8]), scene)
    return torch.where(box[..., None], scene.new_tensor([-0.7, 0.2, 0.8]), scene)


def patch_tokens(clip: torch.Tensor, grid: Grid, hidden: int) -> torch.Tensor:
    """Embed a clip by a fixed random linear map of its patches, and normalise each, as a block's input is.

    clip: (frames, height, width, 3) in pixels, of ``grid.clip_shape``. Returns (1, grid.seq_len, hidden), float32.
    """
    first = clip[:1].expand(PATCH_FRAMES - 1, -1, -1, -1)
    pixels = torch.cat([first, clip])
    patches = pixels.unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH)).unflatten(0, (-1, PATCH_FRAMES))
    patches = patches.permute(0, 2, 4, 1, 3, 5, 6).flatten(3).flatten(0, 2)
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(patches.shape[1], hidden, generator=generator).to(clip.device)
    return F.layer_norm(patches @ embedding, (hidden,)).view(1, grid.seq_len, hidden)
