"""A place for a store, and the toys that are registered while a test runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from blendserve.registry import CODECS, STORES
from blendserve.store.codecs.base import forget_ready


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def toy_store() -> Iterator[None]:
    """A store kind of the tests' own: one file, one line."""
    STORES.add("toy", "tests.store.toy_store:ToyStore")
    yield
    STORES.remove("toy")


@pytest.fixture
def toy_codec() -> Iterator[None]:
    """A codec of the tests' own: one file, one line."""
    forget_ready()
    CODECS.add("toy", "tests.store.toy_codec:Toy")
    yield
    CODECS.remove("toy")
