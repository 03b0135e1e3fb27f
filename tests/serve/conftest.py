"""One server for the tests of a process; each test has its own tenant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.http import CHUNK_TOKENS, KEY, ORIGIN, SEPARATOR, Client, Server, serving
from tests.support.messages import SCRIPT
from tests.support.scripted import scripted_model


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """At the end it must be as empty as at its start."""
    folder = tmp_path_factory.mktemp("serve")
    engine = {"prompt": {"separator": SEPARATOR}, "retrieve": {"chunk_tokens": CHUNK_TOKENS}}
    access: dict[str, Any] = {"keys": folder / "keys.json", "api_key": KEY, "cors_origins": (ORIGIN,)}
    limits = {"slots": 2, "max_concurrent": 12}
    with serving(folder, served_model_name=("public",), engine=engine, **access, **limits) as made:
        yield made
        root = made.with_key(KEY)
        store = root.get("/v1/cache/stats").json()["store"]
        documents = [root.get(f"/v1/documents?collection={name}").json()["total"] for name in "ab"]
    assert (store["chunks"], store["pins"], documents) == (0, 0, [3, 3])


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without collections, whose model always writes the same call of a tool."""
    options: dict[str, Any] = {"engine": {"decode": {"max_new_tokens": None}}, "has_index": False}
    with serving(tmp_path_factory.mktemp("scripted"), model=scripted_model(*SCRIPT), **options) as made:
        yield made


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    yield shared
    shared.forget_tenants()


@pytest.fixture
def client(server: Server) -> Client:
    """An admin with a namespace of its own."""
    return server.tenant(admin=True)
