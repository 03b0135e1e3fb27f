"""A place for a store, and the toys that are registered while a test runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from blendserve.registry import STORES


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def toy_store() -> Iterator[None]:
    """A store kind of the tests' own: one file, one line."""
    STORES.add("toy", "tests.store.toy_store:ToyStore")
    yield
    STORES.remove("toy")
