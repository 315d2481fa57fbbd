"""Random programs of exchanges that follow from a seed: the same on every rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Literal

from .refusals import BEFORE, BETWEEN
from .transfers import Transfer, draw_transfer

Kind = Literal["group", "call", "round_trip", "unwaited", "reopen"]
Final = Literal["names", "flag", "wait", "leave"]

_KINDS: dict[Kind, float] = {"group": 70, "call": 12, "round_trip": 12, "unwaited": 4, "reopen": 2}
_LONGEST_PAUSE_US = 2000


@dataclass(frozen=True)
class Step:
    """What all ranks do next.

    kind: "group" exchanges ``transfers`` as one group; "call" the first by a function; "round_trip" the first by a
        function and the result back; "unwaited" submits a group that nobody waits for, which the next group has to
        find; "reopen" closes the communicator, with such a group where there are transfers, and makes another.
    names: the tags that the group is given, in this order; none where it has no names. There may be some that
        nothing is submitted for.
    final: how the group learns of its last submission: "names" that its names are complete, "flag" by final=True,
        "wait" by wait(), "leave" by the end of the with-block.
    waited: the tags that are waited for, in this order; none where wait() names none.
    late: wait() comes behind the with-block.
    as_method: a function is the communicator's, not the package's.
    refused: (before which submission, which) of calls that must raise, and change nothing.
    pauses_us: how long ranks pause, in microseconds; see :meth:`pause_us`.
    """

    kind: Kind
    transfers: tuple[Transfer, ...] = ()
    names: tuple[str, ...] = ()
    final: Final = "wait"
    waited: tuple[str, ...] = ()
    late: bool = False
    as_method: bool = True
    refused: tuple[tuple[int, str], ...] = ()
    pauses_us: tuple[int, ...] = ()

    def pause_us(self, rank: int, point: int) -> int:
        """How long ``rank`` pauses at its ``point``-th place in the step."""
        return self.pauses_us[(point * 3 + rank) % len(self.pauses_us)] if self.pauses_us else 0

    def describe(self) -> str:
        """A line for people to read."""
        exchanges = "; ".join(
            f"{t.tag} {t.direction} {t.dtype_name} B={t.batch} H={t.num_heads} D={t.head_dim} heads={t.heads} "
            f"seq={t.seq} {'/'.join(dict.fromkeys(t.layouts))}{' with a gradient' if t.gradient else ''}"
            for t in self.transfers
        )
        return f"{self.kind} of {exchanges}" if exchanges else self.kind


def steps(seed: int, world_size: int, max_targets: int) -> Iterator[Step]:
    """The endless program of ``seed``."""
    return (step_at(seed, number, world_size, max_targets) for number in count())


def step_at(seed: int, number: int, world_size: int, max_targets: int) -> Step:
    """Step ``number`` of the program of ``seed``, whose groups need at most ``max_targets`` targets."""
    rng = random.Random(f"{seed} {number} {world_size}")
    kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
    pauses = _draw_pauses(rng)
    if kind in ("call", "round_trip"):
        transfer = draw_transfer(rng, world_size, gradient=rng.random() < 0.25, there_and_back=kind == "round_trip")
        return Step(kind, (transfer,), as_method=rng.random() < 0.7, pauses_us=pauses)
    transfers = () if kind == "reopen" and rng.random() < 0.5 else _draw_transfers(rng, world_size, max_targets)
    if kind != "group":
        return Step(kind, transfers, pauses_us=pauses)
    return _draw_group(rng, transfers, max_targets, pauses)


def _draw_transfers(rng: random.Random, world_size: int, max_targets: int) -> tuple[Transfer, ...]:
    with_gradients = rng.random() < 0.25
    transfers: list[Transfer] = []
    for _ in range(rng.choice(range(1, min(4, max_targets) + 1))):
        taken = tuple(transfer.tag for transfer in transfers)
        gradient = with_gradients and rng.random() < 0.75
        transfers.append(draw_transfer(rng, world_size, taken, gradient=gradient))
    return tuple(transfers)


def _draw_group(rng: random.Random, transfers: tuple[Transfer, ...], max_targets: int, pauses: tuple[int, ...]) -> Step:
    final: Final = rng.choice(("names", "names", "flag", "wait", "leave"))
    tags = [transfer.tag for transfer in transfers]
    names: list[str] = []
    if final == "names" or rng.random() < 0.3:
        names = rng.sample(tags, len(tags))
        if final != "names" and len(names) < max_targets:
            names.append("absent")
    # Without an order of its own, wait() takes that of the names, all of which there must be then.
    waited = rng.sample(tags, rng.randint(1, len(tags))) if "absent" in names or rng.random() < 0.4 else []
    refused = []
    if rng.random() < 0.15:
        at = rng.randint(0, len(tags) - 1)
        refused.append((at, rng.choice(BETWEEN if at else BEFORE)))
    return Step(
        kind="group",
        transfers=transfers,
        names=tuple(names),
        final=final,
        waited=tuple(waited),
        late=final == "leave" or (final in ("names", "flag") and rng.random() < 0.3),
        refused=tuple(refused),
        pauses_us=pauses,
    )


def _draw_pauses(rng: random.Random) -> tuple[int, ...]:
    if rng.random() < 0.7:
        return ()
    return tuple(rng.randrange(_LONGEST_PAUSE_US) if rng.random() < 0.2 else 0 for _ in range(7))
