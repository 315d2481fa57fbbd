"""What an exchange must return, by plain indexing and without the package.

Every rank's input follows from (case, direction, seed, rank), so each rank builds all of them, joins them along the
dimension that the exchange gathers and cuts its own part out of the other. Elements are compared as bits.
"""

from __future__ import annotations

import torch
from cases import Case

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIER = 0x9E3779B1
_MODULUS = 1 << 32


def bits(x: torch.Tensor) -> torch.Tensor:
    """The elements of `x` as integers of their size."""
    return x.view(_INTEGERS[x.element_size()])


def _mixed(ids: torch.Tensor) -> torch.Tensor:
    """Pseudo-random 32-bit numbers in int64, distinct for distinct `ids` modulo 2**32: each step can be undone."""
    for shift in (16, 13, 16):
        ids = ids * _MULTIPLIER % _MODULUS
        ids = ids ^ (ids >> shift)
    return ids


def values(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int, rank: int) -> torch.Tensor:
    """A contiguous tensor whose elements encode (rank, position): distinct over all ranks where an element has 4 bytes
    or more, random bits where it has fewer.
    """
    numel = 1
    for size in shape:
        numel *= size
    ids = torch.arange(numel, dtype=torch.int64, device=device) + (rank << 26)
    mixed = _mixed(ids + seed * _MULTIPLIER)
    if dtype == torch.bool:
        return ((mixed >> 16) & 1).to(torch.uint8).view(dtype).view(shape)
    itemsize = torch.empty((), dtype=dtype).element_size()
    if itemsize == 8:
        # The seed in the high half; the exponent of a float64 stays below infinity's.
        raw = mixed + ((seed & 0xFFFF) << 32)
    elif itemsize == 4:
        raw = mixed - (mixed >= _MODULUS // 2).to(torch.int64) * _MODULUS
    else:
        low = mixed % (1 << (8 * itemsize))
        raw = low if itemsize == 1 else low - (low >= 1 << 15).to(torch.int64) * (1 << 16)
    return raw.to(_INTEGERS[itemsize]).view(dtype).view(shape)


def place(
    shape: tuple[int, int, int, int], layout: str, dtype: torch.dtype, device: str, seed: int, rank: int
) -> torch.Tensor:
    """A (B, S, H, D) tensor that lies in memory as `layout` says, with other values in the gaps of its storage."""
    b, s, h, d = shape

    def fresh(*storage_shape: int) -> torch.Tensor:
        return values(storage_shape, dtype, device, seed, rank)

    if layout == "mixed_by_rank":
        layout = ("contiguous", "fused_qkv", "transposed_d", "sb")[rank % 4]
    if layout == "contiguous":
        return fresh(b, s, h, d)
    if layout == "fused_qkv":
        return fresh(b, s, 3, h, d)[:, :, 1]
    if layout == "sb":
        return fresh(s, b, h, d).transpose(0, 1)
    if layout == "heads_first":
        return fresh(b, h, s, d).transpose(1, 2)
    if layout == "transposed_d":
        return fresh(b, s, d, h).transpose(2, 3)
    if layout == "expanded_batch":
        return fresh(1, s, h, d).expand(b, s, h, d)
    if layout == "expanded_seq":
        return fresh(b, 1, h, d).expand(b, s, h, d)
    if layout == "expanded_heads":
        return fresh(b, s, 1, d).expand(b, s, h, d)
    if layout == "offset":
        return fresh(b * s * h * d + 5)[5:].view(b, s, h, d)
    if layout == "padded_d":
        return fresh(b, s, h, d + 3)[..., :d]
    if layout == "sliced_heads":
        return fresh(b, s, h + 2, d)[:, :, 1 : 1 + h]
    if layout == "strided_seq":
        return fresh(b, 2 * s, h, d)[:, ::2]
    raise ValueError(f"layout {layout!r}")


def make_input(case: Case, direction: str, seed: int, rank: int, device: str = "cpu") -> torch.Tensor:
    """Rank `rank`'s input of `case`."""
    shape = case.input_shape(direction, rank)
    return place(shape, case.layout, case.dtype, device, 16 * seed + case.slot, rank)


def expected(case: Case, direction: str, seed: int, rank: int, device: str = "cpu") -> torch.Tensor:
    """What rank `rank` must hold after the exchange."""
    inputs = [make_input(case, direction, seed, peer, device) for peer in range(case.world_size)]
    return reshard(inputs, case, direction, rank)


def reshard(inputs: list[torch.Tensor], case: Case, direction: str, rank: int) -> torch.Tensor:
    """The exchange of all ranks' `inputs`, seen from `rank`: differentiable where the inputs are."""
    if direction == "scatter_heads":
        start, stop = case.ranges[rank]
        return _join(inputs, 1)[:, :, start:stop]
    start = sum(case.seq[:rank])
    return _join(inputs, 2)[:, start : start + case.seq[rank]]


def _join(inputs: list[torch.Tensor], dim: int) -> torch.Tensor:
    if inputs[0].requires_grad:
        return torch.cat(inputs, dim)
    return torch.cat([bits(x) for x in inputs], dim).view(inputs[0].dtype)


def difference(actual: torch.Tensor, wanted: torch.Tensor) -> str | None:
    """What is wrong with `actual`, None if nothing is: dtype, shape, or the first elements whose bits differ."""
    if actual.dtype != wanted.dtype:
        return f"dtype {actual.dtype}, expected {wanted.dtype}"
    if actual.shape != wanted.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(wanted.shape)}"
    wrong = bits(actual) != bits(wanted)
    count = int(wrong.sum())
    if count == 0:
        return None
    first = wrong.nonzero()[:3].tolist()
    shown = [f"{at}: {bits(actual)[tuple(at)].item():#x} for {bits(wanted)[tuple(at)].item():#x}" for at in first]
    return f"{count} of {wrong.numel()} elements of {tuple(actual.shape)} differ, first (b, s, h, d) {'; '.join(shown)}"


def wrong_elements(actual: torch.Tensor, wanted: torch.Tensor) -> int:
    """How many elements differ in their bits."""
    return int((bits(actual) != bits(wanted)).sum())
