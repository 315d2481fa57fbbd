"""A table: a rank is killed, stopped, ended or failed by an exception at each step of the protocol. The others get an
error in time that names it, and exchange again among themselves.
"""

from __future__ import annotations

import pytest
from fault_table import ALL, DEADLINE_S, FAULTS, STEPS, Case, check, chosen

# Three ranks, or two and four as well: the one that is lost, and more than one that is left.
WORLD_SIZES = [2, 3, 4] if ALL else [3]
CASES = [Case("cpu", "shm", size, *pair) for size in WORLD_SIZES for pair in chosen(STEPS, FAULTS, 2)]


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_faults(case: Case) -> None:
    check(case)
