"""How the ranks of a group arrive at one backend that works on all of them: state facts, decide alike, map, vote."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from . import _C
from .capability import Decision, Facts, decide, peer_refusals, probe
from .engine import Engine
from .errors import BackendUnavailableError, TargetError, kind_of_error
from .fallback import C10dEngine
from .mapping import CudaIpc, Mapping, SharedMemory, SymmetricMemory, segment_name
from .onesided import OneSidedEngine
from .rendezvous import Channel, all_gather_bytes, open_channel
from .torch_compat import group_device_types


def bring_up(
    group: dist.ProcessGroup,
    device: torch.device,
    requested: str,
    max_targets: int,
    timeout_s: float,
    pipelined: bool = False,
) -> tuple[Engine, Decision, list[Facts]]:
    """The engine of the best backend that comes up on every rank, why that one, and what the ranks stated. Collective.

    A backend that fails to come up on some rank is refused on all, and the next one is tried. ``pipelined`` is for the
    asynchronous ops: see OneSidedEngine.

    Raises, alike on every rank, ValueError if the ranks ask for different things, and BackendUnavailableError if the
    backend asked for cannot run, or none can; PeerTimeoutError where a rank is missing.
    """
    config = f"backend={requested} max_targets={max_targets} timeout_s={timeout_s}"
    facts, channel, segment = _state_facts(group, device, config, timeout_s)
    while True:
        decision = decide(facts, requested)
        if decision.backend is None:
            what = "no backend can run" if requested == "auto" else f"backend {requested!r} cannot run"
            raise BackendUnavailableError(f"{what}: {decision.reason}")
        if decision.backend == "c10d":
            return C10dEngine(group, group.rank(), device, channel, timeout_s), decision, facts
        assert segment is not None
        try:
            engine = _one_sided(decision.backend, group, device, segment, channel, max_targets, timeout_s, pipelined)
            return engine, decision, facts
        except TargetError as error:
            facts = [replace(fact, refusals={**fact.refusals, decision.backend: str(error)}) for fact in facts]


def _state_facts(
    group: dist.ProcessGroup, device: torch.device, config: str, timeout_s: float
) -> tuple[list[Facts], Channel, _C.SharedSegment | None]:
    """Every rank's facts, a channel that only these ranks use, and host memory that they share, if they do.

    That memory is the proof that they are on one host: rank 0 creates it, and whoever can map it is.
    """
    rank, world_size = group.rank(), group.size()
    own = probe(device, rank, config, f"{segment_name()} {secrets.token_hex(16)}", group_device_types(group))
    facts = [Facts.from_bytes(text) for text in all_gather_bytes(group, own.to_bytes(), timeout_s)]
    _check_consistent(facts)
    name, key_prefix = facts[0].board.split()
    channel = open_channel(group, key_prefix, timeout_s)
    segment: _C.SharedSegment | None = None
    board_error: str | None = None
    board_bytes = _C.Board.size_bytes(world_size)
    # Made once every rank knows its name, and removed by all: whoever is left cleans up.
    try:
        if rank == 0:
            try:
                segment = _C.SharedSegment.create(name, board_bytes)
            except RuntimeError as error:
                board_error = str(error)
        channel.all_gather(b"")
        if rank != 0:
            try:
                segment = _C.SharedSegment.open(name, board_bytes)
            except RuntimeError as error:
                board_error = str(error)
        own = replace(own, refusals={**peer_refusals(own, facts, board_error), **own.refusals})
        facts = [Facts.from_bytes(text) for text in channel.all_gather(own.to_bytes())]
    finally:
        _C.SharedSegment.unlink(name)
    return facts, channel, segment


def _check_consistent(facts: Sequence[Facts]) -> None:
    """Raise, alike on every rank, if the ranks did not build the same communicator, or one cannot build any."""
    errors = [f"rank {fact.rank}: {fact.error}" for fact in facts if fact.error]
    if errors:
        raise ValueError("; ".join(errors))
    for what in ("config", "device_type"):
        if len({getattr(fact, what) for fact in facts}) > 1:
            stated = ", ".join(f"rank {fact.rank}: {getattr(fact, what)}" for fact in facts)
            raise ValueError(f"the ranks built communicators that differ in {what}: {stated}")


def _one_sided(
    backend: str,
    group: dist.ProcessGroup,
    device: torch.device,
    segment: _C.SharedSegment,
    channel: Channel,
    max_targets: int,
    timeout_s: float,
    pipelined: bool,
) -> Engine:
    """Raises TargetError on every rank when it fails on one."""
    mapping: Mapping
    if backend == "shm":
        mapping = SharedMemory(channel)
    elif backend == "symm_mem":
        mapping = SymmetricMemory(channel, group, device)
    else:
        mapping = CudaIpc(channel, device)
    board = _C.Board(segment, channel.rank, channel.world_size)
    board.register_self()
    channel.all_gather(b"")
    unwatched: list[Exception] = []
    try:
        board.watch_peers()
    except RuntimeError as error:
        unwatched.append(error)
    channel.watch(board)
    engine = OneSidedEngine(backend, channel, device, mapping, max_targets, pipelined)

    def start() -> None:
        if unwatched:
            raise unwatched[0]
        engine.start(board, timeout_s)

    try:
        channel.vote(f"starting {backend}", start)
    except BaseException as error:
        if not isinstance(error, TargetError):  # a rank that comes late finds all the votes, and must hear of this
            engine.abort(kind_of_error(error), f"{type(error).__name__}: {error}")
        engine.close(0.0)
        raise
    return engine
