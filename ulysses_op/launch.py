"""Runs a function on ranks: those that torchrun started, else processes that are started here for it."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

DEFAULT_RANKS = 2
DEFAULT_TIMEOUT_S = 600.0
_HOST = "127.0.0.1"
_GRACE_S = 5.0  # after one rank has failed, for the others to tell what they saw of it
_DEVICES = ("cpu", "cuda")
_TELL_STACK = signal.SIGUSR1  # makes a rank that this module started write its stacks to standard error

RankFunction = Callable[..., int]
"""Called as ``function(device, *args)`` on every rank, the process group initialised; returns an exit status."""


class LaunchError(RuntimeError):
    """Ranks could not be started, failed, or did not end in time; the message holds what each of them said."""


@dataclass(frozen=True)
class Placement:
    """Where ranks run. ``note`` says why they do not run on CUDA devices, or share some; it is empty where each has one
    of its own, or was not to have any.
    """

    world_size: int
    device_type: str
    note: str = ""
    shares_devices: bool = False


def add_arguments(parser: argparse.ArgumentParser, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
    """Arguments of commands that run on ranks: ``ranks`` and ``device`` for place(), ``timeout`` for run(), which is
    ``timeout_s`` where nothing is asked for; None where that is for the command to tell by its other arguments.
    """
    parser.add_argument("--ranks", type=int, help=f"default: torchrun's, else {DEFAULT_RANKS}")
    parser.add_argument(
        "--device", choices=_DEVICES, help="default: cuda where each rank can have a device of its own, else cpu"
    )
    parser.add_argument(
        "--timeout",
        type=positive("seconds"),
        metavar="SECONDS",
        default=timeout_s,
        help=f"for all of it, default: {'by its length' if timeout_s is None else f'{timeout_s:g}'}",
    )


def positive(unit: str) -> Callable[[str], float]:
    """An argument's type: a positive number of ``unit``."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is no positive number of {unit}")
        return value

    return number


def under_torchrun() -> bool:
    """Whether this process already is a rank, started by torchrun or a launcher with the same environment."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def place(ranks: int | None = None, device_type: str | None = None, may_share: bool = False) -> Placement:
    """Decide how many ranks run, and on which devices. Initialises nothing.

    ranks: None takes torchrun's, else 2.
    device_type: "cpu" or "cuda"; None takes CUDA where each rank of a host can have a device of its own, else the CPU.
    may_share: for what takes no times: where CUDA is asked for, several ranks may run on one device. Their process
    group then is Gloo's, since NCCL refuses that.

    Raises LaunchError for what cannot run here.
    """
    if device_type is not None and device_type not in _DEVICES:
        raise LaunchError(f"device is {device_type!r}, expected one of {', '.join(_DEVICES)}")
    if ranks is not None and ranks < 1:
        raise LaunchError(f"ranks is {ranks}, it must be at least 1")
    if under_torchrun():
        world_size = int(os.environ["WORLD_SIZE"])
        if ranks not in (None, world_size):
            raise LaunchError(f"ranks is {ranks}, but torchrun started {world_size}: leave it out")
        on_host = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    else:
        world_size = on_host = DEFAULT_RANKS if ranks is None else ranks
    if device_type == "cpu":
        return Placement(world_size, "cpu")
    lack = _cuda_lack(on_host)
    if not lack:
        return Placement(world_size, "cuda")
    count = torch.cuda.device_count()
    if device_type == "cuda" and may_share and count and not under_torchrun():
        return Placement(world_size, "cuda", f"{world_size} ranks share {count} CUDA device(s)", True)
    if device_type is None:
        return Placement(world_size, "cpu", f"the ranks run on the CPU: {lack}")
    if under_torchrun() and torch.cuda.is_available():
        return Placement(world_size, "cuda")  # the launcher may show each rank a device of its own
    raise LaunchError(f"device is 'cuda', but {lack}")


def run(
    function: RankFunction, args: tuple[Any, ...], placement: Placement, timeout_s: float = DEFAULT_TIMEOUT_S
) -> int:
    """Run ``function(device, *args)`` on every rank; its exit status: this rank's under torchrun, else the largest.

    Outside torchrun the ranks are processes of this host, which end with this call whatever happens; ``function`` and
    ``args`` must be picklable, ``function`` at the top level of its module.

    Raises LaunchError when a rank raises, dies, or is not done after ``timeout_s``; what failed first is told first.
    """
    if under_torchrun():
        with _process_group(placement, int(os.environ.get("LOCAL_RANK", 0)), timeout_s) as device:
            return function(device, *args)
    return _run_own(function, args, placement, timeout_s)


def _cuda_lack(needed: int) -> str:
    """What keeps ``needed`` ranks of this host from having a CUDA device each; empty if nothing does."""
    if not torch.cuda.is_available():
        return "torch has no CUDA" if torch.version.cuda is None else "no CUDA device is available"
    if not dist.is_nccl_available():
        return "torch has no NCCL"
    count = torch.cuda.device_count()
    return "" if count >= needed else f"{needed} ranks need a CUDA device each, and this host has {count}"


@contextmanager
def _process_group(placement: Placement, local_rank: int, timeout_s: float, **init: Any) -> Iterator[torch.device]:
    """The default process group around a rank's work, and the device of this rank."""
    backend, device = "gloo", torch.device("cpu")
    if placement.device_type == "cuda":
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:gloo" if placement.shares_devices else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **init)
    # Not in a finally: after a failure, peers that are stuck would hold up this rank in it, too.
    yield device
    dist.destroy_process_group()


def _run_own(function: RankFunction, args: tuple[Any, ...], placement: Placement, timeout_s: float) -> int:
    # This process keeps the store: no rank's end takes it away from the others. Port 0 is any that is free.
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    connections: list[Connection] = []
    try:
        for rank in range(placement.world_size):
            ours, theirs = context.Pipe(duplex=False)
            connections.append(ours)
            process = context.Process(
                target=_rank_main, args=(theirs, rank, placement, store.port, timeout_s, function, args), daemon=True
            )
            process.start()
            processes.append(process)
            theirs.close()
        return _collect(processes, connections, timeout_s)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for connection in connections:
            connection.close()


def _rank_main(
    connection: Connection,
    rank: int,
    placement: Placement,
    port: int,
    timeout_s: float,
    function: RankFunction,
    args: tuple[Any, ...],
) -> None:
    _end_with_parent()
    faulthandler.register(_TELL_STACK, all_threads=True)
    try:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // placement.world_size))
        store = dist.TCPStore(_HOST, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        init = {"store": store, "rank": rank, "world_size": placement.world_size}
        with _process_group(placement, rank, timeout_s, **init) as device:
            status = function(device, *args)
    except BaseException:
        connection.send((time.monotonic(), traceback.format_exc()))
        sys.stdout.flush()
        os._exit(1)
    connection.send(status)


def _end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, however that dies."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _end_of(code: int | None) -> str:
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was killed ({name}{', out of memory?' if -code == signal.SIGKILL else ''})"


def _collect(processes: list[Any], connections: list[Connection], timeout_s: float) -> int:
    """The largest exit status, once every rank has sent its own and ended."""
    statuses: dict[int, int] = {}
    failures: dict[int, tuple[float, str]] = {}  # when, and what
    deadline = time.monotonic() + timeout_s
    late = f"did not end within {timeout_s:g} s"
    while len(statuses) + len(failures) < len(processes):
        waiting = {connections[r]: r for r in range(len(processes)) if r not in statuses and r not in failures}
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in waiting.values():
                os.kill(processes[rank].pid, _TELL_STACK)
                failures[rank] = (time.monotonic(), late)
            time.sleep(0.5)
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting[connection]
            try:
                answer = connection.recv()
            except EOFError:
                # Told first: peers may have failed of it, and told that before its end showed here.
                processes[rank].join(_GRACE_S)
                answer = (0.0, f"{_end_of(processes[rank].exitcode)}, without a word")
            if isinstance(answer, int):
                statuses[rank] = answer
                continue
            if not failures:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
                late = f"was ended: it had not noticed within {_GRACE_S:g} s"
            failures[rank] = answer
    if failures:
        order = sorted(failures, key=lambda rank: failures[rank])
        report = "".join(f"\n--- rank {rank}\n{failures[rank][1].rstrip()}" for rank in order)
        raise LaunchError(f"rank {', '.join(map(str, order))} of {len(processes)} failed, the first first:{report}")
    for process in processes:
        process.join(max(_GRACE_S, deadline - time.monotonic()))
    codes = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode != 0}
    if codes:
        raise LaunchError(f"ranks did their work, but then ended badly; exit codes (None: still running): {codes}")
    return max(statuses.values())
