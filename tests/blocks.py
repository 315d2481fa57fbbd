"""The zoo: attention models in miniature, written once and run both whole and split over ranks.

A block takes an exchange. `Dense` moves nothing and stands for the model on one device; `Sharded` moves for real. All
sequences lie in dimension 1, of inputs as of outputs, so that a rank's part is a range of rows; what is scattered is a
range of heads.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ulysses_op

WIDTH, DIM = 16, 8

Lengths = tuple[int, ...]


class Dense:
    """The exchange of a model that is not split."""

    def scatter(self, x: Tensor, heads: str = "q", of: str = "x") -> Tensor:
        return x

    def gather(self, x: Tensor, of: str = "x") -> Tensor:
        return x

    def own(self, x: Tensor) -> Tensor:
        return x


class Sharded:
    """The exchange of rank ``rank`` of ``block``, over ``communicator``.

    ``heads`` is "q" or "kv", ``of`` names the sequence; heads and lengths that are alike on all ranks are not passed.
    """

    def __init__(self, communicator: Any, block: Block, rank: int, world_size: int) -> None:
        self.communicator = communicator
        self.ranges = {heads: block.ranges(heads, world_size) for heads in ("q", "kv")}
        self.heads = {heads: ranges if block.planned else None for heads, ranges in self.ranges.items()}
        self.lengths = {of: x if len(set(x)) > 1 else None for of, x in block.lengths(world_size).items()}
        self.rank = rank

    def scatter(self, x: Tensor, heads: str = "q", of: str = "x") -> Tensor:
        return self.communicator.scatter_heads(x, heads=self.heads[heads], seq_lens=self.lengths[of])

    def gather(self, x: Tensor, of: str = "x") -> Tensor:
        return self.communicator.gather_heads(x, heads=self.heads["q"], seq_lens=self.lengths[of])

    def own(self, x: Tensor) -> Tensor:
        """This rank's key heads of a tensor that every rank holds whole."""
        start, stop = self.ranges["kv"][self.rank]
        return x[:, :, start:stop]


Exchange = Dense | Sharded


class Block(nn.Module):
    """A model whose ``forward`` takes an exchange and the tensors that ``inputs`` names.

    inputs: of "x" and "text", tokens (B, S, WIDTH) split over the ranks; "caption", tokens that every rank holds;
    "rope", cosines and sines (2, S, 1, DIM) split as x; "whole_rope", the same, held by every rank.
    outputs: each the sequence it is split by, or "heads" for one that stays scattered.
    groups: how many submissions each group of the forward graph has; a scatter that meets no other, or a gather, is a
    group of one.
    backward: the same of the backward graph.
    more_kernels: what each kernel is there for that the pass adds to the backward graph.
    modes: "inference" and "training": the graphs that are looked at. Both give right results in every block.
    exact: every value is an integer small enough for sums in any order to be equal, in double precision.
    """

    inputs: ClassVar[tuple[str, ...]] = ("x", "rope")
    outputs: ClassVar[tuple[str, ...]] = ("x",)
    batch: ClassVar[int] = 1
    heads: ClassVar[tuple[int, int]] = (4, 4)
    groups: ClassVar[tuple[int, ...]] = (3, 1)
    backward: ClassVar[tuple[int, ...]] = (1, 2, 1)
    more_kernels: ClassVar[tuple[str, ...]] = ()
    modes: ClassVar[tuple[str, ...]] = ("inference",)
    exact: ClassVar[bool] = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.exact else torch.float32

    @property
    def planned(self) -> bool:
        """Whether head plans are passed."""
        return self.heads[0] != self.heads[1]

    def ranges(self, heads: str, world_size: int) -> Any:
        plan = ulysses_op.head_plan(*self.heads, world_size)
        return plan.q if heads == "q" else plan.kv

    def is_alike(self, world_size: int) -> bool:
        """Whether all ranks compute on the same shapes."""
        shares = [tuple(stop - start for start, stop in self.ranges(heads, world_size)) for heads in ("q", "kv")]
        return all(len(set(sizes)) == 1 for sizes in (*shares, *self.lengths(world_size).values()))

    def lengths(self, world_size: int) -> dict[str, Lengths]:
        """Each sequence's length on each rank."""
        return {"x": (8,) * world_size, "text": (3,) * world_size}


CAPTION = 5
_ROWS = {"x": "x", "text": "text", "rope": "x"}  # inputs that are split, and the sequence they are split by


def build(name: str) -> Block:
    """The block with its weights, the same on every rank."""
    torch.manual_seed(7)
    block = BLOCKS[name]()
    block.to(block.dtype)
    if block.exact:
        for parameter in block.parameters():
            parameter.data.normal_().sign_()
    return block


def make_inputs(block: Block, world_size: int, seed: int) -> list[Tensor]:
    """The inputs of the whole model."""
    generator = torch.Generator().manual_seed(seed)
    lengths = {name: sum(each) for name, each in block.lengths(world_size).items()} | {"caption": CAPTION}
    made = []
    for name in block.inputs:
        if "rope" in name:
            frequencies = 10.0 ** -torch.arange(0, 1, 2 / DIM)
            angles = torch.arange(lengths["x"])[:, None] * torch.cat((frequencies, frequencies))
            made.append(torch.stack((angles.cos(), angles.sin()))[:, :, None])
            continue
        x = torch.randn(block.batch, lengths[name], WIDTH, generator=generator, dtype=block.dtype)
        made.append(x.sign() if block.exact else x)
    return made


def own_inputs(block: Block, rank: int, world_size: int, whole: list[Tensor]) -> list[Tensor]:
    """A rank's part of the inputs."""
    rows = _rows(block, rank, world_size)
    return [x[:, rows[_ROWS[name]]] if name in _ROWS else x for name, x in zip(block.inputs, whole, strict=True)]


def own_part(block: Block, rank: int, world_size: int, whole: list[Tensor]) -> list[Tensor]:
    """A rank's part of the outputs, and of the gradients of those inputs that are split and learned."""
    rows = _rows(block, rank, world_size)
    start, stop = block.ranges("q", world_size)[rank]
    gradients = [_ROWS[name] for name in block.inputs if is_learned(name) and not is_shared(name)]
    names = [*block.outputs, *gradients][: len(whole)]
    return [x[:, :, start:stop] if name == "heads" else x[:, rows[name]] for name, x in zip(names, whole, strict=True)]


def is_learned(name: str) -> bool:
    """Whether gradients flow to that input."""
    return "rope" not in name


def is_shared(name: str) -> bool:
    """Whether every rank holds that input whole, so that its gradients on the ranks add up."""
    return name not in _ROWS


def _rows(block: Block, rank: int, world_size: int) -> dict[str, slice]:
    return {
        name: slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
        for name, lengths in block.lengths(world_size).items()
    }


# Parts.


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """RoPE, on (B, S, H, DIM)."""
    first, second = x.chunk(2, -1)
    return x * rope[0] + torch.cat((-second, first), -1) * rope[1]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """On (B, S, H, DIM), with grouped heads where k has fewer."""
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped).transpose(1, 2)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Projections(nn.Module):
    """Q, K and V of one fused projection, Q and K normed, and rotated where there is a table."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = linear(WIDTH, 3 * heads * DIM)
        self.norm_q, self.norm_k = nn.RMSNorm(DIM), nn.RMSNorm(DIM)

    def forward(self, x: Tensor, rope: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, DIM)).unbind(2)
        q, k = self.norm_q(q), self.norm_k(k)
        return (q, k, v) if rope is None else (rotate(q, rope), rotate(k, rope), v)


class Layer(nn.Module):
    """Self-attention and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = Projections()
        self.out = linear(4 * DIM, WIDTH)

    def forward(self, exchange: Exchange, x: Tensor, rope: Tensor | None, of: str = "x") -> Tensor:
        q, k, v = (exchange.scatter(t, of=of) for t in self.projections(x, rope))
        return x + self.out(exchange.gather(attention(q, k, v), of=of).flatten(2))


# The zoo.


class FusedQKV(Block):
    modes: ClassVar[tuple[str, ...]] = ("inference", "training")

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, exchange: Exchange, x: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        return (self.layer(exchange, x, rope),)


class Batch2(FusedQKV):
    modes = ("inference",)
    batch = 2


class SeparateProjections(Block):
    """Q can leave before K is projected."""

    modes = ("training",)

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, 4 * DIM) for _ in range(3))
        self.norm_q, self.norm_k = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.out = nn.Linear(4 * DIM, WIDTH)

    def forward(self, exchange: Exchange, x: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (project(x).unflatten(-1, (4, DIM)) for project in (self.q, self.k, self.v))
        q, k = rotate(self.norm_q(q), rope), rotate(self.norm_k(k), rope)
        o = attention(exchange.scatter(q), exchange.scatter(k), exchange.scatter(v))
        return (x + self.out(exchange.gather(o).flatten(2)),)


class CrossAttention(Block):
    """Queries of x; keys and values of a caption that every rank holds, from which it takes its heads."""

    inputs = ("x", "caption")
    groups = (1, 1)
    backward = (1, 1)
    modes = ("training",)

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = linear(WIDTH, 4 * DIM), linear(WIDTH, 2 * 4 * DIM)
        self.norm_q, self.norm_k = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.out = linear(4 * DIM, WIDTH)

    def forward(self, exchange: Exchange, x: Tensor, caption: Tensor) -> tuple[Tensor, ...]:
        q = exchange.scatter(self.norm_q(self.q(x).unflatten(-1, (4, DIM))))
        k, v = self.kv(caption).unflatten(-1, (2, 4, DIM)).unbind(2)
        o = attention(q, exchange.own(self.norm_k(k)), exchange.own(v))
        return (x + self.out(exchange.gather(o).flatten(2)),)


class SplitCrossAttention(Block):
    """Keys and values of a text that is split too, with a length of its own."""

    inputs = ("x", "text")

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = linear(WIDTH, 4 * DIM), linear(WIDTH, 2 * 4 * DIM)
        self.norm_q, self.norm_k = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.out = linear(4 * DIM, WIDTH)

    def forward(self, exchange: Exchange, x: Tensor, text: Tensor) -> tuple[Tensor, ...]:
        q = exchange.scatter(self.norm_q(self.q(x).unflatten(-1, (4, DIM))))
        k, v = self.kv(text).unflatten(-1, (2, 4, DIM)).unbind(2)
        o = attention(q, exchange.scatter(self.norm_k(k), of="text"), exchange.scatter(v, of="text"))
        return (x + self.out(exchange.gather(o).flatten(2)),)


class SelfAndCrossAttention(Block):
    """A video transformer's layer: a group, a single exchange, and a feed-forward network behind them."""

    inputs = ("x", "caption", "rope")
    groups = (3, 1, 1, 1)

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cross = Layer(), CrossAttention()
        self.up, self.down = linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH, WIDTH)

    def forward(self, exchange: Exchange, x: Tensor, caption: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        (x,) = self.cross(exchange, self.layer(exchange, x, rope), caption)
        return (x + self.down(F.gelu(self.up(x))),)


class DoubleStream(Block):
    """Image and text with projections of their own, one attention over both."""

    inputs = ("x", "text", "rope")
    outputs = ("x", "text")
    modes = ("training",)

    def __init__(self) -> None:
        super().__init__()
        self.image, self.words = Projections(), Projections()
        self.out_image, self.out_words = linear(4 * DIM, WIDTH), linear(4 * DIM, WIDTH)

    def lengths(self, world_size: int) -> dict[str, Lengths]:
        lengths = super().lengths(world_size)
        return {**lengths, "both": tuple(x + text for x, text in zip(lengths["x"], lengths["text"], strict=True))}

    def forward(self, exchange: Exchange, x: Tensor, text: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        both = (torch.cat(pair, 1) for pair in zip(self.words(text), self.image(x, rope), strict=True))
        q, k, v = (exchange.scatter(t, of="both") for t in both)
        o = exchange.gather(attention(q, k, v), of="both").flatten(2)
        words, image = o.split((text.shape[1], x.shape[1]), 1)
        return x + self.out_image(image), text + self.out_words(words)


class ParallelMLP(Block):
    """Flux' single stream: one projection for attention and MLP, which does not depend on attention, and one back."""

    modes = ("training",)

    def __init__(self) -> None:
        super().__init__()
        self.into = linear(WIDTH, 3 * 4 * DIM + 2 * WIDTH)
        self.norm_q, self.norm_k = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.out = linear(4 * DIM + 2 * WIDTH, WIDTH)

    def forward(self, exchange: Exchange, x: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        qkv, mlp = self.into(x).split((3 * 4 * DIM, 2 * WIDTH), -1)
        q, k, v = qkv.unflatten(-1, (3, 4, DIM)).unbind(2)
        q, k = rotate(self.norm_q(q), rope), rotate(self.norm_k(k), rope)
        o = exchange.gather(attention(exchange.scatter(q), exchange.scatter(k), exchange.scatter(v)))
        return (x + self.out(torch.cat((o.flatten(2), F.gelu(mlp, approximate="tanh")), -1)),)


class GroupedQueries(Block):
    """28 query heads share 7 key heads, which split over no even number of ranks."""

    heads = (28, 7)
    modes: ClassVar[tuple[str, ...]] = ("inference", "training")

    def __init__(self) -> None:
        super().__init__()
        queries, keys = self.heads
        self.qkv = linear(WIDTH, (queries + 2 * keys) * DIM)
        self.norm_q, self.norm_k = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.out = linear(queries * DIM, WIDTH)

    def forward(self, exchange: Exchange, x: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        queries, keys = self.heads
        q, k, v = self.qkv(x).unflatten(-1, (queries + 2 * keys, DIM)).split((queries, keys, keys), 2)
        q, k = rotate(self.norm_q(q), rope), rotate(self.norm_k(k), rope)
        o = attention(exchange.scatter(q), exchange.scatter(k, "kv"), exchange.scatter(v, "kv"))
        return (x + self.out(exchange.gather(o).flatten(2)),)


class MultiQuery(GroupedQueries):
    """One key head, which every rank gets; the backward adds the ranks' gradients of it."""

    heads = (4, 1)
    modes = ("training",)


class Uneven(FusedQKV):
    modes = ("training",)

    def lengths(self, world_size: int) -> dict[str, Lengths]:
        return {"x": (8, 5, 7, 3)[:world_size]}


class EmptyShard(FusedQKV):
    """The last rank has no token of its own, and takes its share of the heads nevertheless."""

    modes: ClassVar[tuple[str, ...]] = ("inference", "training")

    def lengths(self, world_size: int) -> dict[str, Lengths]:
        return {"x": (*(8, 5, 7)[: world_size - 1], 0)}


class FourLayers(Block):
    groups = (3, 1) * 4

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, exchange: Exchange, x: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        for layer in self.layers:
            x = layer(exchange, x, rope)
        return (x,)


class Checkpointed(Block):
    """Each layer's forward runs again in the backward, exchanges and all."""

    groups = (3, 1) * 2
    # Each layer forward, and the gradient of what it computed.
    backward = (3, 1, 1, 2, 1) * 2
    more_kernels = (
        "without the pass both layers are normed in one kernel, before the first gradient",
        "and so are the gradients of the norms' weights",
    )
    modes = ("training",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, exchange: Exchange, x: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        for layer in self.layers:
            x = checkpoint(layer, exchange, x, rope, use_reentrant=False)
        return (x,)


class ReturnsScattered(Block):
    """A cache of keys and values leaves the graph, and is read after later groups."""

    outputs = ("x", "heads", "heads")
    groups = (3, 1) * 2

    def __init__(self) -> None:
        super().__init__()
        self.projections, self.out, self.second = Projections(), linear(4 * DIM, WIDTH), Layer()

    def forward(self, exchange: Exchange, x: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (exchange.scatter(t) for t in self.projections(x, rope))
        x = x + self.out(exchange.gather(attention(q, k, v)).flatten(2))
        return self.second(exchange, x, rope), k, v


class UsedAgain(Block):
    """The second layer's values are mixed with the first's, which by then have outlived a scatter of the same tag."""

    groups = (3, 1) * 2
    backward = (1, 2, 1) * 2
    more_kernels = ("without the pass the gradients of both layers' norms' weights are one kernel",)
    modes = ("training",)

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(Projections() for _ in range(2))
        self.out = nn.ModuleList(linear(4 * DIM, WIDTH) for _ in range(2))

    def forward(self, exchange: Exchange, x: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        first: Tensor | None = None
        for projections, out in zip(self.projections, self.out, strict=True):
            q, k, v = (exchange.scatter(t) for t in projections(x, rope))
            first = v if first is None else first
            x = x + out(exchange.gather(attention(q, k, (v + first) / 2)).flatten(2))
        return (x,)


class GatedValues(Block):
    """V has work of its own behind its projection, though less than Q and K."""

    modes = ("training",)

    def __init__(self) -> None:
        super().__init__()
        self.projections, self.gate, self.out = Projections(), linear(WIDTH, 4), linear(4 * DIM, WIDTH)

    def forward(self, exchange: Exchange, x: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.projections(x, rope)
        v = v * self.gate(x).sigmoid()[..., None]
        o = attention(exchange.scatter(q), exchange.scatter(k), exchange.scatter(v))
        return (x + self.out(exchange.gather(o).flatten(2)),)


class LargeQueryBranch(Block):
    """Several matrix products on Q: what frees memory soonest is then to leave V for last."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = linear(WIDTH, 3 * 4 * DIM), linear(4 * DIM, WIDTH)
        self.up, self.down = linear(DIM, 24 * DIM), linear(24 * DIM, DIM)
        self.norm_q, self.norm_k = nn.RMSNorm(DIM), nn.RMSNorm(DIM)

    def forward(self, exchange: Exchange, x: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, DIM)).unbind(2)
        q = self.down(F.relu(self.up(q)))
        q, k = rotate(self.norm_q(q), rope), rotate(self.norm_k(k), rope)
        o = attention(exchange.scatter(q), exchange.scatter(k), exchange.scatter(v))
        return (x + self.out(exchange.gather(o).flatten(2)),)


class RotatesAfterwards(Block):
    """LingBot's order: norms before the scatter, RoPE after it, on whole sequences."""

    inputs = ("x", "whole_rope")
    # Where PyTorch writes a rotation's gradient as one kernel for each half and one for their sum.
    more_kernels = ("K's gradient is rotated and leaves while Q's is rotated",) * 3
    modes = ("training",)

    def __init__(self) -> None:
        super().__init__()
        self.projections, self.out = Projections(), linear(4 * DIM, WIDTH)

    def forward(self, exchange: Exchange, x: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (exchange.scatter(t) for t in self.projections(x))
        o = attention(rotate(q, rope), rotate(k, rope), v)
        return (x + self.out(exchange.gather(o).flatten(2)),)


class TwoAttentions(Block):
    """Two groups neither of which needs the other."""

    inputs = ("x", "text", "rope")
    outputs = ("x", "text")
    groups = (3, 1) * 2

    def __init__(self) -> None:
        super().__init__()
        self.image, self.words = Layer(), Layer()

    def forward(self, exchange: Exchange, x: Tensor, text: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        return self.image(exchange, x, rope), self.words(exchange, text, None, "text")


class Integers(Block):
    """Linear attention on small integers: every sum is exact, so that results are equal to the last bit."""

    inputs = ("x",)
    backward = (1, 1, 1, 1)  # the gradients come from a product each
    modes = ("training",)
    exact = True

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = linear(WIDTH, 3 * 4 * DIM), linear(4 * DIM, WIDTH)

    def forward(self, exchange: Exchange, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, DIM)).unbind(2)
        q, k, v = (exchange.scatter(t).transpose(1, 2) for t in (F.relu(q), F.relu(k), v))
        o = (q @ (k.transpose(2, 3) @ v)).transpose(1, 2)
        return (self.out(exchange.gather(o).flatten(2)),)


BLOCKS: dict[str, type[Block]] = {
    block.__name__: block
    for block in (
        FusedQKV,
        Batch2,
        SeparateProjections,
        CrossAttention,
        SplitCrossAttention,
        SelfAndCrossAttention,
        DoubleStream,
        ParallelMLP,
        GroupedQueries,
        MultiQuery,
        Uneven,
        EmptyShard,
        FourLayers,
        Checkpointed,
        ReturnsScattered,
        UsedAgain,
        GatedValues,
        LargeQueryBranch,
        RotatesAfterwards,
        TwoAttentions,
        Integers,
    )
}
