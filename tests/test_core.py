"""The C++ core under sanitizers: ranks as threads, so that ThreadSanitizer sees whether the handshakes order what peers
write before what a rank reads, and the other way round."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = [ROOT / "csrc" / f"{name}.cpp" for name in ("board", "copy_plan", "shared_segment", "shm_transport")]
CXX = os.environ.get("CXX", "c++")
SANITIZERS = ("thread", "address,undefined")
GROUPS = int(os.environ.get("ULYSSES_OP_TEST_GROUPS", "1000"))


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The program for each sanitizer that the compiler has."""
    if shutil.which(CXX) is None:
        pytest.skip(f"no C++ compiler {CXX}")
    directory = tmp_path_factory.mktemp("core")
    empty = directory / "empty.cpp"
    empty.write_text("int main() {}\n")
    programs = {}
    for sanitizer in SANITIZERS:
        flags = ["-std=c++17", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
        program = directory / sanitizer.split(",")[0]
        if subprocess.run([CXX, *flags, str(empty), "-o", str(program)], capture_output=True).returncode:
            continue
        sources = [ROOT / "tests" / "core" / "stress.cpp", *CORE]
        command = [CXX, *flags, f"-I{ROOT / 'csrc'}", *map(str, sources), "-o", str(program), "-lrt"]
        subprocess.run(command, check=True)
        programs[sanitizer] = program
    return programs


def run(stress: dict[str, Path], sanitizer: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    if sanitizer not in stress:
        pytest.skip(f"{CXX} has no -fsanitize={sanitizer} here")
    return subprocess.run([str(stress[sanitizer]), *arguments], capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_stress(stress: dict[str, Path], sanitizer: str, world_size: int) -> None:
    found = run(stress, sanitizer, str(world_size), str(GROUPS), str(world_size))
    assert (found.returncode, found.stdout) == (0, "held\n"), found.stderr


@pytest.mark.parametrize("handshake", ["ready", "done"])
def test_races_are_found_without_a_handshake(stress: dict[str, Path], handshake: str) -> None:
    found = run(stress, "thread", "2", str(GROUPS), "1", handshake)
    assert found.returncode != 0
    assert "data race" in found.stderr or "a wrong element" in found.stderr
