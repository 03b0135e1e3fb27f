"""One published store, the service that delivers it, and a prompt over its chunks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from blendserve.core import Prompt
from blendserve.fetch.kdn.manifest import Collection
from blendserve.store import KVStore
from tests.support.peers import Service, published, question


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


@pytest.fixture(scope="session")
def made(folder: Path) -> tuple[KVStore, Collection]:
    return published(folder)


@pytest.fixture(scope="session")
def service(made: tuple[KVStore, Collection]) -> Iterator[Service]:
    with Service(made[0]) as running:
        yield running


@pytest.fixture(scope="session")
def prompt() -> Prompt:
    return question()
