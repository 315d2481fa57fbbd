"""The table of faults on CUDA devices, with what only they have: captures, replays, and errors of the device."""

from __future__ import annotations

from typing import Any

import pytest
import test_memory_faults
from fault_table import ALL, DEADLINE_S, DEVICE_FAULTS, FAULTS, GRAPH_STEPS, STEPS, Case, check, chosen
from ranks import DEVICES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICES < 1, reason="needs a CUDA device"),
]

# Several ranks may share a device, but not with symmetric memory.
TWO_DEVICES = pytest.mark.skipif(DEVICES < 2, reason=f"needs two CUDA devices, this machine has {DEVICES}")
WORLD_SIZES = [2, 3, 4] if ALL else [2, 3]
# The handshakes and the replay, with every fault; of the other steps some.
WHOLE = ("before READY", "before DONE", "instead of a replay", "in a replay")
DEVICE_STEPS = ("between submissions", "before DONE", "in wait", "before a target grows", "in a replay")


def cases(backend: str, *marks: Any) -> list[Any]:
    found = []
    for world_size in WORLD_SIZES:
        if backend == "symm_mem" and world_size > max(2, DEVICES):
            continue
        pairs = chosen({**STEPS, **GRAPH_STEPS}, FAULTS, 1, WHOLE if world_size == 2 else ())
        pairs += chosen(DEVICE_STEPS, DEVICE_FAULTS, 1)
        made = [Case("cuda", backend, world_size, *pair) for pair in pairs]
        found += [pytest.param(case, id=str(case), marks=marks) for case in made]
    return found


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("case", [*cases("symm_mem", TWO_DEVICES), *cases("cuda_ipc")])
def test_faults(case: Case) -> None:
    check(case)


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("backend", [pytest.param("symm_mem", marks=TWO_DEVICES), "cuda_ipc"])
@pytest.mark.parametrize("step", test_memory_faults.STEPS)
def test_a_rank_without_memory(step: str, backend: str) -> None:
    test_memory_faults.check(Case("cuda", backend, 2, step, "no device memory"))
