"""One toy server for the frameworks' integrations, which are imported from this checkout."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from blendserve.core import Passage
from tests.support.engines import PASSAGES, QUESTIONS
from tests.support.http import Server, serving

UNTITLED = [Passage(p.text) for p in PASSAGES]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("integrations")) as made:
        made.engine.precompute([*PASSAGES, *UNTITLED])
        yield made


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> None:
    """Mark coroutine tests, those of langchain-tests too, for pytest-asyncio."""
    if name.startswith("test_") and inspect.iscoroutinefunction(obj):
        pytest.mark.asyncio(loop_scope="session")(obj)  # clients keep connections, which belong to a loop


def own_answer(
    server: Server, passages: Sequence[Passage], question: str = QUESTIONS[0], **options: Any
) -> dict[str, Any]:
    """The server's own answer over these passages."""
    documents = [{"text": p.text, "title": p.title} for p in passages]
    return server.ask(question, documents=documents, **options)
