"""A toy server for the frameworks' integrations, which are imported from this checkout, and their asynchronous tests."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from blendserve.serve.config import ServeConfig
from tests.engine.helpers import PASSAGES
from tests.integrations.helpers import UNTITLED
from tests.serve.helpers import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("integrations"), ServeConfig())
    made.engine.precompute([*PASSAGES, *UNTITLED])
    yield made
    made.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> None:
    """Mark coroutine tests, those of langchain-tests too, for pytest-asyncio."""
    if name.startswith("test_") and inspect.iscoroutinefunction(obj):
        pytest.mark.asyncio(loop_scope="module")(obj)  # clients keep connections, which belong to a loop
