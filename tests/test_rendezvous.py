"""What is left of a rendezvous that nobody waits for any more: threads that end, before Python does."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch.distributed as dist

from ulysses_op import _C, bounded_calls, rendezvous
from ulysses_op.errors import PeerAbortError, PeerTimeoutError
from ulysses_op.mapping import segment_name


def until_none_runs() -> None:
    deadline = time.monotonic() + 10
    while any(thread.name == "ulysses_op rendezvous" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_interrupted_rendezvous_ends() -> None:
    channel = rendezvous.Channel(dist.ProcessGroup(0, 2), dist.HashStore(), "interrupted", 60.0)
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            channel.all_gather(b"")
    finally:
        signal.signal(signal.SIGALRM, handler)
    until_none_runs()


def test_a_rank_that_comes_late_finds_no_rendezvous_that_was_given_up() -> None:
    name = segment_name()
    segment = _C.SharedSegment.create(name, _C.Board.size_bytes(2))
    _C.SharedSegment.unlink(name)
    boards = [_C.Board(segment, rank, 2) for rank in range(2)]
    store = dist.HashStore()
    first, late = (rendezvous.Channel(dist.ProcessGroup(rank, 2), store, "late", 0.1) for rank in range(2))
    for channel, board in zip((first, late), boards, strict=True):
        board.register_self()
        channel.watch(board)
    with pytest.raises(PeerTimeoutError):
        first.all_gather(b"")
    transport = _C.ShmTransport(boards[0], 60.0, False, False)
    transport.abort("abort", "rank 0: gave up")
    with pytest.raises(PeerAbortError, match="rank 0: gave up"):
        late.all_gather(b"")


def test_a_call_that_is_stuck_is_waited_for_at_exit() -> None:
    with pytest.raises(TimeoutError):
        bounded_calls.bounded(lambda left: left.wait(10.0) and time.sleep(0.3), 0.1)
    assert any(not through.is_set() for through in bounded_calls._left_alone)
    start = time.monotonic()
    bounded_calls._end_threads()
    assert time.monotonic() - start > 0.1
    until_none_runs()
