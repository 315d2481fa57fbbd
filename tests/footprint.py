"""Whether a process that does the same again and again stays as large as it was."""

from __future__ import annotations

import ranks
import torch

from ulysses_op.soak.resources import held

# What may come on top. Memory in MiB: malloc and the device's driver do not give back all at once. The driver and NCCL
# have threads, files and memory of their own; bounds for them are below what is lost when a hundred communicators, or a
# thousand groups, each keep one.
BOUNDS = {
    "cpu": {"resident MiB": 4},
    "cuda": {"resident MiB": 32, "CUDA MiB": 32, "MiB of tensors": 16, "open descriptors": 32, "threads": 16},
}


class Footprint:
    """What this process holds when it is made, after a warm-up, and whenever it is asked again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.before = self.now = self._measure()

    def grown(self) -> list[str]:
        """What has grown, one line each; empty if nothing has."""
        self.now = self._measure()
        bounds = BOUNDS[self._device.type]
        return [
            f"{what} grew from {before} to {self.now[what]}"
            for what, before in self.before.items()
            if self.now[what] > before + bounds.get(what, 0)
        ]

    def __str__(self) -> str:
        return ", ".join(f"{what} {before} -> {self.now[what]}" for what, before in self.before.items())

    def _measure(self) -> dict[str, int]:
        found = held(self._device)
        # A name is there for as long as ranks map each other's memory, another program's ranks as well.
        del found["names in /dev/shm"]
        if self._device.type == "cuda":
            found["MiB of tensors"] = torch.cuda.memory_allocated(self._device) >> 20
            if ranks.SHARED_DEVICE:  # what is left of the device tells of all ranks, and of those of other tests
                del found["CUDA MiB"]
        return found
