"""What a process holds, and whether it has grown."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch

_MIB = 1 << 20

GROWTH_BOUNDS = {
    "resident MiB": 128,  # targets that have grown, and what malloc keeps
    "open descriptors": 16,
    "threads": 8,
    "mapped segments": 256,  # of the targets of two communicators, on all ranks
    "names in /dev/shm": 16,  # other programs' too: names are there while ranks map each other's memory
    "CUDA MiB": 256,
}
"""How much more than at first a process may hold."""
SETTLING_ROUNDS = 3
"""Rounds that measure what is held at first."""


class Growth:
    """Measures a process again and again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rounds = 0
        self._first: dict[str, int] = {}

    def measure(self) -> str:
        """What has grown by more than its bound since the first rounds; empty if nothing has."""
        now = held(self._device)
        self._rounds += 1
        if self._rounds <= SETTLING_ROUNDS:
            self._first = {what: max(number, self._first.get(what, 0)) for what, number in now.items()}
            return ""
        return "; ".join(
            f"{what} grew from {self._first[what]} to {number}, by more than {GROWTH_BOUNDS[what]}"
            for what, number in now.items()
            if number > self._first[what] + GROWTH_BOUNDS[what]
        )


def held(device: torch.device) -> dict[str, int]:
    """What this process holds now, by the names of :data:`GROWTH_BOUNDS`."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    maps = Path("/proc/self/maps").read_text().splitlines()
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    found = {
        "resident MiB": pages * os.sysconf("SC_PAGE_SIZE") // _MIB,
        "open descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mapped segments": sum("ulysses_op-" in line for line in maps),
        "names in /dev/shm": sum(name.startswith("ulysses_op-") for name in names),
    }
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        found["CUDA MiB"] = (total - free) // _MIB
    return found
