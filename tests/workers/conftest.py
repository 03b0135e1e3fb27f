"""One small Ray cluster for all of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blendserve.workers.cluster import cluster


@pytest.fixture(scope="session")
def cpus() -> Iterator[int]:
    """CPUs of each of two workers, on a cluster of two."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'blendserve[ray]'")
    with cluster(None, 2) as each:
        yield each
