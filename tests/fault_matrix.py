"""`python tests/fault_matrix.py FILE`: what ULYSSES_OP_TEST_FAULT_TABLE=FILE has kept, steps by faults. A cell tells
how many ranks the worlds had, which errors those had that were left, and how long it took at most until they had them.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

LETTERS = {"PeerTimeoutError": "T", "PeerAbortError": "A", "TargetError": "M", "BrokenCommunicatorError": "B"}
TOLD = re.compile(r"rank \d+: (\w+) after ([\d.]+) s, closed in ([\d.]+) s, then (right|WRONG) on \w+")


def main(path: str) -> None:
    sizes: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    errors: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    took: dict[tuple[str, str, str], float] = defaultdict(float)
    wrong: set[tuple[str, str, str]] = set()
    close_s = 0.0
    for line in Path(path).read_text().splitlines():
        backend, size, step, fault, *told = line.split(" | ")
        cell = (backend, step, fault)
        sizes[cell].add(size)
        for found in filter(None, map(TOLD.match, told)):
            errors[cell].add(LETTERS.get(found[1], found[1]))
            took[cell] = max(took[cell], float(found[2]))
            close_s = max(close_s, float(found[3]))
            if found[4] == "WRONG":
                wrong.add(cell)
    print(f"closed within {close_s:.2f} s; {'; '.join(f'{name}: {letter}' for name, letter in LETTERS.items())}")
    for backend in dict.fromkeys(cell[0] for cell in sizes):
        groups: dict[tuple[str, ...], list[str]] = defaultdict(list)  # steps that have the same faults
        for step in dict.fromkeys(cell[1] for cell in sizes if cell[0] == backend):
            groups[tuple(sorted(cell[2] for cell in sizes if cell[:2] == (backend, step)))].append(step)
        for faults, steps in groups.items():
            width = max(18, *(len(fault) + 2 for fault in faults))
            print(f"\n{backend:34}" + "".join(f"{fault:{width}}" for fault in faults).rstrip())
            for step in steps:
                row = [(backend, step, fault) for fault in faults]
                cells = [f"{','.join(sorted(sizes[c]))} {''.join(sorted(errors[c]))} {took[c]:.2f} s" for c in row]
                cells = [text + " WRONG" * (cell in wrong) for text, cell in zip(cells, row, strict=True)]
                print(f"{step:34}" + "".join(f"{text:{width}}" for text in cells).rstrip())


if __name__ == "__main__":
    main(sys.argv[1])
