"""What a communicator's last groups were, for people who look for what went wrong."""

from __future__ import annotations

import datetime
import json
import logging
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from . import registry

if TYPE_CHECKING:
    from .communicator import Communicator
    from .exchange_group import ExchangeGroup
    from .steps import Step

DIRECTORY_VARIABLE = "ULYSSES_OP_FLIGHT_RECORD"
LENGTH = 64

_log = logging.getLogger(__name__)


class FlightRecord:
    """The last groups of one communicator, the oldest first. Keeping it costs an append and three looks at the clock a
    group; it holds no tensors but those of groups that are under way.
    """

    def __init__(self) -> None:
        self._groups: deque[ExchangeGroup] = deque(maxlen=LENGTH)
        self._begun = 0

    def begin(self, group: ExchangeGroup) -> None:
        """A group begins: it is kept, and its own marks tell the rest."""
        self._begun += 1
        group.begun_ns = time.time_ns()
        self._groups.append(group)

    def clear(self) -> None:
        self._groups.clear()

    def groups(self) -> list[dict[str, Any]]:
        """A description of each, of plain values. ``number`` counts the communicator's groups from 1; times are seconds
        since the epoch, None for what has not come: a group that is complete has its last submission, one that is
        delivered its results, on CUDA in the order of streams.
        """
        kept = list(self._groups)
        first = self._begun - len(kept) + 1
        return [_described(first + i, group) for i, group in enumerate(kept)]


def flight_record(communicator: Communicator, failure: str | None = None) -> dict[str, Any]:
    """What :meth:`Communicator.flight_record` returns."""
    beside = communicator._companion
    return {
        "time": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%dT%H:%M:%S.%f}Z",
        "pid": os.getpid(),
        "communicator": communicator._where[0],
        "rank": communicator.rank,
        "world_size": communicator.world_size,
        "backend": communicator.known_backend,
        "failure": failure,
        "groups": communicator._record.groups(),
        "compiled_groups": [] if beside is None else beside._record.groups(),
    }


def dump_flight_records(directory: str | os.PathLike[str]) -> list[str]:
    """Write the flight records of this process's communicators, but for those that have failed, to ``directory``, which
    is made if need be, as JSON, one file each; their paths. Local, and safe in a signal handler of Python, where a rank
    waits for its peers.

    Raises OSError where that cannot be done.
    """
    communicators = [communicator for _, communicator in registry.living()]
    return [_write(flight_record(one), os.fspath(directory)) for one in communicators if one._broken is None]


def dump_on_failure(communicator: Communicator, failure: str) -> None:
    """Write the record to the directory that the environment names, if it does. A failure to is no other failure."""
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        return
    try:
        _write(flight_record(communicator, failure), directory)
    except OSError as error:
        _log.warning("%s: the flight record cannot be written: %s", DIRECTORY_VARIABLE, error)


def _write(record: dict[str, Any], directory: str) -> str:
    communicator = "".join(character if character.isalnum() else "-" for character in record["communicator"])
    stamp = record["time"].translate(str.maketrans("", "", "-:."))
    path = os.path.join(directory, f"ulysses_op-{communicator}-rank{record['rank']}-pid{record['pid']}-{stamp}.json")
    os.makedirs(directory, exist_ok=True)
    with open(path, "w") as file:
        json.dump(record, file, indent=1)
    return path


def _described(number: int, group: ExchangeGroup) -> dict[str, Any]:
    return {
        "number": number,
        "tags": list(group.tags),
        "captured": group.captured,
        "begun": _seconds(group.begun_ns),
        "complete": _seconds(group.complete_ns),
        "delivered": _seconds(group.delivered_ns),
        "submissions": [_submitted(step) for step in group.path],
    }


def _submitted(step: Step) -> dict[str, Any]:
    exchange = step.exchange
    return {
        "tag": step.tag,
        "direction": exchange.direction,
        "dtype": str(step.dtype).removeprefix("torch."),
        "batch": exchange.batch,
        "num_heads": exchange.num_heads,
        "head_dim": exchange.head_dim,
        "heads": [list(pair) for pair in exchange.heads],
        "seq_lens": list(exchange.seq_lens),
        "differentiable": step.differentiable,
        "final": step.final,
    }


def _seconds(nanoseconds: int) -> float | None:
    return nanoseconds / 1e9 if nanoseconds else None
