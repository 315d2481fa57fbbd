"""Shapes of models by name."""

from __future__ import annotations

Shape = tuple[int, int, int, int]
"""(B, S_local, H, D) of one of q, k and v on a rank, before its heads are scattered."""

_SEQUENCES: dict[str, Shape] = {  # (B, S_global, H, D); H of one tensor-parallel rank
    "h3-u2": (1, 18944, 56, 128),
    "h3-tp2u2": (1, 18944, 28, 128),
    "lingbot-u2": (1, 6240, 40, 128),
    "wan-480p": (1, 32760, 40, 128),
    "wan-720p": (1, 75600, 40, 128),
    "flux-1024": (1, 4608, 24, 128),
    "small": (1, 2048, 24, 128),
}
PROFILES = tuple(_SEQUENCES)


def shape_of(name: str, world_size: int) -> Shape:
    """The profile's shape on each of ``world_size`` ranks. Raises ValueError where it does not split equally."""
    batch, seq_global, num_heads, head_dim = _SEQUENCES[name]
    if seq_global % world_size or num_heads % world_size:
        raise ValueError(f"{name} has {seq_global} tokens and {num_heads} heads: {world_size} ranks do not divide both")
    return batch, seq_global // world_size, num_heads, head_dim
