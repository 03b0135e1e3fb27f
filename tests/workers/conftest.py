"""One small Ray cluster for all of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from blendserve.workers.cluster import Share, cluster


@pytest.fixture(scope="session")
def share() -> Iterator[Share]:
    """Of each of two workers."""
    if (
        importlib.util.find_spec("ray") is None
    ):  # not imported here: what is set before that keeps it on loopback
        pytest.skip("Ray is not installed: pip install 'blendserve[ray]'")
    with cluster(None, 2) as each:
        yield each
