"""What all integrations do: documents in their order, streams, options and errors, against the server's own API."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from blendserve.core import Passage
from tests.integrations.conftest import UNTITLED, own_answer
from tests.support.engines import QUESTIONS
from tests.support.http import MODEL, Server

pytest.importorskip("pytest_asyncio")

QUESTION = QUESTIONS[0]
Passages = Sequence[Passage]
PACKAGES = {
    "langchain": "langchain_openai",
    "llama_index": "llama_index.core",
    "haystack": "haystack.version",
}


class Case(SimpleNamespace):
    """What a framework is asked: passages, stream, later (by its asynchronous interface), url, model and options."""


async def langchain(case: Case) -> tuple[list[str], Any]:
    from langchain_blendserve import ChatBlendserve
    from langchain_core.documents import Document

    documents = [Document(p.text, id=f"id-{n}") for n, p in enumerate(case.passages)]
    chat: Any = ChatBlendserve(model=case.model, base_url=case.url, max_retries=0, **case.options)
    asked: Any = {"input": QUESTION, "documents": documents}
    if case.stream:
        chunks = [c async for c in chat.astream(**asked)] if case.later else list(chat.stream(**asked))
    else:
        chunks = [await chat.ainvoke(**asked) if case.later else chat.invoke(**asked)]
    whole = sum(chunks[1:], chunks[0])
    return [c.content for c in chunks], whole.response_metadata


async def llama_index(case: Case) -> tuple[list[str], Any]:
    from llama_index.core.schema import NodeWithScore, TextNode
    from llama_index.response_synthesizers.blendserve import BlendserveSynthesizer

    nodes = [NodeWithScore(node=TextNode(text=p.text, id_=f"id-{n}")) for n, p in enumerate(case.passages)]
    own: Any = {"streaming": case.stream, "additional_kwargs": case.options, "max_retries": 0}
    made: Any = BlendserveSynthesizer(case.model, case.url, **own)
    said = await made.asynthesize(QUESTION, nodes) if case.later else made.synthesize(QUESTION, nodes)
    assert [n.node_id for n in said.source_nodes] == [n.node_id for n in nodes]
    if not case.stream:
        return [said.response], said.metadata
    pieces = [p async for p in said.response_gen] if case.later else list(said.response_gen)
    return pieces, said.metadata


async def haystack(case: Case) -> tuple[list[str], Any]:
    from haystack import Document
    from haystack_integrations.components.generators.blendserve import BlendserveGenerator

    documents = [Document(id=f"id-{n}", content=p.text) for n, p in enumerate(case.passages)]
    pieces: list[str] = []

    def on_piece(chunk: Any) -> None:
        pieces.append(chunk.content)

    async def on_piece_later(chunk: Any) -> None:
        on_piece(chunk)

    made: Any = BlendserveGenerator(case.model, case.url, max_retries=0, generation_kwargs=case.options)
    callback: Any = (on_piece_later if case.later else on_piece) if case.stream else None
    asked: Any = {"query": QUESTION, "documents": documents, "streaming_callback": callback}
    said = await made.run_async(**asked) if case.later else made.run(**asked)
    assert not case.stream or "".join(pieces) == said["replies"][0]
    return pieces or said["replies"], said["meta"][0]


@pytest.fixture(params=[langchain, llama_index, haystack], ids=lambda ask: ask.__name__)
def ask(request: pytest.FixtureRequest, server: Server) -> Any:
    """Asks a framework -> its answer's pieces, and x_blendserve."""
    pytest.importorskip(PACKAGES[request.param.__name__])

    async def ask(passages: Passages, stream: bool = False, later: bool = False, **more: Any) -> Any:
        case = {"model": MODEL, "options": {}, "url": f"{server.url}/v1", **more}
        pieces, metadata = await request.param(Case(passages=passages, stream=stream, later=later, **case))
        return pieces, metadata["x_blendserve"]

    return ask


@pytest.mark.parametrize(
    ("order", "stream", "later"), [(1, False, False), (-1, False, True), (-1, True, False), (1, True, True)]
)
async def test_documents_are_blended_in_their_order(
    server: Server, ask: Any, order: int, stream: bool, later: bool
) -> None:
    passages = UNTITLED[::order]
    own = own_answer(server, passages)
    pieces, extra = await ask(passages, stream, later)
    assert "".join(pieces) == own["text"]
    assert (len(pieces) > 2) == stream
    assert extra["report"] == own["report"]
    assert [p["id"] for p in extra["passages"]] == [f"id-{n}" for n in range(len(passages))]


async def test_options_are_sent_with_the_documents(server: Server, ask: Any) -> None:
    options = {"max_tokens": 3, "extra_body": {"x_blendserve": {"method": "full"}}}
    own = own_answer(server, UNTITLED, method="full", max_tokens=3)
    pieces, extra = await ask(UNTITLED, options=options)
    assert ("".join(pieces), extra["report"]) == (own["text"], own["report"])


async def test_an_error_of_the_server_is_openais(ask: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        await ask(UNTITLED, model="gpt-9")
