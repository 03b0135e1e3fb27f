"""blendserve-haystack: serialisation, pipelines, and what other integrations do not have."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.conftest import own_answer
from tests.support.engines import PASSAGES, QUESTIONS
from tests.support.http import MODEL, Server

pytest.importorskip("haystack.version")
pytest.importorskip("pytest_asyncio")

from haystack import Document, Pipeline
from haystack.components.builders import AnswerBuilder
from haystack.components.generators.utils import print_streaming_chunk
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.dataclasses import StreamingChunk
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.utils import Secret
from haystack_integrations.components.generators.blendserve import BlendserveGenerator

DOCUMENTS = [Document(id=p.title.lower(), content=p.text, meta={"title": p.title}) for p in PASSAGES]
QUESTION = QUESTIONS[0]
TYPE = "haystack_integrations.components.generators.blendserve.generator.BlendserveGenerator"


def generator(server: Server, **options: Any) -> BlendserveGenerator:
    return BlendserveGenerator(MODEL, f"{server.url}/v1", max_retries=0, **options)


def test_serialisation() -> None:
    secret, callback = Secret.from_env_var("KEY"), print_streaming_chunk
    more: dict[str, Any] = {"generation_kwargs": {"max_tokens": 5}, "timeout": 7.0}
    made = BlendserveGenerator(MODEL, "https://a/v1", api_key=secret, streaming_callback=callback, **more)
    data = made.to_dict()
    assert data["type"] == TYPE
    assert data["init_parameters"].items() >= {"model": MODEL, "api_base_url": "https://a/v1", **more}.items()
    again = BlendserveGenerator.from_dict(made.to_dict())
    assert (again.streaming_callback, again.api_key, again.to_dict()) == (callback, secret, data)
    with pytest.raises(ValueError):  # noqa: PT011  a key is never serialised
        BlendserveGenerator(MODEL, api_key=Secret.from_token("secret")).to_dict()


def test_without_documents_there_are_none_or_the_servers(server: Server) -> None:
    for documents, own in (([], own_answer(server, [])), (None, server.ask(QUESTION))):
        said = generator(server).run(QUESTION, documents)
        (meta,) = said["meta"]
        assert said["replies"] == [own["text"]]
        assert (meta["model"], meta["finish_reason"]) == (MODEL, own["finish_reason"])
        assert meta["usage"]["prompt_tokens_details"]["cached_tokens"] == own["cached_tokens"]
        assert len(meta["x_blendserve"]["passages"]) == len(own["passages"])


def test_arguments_of_a_call_complete_those_of_the_constructor(server: Server) -> None:
    seen: list[StreamingChunk] = []
    full = {"extra_body": {"x_blendserve": {"method": "full"}}, "max_tokens": 9}
    made = generator(server, generation_kwargs=full, streaming_callback=seen.append)
    said = made.run(QUESTION, DOCUMENTS, generation_kwargs={"max_tokens": 3})
    own = own_answer(server, PASSAGES, method="full", max_tokens=3)
    assert said["replies"] == ["".join(chunk.content for chunk in seen)] == [own["text"]]
    assert sum(chunk.start for chunk in seen) == 1
    assert seen[0].component_info is not None
    assert seen[0].component_info.type == TYPE


async def test_a_closed_generator_opens_again(server: Server) -> None:
    made = generator(server)
    first = made.run(QUESTION, DOCUMENTS)["replies"]
    made.close()
    assert made.run(QUESTION, DOCUMENTS)["replies"] == first
    assert (await made.run_async(QUESTION, DOCUMENTS))["replies"] == first
    await made.close_async()
    assert (await made.run_async(QUESTION, DOCUMENTS))["replies"] == first


def test_a_document_without_text_is_refused(server: Server) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        generator(server).run(QUESTION, [Document(id="empty")])


async def test_a_pipeline(server: Server) -> None:
    store, made = InMemoryDocumentStore(), Pipeline()
    store.write_documents(DOCUMENTS)
    made.add_component("retriever", InMemoryBM25Retriever(store, top_k=2))
    made.add_component("generator", generator(server))
    made.add_component("answers", AnswerBuilder())
    made.connect("retriever.documents", "generator.documents")
    made.connect("retriever.documents", "answers.documents")
    made.connect("generator.replies", "answers.replies")
    made.connect("generator.meta", "answers.meta")
    inputs = {name: {"query": QUESTION} for name in ("retriever", "generator", "answers")}
    for result in (made.run(inputs), await made.run_async(inputs)):
        (answer,) = result["answers"]["answers"]
        passages = [next(p for p in PASSAGES if p.title == d.meta["title"]) for d in answer.documents]
        own = own_answer(server, passages)
        assert (answer.data, answer.meta["x_blendserve"]["report"]) == (own["text"], own["report"])
