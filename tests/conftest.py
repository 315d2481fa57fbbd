from __future__ import annotations

from collections.abc import Iterator

import pytest
import ranks


@pytest.fixture(scope="session", autouse=True)
def _pools_end_with_the_session() -> Iterator[None]:
    yield
    ranks.close_pools()


@pytest.fixture
def pool() -> ranks.RankPool:
    """Four CPU ranks; smaller worlds are sub-groups of them."""
    return ranks.pool(4)
