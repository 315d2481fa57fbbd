"""How the ranks of a group tell each other small things on the host: bounded in time, without the GPU, without
pickles.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist

from . import _C
from .bounded_calls import bounded
from .errors import BrokenCommunicatorError, MismatchError, PeerTimeoutError, TargetError, error_of_kind
from .steps import text_of
from .torch_compat import group_device_types, group_store

_FIELD_CHARACTERS = 512  # what is told of each thing in which ranks may differ
_MESSAGE_BYTES = 8192
_STORE_GRACE_S = 1.0  # beyond the time-out, for a store that answers, and for a process that is about to have ended


def open_channel(group: dist.ProcessGroup, prefix: str, timeout_s: float) -> Channel:
    """A channel of the ranks of ``group``. Raises BrokenCommunicatorError when its store cannot be reached."""
    try:
        store = bounded(lambda _: group_store(group), timeout_s + _STORE_GRACE_S)
    except (RuntimeError, TimeoutError) as error:
        raise BrokenCommunicatorError(f"rank {group.rank()}: {_unreachable(error)}") from error
    return Channel(group, store, prefix, timeout_s)


def _unreachable(error: Exception) -> str:
    return f"the store of the process group cannot be reached: {str(error).splitlines()[0]}"


_left: weakref.WeakKeyDictionary[dist.ProcessGroup, list[str]] = weakref.WeakKeyDictionary()
"""Keys that this rank has set in channels which are gone. Others may read them until all meet in the group's next one.
"""


def all_gather_bytes(group: dist.ProcessGroup, payload: bytes, timeout_s: float) -> list[bytes]:
    """Every rank's ``payload`` (at most 8188 bytes), by one collective of the process group.

    Used once a communicator, to agree on a key prefix that no earlier communicator has used; then :class:`Channel`
    takes over.

    Raises PeerTimeoutError when some rank does not take part within ``timeout_s``.
    """
    if len(payload) > _MESSAGE_BYTES - 4:
        raise ValueError(f"payload has {len(payload)} bytes, at most {_MESSAGE_BYTES - 4} fit")
    types = group_device_types(group)
    device = torch.device("cpu") if "cpu" in types else torch.device("cuda", torch.cuda.current_device())
    message = len(payload).to_bytes(4, "little") + payload
    own = torch.frombuffer(bytearray(message.ljust(_MESSAGE_BYTES, b"\0")), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    work = dist.all_gather(gathered, own, group=group, async_op=True)
    assert work is not None
    deadline = time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise PeerTimeoutError(
                f"rank {group.rank()}: not every rank of the group built its communicator within {timeout_s} s. The "
                "process group is left in the middle of a collective: destroy it, and create another one"
            )
        time.sleep(0.0002)
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerTimeoutError(
            f"rank {group.rank()}: a rank of the group ended before it built its communicator: {error}"
        ) from error
    messages = [bytes(tensor.tolist()) for tensor in gathered]
    return [text[4 : 4 + int.from_bytes(text[:4], "little")] for text in messages]


def _fields_of(payload: bytes) -> dict[str, str]:
    """What a peer says that it submitted; nothing where it says something else."""
    try:
        found = json.loads(payload)
    except ValueError:
        return {}
    return {name: str(text) for name, text in found.items()} if isinstance(found, dict) else {}


def _differences(own: Mapping[str, str], others: Mapping[int, Mapping[str, str]]) -> str:
    told = []
    for name, text in own.items():
        there: dict[str, list[str]] = {}
        for peer, fields in others.items():
            if fields.get(name, text) != text:
                there.setdefault(fields[name], []).append(str(peer))
        if there:
            on_ranks = ", ".join(f"{other} on rank {', '.join(peers)}" for other, peers in there.items())
            hint = ": where lengths are uneven, pass the same seq_lens= on all ranks" if name == "seq_lens" else ""
            told.append(f"{name}: {text} here, {on_ranks}{hint}")
    return f"they differ in {'; in '.join(told)}" if told else "they differ in what they submitted before it"


class Channel:
    """All-gathers of byte strings through the group's store, in which nothing adds up. Every rank makes the same calls
    in the same order.

    ``prefix`` is equal on these ranks, and nobody else's.
    """

    def __init__(self, group: dist.ProcessGroup, store: dist.Store, prefix: str, timeout_s: float) -> None:
        self.prefix = prefix
        self.rank = group.rank()
        self.world_size = group.size()
        self._store = dist.PrefixStore("ulysses_op", store)
        self._timeout_s = timeout_s
        self._round = 0
        left = _left.setdefault(group, [])
        self._set_before = left.copy()  # keys of this rank that nobody reads once all ranks are in the next round
        left.clear()
        weakref.finalize(self, left.extend, self._set_before).atexit = False
        self._board: _C.Board | None = None
        self._idle: Callable[[], bool] | None = None

    def watch(self, board: _C.Board, idle: Callable[[], bool] | None = None) -> None:
        """While waiting, notice peers that have ended, closed or given up, and those that are in a handshake, where
        ``idle`` tells whether this rank is in none.
        """
        self._board = board
        self._idle = idle

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order.

        Raises PeerTimeoutError that names the ranks that are missing or have ended, PeerAbortError when one gave up,
        MismatchError when one is in a handshake instead, BrokenCommunicatorError when the store cannot be reached.
        """
        self._round += 1
        try:
            return bounded(lambda left: self._all_gather(payload, left), self._timeout_s + _STORE_GRACE_S)
        except BrokenCommunicatorError:
            raise
        except (RuntimeError, TimeoutError) as error:
            self._raise_if_told()
            gone = self._gone(range(self.world_size))
            # A store that ends with the rank that hosts it is missed a little before that rank is.
            deadline = time.monotonic() + (0.0 if isinstance(error, TimeoutError) else _STORE_GRACE_S)
            while self._board is not None and not gone and time.monotonic() < deadline:
                time.sleep(0.01)
                gone = self._gone(range(self.world_size))
            self._raise_if_told()  # behind the look: who gives up tells, and closes then
            ended = f"the process of rank(s) {gone} has ended, or closed the communicator, and " if gone else ""
            raise (PeerTimeoutError if gone else BrokenCommunicatorError)(
                f"rank {self.rank}, in a rendezvous: {ended}{_unreachable(error)}"
            ) from error

    def _all_gather(self, payload: bytes, left: threading.Event) -> list[bytes]:
        keys = [f"{self.prefix}/{self._round}/{peer}" for peer in range(self.world_size)]
        earlier = len(self._set_before)
        self._set_before.append(keys[self.rank])
        self._store.set(keys[self.rank], b"\0" + payload)  # type: ignore[arg-type]
        start = time.monotonic()
        for attempt in itertools.count():
            if left.is_set():
                raise TimeoutError("nobody waits for this rendezvous any more")
            signalling = self._signalling()
            if self._store.check(keys):
                break
            waited_s = time.monotonic() - start
            if attempt % 16 == 15:
                self._give_up_if_hopeless(keys, signalling, waited_s)
            time.sleep(min(0.01, waited_s / 8 + 0.0001))
        # The keys of ranks that have given this round up are there too, for one that stood still meanwhile.
        self._raise_if_told()
        payloads = [bytes(self._store.get(key))[1:] for key in keys]
        # A rank is in this round only once it has read those before, and all ranks are in this one.
        for key in self._set_before[:earlier]:
            self._store.delete_key(key)
        del self._set_before[:earlier]
        return payloads

    def compare(self, digest: int, fields: Mapping[str, str], backend: str) -> None:
        """Raise MismatchError unless ``digest``, 64 bits, is the same on every rank. ``fields`` are what it stands for,
        by name; those in which ranks differ are told."""
        own = digest.to_bytes(8, "little")
        cut = {name: text[:_FIELD_CHARACTERS] for name, text in fields.items()}
        try:
            payloads = self.all_gather(own + json.dumps(cut).encode())
        except MismatchError as error:  # a peer is elsewhere
            raise MismatchError(f"{error}. This rank submits {text_of(cut)}") from None
        others = {peer: _fields_of(payload[8:]) for peer, payload in enumerate(payloads) if payload[:8] != own}
        if others:
            raise MismatchError(
                f"rank {self.rank} ({backend}), tag {cut['tag']}: the ranks submitted different things: "
                f"{_differences(cut, others)}"
            )

    def _signalling(self) -> list[int]:
        """Peers whose signal this rank has not asked for; none while it is in a handshake itself, and may yet ask."""
        if self._board is None or self._idle is None or not self._idle():
            return []
        return [peer for peer in range(self.world_size) if peer != self.rank and self._board.signalled(peer)]

    def _raise_if_told(self) -> None:
        told = self._board.aborted() if self._board is not None else None
        if told is not None:
            raise error_of_kind(told.kind)(f"rank {self.rank}, in a rendezvous: a peer gave up: {told.message}")

    def _gone(self, peers: Iterable[int]) -> list[int]:
        board = self._board
        return [peer for peer in peers if board is not None and peer != self.rank and board.peer_gone(peer)]

    def _give_up_if_hopeless(self, keys: list[str], signalling: list[int], waited_s: float) -> None:
        missing = [peer for peer, key in enumerate(keys) if not self._store.check([key])]
        here = f"rank {self.rank}"
        gone = self._gone(missing)
        self._raise_if_told()  # behind the look: who gives up tells, and closes then
        if gone:
            ended = f"the process of rank(s) {gone} has ended, or closed the communicator"
            raise PeerTimeoutError(f"{here}, in a rendezvous: {ended}")
        # Signalled before the key was looked for: a peer that takes part would have set its key before its signal.
        elsewhere = [peer for peer in missing if peer in signalling]
        if elsewhere:
            raise MismatchError(
                f"{here}, in a rendezvous: rank(s) {elsewhere} submitted another tag, shape, dtype, plan or order"
            )
        if waited_s > self._timeout_s:
            raise PeerTimeoutError(
                f"{here}: rank(s) {missing} did not take part in a rendezvous within {self._timeout_s} s; ranks that "
                "compile or load for longer need a larger timeout_s (or ULYSSES_OP_TIMEOUT_S)"
            )

    def gather_results(self, what: str, attempt: Callable[[], bytes]) -> list[bytes]:
        """All-gather what ``attempt`` returns on each rank; where it raised on some rank, raise TargetError on all."""
        try:
            payload = b"+" + attempt()
        except Exception as error:  # whatever it is, the other ranks must hear of it
            payload = b"-" + f"{type(error).__name__}: {error}".encode()[:4096]
        results = self.all_gather(payload)
        errors = [
            f"rank {peer}: {result[1:].decode(errors='replace')}"
            for peer, result in enumerate(results)
            if result[:1] != b"+"
        ]
        if errors:
            raise TargetError(f"{what} failed on {'; '.join(errors)}")
        return [result[1:] for result in results]

    def vote(self, what: str, attempt: Callable[[], object]) -> None:
        """Run ``attempt`` on each rank; where it raised on some rank, raise TargetError on all."""

        def run() -> bytes:
            attempt()
            return b""

        self.gather_results(what, run)
