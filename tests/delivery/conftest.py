"""A published collection, the service that delivers it, and a prompt whose chunks it has; a file may have its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blendserve.core import Prompt
from blendserve.engine.engine import Engine
from blendserve.store import KVStore, MemoryStore
from blendserve.store.kdn.collection import Collection
from tests.delivery.helpers import Service, published
from tests.engine.helpers import CONFIG, PASSAGES, reader


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[KVStore, Collection]:
    return published(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def service(made: tuple[KVStore, Collection]) -> Iterator[Service]:
    with Service(made[0]) as running:
        yield running


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return Engine(CONFIG, reader(), MemoryStore(2**30)).prompts.build("Who sat on the mat?", PASSAGES)
