"""One published collection, the server that delivers it, and a prompt over its chunks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blendserve.core import Prompt
from tests.support.peers import Published, Service, published, question


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return published(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="session")
def service(made: Published) -> Iterator[Service]:
    with Service(made.folder) as running:
        yield running


@pytest.fixture(scope="session")
def prompt() -> Prompt:
    return question()
