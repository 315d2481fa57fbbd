"""The C++ core under sanitizers: ranks as threads, so that ThreadSanitizer sees whether the handshakes order what peers
write before what a rank reads, and the other way round; and the extension in ranks that are processes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
CORE = [ROOT / "csrc" / f"{name}.cpp" for name in ("board", "copy_plan", "shared_segment", "shm_transport")]
CXX = os.environ.get("CXX", "c++")
SANITIZERS = ("thread", "address,undefined")
GROUPS = int(os.environ.get("ULYSSES_OP_TEST_GROUPS", "1000"))


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The program for each sanitizer that the compiler has."""
    if shutil.which(CXX) is None:
        pytest.skip(f"no C++ compiler {CXX}")
    directory = tmp_path_factory.mktemp("core")
    empty = directory / "empty.cpp"
    empty.write_text("int main() {}\n")
    programs, builds = {}, []
    for sanitizer in SANITIZERS:
        flags = ["-std=c++17", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
        program = directory / sanitizer.split(",")[0]
        if subprocess.run([CXX, *flags, str(empty), "-o", str(program)], capture_output=True).returncode:
            continue
        sources = [*sorted((ROOT / "tests" / "core").glob("*.cpp")), *CORE]
        command = [CXX, *flags, f"-I{ROOT / 'csrc'}", *map(str, sources), "-o", str(program), "-lrt"]
        builds.append(subprocess.Popen(command))
        programs[sanitizer] = program
    assert [build.wait() for build in builds] == [0] * len(builds)
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


def test_the_extension_in_a_soak(stress: dict[str, Path], tmp_path: Path) -> None:
    """`make sanitize` does more of it, and under ThreadSanitizer too."""
    if "address,undefined" not in stress:
        pytest.skip(f"{CXX} has no -fsanitize=address,undefined here")
    sanitized = load(ROOT / "tests" / "core" / "sanitize.py").Sanitized("address,undefined", tmp_path)
    sanitized.check()
    soak = ("-m", "ulysses_op", "soak", "--device", "cpu", "--backend", "shm", "--ranks", "2", "--steps", "60")
    found = sanitized.run(*soak, capture=True)
    assert found.returncode == 0 and "everything held on 2 ranks (shm): 60 steps" in found.stdout, found.stderr
