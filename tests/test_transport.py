"""What a rank's transport tells of peers that are late, lost or silent: its peers are played by this process."""

from __future__ import annotations

import os
import resource
import threading
import time

import pytest
import torch

from ulysses_op import _C
from ulysses_op.mapping import segment_name

READY = (1 << 32) | 1


def shared(world_size: int) -> _C.SharedSegment:
    """What the boards of a world lie on."""
    name = segment_name()
    try:
        return _C.SharedSegment.create(name, _C.Board.size_bytes(world_size))
    finally:
        _C.SharedSegment.unlink(name)


def ended(segment: _C.SharedSegment, rank: int, world_size: int) -> int:
    """A rank that has registered, and whose process, the one returned, has ended since."""
    pid = os.fork()
    if pid == 0:
        _C.Board(segment, rank, world_size).register_self()
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # reaped by nobody yet
    return pid


def transport(segment: _C.SharedSegment, rank: int, world_size: int, timeout_s: float) -> _C.ShmTransport:
    board = _C.Board(segment, rank, world_size)
    board.register_self()
    board.watch_peers()
    return _C.ShmTransport(board, timeout_s, False, False)


def failure_of(made: _C.ShmTransport) -> tuple[_C.Failure, float]:
    """What a group fails with, and when."""
    start = time.monotonic()
    made.begin(READY)
    made.wait(made.end(READY))
    failure = made.failure()
    assert failure is not None
    return failure, time.monotonic() - start


def test_a_peer_that_has_closed_is_told_of_at_once() -> None:
    segment = shared(3)
    first, second, _ = (transport(segment, rank, 3, 20.0) for rank in range(3))
    assert second.shutdown(1.0)
    failure, took_s = failure_of(first)
    assert (failure.kind, failure.peers) == ("peer_gone", [1])
    assert took_s < 10.0


def test_an_ended_peer_is_told_of_while_another_is_late() -> None:
    segment = shared(4)
    for rank in (2, 3):
        ended(segment, rank, 4)
    failure, took_s = failure_of(transport(segment, 0, 4, 20.0))
    assert (failure.kind, failure.peers) == ("peer_gone", [2, 3])
    assert took_s < 10


def test_a_peer_that_differs_is_told_of_while_another_is_late() -> None:
    segment = shared(3)
    other = transport(segment, 2, 3, 20.0)
    other.begin(READY + 2)
    failure, took_s = failure_of(transport(segment, 0, 3, 20.0))
    assert (failure.kind, failure.peers) == ("mismatch", [2])
    assert took_s < 10


def test_all_that_are_late_are_told_of() -> None:
    failure, _ = failure_of(transport(shared(4), 0, 4, 0.1))
    assert (failure.kind, failure.peers) == ("timeout", [1, 2, 3])


def test_peers_that_are_late_one_after_another_have_one_timeout() -> None:
    segment = shared(3)
    late = transport(segment, 1, 3, 20.0)
    timer = threading.Timer(0.8, late.begin, (READY,))
    timer.start()
    failure, took_s = failure_of(transport(segment, 0, 3, 1.0))
    timer.join()
    assert (failure.kind, failure.peers) == ("timeout", [2])
    assert took_s == pytest.approx(1.0, abs=0.7)


def test_nobody_waits_for_what_comes_after_the_end() -> None:
    made = transport(shared(2), 0, 2, 20.0)
    made.shutdown(0.0)
    failure, _ = failure_of(made)
    assert failure.kind == "closed"


def test_a_rank_that_is_lost_while_it_tells_is_named() -> None:
    """The message is cut short, who it is about is not."""
    segment = shared(2)
    words = torch.frombuffer(segment, dtype=torch.int32)
    told = _C.Board(segment, 0, 2)
    assert told.aborted() is None
    words[0] = -(1 << 31) | 1 << 8 | 2  # as rank 1 leaves it in the middle of telling of a mismatch
    failure = told.aborted()
    assert failure is not None
    assert (failure.kind, failure.message) == ("mismatch", "rank 1 gave up")


def test_a_peer_that_cannot_be_watched_is_an_error() -> None:
    segment = shared(2)
    _C.Board(segment, 1, 2).register_self()
    board = _C.Board(segment, 0, 2)
    free = os.dup(0)
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(RuntimeError, match="watching the process of rank 1"):
            board.watch_peers()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    board.watch_peers()
    assert not board.peer_gone(1)


def test_a_peer_that_has_ended_before_it_is_watched_is_gone() -> None:
    segment = shared(2)
    os.waitpid(ended(segment, 1, 2), 0)
    board = _C.Board(segment, 0, 2)
    board.watch_peers()
    assert board.peer_gone(1)
