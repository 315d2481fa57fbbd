"""Build of the extension module ulysses_op._C; everything declarative is in pyproject.toml.

Environment:
    ULYSSES_OP_CUDA    "auto" (default): the CUDA half is compiled where cuda.h is found. "0": it is left out.
                       "1": a missing cuda.h is an error.
    CUDA_HOME, CUDA_PATH   CUDA toolkits, whose include folder is searched first, in this order.
    ULYSSES_OP_WERROR  "1": compiler warnings are errors.
    MAX_JOBS           number of parallel compiler processes.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

import pybind11
from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

try:
    # Compiles with ninja, and only what changed. Absent in build isolation: torch is no build requirement.
    from torch.utils.cpp_extension import BuildExtension as build_ext_base
except (ImportError, OSError):
    from pybind11.setup_helpers import build_ext as build_ext_base

    ParallelCompile("MAX_JOBS").install()

MIN_CUDA_VERSION = 12000  # CUDA_VERSION of cuda.h: 1000 * major + 10 * minor


def site_packages() -> list[Path]:
    """Package folders of this interpreter, those that build isolation hides from sys.path included."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    folders += [entry for entry in sys.path if os.path.basename(entry) in ("site-packages", "dist-packages")]
    return [Path(folder) for folder in dict.fromkeys(folders)]


def cuda_include_candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    """Folders that may hold cuda.h, the most explicit choice first."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if environ.get(name):
            yield Path(environ[name], "include")
    yield Path("/usr/local/cuda/include")
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    if nvcc:
        yield Path(nvcc).parent.parent / "include"
        yield Path(nvcc).resolve().parent.parent / "include"
    for folder in site_packages():
        yield folder / "nvidia" / "cuda_runtime" / "include"
        yield from sorted(folder.glob("nvidia/cu[0-9]*/include"), reverse=True)


def cuda_version(include: Path) -> int | None:
    """CUDA_VERSION of the folder's cuda.h; None where there is none."""
    try:
        text = (include / "cuda.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^\s*#\s*define\s+CUDA_VERSION\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else None


def find_cuda_include(environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """Folder whose cuda.h the CUDA half is compiled against, or None, and a line that says why."""
    wanted = environ.get("ULYSSES_OP_CUDA") or "auto"
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"ULYSSES_OP_CUDA={wanted!r}: use 'auto', '0' or '1'")
    if wanted == "0":
        return None, "CPU only (ULYSSES_OP_CUDA=0)"
    reason = "no cuda.h found"
    for include in dict.fromkeys(cuda_include_candidates(environ)):
        version = cuda_version(include)
        if version is None:
            continue
        if version >= MIN_CUDA_VERSION:
            return include, f"with CUDA (cuda.h {version // 1000}.{version % 1000 // 10} in {include})"
        reason = f"the cuda.h in {include} has CUDA_VERSION {version}, {MIN_CUDA_VERSION} is needed"
    if wanted == "1":
        raise SystemExit(f"ULYSSES_OP_CUDA=1, but {reason}: set CUDA_HOME or install nvidia-cuda-runtime")
    return None, f"CPU only ({reason}; set CUDA_HOME or install nvidia-cuda-runtime to compile the CUDA half)"


def make_extension(cuda_include: Path | None, werror: bool) -> Pybind11Extension:
    sources = sorted(glob.glob("csrc/*.cpp"))
    if cuda_include is None:
        sources = [source for source in sources if not os.path.basename(source).startswith("cuda_")]
    # System folders: warnings of headers that are not ours are not reported.
    system_includes = [pybind11.get_include()] + ([str(cuda_include)] if cuda_include else [])
    flags = ["-pthread", "-Wall", "-Wextra"] + (["-Werror"] if werror else [])
    return Pybind11Extension(
        "ulysses_op._C",
        sources,
        depends=sorted(glob.glob("csrc/*.h")),
        include_pybind11=False,
        define_macros=[("ULYSSES_OP_WITH_CUDA", "1")] if cuda_include else [],
        extra_compile_args=[*flags, *(arg for folder in system_includes for arg in ("-isystem", folder))],
        extra_link_args=["-pthread"],
        libraries=["dl", "rt"],
        cxx_std=17,
    )


class build_ext(build_ext_base):
    """Says whether the CUDA half is compiled, and keeps the objects of editable installs for the next one."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.force = True  # the flags depend on the environment, which distutils' time stamps do not see

    def run(self) -> None:
        if self.inplace or self.editable_mode:
            platform = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
            self.build_temp = os.path.join("build", f"inplace-{platform}")
        print(f"ulysses_op._C: {cuda_report}", flush=True)
        super().run()


if __name__ == "__main__":
    cuda_include, cuda_report = find_cuda_include(os.environ)
    setup(
        ext_modules=[make_extension(cuda_include, werror=os.environ.get("ULYSSES_OP_WERROR") == "1")],
        cmdclass={"build_ext": build_ext},
    )
