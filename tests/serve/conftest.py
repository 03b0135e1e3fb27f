"""One server for the tests of a process; each test has its own tenant."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.http import Server, TenantClient, shared_server


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with shared_server(tmp_path_factory.mktemp("serve")) as made:
        yield made


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    yield shared
    shared.forget_tenants()


@pytest.fixture
def client(server: Server) -> TenantClient:
    """An admin with a namespace of its own."""
    return server.tenant(admin=True)
