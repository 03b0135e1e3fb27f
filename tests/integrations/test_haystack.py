"""blendserve-haystack: serialisation, pipelines and streams, and the answers of the server's own API."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.engine.helpers import PASSAGES, QUESTIONS
from tests.integrations.helpers import own_answer
from tests.serve.helpers import Server

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

MODEL = "tiny"
DOCUMENTS = [Document(id=p.title.lower(), content=p.text, meta={"title": p.title}) for p in PASSAGES]
QUESTION = QUESTIONS[0]
TYPE = "haystack_integrations.components.generators.blendserve.generator.BlendserveGenerator"


def generator(server: Server, **options: Any) -> BlendserveGenerator:
    return BlendserveGenerator(MODEL, f"{server.url}/v1", max_retries=0, **options)


def test_to_dict_and_from_dict() -> None:
    made = BlendserveGenerator(
        MODEL,
        "https://base.url/v1",
        api_key=Secret.from_env_var("KEY"),
        streaming_callback=print_streaming_chunk,
        generation_kwargs={"max_tokens": 5},
        timeout=7.0,
    )
    data = made.to_dict()
    assert data == {
        "type": TYPE,
        "init_parameters": {
            "model": MODEL,
            "api_base_url": "https://base.url/v1",
            "api_key": {"type": "env_var", "env_vars": ["KEY"], "strict": True},
            "streaming_callback": "haystack.components.generators.utils.print_streaming_chunk",
            "generation_kwargs": {"max_tokens": 5},
            "timeout": 7.0,
            "max_retries": 2,
        },
    }
    again = BlendserveGenerator.from_dict(made.to_dict())
    assert again.streaming_callback is print_streaming_chunk
    assert again.api_key == Secret.from_env_var("KEY")
    assert again.to_dict() == data


def test_defaults_survive_serialisation() -> None:
    made = BlendserveGenerator(MODEL)
    again = BlendserveGenerator.from_dict(made.to_dict())
    assert again.streaming_callback is None
    assert again.to_dict() == made.to_dict()


def test_a_key_is_never_serialised() -> None:
    with pytest.raises(ValueError, match="token"):
        BlendserveGenerator(MODEL, api_key=Secret.from_token("secret")).to_dict()


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1), slice(0, 0)])
def test_documents_are_blended_in_their_order(server: Server, order: slice) -> None:
    own = own_answer(server, QUESTION, PASSAGES[order])
    said = generator(server).run(QUESTION, DOCUMENTS[order])
    assert said["replies"] == [own["text"]]
    (meta,) = said["meta"]
    assert meta["x_blendserve"]["report"] == own["report"]
    assert [p["id"] for p in meta["x_blendserve"]["passages"]] == [d.id for d in DOCUMENTS[order]]
    assert (meta["model"], meta["finish_reason"]) == (MODEL, own["finish_reason"])
    assert meta["usage"]["prompt_tokens_details"]["cached_tokens"] == own["cached_tokens"]


def test_without_documents_the_server_retrieves(server: Server) -> None:
    own = server.post("/v1/rag/query", {"question": QUESTION}).json()
    said = generator(server).run(QUESTION)
    assert said["replies"] == [own["text"]]
    assert len(said["meta"][0]["x_blendserve"]["passages"]) == len(own["passages"]) > 0


async def test_callbacks_get_each_piece(server: Server) -> None:
    own = own_answer(server, QUESTION, PASSAGES)["text"]
    seen: list[StreamingChunk] = []

    async def later(chunk: StreamingChunk) -> None:
        seen.append(chunk)

    of_constructor = generator(server, streaming_callback=seen.append)
    runs = [
        of_constructor.run(QUESTION, DOCUMENTS),
        generator(server).run(QUESTION, DOCUMENTS, streaming_callback=seen.append),
        await generator(server).run_async(QUESTION, DOCUMENTS, streaming_callback=later),
        await of_constructor.run_async(QUESTION, DOCUMENTS),
    ]
    assert [run["replies"] for run in runs] == [[own]] * 4
    assert "".join(chunk.content for chunk in seen) == own * 4
    assert sum(chunk.start for chunk in seen) == 4
    assert seen[0].component_info is not None
    assert seen[0].component_info.type == TYPE


async def test_asynchronous_without_a_callback(server: Server) -> None:
    own = own_answer(server, QUESTION, PASSAGES)
    made = generator(server)
    said = await made.run_async(QUESTION, DOCUMENTS)
    assert said["replies"] == [own["text"]]
    assert said["meta"][0]["x_blendserve"]["report"] == own["report"]
    await made.close_async()
    assert (await made.run_async(QUESTION, DOCUMENTS))["replies"] == [own["text"]]


def test_a_closed_generator_opens_again(server: Server) -> None:
    made = generator(server)
    first = made.run(QUESTION, DOCUMENTS)
    made.close()
    assert made.run(QUESTION, DOCUMENTS)["replies"] == first["replies"]


def test_generation_kwargs_are_merged(server: Server) -> None:
    full = {"extra_body": {"x_blendserve": {"method": "full"}}, "max_tokens": 9}
    said = generator(server, generation_kwargs=full).run(
        QUESTION, DOCUMENTS, generation_kwargs={"max_tokens": 3}
    )
    own = own_answer(server, QUESTION, PASSAGES, method="full", max_tokens=3)
    assert said["replies"] == [own["text"]]
    assert said["meta"][0]["x_blendserve"]["report"] == own["report"]


def test_a_document_without_text_is_refused(server: Server) -> None:
    with pytest.raises(ValueError, match="document empty has no text"):
        generator(server).run(QUESTION, [Document(id="empty")])


def pipeline(server: Server) -> Pipeline:
    store = InMemoryDocumentStore()
    store.write_documents(DOCUMENTS)
    made = Pipeline()
    made.add_component("retriever", InMemoryBM25Retriever(store, top_k=2))
    made.add_component("generator", generator(server))
    made.add_component("answers", AnswerBuilder())
    made.connect("retriever.documents", "generator.documents")
    made.connect("retriever.documents", "answers.documents")
    made.connect("generator.replies", "answers.replies")
    made.connect("generator.meta", "answers.meta")
    return made


def test_a_pipeline(server: Server) -> None:
    made = pipeline(server)
    inputs = {name: {"query": QUESTION} for name in ("retriever", "generator", "answers")}
    (answer,) = made.run(inputs)["answers"]["answers"]
    passages = [next(p for p in PASSAGES if p.title == d.meta["title"]) for d in answer.documents]
    own = own_answer(server, QUESTION, passages)
    assert answer.data == own["text"]
    assert answer.meta["x_blendserve"]["report"] == own["report"]
    again = Pipeline.loads(made.dumps())
    assert again.to_dict()["components"]["generator"] == made.to_dict()["components"]["generator"]


async def test_an_asynchronous_pipeline(server: Server) -> None:
    inputs = {name: {"query": QUESTION} for name in ("retriever", "generator", "answers")}
    later = await pipeline(server).run_async(inputs)
    now = pipeline(server).run(inputs)
    assert later["answers"]["answers"][0].data == now["answers"]["answers"][0].data


def test_an_error_of_the_server_is_openais(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        BlendserveGenerator("gpt-9", f"{server.url}/v1").run(QUESTION, DOCUMENTS)
