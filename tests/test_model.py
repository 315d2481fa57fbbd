"""The READY/DONE handshake, model-checked: the cheap configurations of two and three ranks, and all mutations."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "model" / "run.sh"
SPIN = os.environ.get("SPIN", "spin")
CC = os.environ.get("CC", "cc")


def missing_program() -> str | None:
    return next((program for program in ("bash", SPIN, CC) if shutil.which(program) is None), None)


def configurations() -> list[str]:
    if shutil.which("bash") is None:
        return []
    listing = subprocess.run(["bash", str(RUN), "--list", "--quick"], capture_output=True, text=True, check=True)
    return listing.stdout.splitlines()


def check(configuration: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", str(RUN), configuration], capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """Of all configurations that are to be tested, as many at once as there are processors."""
    chosen = [
        item.callspec.params["configuration"]
        for item in request.session.items
        if getattr(item, "originalname", "") == "test_model"
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {configuration: pool.submit(check, configuration) for configuration in chosen}


@pytest.mark.skipif(missing_program() is not None, reason=f"the model needs {missing_program()}: not installed")
@pytest.mark.parametrize("configuration", configurations())
def test_model(configuration: str, runs: dict[str, Future[subprocess.CompletedProcess[str]]]) -> None:
    run = runs[configuration].result()
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"


def test_every_mutation_is_among_them() -> None:
    if missing_program() == "bash":
        pytest.skip("run.sh needs bash, which is not installed")
    listing = subprocess.run(["bash", str(RUN), "--list"], capture_output=True, text=True, check=True)
    mutations = {name for name in listing.stdout.splitlines() if name.startswith("mutation:")}
    assert mutations
    assert mutations <= set(configurations())
