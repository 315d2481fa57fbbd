"""Whether a process that does the same again and again stays as large as it was."""

from __future__ import annotations

import torch

from ulysses_op.soak.resources import held

# Beyond these, what is held has grown. Memory in MiB: malloc and the device's driver do not give back all at once, and
# the driver and NCCL have memory of their own on the host, too.
BOUNDS = {
    "cpu": {"resident MiB": 4},
    "cuda": {"resident MiB": 32, "CUDA MiB": 32, "open descriptors": 8, "threads": 2},
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
            found["bytes of tensors"] = torch.cuda.memory_allocated(self._device)
        return found
