"""The gate, as a table: facts in, backend and reason out. No process group, no GPU."""

from __future__ import annotations

import pytest

from ulysses_op.capability import BACKENDS, Facts, decide, disabled_backends, peer_refusals

CPU = {"symm_mem": "for CUDA tensors", "cuda_ipc": "for CUDA tensors"}
CUDA = {"shm": "for CPU tensors"}
NO_PEERS = {"symm_mem": "no peer access", "cuda_ipc": "no peer access"}
OLD_TORCH = {"symm_mem": "no symmetric memory"}
OTHER_HOST = dict.fromkeys(("symm_mem", "cuda_ipc", "shm"), "not one host")
NO_GROUP = {"c10d": "no backend for these tensors"}


def world(device_type: str, base: dict[str, str], *extra: dict[str, str]) -> list[Facts]:
    return [Facts(rank, device_type, "", refusals={**base, **more}) for rank, more in enumerate(extra)]


@pytest.mark.parametrize(
    ("facts", "backend", "mentions"),
    [
        (world("cuda", CUDA, {}, {}), "symm_mem", "all 2 ranks can run it"),
        (world("cuda", CUDA, {}, {}, {}, {}), "symm_mem", "all 4 ranks"),
        (world("cuda", CUDA, {}, OLD_TORCH), "cuda_ipc", "symm_mem refused (rank 1: no symmetric memory)"),
        (world("cuda", CUDA, OLD_TORCH, {}), "cuda_ipc", "symm_mem refused (rank 0: no symmetric memory)"),
        (world("cuda", CUDA, {}, {}, NO_PEERS), "c10d", "cuda_ipc refused (rank 2: no peer access)"),
        (world("cuda", CUDA, {}, OTHER_HOST), "c10d", "symm_mem refused (rank 1: not one host)"),
        (world("cuda", CUDA, OLD_TORCH, {"cuda_ipc": "disabled"}), "c10d", "cuda_ipc refused (rank 1: disabled)"),
        (world("cuda", CUDA, NO_GROUP, NO_GROUP), "symm_mem", "all 2 ranks can run it"),
        (world("cuda", CUDA, {**NO_PEERS, **NO_GROUP}, {}), None, "c10d: rank 0: no backend"),
        (world("cpu", CPU, {}, {}), "shm", "all 2 ranks can run it"),
        (world("cpu", CPU, {}, {}, {"shm": "disabled"}), "c10d", "shm refused (rank 2: disabled)"),
        (world("cpu", CPU, OTHER_HOST, OTHER_HOST), "c10d", "shm refused (rank 0: not one host)"),
        (world("cpu", CPU, NO_GROUP, {}), "shm", "all 2 ranks can run it"),
        (world("cpu", CPU, {"shm": "disabled", **NO_GROUP}, {}), None, "shm: rank 0: disabled"),
        (world("xpu", {**CPU, "shm": "for CPU tensors"}, {}, {}), "c10d", "all 2 ranks can run it"),
        (world("cpu", CPU, {}), "shm", "all 1 ranks can run it"),
    ],
)
def test_auto(facts: list[Facts], backend: str | None, mentions: str) -> None:
    decision = decide(facts)
    assert decision.backend == backend
    assert mentions in decision.reason
    assert backend not in decision.refused


@pytest.mark.parametrize("requested", BACKENDS)
@pytest.mark.parametrize("refusing", [None, 0, 1])
def test_a_forced_backend_is_taken_or_refused_and_never_replaced(requested: str, refusing: int | None) -> None:
    facts = [Facts(rank, "cpu", "", refusals={requested: "broken"} if rank == refusing else {}) for rank in range(2)]
    decision = decide(facts, requested)
    if refusing is None:
        assert decision.backend == requested
    else:
        assert decision.backend is None
        assert decision.reason == f"rank {refusing}: broken"


def test_every_rank_decides_alike_whatever_its_own_facts() -> None:
    facts = world("cuda", CUDA, {}, OLD_TORCH, NO_PEERS)
    travelled = [Facts.from_bytes(fact.to_bytes()) for fact in facts]
    assert travelled == facts
    assert decide(travelled) == decide(facts)


def test_reason_leaves_out_backends_for_other_devices() -> None:
    assert "shm" not in decide(world("cuda", CUDA, {}, NO_PEERS)).reason
    assert "symm_mem" not in decide(world("cpu", CPU, {}, {"shm": "disabled"})).reason


def test_one_device_for_two_ranks_is_refused_by_symm_mem_alone() -> None:
    facts = [Facts(rank, "cuda", "", bus_id="0000:1b:00.0") for rank in range(2)]
    refusals = peer_refusals(facts[0], facts, None)
    assert set(refusals) == {"symm_mem"}
    assert "shares device 0000:1b:00.0 with rank 1" in refusals["symm_mem"]


def test_ranks_without_common_memory_run_no_one_sided_backend() -> None:
    facts = [Facts(rank, "cpu", "") for rank in range(2)]
    refusals = peer_refusals(facts[1], facts, "shm_open: no such file")
    assert set(refusals) == {"symm_mem", "cuda_ipc", "shm"}
    assert peer_refusals(facts[1], facts, None) == {}


def test_disabled_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULYSSES_OP_DISABLE", "symm_mem, shm")
    assert disabled_backends() == ["symm_mem", "shm"]
    monkeypatch.setenv("ULYSSES_OP_DISABLE", "nvlink")
    with pytest.raises(ValueError, match=r"ULYSSES_OP_DISABLE names \['nvlink'\]"):
        disabled_backends()
