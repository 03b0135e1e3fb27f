"""llama-index-response-synthesizers-blendserve: nodes and query engines."""

from __future__ import annotations

from typing import Any

import pytest

from blendserve.core import Passage
from tests.integrations.conftest import UNTITLED, own_answer
from tests.support.engines import PASSAGES, QUESTIONS
from tests.support.http import MODEL, Server

pytest.importorskip("llama_index.core")

from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.response_synthesizers.blendserve import BlendserveSynthesizer

NODES = [NodeWithScore(node=TextNode(text=p.text, id_=p.title.lower())) for p in PASSAGES]
QUESTION = QUESTIONS[0]


def synthesizer(server: Server, **options: Any) -> BlendserveSynthesizer:
    return BlendserveSynthesizer(MODEL, f"{server.url}/v1", max_retries=0, **options)


def test_a_node_is_shown_with_its_metadata(server: Server) -> None:
    known = {"title": "Moon", "page": 7}
    node = TextNode(text="It is round.", metadata=known, excluded_llm_metadata_keys=["page"])
    response = synthesizer(server).synthesize(QUESTION, [NodeWithScore(node=node)])
    assert response.metadata is not None
    shown = [p["text"] for p in response.metadata["x_blendserve"]["passages"]]
    assert shown == ["title: Moon\n\nIt is round."]
    assert response.metadata[node.node_id] == node.metadata


def test_texts_alone_are_documents_and_no_nodes_are_llama_indexs(server: Server) -> None:
    said = synthesizer(server).get_response(QUESTION, [p.text for p in PASSAGES])
    assert said == own_answer(server, UNTITLED)["text"]
    assert str(synthesizer(server).synthesize(QUESTION, [])) == "Empty Response"
    own = synthesizer(server, empty_response="Nothing found.")
    assert str(own.synthesize(QUESTION, [])) == "Nothing found."


def test_a_query_engine(server: Server) -> None:
    index = VectorStoreIndex([n.node for n in NODES], embed_model=MockEmbedding(embed_dim=8))
    made = RetrieverQueryEngine(index.as_retriever(similarity_top_k=3), synthesizer(server))  # without an LLM
    response = made.query(QUESTION)
    assert len(response.source_nodes) == 3
    texts = [Passage(n.node.get_content()) for n in response.source_nodes]
    assert str(response) == own_answer(server, texts)["text"]
