"""What holds of the package as built: what importing it does not do, what its extension does not link."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import ulysses_op
from ulysses_op import _C

SETUP = Path(__file__).parent.parent / "setup.py"


def run_python(code: str, **environ: str) -> str:
    """Standard output of a fresh interpreter that runs the code."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environ}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def run_tool(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_import_does_not_initialise_cuda() -> None:
    out = run_python(
        "import torch\n"
        "def driver(): return 'libcuda.so' in open('/proc/self/maps').read()\n"
        "before = driver()\n"
        "import ulysses_op\n"
        "print(torch.cuda.is_initialized(), driver() != before)"
    )
    assert out == "False False"


def test_import_without_visible_devices() -> None:
    assert run_python("import ulysses_op; print('imported')", CUDA_VISIBLE_DEVICES="") == "imported"


def test_extension_loads_without_torch() -> None:
    out = run_python(
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('ulysses_op._C', {_C.__file__!r})\n"
        "spec.loader.exec_module(importlib.util.module_from_spec(spec))\n"
        "print('torch' in sys.modules)"
    )
    assert out == "False"


def test_extension_links_neither_cuda_nor_torch() -> None:
    needed = [line for line in run_tool("readelf", "-dW", _C.__file__).splitlines() if "(NEEDED)" in line]
    assert any("libstdc++" in line for line in needed)
    unwanted = ("libcuda", "libcudart", "libtorch", "libc10", "libnccl")
    assert not [line for line in needed if any(name in line for name in unwanted)]


def test_extension_hides_its_symbols() -> None:
    listing = run_tool("nm", "-D", "-C", "--defined-only", _C.__file__)
    exported = [line.split(maxsplit=2)[2] for line in listing.splitlines()]
    assert "PyInit__C" in exported
    # Members that std's own templates make of these types are weak and may show.
    assert not [name for name in exported if name.startswith(("ulysses::", "pybind11::"))]


def test_built_with_cuda_is_a_bool() -> None:
    assert isinstance(_C.built_with_cuda, bool)


def test_version_and_type_marker() -> None:
    assert ulysses_op.__version__ == importlib.metadata.version("ulysses_op")
    package = Path(ulysses_op.__file__).parent
    assert (package / "py.typed").is_file()
    assert (package / "_C.pyi").is_file()


@pytest.fixture
def setup_py() -> ModuleType:
    """The build script, whose search for cuda.h is a function of the environment; nothing is built."""
    pytest.importorskip("pybind11")
    spec = importlib.util.spec_from_file_location("ulysses_op_setup", SETUP)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_cuda_h(root: Path, version: int) -> Path:
    include = root / "include"
    include.mkdir(parents=True)
    (include / "cuda.h").write_text(f"#define CUDA_VERSION {version}\n")
    return include


def test_cuda_header_is_taken_from_the_most_explicit_place(setup_py: ModuleType, tmp_path: Path) -> None:
    home, path = write_cuda_h(tmp_path / "home", 12060), write_cuda_h(tmp_path / "path", 13000)
    environ = {"CUDA_HOME": str(home.parent), "CUDA_PATH": str(path.parent), "PATH": ""}
    include, report = setup_py.find_cuda_include(environ)
    assert include == home
    assert "12.6" in report and str(home) in report


def test_cuda_header_too_old_is_passed_over(setup_py: ModuleType, tmp_path: Path) -> None:
    home, path = write_cuda_h(tmp_path / "home", 11080), write_cuda_h(tmp_path / "path", 13000)
    environ = {"CUDA_HOME": str(home.parent), "CUDA_PATH": str(path.parent), "PATH": ""}
    assert setup_py.find_cuda_include(environ)[0] == path


def test_cuda_header_beside_nvcc(setup_py: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    include = write_cuda_h(tmp_path / "toolkit", 12080)
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.touch(mode=0o755)
    assert include in setup_py.cuda_include_candidates({"PATH": str(nvcc.parent)})


@pytest.mark.parametrize("folder", ["cuda_runtime", "cu13"])
def test_cuda_header_in_a_wheel(
    setup_py: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    include = write_cuda_h(tmp_path / "nvidia" / folder, 13000)
    monkeypatch.setattr(setup_py, "site_packages", lambda: [tmp_path])
    assert include in setup_py.cuda_include_candidates({"PATH": ""})


def test_cuda_half_by_environment(setup_py: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    include = write_cuda_h(tmp_path, 13000)
    monkeypatch.setattr(setup_py, "cuda_include_candidates", lambda environ: [include])
    assert setup_py.find_cuda_include({})[0] == include
    assert setup_py.find_cuda_include({"ULYSSES_OP_CUDA": "0"})[0] is None
    monkeypatch.setattr(setup_py, "cuda_include_candidates", lambda environ: [])
    assert setup_py.find_cuda_include({})[0] is None
    with pytest.raises(SystemExit, match=r"no cuda\.h found"):
        setup_py.find_cuda_include({"ULYSSES_OP_CUDA": "1"})
    with pytest.raises(SystemExit, match="ULYSSES_OP_CUDA='yes'"):
        setup_py.find_cuda_include({"ULYSSES_OP_CUDA": "yes"})
