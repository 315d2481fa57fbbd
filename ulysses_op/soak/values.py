"""What ranks pass in and what they must get, by plain indexing: every rank can make every rank's tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from hashlib import blake2b

import torch

from .transfers import Transfer

Fresh = Callable[[tuple[int, ...]], torch.Tensor]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LARGEST_COTANGENT = 4  # of whole numbers: their sums over any ranks are exact in half precision, in any order


class WrongResult(Exception):
    """A result is not what it must be; the message says where, and by how much."""


def bits(x: torch.Tensor) -> torch.Tensor:
    """The elements of ``x`` as integers of their size."""
    return x.view(_INTEGERS[x.element_size()])


def make_input(transfer: Transfer, key: str, rank: int, device: torch.device) -> torch.Tensor:
    """What ``rank`` passes in, random bits in its layout. ``key`` tells tensors apart, and starts with the seed."""
    shape, dtype = transfer.input_shape(rank), transfer.dtype
    return _place(shape, transfer.layouts[rank], lambda storage: _random(storage, dtype, f"{key} {rank}", device))


def make_cotangent(transfer: Transfer, key: str, rank: int, device: torch.device) -> torch.Tensor:
    """The gradient of what ``rank`` gets, of small whole numbers, in the layout of its right neighbour's input."""
    shape, layout = transfer.output_shape(rank), transfer.layouts[(rank + 1) % len(transfer.layouts)]
    generator = _generator(f"cotangent {key} {rank}")

    def fresh(storage: tuple[int, ...]) -> torch.Tensor:
        numbers = torch.randint(-_LARGEST_COTANGENT, _LARGEST_COTANGENT + 1, storage, generator=generator)
        return numbers.to(transfer.dtype).to(device)

    return _place(shape, layout, fresh)


def expected(transfer: Transfer, inputs: list[torch.Tensor], rank: int) -> torch.Tensor:
    """What ``rank`` must get of all ranks' ``inputs``, bit for bit."""
    whole = torch.cat([bits(x.detach()) for x in inputs], 1 if transfer.direction == "scatter_heads" else 2)
    return _own_part(transfer, whole, rank).view(transfer.dtype)


def expected_gradient(
    transfer: Transfer, inputs: list[torch.Tensor], cotangents: list[torch.Tensor], rank: int
) -> torch.Tensor:
    """The gradient of the input of ``rank``, (B, S_local, H, D) or (B, S_global, H_local, D): autograd's of joining all
    ranks' inputs and cutting out what each rank gets, for the ranks' ``cotangents``.

    Half precision is summed in float32, as the exchange does.
    """
    wide = torch.promote_types(transfer.dtype, torch.float32)
    own = torch.zeros_like(inputs[rank], dtype=wide, memory_format=torch.contiguous_format).requires_grad_()
    joined = [
        own if peer == rank else torch.zeros(x.shape, dtype=wide, device=x.device) for peer, x in enumerate(inputs)
    ]
    whole = torch.cat(joined, 1 if transfer.direction == "scatter_heads" else 2)
    outputs = [_own_part(transfer, whole, peer) for peer in range(len(inputs))]
    (gradient,) = torch.autograd.grad(outputs, own, [cotangent.to(wide) for cotangent in cotangents])
    return gradient.to(transfer.dtype)


def compare(actual: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Raises WrongResult unless ``actual`` has the type, shape and bits of ``wanted``."""
    if actual.dtype != wanted.dtype or actual.shape != wanted.shape:
        raise WrongResult(
            f"{what} is {tuple(actual.shape)} of {actual.dtype}, expected {tuple(wanted.shape)} of {wanted.dtype}"
        )
    wrong = bits(actual.detach()) != bits(wanted)
    if not bool(wrong.any()):
        return
    at = tuple(wrong.nonzero()[0].tolist())
    mask = (1 << (8 * actual.element_size())) - 1
    got, want = (int(bits(x.detach())[at]) & mask for x in (actual, wanted))
    raise WrongResult(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} elements of {tuple(actual.shape)} are wrong, the first at "
        f"(b, s, h, d) = {at}: {got:#x}, expected {want:#x}"
    )


def _own_part(transfer: Transfer, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """What ``rank`` gets of ``whole`` (B, S_global, H, D)."""
    if transfer.direction == "scatter_heads":
        start, stop = transfer.heads[rank]
        return whole[:, :, start:stop]
    start = sum(transfer.seq[:rank])
    return whole[:, start : start + transfer.seq[rank]]


def _generator(key: str) -> torch.Generator:
    number = int.from_bytes(blake2b(key.encode(), digest_size=7).digest(), "little")
    return torch.Generator().manual_seed(number)


def _random(storage: tuple[int, ...], dtype: torch.dtype, key: str, device: torch.device) -> torch.Tensor:
    numel = math.prod(storage)
    nbytes = numel * dtype.itemsize
    words = torch.empty(-(-nbytes // 4), dtype=torch.int32).random_(
        -(1 << 31), (1 << 31) - 1, generator=_generator(key)
    )
    raw = words.view(torch.uint8)[:nbytes]
    if dtype == torch.bool:
        raw = raw & 1
    return raw.view(dtype).view(storage).to(device)


def _place(shape: tuple[int, int, int, int], layout: str, fresh: Fresh) -> torch.Tensor:
    """A (B, S, H, D) tensor that lies in memory as ``layout`` says, in storage that ``fresh`` fills, gaps and all."""
    b, s, h, d = shape
    placed = {
        "contiguous": lambda: fresh((b, s, h, d)),
        "fused_qkv": lambda: fresh((b, s, 3, h, d))[:, :, 1],
        "batch_second": lambda: fresh((s, b, h, d)).transpose(0, 1),
        "heads_first": lambda: fresh((b, h, s, d)).transpose(1, 2),
        "transposed_d": lambda: fresh((b, s, d, h)).transpose(2, 3),
        "offset": lambda: fresh((b * s * h * d + 5,))[5:].view(b, s, h, d),
        "expanded_batch": lambda: fresh((1, s, h, d)).expand(b, s, h, d),
        "expanded_seq": lambda: fresh((b, 1, h, d)).expand(b, s, h, d),
        "expanded_heads": lambda: fresh((b, s, 1, d)).expand(b, s, h, d),
        "padded_d": lambda: fresh((b, s, h, d + 3))[..., :d],
        "sliced_heads": lambda: fresh((b, s, h + 2, d))[:, :, 1 : 1 + h],
        "strided_seq": lambda: fresh((b, 2 * s, h, d))[:, ::2],
    }
    return placed[layout]()
