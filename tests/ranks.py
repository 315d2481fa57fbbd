"""Real rank processes for the tests.

A pool keeps one process a rank alive and runs module-level functions on all of them, since importing torch for every
test costs more than the test. Sub-groups of one world serve the smaller world sizes; ranks outside the group stay idle.
`run_fresh` starts processes that live for one function, for tests that look at how a process ends.

Run as a script, this file is the entry point of such a fresh process.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HOST = "127.0.0.1"
DEVICES = torch.cuda.device_count()
# Where there is one device alone, ranks share it, which symmetric memory and NCCL refuse.
SHARED_DEVICE = DEVICES == 1
ONE_SIDED_ON_CUDA = ("cuda_ipc",) if SHARED_DEVICE else ("symm_mem", "cuda_ipc")
PREFERRED_ON_CUDA = ONE_SIDED_ON_CUDA[0]
DEADLINE_S = 60.0
# After one rank has failed, the others are stuck in whatever they expected of it: they get this long to answer.
GRACE_S = 10.0
# The groups that every world creates at its start, where they fit.
SUBGROUPS = ((0, 1), (0, 1, 2), (0, 2), (1, 3))

_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
_communicators: dict[tuple[tuple[int, ...], str, str], Any] = {}


class RankFailure(AssertionError):
    """A function raised, died or did not answer on some rank; the message holds each such rank's traceback or stack."""


# ---- inside a rank


def group_of(members: tuple[int, ...]) -> dist.ProcessGroup:
    """The process group of `members`, global ranks in ascending order."""
    return _groups[members]


def meet(group: dist.ProcessGroup) -> None:
    """A barrier of the hosts."""
    dist.all_reduce(torch.zeros(1), group=group)


def device_of(device: str) -> torch.device:
    """This rank's device of the kind "cpu" or "cuda", which it may share with other ranks."""
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)


def fresh_group(members: tuple[int, ...]) -> dist.ProcessGroup | None:
    """A new process group of `members`, for tests that leave a group in disorder; None outside of it.

    Every rank of the world calls this.
    """
    group = dist.new_group(list(members))
    return group if dist.get_rank() in members else None


def fresh_communicator(
    group: tuple[int, ...] | dist.ProcessGroup, backend: str, device: str = "cpu", **arguments: Any
) -> Any:
    """A communicator built for this call alone; the caller closes it."""
    import ulysses_op

    if isinstance(group, tuple):
        group = group_of(group)
    made = ulysses_op.Communicator(group, backend=backend, **{"timeout_s": 30.0, **arguments})
    made.build(device_of(device))
    return made


def communicator(members: tuple[int, ...], backend: str, device: str = "cpu") -> Any:
    """This process's communicator of (members, backend, device), made by the first call and reused across tests."""
    key = (members, backend, device)
    if key not in _communicators:
        _communicators[key] = fresh_communicator(members, backend, device)
    return _communicators[key]


@contextlib.contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Environment variables of this process for a while; None removes one."""
    before = {name: os.environ.get(name) for name in values}
    try:
        _set_environment(values)
        yield
    finally:
        _set_environment(before)


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def join_world(rank: int, world_size: int, store_at: str, device: str) -> None:
    """Makes this process rank `rank` of the world that meets at `store_at`: a file's path, or a port of this host."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank % DEVICES)
        # NCCL refuses two ranks on one device.
        backend = "cpu:gloo,cuda:nccl" if world_size <= DEVICES else "cpu:gloo,cuda:gloo"
    timeout = timedelta(seconds=DEADLINE_S)
    if store_at.isdecimal():
        store: dist.Store = dist.TCPStore(HOST, int(store_at), is_master=False, timeout=timeout)
    else:
        store = dist.FileStore(store_at)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _rank_main(rank: int, world_size: int, device: str, store_at: str, log_path: str, connection: Connection) -> None:
    _die_with_parent()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=log, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    join_world(rank, world_size, store_at, device)
    _groups[tuple(range(world_size))] = dist.group.WORLD
    for members in SUBGROUPS:
        if members[-1] < world_size and members not in _groups:
            group = dist.new_group(list(members))
            if rank in members:
                _groups[members] = group
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        if call is None:
            break
        fn, args, kwargs = call
        try:
            answer = ("result", fn(rank, world_size, *args, **kwargs))
        except BaseException:
            answer = ("error", traceback.format_exc())
        try:
            connection.send(answer)
        except Exception:
            connection.send(("error", f"the result cannot be sent to the test:\n{traceback.format_exc()}"))
    for made in _communicators.values():
        made.close()
    dist.destroy_process_group()


# ---- inside the test process


class RankPool:
    """`world_size` processes in one world. A call that fails on any rank ends them all; the next one starts others."""

    def __init__(self, world_size: int, device: str = "cpu") -> None:
        self.world_size = world_size
        self.device = device
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = DEADLINE_S, **kwargs: Any) -> list[Any]:
        """`fn(rank, world_size, *args, **kwargs)` on every rank; the results in the order of the ranks.

        Raises RankFailure when a rank raises, dies or has not answered after `timeout_s`.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((fn, args, kwargs))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) + len(failures) < self.world_size:
            missing = [r for r in range(self.world_size) if r not in results and r not in failures]
            ready = wait([self._connections[r] for r in missing], max(0.0, deadline - time.monotonic()))
            if not ready:
                failures.update(self._stuck(missing, timeout_s))
                break
            for r in missing:
                if self._connections[r] not in ready:
                    continue
                try:
                    kind, value = self._connections[r].recv()
                except (EOFError, ConnectionResetError):
                    self._processes[r].join(5.0)
                    kind, value = "error", f"died with exit code {self._processes[r].exitcode}\n{self._log(r)}"
                if kind == "result":
                    results[r] = value
                    continue
                failures[r] = value
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            self._kill()
            name = f"{fn.__module__}.{fn.__qualname__}"
            report = "".join(f"\n--- rank {r}\n{failures[r]}" for r in sorted(failures))
            raise RankFailure(
                f"{name} failed on rank {', '.join(map(str, sorted(failures)))} of {self.world_size}{report}"
            )
        return [results[r] for r in range(self.world_size)]

    def close(self) -> None:
        """Ends the ranks; they leave their world in order unless they do not answer."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        deadline = time.monotonic() + 10.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        context = multiprocessing.get_context("spawn")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            # A file, not a TCPStore: each connection of that looks its peer up in the DNS, seconds where it is slow.
            args = (
                rank,
                self.world_size,
                self.device,
                f"{self._directory.name}/store",
                str(self._log_path(rank)),
                theirs,
            )
            process = context.Process(target=_rank_main, args=args, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _stuck(self, missing: list[int], timeout_s: float) -> dict[int, str]:
        for r in missing:
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(self._processes[r].pid, signal.SIGUSR1)
        time.sleep(1.0)
        return {
            r: f"no answer within {timeout_s} s or {GRACE_S} s of a peer's failure\n{self._log(r)}" for r in missing
        }

    def _log_path(self, rank: int) -> Path:
        assert self._directory is not None
        return Path(self._directory.name) / f"rank{rank}.log"

    def _log(self, rank: int) -> str:
        path = self._log_path(rank)
        return path.read_text(errors="replace")[-8000:] if path.exists() else ""

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(10.0)
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


_pools: dict[tuple[int, str], RankPool] = {}


def pool(world_size: int, device: str = "cpu") -> RankPool:
    """The pool of (world_size, device), which all tests share."""
    return _pools.setdefault((world_size, device), RankPool(world_size, device))


def close_pools() -> None:
    for made in _pools.values():
        made.close()
    _pools.clear()


# ---- fresh processes


@dataclass
class FreshRank:
    status: int
    stdout: str
    stderr: str


@dataclass
class FreshRun:
    ranks: list[FreshRank]
    # Names that the run left in /dev/shm.
    leftovers: list[str] = field(default_factory=list)


def run_fresh(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    timeout_s: float = DEADLINE_S,
    env: dict[str, str] | None = None,
    tcp: bool = False,
) -> FreshRun:
    """`fn(rank, world_size, *args)` in fresh processes that have joined a world and end as Python ends.

    The arguments travel as JSON. The world's store is a file, or with `tcp` a TCPStore on a port of its own choice.

    Raises RankFailure with the stacks of all ranks when one of them is still alive after `timeout_s`.
    """
    before = shared_memory()
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timeout) if tcp else None
    target = f"{fn.__module__}:{fn.__qualname__}"
    with tempfile.TemporaryDirectory(prefix="fresh-") as directory, contextlib.ExitStack() as files:
        processes = []
        for rank in range(world_size):
            store_at = f"{directory}/store" if store is None else str(store.port)
            command = [sys.executable, __file__, target, str(rank), str(world_size), store_at, device, json.dumps(args)]
            out = files.enter_context(open(Path(directory) / f"{rank}.out", "w"))
            err = files.enter_context(open(Path(directory) / f"{rank}.err", "w"))
            processes.append(subprocess.Popen(command, stdout=out, stderr=err, env={**os.environ, **(env or {})}))
        deadline = time.monotonic() + timeout_s
        stuck = []
        for rank, process in enumerate(processes):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                stuck.append(rank)
                process.send_signal(signal.SIGUSR1)
        if stuck:
            time.sleep(1.0)
            for rank in stuck:
                processes[rank].kill()
                processes[rank].wait(10.0)
        texts = [
            [(Path(directory) / f"{r}.{end}").read_text(errors="replace") for end in ("out", "err")]
            for r in range(world_size)
        ]
    if stuck:
        report = "".join(f"\n--- rank {r}, status {processes[r].returncode}\n{texts[r][1]}" for r in range(world_size))
        raise RankFailure(f"{target}: rank {', '.join(map(str, stuck))} still alive after {timeout_s} s{report}")
    ended = [FreshRank(process.returncode, out, err) for process, (out, err) in zip(processes, texts, strict=True)]
    return FreshRun(ended, shared_memory_left_since(before))


def shared_memory() -> set[str]:
    """The names in /dev/shm, but for those of Python's own semaphores, which come and go with any process here."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if not name.startswith("sem.")}


def shared_memory_left_since(before: set[str]) -> list[str]:
    """Names that appeared and stay: what another process on this host holds for a moment is not a leftover."""
    for _ in range(100):
        left = shared_memory() - before
        if not left:
            break
        time.sleep(0.1)
    return sorted(left)


def _fresh_main(target: str, rank: str, world_size: str, store_at: str, device: str, args: str) -> None:
    _die_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    join_world(int(rank), int(world_size), store_at, device)
    # A rank that is through at once would leave while others are still connecting.
    meet(dist.group.WORLD)
    module, name = target.split(":")
    getattr(importlib.import_module(module), name)(int(rank), int(world_size), *json.loads(args))


if __name__ == "__main__":
    _fresh_main(*sys.argv[1:])
