"""What every rank must end up with: all-gather along one dimension, then slice the other. Knows nothing of layouts.

Arrays are (B, S, H, D) or have further dimensions behind D.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def scattered(inputs: Sequence[Array], heads: Sequence[tuple[int, int]]) -> list[Array]:
    """Outputs (B, S_global, H_local, D) of all ranks from their inputs (B, S_local, H, D)."""
    whole = np.concatenate(list(inputs), axis=1)
    return [whole[:, :, start:stop] for start, stop in heads]


def gathered(inputs: Sequence[Array], seq_lens: Sequence[int]) -> list[Array]:
    """Outputs (B, S_local, sum(H_local), D) of all ranks from their inputs (B, S_global, H_local, D)."""
    whole = np.concatenate(list(inputs), axis=2)
    return np.split(whole, np.cumsum(seq_lens)[:-1], axis=1)
