"""llama-index-response-synthesizers-blendserve: the checks of LlamaIndex's template and the server's own answers."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from blendserve.core import Passage
from tests.engine.helpers import PASSAGES, QUESTIONS
from tests.integrations.helpers import UNTITLED, own_answer
from tests.serve.helpers import Server

pytest.importorskip("llama_index.core")
pytest.importorskip("pytest_asyncio")

from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.response_synthesizers.blendserve import BlendserveSynthesizer

MODEL = "tiny"
NODES = [NodeWithScore(node=TextNode(text=p.text, id_=p.title.lower())) for p in PASSAGES]
QUESTION = QUESTIONS[0]


def synthesizer(server: Server, **options: Any) -> BlendserveSynthesizer:
    return BlendserveSynthesizer(MODEL, f"{server.url}/v1", max_retries=0, **options)


def test_class() -> None:
    """As LlamaIndex's template for integrations asks for."""
    assert BaseSynthesizer.__name__ in [base.__name__ for base in BlendserveSynthesizer.__mro__]


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_nodes_are_blended_in_their_order(server: Server, order: slice) -> None:
    own = own_answer(server, QUESTION, UNTITLED[order])
    response = synthesizer(server).synthesize(QUESTION, NODES[order])
    assert isinstance(response, Response)
    assert response.response == own["text"]
    assert [n.node_id for n in response.source_nodes] == [n.node_id for n in NODES[order]]
    assert response.metadata is not None
    extra = response.metadata["x_blendserve"]
    assert extra["report"] == own["report"]
    assert [p["id"] for p in extra["passages"]] == [n.node_id for n in NODES[order]]


async def test_streams_and_asynchronous_calls_say_the_same(server: Server) -> None:
    own = own_answer(server, QUESTION, UNTITLED)
    plain, streaming = synthesizer(server), synthesizer(server, streaming=True)
    assert str(await plain.asynthesize(QUESTION, NODES)) == own["text"]
    stream = streaming.synthesize(QUESTION, NODES)
    assert isinstance(stream, StreamingResponse)
    pieces = list(stream.response_gen)
    later = await streaming.asynthesize(QUESTION, NODES)
    assert isinstance(later, AsyncStreamingResponse)
    assert [piece async for piece in later.response_gen] == pieces
    assert "".join(pieces) == own["text"]
    assert len(pieces) > 2
    for response in (stream, later):
        assert response.metadata is not None
        assert response.metadata["x_blendserve"]["report"] == own["report"]
        assert len(response.metadata["x_blendserve"]["passages"]) == len(NODES)


def test_a_node_is_shown_with_its_metadata(server: Server) -> None:
    node = TextNode(
        text="It is round.", metadata={"title": "Moon", "page": 7}, excluded_llm_metadata_keys=["page"]
    )
    response = synthesizer(server).synthesize(QUESTION, [NodeWithScore(node=node)])
    assert response.metadata is not None
    assert [p["text"] for p in response.metadata["x_blendserve"]["passages"]] == [
        "title: Moon\n\nIt is round."
    ]
    assert response.metadata[node.node_id] == node.metadata


def test_texts_alone_are_documents_too(server: Server) -> None:
    said = synthesizer(server).get_response(QUESTION, [p.text for p in PASSAGES])
    assert said == own_answer(server, QUESTION, UNTITLED)["text"]


def test_without_nodes_the_answer_is_llama_indexs(server: Server) -> None:
    assert str(synthesizer(server).synthesize(QUESTION, [])) == "Empty Response"
    own = synthesizer(server, empty_response="Nothing found.")
    assert str(own.synthesize(QUESTION, [])) == "Nothing found."


def test_further_arguments_go_along_with_the_documents(server: Server) -> None:
    options = {"max_tokens": 3, "extra_body": {"x_blendserve": {"method": "full"}}}
    response = synthesizer(server, additional_kwargs=options).synthesize(QUESTION, NODES)
    own = own_answer(server, QUESTION, UNTITLED, method="full", max_tokens=3)
    assert str(response) == own["text"]
    assert response.metadata is not None
    assert response.metadata["x_blendserve"]["report"] == own["report"]


def test_a_query_engine(server: Server) -> None:
    embedding = MockEmbedding(embed_dim=8)
    index = VectorStoreIndex([n.node for n in NODES], embed_model=embedding)
    engine = index.as_query_engine(
        llm=MockLLM(), response_synthesizer=synthesizer(server), similarity_top_k=3
    )
    response = engine.query(QUESTION)
    assert len(response.source_nodes) == 3
    texts = [Passage(n.node.get_content()) for n in response.source_nodes]
    assert str(response) == own_answer(server, QUESTION, texts)["text"]


def test_no_llm_is_needed(server: Server) -> None:
    index = VectorStoreIndex([n.node for n in NODES], embed_model=MockEmbedding(embed_dim=8))
    engine = RetrieverQueryEngine(index.as_retriever(), synthesizer(server))
    assert str(engine.query(QUESTION))


def test_an_error_of_the_server_is_openais(server: Server) -> None:
    wrong = BlendserveSynthesizer("gpt-9", f"{server.url}/v1")
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        wrong.synthesize(QUESTION, NODES)
