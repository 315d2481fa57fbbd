"""The extension under sanitizers, on shm: built into a directory of its own, shown to find faults of ours, then tested.

    python tests/core/sanitize.py [--sanitizers address,undefined thread] [--minutes 1] [--tests FILE ...]

Ranks are processes, of which ThreadSanitizer sees one at a time: whether handshakes order what ranks write is for
stress.cpp, where ranks are threads. Here it is about the threads of a rank.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CXX = os.environ.get("CXX", "c++")
SANITIZERS = ("address,undefined", "thread")
RUNTIMES = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}
# What must be found, as misuse.py calls it, and what is then said of it.
FAULTS = {
    "address,undefined": {
        "overflow": r"AddressSanitizer: heap-buffer-overflow.*copy_rows",
        "freed": r"AddressSanitizer: heap-use-after-free.*copy_rows",
        "wrapped": r"shm_transport\.cpp:\d+:\d+: runtime error: applying non-zero offset",
    },
    "thread": {"race": r"ThreadSanitizer: data race.*copy_rows"},
}
# The tests of what may go wrong with memory. Their programs are many and short, for which ThreadSanitizer is too slow.
TESTS = ("test_copy_plan.py", "test_lifetime.py", "test_misuse.py", "test_faults.py")


class Sanitized:
    """The package with its extension compiled by a sanitizer, in ``directory``."""

    def __init__(self, sanitizer: str, directory: Path) -> None:
        self.sanitizer = sanitizer
        self._directory = directory
        flags = f"-fsanitize={sanitizer}"
        compiled = f"{flags} -fno-sanitize-recover=all -fno-omit-frame-pointer -O0 -g"
        environ = {**os.environ, "CFLAGS": compiled, "LDFLAGS": flags, "ULYSSES_OP_CUDA": "0"}
        where = ["--build-lib", str(directory / "lib"), "--build-temp", str(directory / "objects")]
        command = [sys.executable, "setup.py", "-q", "build", *where]
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{command} failed:\n{done.stdout}{done.stderr}")

    def run(self, *arguments: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
        """Python with ``arguments``. Its ranks inherit what makes it work."""
        # The runtimes come first; they look for what throws exceptions at their start, so that comes with them.
        runtimes = [RUNTIMES[name] for name in self.sanitizer.split(",")]
        environ = {
            **os.environ,
            "LD_PRELOAD": " ".join(_library(name) for name in (*runtimes, "libstdc++.so")),
            # Python itself leaves much behind; stress.cpp looks for leaks of the core.
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "TSAN_OPTIONS": f"suppressions={HERE / 'tsan.supp'}",
            "PYTHONPATH": f"{self._directory / 'lib'}:{ROOT / 'tests'}",
        }
        # Not where the package's sources are: they would be imported, with the ordinary extension.
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=self._directory, env=environ, capture_output=capture, text=True)

    def check(self) -> None:
        """AssertionError unless this is what is imported, and it finds faults, but none where none is."""
        code = "import importlib.util as u; print(*u.find_spec('ulysses_op').submodule_search_locations)"
        found = self.run("-c", code, capture=True)
        assert found.stdout == f"{self._directory}/lib/ulysses_op\n", found.stdout + found.stderr
        for fault, pattern in FAULTS[self.sanitizer].items():
            found = self.run(str(HERE / "misuse.py"), fault, capture=True)
            assert found.returncode and re.search(pattern, found.stderr, re.DOTALL), (fault, found.stdout, found.stderr)
        found = self.run(str(HERE / "misuse.py"), "none", capture=True)
        right = found.stdout.startswith(f"nothing found in {self._directory}/lib/ulysses_op/_C.")
        assert found.returncode == 0 and right, found.stdout + found.stderr


def _library(name: str) -> str:
    """Where the compiler has the library."""
    command = [CXX, f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sanitizers", nargs="+", choices=SANITIZERS, default=SANITIZERS)
    parser.add_argument("--minutes", default="1", help="of the soak, with each number of ranks; default: %(default)s")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="under the address sanitizer")
    options = parser.parse_args(arguments)
    failed = []
    for sanitizer in options.sanitizers:
        sanitized = Sanitized(sanitizer, ROOT / "build" / f"sanitized-{sanitizer.split(',')[0]}")
        sanitized.check()
        print(f"{sanitizer}: finds {', '.join(FAULTS[sanitizer])}, and nothing in a right use", flush=True)
        soak = ("-m", "ulysses_op", "soak", "--device", "cpu", "--backend", "shm", "--minutes", options.minutes)
        calls = [(*soak, "--ranks", ranks) for ranks in ("2", "3")]
        if "address" in sanitizer and options.tests:
            calls.append(("-m", "pytest", "-q", *(str(ROOT / "tests" / test) for test in options.tests)))
        for call in calls:
            print(f"{sanitizer}: python {' '.join(call)}", flush=True)
            if sanitized.run(*call).returncode:
                failed.append(f"{sanitizer}: python {' '.join(call)}")
    print("\n".join(["FAILED", *failed]) if failed else "nothing was found")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
