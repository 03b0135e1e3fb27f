"""Evaluations that many tests read, each run once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from blendserve.evaluate.job import Outcome
from tests.support.evaluations import toy_run


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """One of support.evaluations.RUNS; `coded` with its plots."""
    return cache(lambda kind: toy_run(kind, tmp_path_factory.mktemp(kind), draws=kind == "coded"))
