"""``python -m ulysses_op doctor``: what every rank finds, which backends run here, which do not, and why."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import _C, __version__
from .capability import BACKENDS, DISABLE_VARIABLE, Facts, disabled_backends
from .communicator import TIMEOUT_VARIABLE, Communicator
from .errors import BackendUnavailableError
from .flight_record import DIRECTORY_VARIABLE
from .launch import LaunchError, Placement, add_arguments, place, run
from .mapping import segment_name
from .onesided import POISON_VARIABLE
from .rendezvous import all_gather_bytes

DESCRIPTION = """\
Prints versions, what every rank finds on its device, how ranks reach each other, and every backend: in use, usable, or
refused and why. Each backend that is not refused exchanges a small tensor, which is checked bit by bit. Starts its own
ranks unless torchrun did.

exit status: 0 a backend that writes straight into peers' memory is in use, and right
             1 only the fallback, c10d, is left, and right
             2 nothing works, an exchange failed or was wrong, or the ranks could not run"""

VARIABLES = (
    DISABLE_VARIABLE,
    TIMEOUT_VARIABLE,
    DIRECTORY_VARIABLE,
    POISON_VARIABLE,
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MODULE_LOADING",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_SYMMMEM",
    "NCCL_P2P_DISABLE",
)
"""Environment variables that change what runs here."""

_PEER_TIMEOUT_S = 30.0
_ROUNDS = 3


@dataclass
class RankFinding:
    """What one rank finds, before it builds any communicator."""

    rank: int
    host: str
    pid: int
    device: str
    variables: dict[str, str]
    shares_memory_with: list[int] = field(default_factory=list)
    device_name: str = ""
    bus_id: str = ""
    copy_engines: int | None = None
    stream_memory_operations: bool | None = None
    cuda_driver_version: str = ""
    reaches: dict[int, str] = field(default_factory=dict)  # by rank: "yes", "no", or why it cannot be told
    problem: str = ""


@dataclass
class BackendFinding:
    """What came of one backend."""

    state: str  # "in use", "usable", "refused" or "failed"
    exchange: str = ""  # "right" or "wrong"; empty where none took place
    reason: str = ""  # of a refusal or failure


@dataclass
class Report:
    """Everything that the doctor finds; ``to_json`` has the same names."""

    versions: dict[str, str]
    placement: Placement
    ranks: list[RankFinding]
    backend: str | None
    reason: str
    backends: dict[str, BackendFinding]
    status: int


def add_parser(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def main(options: argparse.Namespace) -> int:
    """Run the doctor; the exit status."""
    try:
        placement = place(options.ranks, options.device, may_share=True)
        return run(examine, (placement, options.json), placement, options.timeout)
    except LaunchError as error:
        if options.json:
            print(json.dumps({"versions": versions(), "error": str(error), "status": 2}, indent=2))
        else:
            _print_versions(versions())
        print(f"doctor: {error}", file=sys.stderr)
        return 2


def examine(device: torch.device, placement: Placement, as_json: bool) -> int:
    """The examination on one rank; rank 0 prints the report. The exit status is the same on all ranks."""
    ranks = find_ranks(device)
    problem = next((f"rank {finding.rank}: {finding.problem}" for finding in ranks if finding.problem), "")
    if problem:
        report = Report(versions(), placement, ranks, None, problem, {}, 2)
    else:
        report = find_backends(device, placement, ranks)
    if dist.get_rank() == 0:
        print(json.dumps(asdict(report), indent=2) if as_json else describe(report), flush=True)
    return report.status


def versions() -> dict[str, str]:
    """Of everything that takes part; "none" for what is not there."""
    found = {
        "ulysses_op": f"{__version__}, built {'with' if _C.built_with_cuda else 'without'} CUDA",
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "none",
        "NCCL": "none",
        "NVIDIA driver": _driver_release() or "none",
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    if torch.version.cuda and dist.is_nccl_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def find_ranks(device: torch.device) -> list[RankFinding]:
    """What each rank finds, in rank order. Collective."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = RankFinding(
        rank,
        socket.gethostname(),
        os.getpid(),
        str(device),
        {k: os.environ[k][:200] for k in VARIABLES if k in os.environ},
    )
    try:
        disabled_backends()
        Communicator()  # reads the time-out
    except ValueError as error:
        own.problem = str(error)
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        own.device_name = properties.name
        own.bus_id = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    name = segment_name()
    try:
        try:
            segment = _C.SharedSegment.create(name, 4096)
        except RuntimeError:
            segment = None  # the rank will not reach itself either
        heard = [json.loads(text) for text in _all_gather({"segment": name, "bus_id": own.bus_id})]
        for peer, said in enumerate(heard):
            if _opens(said["segment"]):
                own.shares_memory_with.append(peer)
        if own.bus_id and _C.built_with_cuda:
            _find_cuda(own, [said["bus_id"] for said in heard])
        findings = [_finding(json.loads(text)) for text in _all_gather(asdict(own))]
        del segment
    finally:
        _C.SharedSegment.unlink(name)
    assert len(findings) == world_size
    return findings


def find_backends(device: torch.device, placement: Placement, ranks: list[RankFinding]) -> Report:
    """Try every backend, then see which one is chosen. Collective."""
    found: dict[str, BackendFinding] = {}
    for backend in BACKENDS:
        found[backend] = _try(backend, device)
    chosen, reason = None, ""
    facts: list[Facts] = []
    try:
        with Communicator(timeout_s=_PEER_TIMEOUT_S) as comm:
            comm.build(device)
            chosen, reason, facts = comm.backend, comm.reason, comm.facts
    except BackendUnavailableError as error:
        reason = str(error)
    for backend, finding in found.items():
        if finding.state == "refused":
            finding.reason = _refusals(facts, backend) or finding.reason
    if chosen is not None and found[chosen].state == "usable":
        found[chosen].state = "in use"
    broken = any(finding.state == "failed" or finding.exchange == "wrong" for finding in found.values())
    status = 2 if broken or chosen is None else 1 if chosen == "c10d" else 0
    return Report(versions(), placement, ranks, chosen, reason, found, status)


def describe(report: Report) -> str:
    """The report as text."""
    lines = [f"{name:<15} {version}" for name, version in report.versions.items()]
    lines += ["", f"ranks           {report.placement.world_size} on {report.placement.device_type}"]
    if report.placement.note:
        lines.append(f"                {report.placement.note}")
    for finding in report.ranks:
        lines += _describe_rank(finding)
    lines += ["", "environment"]
    lines += _describe_variables(report.ranks)
    if report.backends:
        lines += ["", "backends, the preferred first"]
    for backend, found in report.backends.items():
        exchange = {"right": ", exchange bitwise right on all ranks", "wrong": ", exchange WRONG"}.get(
            found.exchange, ""
        )
        reason = f": {found.reason}" if found.reason else ""
        lines.append(f"  {backend:<13} {found.state}{exchange}{reason}")
    verdict = {
        0: "ranks write straight into each other's memory",
        1: "works, but only on the fallback: no direct writes into peers' memory",
        2: "does not work",
    }[report.status]
    if report.placement.world_size == 1 and report.status < 2:
        verdict = "one rank exchanges with nobody: 2 ranks or more show what works"
    lines += ["", f"in use          {report.backend or 'nothing'}: {report.reason}", f"verdict         {verdict}"]
    return "\n".join(lines)


def _describe_rank(finding: RankFinding) -> list[str]:
    name = f" {finding.device_name}, {finding.bus_id}" if finding.device_name else ""
    lines = [f"  rank {finding.rank:<8} {finding.device}{name}; host {finding.host}, process {finding.pid}"]
    if finding.copy_engines is not None:
        operations = "has" if finding.stream_memory_operations else "lacks"
        lines.append(
            f"{'':16}{finding.copy_engines} copy engines; {operations} 64-bit stream memory operations; "
            f"driver for CUDA {finding.cuda_driver_version}"
        )
    lines.append(f"{'':16}shares host memory with rank(s) {', '.join(map(str, finding.shares_memory_with)) or 'none'}")
    if finding.reaches:
        reaches = ", ".join(f"{peer}: {answer}" for peer, answer in finding.reaches.items())
        lines.append(f"{'':16}peer access to the device of rank {reaches}")
    if finding.problem:
        lines.append(f"{'':16}PROBLEM: {finding.problem}")
    return lines


def _describe_variables(ranks: Sequence[RankFinding]) -> list[str]:
    lines, width = [], max(map(len, VARIABLES))
    for variable in VARIABLES:
        values = [finding.variables.get(variable) for finding in ranks]
        shown = ["not set" if value is None else repr(value) for value in values]
        if len(set(shown)) == 1:
            lines.append(f"  {variable:<{width}} {shown[0]}")
        else:
            by_rank = ", ".join(f"rank {finding.rank}: {text}" for finding, text in zip(ranks, shown, strict=True))
            lines.append(f"  {variable:<{width}} DIFFERS: {by_rank}")
    return lines


def _print_versions(found: dict[str, str]) -> None:
    for name, version in found.items():
        print(f"{name:<15} {version}")


def _try(backend: str, device: torch.device) -> BackendFinding:
    """Build a communicator on ``backend`` and exchange on it. Alike on all ranks."""
    error = ""
    try:
        with Communicator(backend=backend, timeout_s=_PEER_TIMEOUT_S) as comm:
            comm.build(device)
            right = _exchanges_rightly(comm, device)
    except BackendUnavailableError as refusal:
        return BackendFinding("refused", reason=str(refusal))
    except Exception as failure:  # whatever a driver or a peer comes up with is what the report is for
        error, right = f"{type(failure).__name__}: {failure}", False
    heard = [json.loads(text) for text in _all_gather({"error": error[:2000], "right": right})]
    errors = [f"rank {rank}: {said['error']}" for rank, said in enumerate(heard) if said["error"]]
    if errors:
        return BackendFinding("failed", reason="; ".join(errors))
    wrong = [str(rank) for rank, said in enumerate(heard) if not said["right"]]
    if wrong:
        return BackendFinding("failed", "wrong", f"rank {', '.join(wrong)} did not get what its peers sent")
    return BackendFinding("usable", "right")


def _exchanges_rightly(comm: Communicator, device: torch.device) -> bool:
    """Exchange numbered elements there and back, uneven and strided, over targets that are used again."""
    rank, world_size = comm.rank, comm.world_size
    seq_lens = [64 + 8 * peer for peer in range(world_size)]
    start = sum(seq_lens[:rank])
    rows, heads = slice(start, start + seq_lens[rank]), slice(2 * rank, 2 * rank + 2)
    shape = (2, sum(seq_lens), 2 * world_size, 3, 32)  # q, k and v side by side, as of a fused projection
    right = True
    for turn in range(_ROUNDS):
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int32, device=device).view(shape) * (turn + 1)
        wanted = whole.unbind(3)
        with comm.group("q", "k", "v") as group:
            for tag, part in zip(group.tags, whole[:, rows].contiguous().unbind(3), strict=True):
                group.submit(part, tag=tag, seq_lens=seq_lens)
            results = group.wait()
        for result, part in zip(results, wanted, strict=True):
            right = torch.equal(result, part[:, :, heads]) and right
            back = comm.gather_heads(part[:, :, heads], seq_lens=seq_lens)
            right = torch.equal(back, part[:, rows]) and right
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    comm.check()
    return right


def _find_cuda(own: RankFinding, bus_ids: Sequence[str]) -> None:
    try:
        facts = _C.cuda_device_facts(own.bus_id)
    except RuntimeError as error:
        own.device_name += f" ({error})"
        return
    own.copy_engines = facts.copy_engines
    own.stream_memory_operations = facts.stream_memory_operations
    own.cuda_driver_version = f"{facts.driver_version // 1000}.{facts.driver_version % 1000 // 10}"
    for peer, bus_id in enumerate(bus_ids):
        if peer == own.rank:
            continue
        if bus_id == own.bus_id:
            own.reaches[peer] = "it is the same device"
            continue
        try:
            own.reaches[peer] = "yes" if _C.cuda_can_access_peer(own.bus_id, bus_id) else "no"
        except RuntimeError as error:
            own.reaches[peer] = f"not visible here ({error})"


def _refusals(facts: Sequence[Facts], backend: str) -> str:
    """Every reason that a rank has against ``backend``, with the ranks that have it."""
    by_reason: dict[str, list[str]] = {}
    for fact in facts:
        if backend in fact.refusals:
            by_reason.setdefault(fact.refusals[backend], []).append(str(fact.rank))
    return "; ".join(f"rank {', '.join(ranks)}: {reason}" for reason, ranks in by_reason.items())


def _opens(name: str) -> bool:
    try:
        _C.SharedSegment.open(name, 4096)
    except RuntimeError:
        return False
    return True


def _all_gather(value: dict[str, Any]) -> list[bytes]:
    assert dist.group.WORLD is not None
    return all_gather_bytes(dist.group.WORLD, json.dumps(value).encode(), _PEER_TIMEOUT_S)


def _finding(value: dict[str, Any]) -> RankFinding:
    value["reaches"] = {int(peer): answer for peer, answer in value["reaches"].items()}
    return RankFinding(**value)


def _driver_release() -> str:
    """Release of the NVIDIA kernel driver, for instance "580.159.03"; empty where there is none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\b(\d+\.\d+(\.\d+)?)\b", text)
    return found[1] if found else ""
