"""Which backend a group of ranks uses: every rank states facts, and all decide alike by one pure function."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from . import _C

BACKENDS = ("symm_mem", "cuda_ipc", "shm", "c10d")
"""In order of preference."""

DISABLE_VARIABLE = "ULYSSES_OP_DISABLE"


@dataclass(frozen=True)
class Facts:
    """What one rank knows about itself; ``refusals`` holds, for each backend that it cannot run, the reason."""

    rank: int
    device_type: str
    config: str
    device_name: str = ""
    bus_id: str = ""
    torch_version: str = torch.__version__
    board: str = ""
    error: str = ""
    refusals: dict[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_bytes(text: bytes) -> Facts:
        return Facts(**json.loads(text))


class Decision(NamedTuple):
    """``backend`` is None when the backend asked for cannot run. ``refused`` tells why each other one was not taken."""

    backend: str | None
    reason: str
    refused: dict[str, str]


def refusal(facts: Sequence[Facts], backend: str) -> str | None:
    """Why these ranks cannot run ``backend``: the first rank's reason that has one, or None."""
    for fact in facts:
        if backend in fact.refusals:
            return f"rank {fact.rank}: {fact.refusals[backend]}"
    return None


def decide(facts: Sequence[Facts], requested: str = "auto") -> Decision:
    """The backend that all ranks use. Pure: equal facts give equal decisions on every rank.

    ``requested`` is "auto" or one of :data:`BACKENDS`, which then is taken or refused, never replaced.
    """
    refused = {backend: text for backend in BACKENDS if (text := refusal(facts, backend)) is not None}
    if requested != "auto":
        if requested in refused:
            return Decision(None, refused[requested], refused)
        return Decision(requested, "asked for", refused)
    for backend in BACKENDS:
        if backend not in refused:
            passed_over = [f"{name} refused ({refused[name]})" for name in BACKENDS if name in refused]
            what = f"all {len(facts)} ranks can run it"
            relevant = [text for name, text in zip(refused, passed_over, strict=True) if _concerns(name, facts)]
            return Decision(backend, "; ".join([what, *relevant]), refused)
    return Decision(None, "; ".join(f"{name}: {text}" for name, text in refused.items()), refused)


def _concerns(backend: str, facts: Sequence[Facts]) -> bool:
    """Whether a reader wants to know why ``backend`` was passed over: not where it is for other devices anyway."""
    return (facts[0].device_type == "cpu") == (backend == "shm")


def probe(device: torch.device, rank: int, config: str, board: str, group_devices: set[str]) -> Facts:
    """This rank's facts before it has heard of any other. Raises nothing: what does not work becomes a refusal."""
    refusals: dict[str, str] = {}
    bus_id = ""
    name = ""
    if device.type == "cuda":
        refusals["shm"] = "the tensors are on a CUDA device, shm is for CPU tensors"
        properties: Any = torch.cuda.get_device_properties(device)
        name = properties.name
        bus_id = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        text = _cuda_refusal(bus_id)
        if text:
            refusals["symm_mem"] = refusals["cuda_ipc"] = text
        else:
            text = _symm_mem_refusal(device)
            if text:
                refusals["symm_mem"] = text
    else:
        for backend in ("symm_mem", "cuda_ipc"):
            refusals[backend] = f"the tensors are on {device.type}, {backend} is for CUDA tensors"
        if device.type != "cpu":
            refusals["shm"] = f"the tensors are on {device.type}, shm is for CPU tensors"
    if device.type not in group_devices:
        refusals["c10d"] = (
            f"the process group has no backend for {device.type} tensors, only for {', '.join(sorted(group_devices))}: "
            "create it with one, for instance 'cpu:gloo,cuda:nccl'"
        )
    error = ""
    try:
        for backend in disabled_backends():
            refusals[backend] = f"disabled by {DISABLE_VARIABLE}"
    except ValueError as wrong:
        error = str(wrong)
    return Facts(rank, device.type, config, name, bus_id, torch.__version__, board, error, refusals)


def disabled_backends() -> list[str]:
    """The backends that the environment disables on this rank."""
    names = [name.strip() for name in os.environ.get(DISABLE_VARIABLE, "").split(",") if name.strip()]
    unknown = [name for name in names if name not in BACKENDS]
    if unknown:
        raise ValueError(f"{DISABLE_VARIABLE} names {unknown}, expected some of {', '.join(BACKENDS)}")
    return names


def peer_refusals(own: Facts, others: Sequence[Facts], board_error: str | None) -> dict[str, str]:
    """What this rank cannot run with these peers, on top of what it cannot run at all."""
    refusals: dict[str, str] = {}
    if board_error is not None:
        for backend in ("symm_mem", "cuda_ipc", "shm"):
            refusals[backend] = f"not all ranks share this rank's host memory: {board_error}"
    if own.bus_id:
        text = _peer_access_refusal(own, others)
        if text:
            refusals.setdefault("symm_mem", text)
            refusals.setdefault("cuda_ipc", text)
        text = _shared_device_refusal(own, others)
        if text:
            refusals.setdefault("symm_mem", text)
    return refusals


def _cuda_refusal(bus_id: str) -> str | None:
    if torch.version.hip is not None:
        return "this is a ROCm build of torch; copy engines are driven through the CUDA driver"
    if not _C.built_with_cuda:
        return "ulysses_op was built without CUDA (no cuda.h was found): set CUDA_HOME and build it again"
    try:
        facts = _C.cuda_device_facts(bus_id)
    except RuntimeError as error:
        return str(error)
    if not facts.stream_memory_operations:
        return "the device has no 64-bit stream memory operations"
    return None


def _symm_mem_refusal(device: torch.device) -> str | None:
    try:
        import torch.distributed._symmetric_memory as symm_mem
    except ImportError as error:
        return f"torch {torch.__version__} has no symmetric memory: {error}"
    backend = symm_mem.get_backend(device)
    if backend != "CUDA":
        return f"torch's symmetric memory uses the {backend} backend in this process, CUDA is needed"
    return None


def _peer_access_refusal(own: Facts, others: Sequence[Facts]) -> str | None:
    for other in others:
        if other.bus_id in ("", own.bus_id):
            continue
        try:
            if not _C.cuda_can_access_peer(own.bus_id, other.bus_id):
                return f"device {own.bus_id} has no peer access to {other.bus_id} of rank {other.rank}"
        except RuntimeError as error:
            return (
                f"device {other.bus_id} of rank {other.rank} is not visible to this process "
                f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}): {error}"
            )
    return None


def _shared_device_refusal(own: Facts, others: Sequence[Facts]) -> str | None:
    for other in others:
        if other.rank != own.rank and other.bus_id == own.bus_id:
            return f"shares device {own.bus_id} with rank {other.rank}; torch's symmetric memory wants one a rank"
    return None
