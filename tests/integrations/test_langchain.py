"""langchain-blendserve: LangChain's standard tests and the answers of the server's own API."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.engine.helpers import PASSAGES, QUESTIONS
from tests.integrations.helpers import own_answer
from tests.serve.helpers import Server

pytest.importorskip("langchain_openai")
pytest.importorskip("langchain_tests")

from langchain_blendserve import (
    BlendserveRetriever,
    ChatBlendserve,
    create_blend_chain,
    create_blend_documents_chain,
)
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_tests.integration_tests import ChatModelIntegrationTests, RetrieversIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

MODEL = "tiny"
DOCUMENTS = [Document(p.text, metadata={"title": p.title}, id=p.title.lower()) for p in PASSAGES]
QUESTION = QUESTIONS[0]


@pytest.fixture
def chat(server: Server) -> ChatBlendserve:
    return ChatBlendserve(model=MODEL, base_url=f"{server.url}/v1", max_retries=0)


class TestChatUnit(ChatModelUnitTests):
    """LangChain's standard tests that need no server. No model of this server calls tools."""

    chat_model_class = ChatBlendserve
    chat_model_params = {"model": MODEL}  # noqa: RUF012  the base class declares properties
    has_tool_calling = False
    has_structured_output = False
    init_from_env_params = (  # environment, arguments, attributes
        {"BLENDSERVE_API_KEY": "api_key", "BLENDSERVE_BASE_URL": "https://base.url/v1"},
        {"model": MODEL},
        {"openai_api_key": "api_key", "openai_api_base": "https://base.url/v1"},
    )


class TestChat(ChatModelIntegrationTests):
    """LangChain's standard tests against a server with a random model, which answers nonsense but no tool calls."""

    chat_model_class = ChatBlendserve
    has_tool_calling = False
    has_structured_output = False
    supports_model_override = False  # the server has one model
    supported_usage_metadata_details = {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        self.url = f"{server.url}/v1"

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "base_url": self.url}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        """An answer over documents whose KV is stored."""
        chat = ChatBlendserve(**self.chat_model_params, documents=DOCUMENTS)
        if not stream:
            return chat.invoke(QUESTION)
        first, *rest = chat.stream(QUESTION)
        return sum(rest, first)


class TestRetriever(RetrieversIntegrationTests):
    """LangChain's standard tests over two collections of three passages each."""

    retriever_constructor = BlendserveRetriever
    retriever_query_example = QUESTION

    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        self.url = f"{server.url}/v1"

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"base_url": self.url}


def test_a_retriever_finds_what_the_server_retrieves(server: Server) -> None:
    question = "Where did the snow fall on the hills?"
    found = BlendserveRetriever(base_url=f"{server.url}/v1", k=3).invoke(question)
    own = server.post("/v1/rag/query", {"question": question, "top_k": 3}).json()["passages"]
    assert [(d.id, d.page_content) for d in found] == [(p["id"], p["text"]) for p in own]
    assert found[0].metadata == {"title": "Snow", "doc_id": "snow", "score": own[0]["score"]}
    only = BlendserveRetriever(base_url=f"{server.url}/v1", k=3, collections=["b"]).invoke(question)
    assert {d.metadata["title"] for d in only} == {"Dogs", "Bread", "Clocks"}


async def test_a_retrievers_error_holds_the_servers_message(server: Server) -> None:
    retriever = BlendserveRetriever(base_url=f"{server.url}/v1", collections=["nothing"])
    with pytest.raises(httpx.HTTPStatusError, match=r"404 .*'nothing'"):
        retriever.invoke(QUESTION)
    with pytest.raises(httpx.HTTPStatusError, match=r"404 .*'nothing'"):
        await retriever.ainvoke(QUESTION)


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1), slice(0, 0)])
def test_documents_are_blended_in_their_order(server: Server, chat: ChatBlendserve, order: slice) -> None:
    own = own_answer(server, QUESTION, PASSAGES[order])
    documents = DOCUMENTS[order]
    said = chat.invoke(QUESTION, documents=documents)
    assert said.content == own["text"]
    extra = said.response_metadata["x_blendserve"]
    assert extra["report"] == own["report"]
    assert [p["id"] for p in extra["passages"]] == [d.id for d in documents]
    at_construction = ChatBlendserve(
        model=MODEL,
        base_url=f"{server.url}/v1",
        documents=[{"text": d.page_content, "title": d.metadata["title"]} for d in documents],
    )
    for same in (at_construction, chat.bind(documents=documents)):
        assert same.invoke(QUESTION).content == own["text"]


async def test_streams_and_asynchronous_calls_say_the_same(server: Server, chat: ChatBlendserve) -> None:
    own = own_answer(server, QUESTION, PASSAGES)
    assert (await chat.ainvoke(QUESTION, documents=DOCUMENTS)).content == own["text"]
    chunks = list(chat.stream(QUESTION, documents=DOCUMENTS))
    later = [chunk async for chunk in chat.astream(QUESTION, documents=DOCUMENTS)]
    for first, *rest in (chunks, later):
        whole: AIMessageChunk = sum(rest, first)
        assert whole.content == own["text"]
        extra = whole.response_metadata["x_blendserve"]
        assert extra["report"] == own["report"]
        assert len(extra["passages"]) == len(DOCUMENTS)
        assert whole.usage_metadata is not None
        assert whole.usage_metadata["input_token_details"]["cache_read"] == own["cached_tokens"] > 0


def test_a_calls_documents_replace_those_of_the_constructor(server: Server) -> None:
    chat = ChatBlendserve(model=MODEL, base_url=f"{server.url}/v1", documents=DOCUMENTS)
    said = chat.invoke(QUESTION, documents=DOCUMENTS[:1])
    assert [p["title"] for p in said.response_metadata["x_blendserve"]["passages"]] == ["Cats"]


def test_a_cached_answer_belongs_to_its_documents(server: Server) -> None:
    cache, url = InMemoryCache(), f"{server.url}/v1"
    for passages in (PASSAGES[:1], PASSAGES[1:2]):
        documents = [{"text": p.text, "title": p.title} for p in passages]
        own = own_answer(server, QUESTION, passages)["text"]
        chat = ChatBlendserve(model=MODEL, base_url=url, cache=cache, documents=documents)
        assert [chat.invoke(QUESTION).content for _ in range(2)] == [own] * 2
        plain = ChatBlendserve(model=MODEL, base_url=url, cache=cache)
        assert plain.invoke(QUESTION, documents=documents).content == own


def test_own_options_go_along_with_documents(server: Server) -> None:
    full = {"x_blendserve": {"method": "full"}}
    chat = ChatBlendserve(model=MODEL, base_url=f"{server.url}/v1", extra_body=full)
    said = chat.invoke(QUESTION, documents=DOCUMENTS)
    assert said.response_metadata["x_blendserve"]["report"]["method"] == "full"


def test_a_key_of_openai_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of another service")
    monkeypatch.setenv("OPENAI_API_BASE", "https://example.invalid/v1")
    chat = ChatBlendserve(model=MODEL)
    assert chat.root_client.api_key == "none"
    assert chat.root_client.base_url.host == "127.0.0.1"


def test_an_error_of_the_server_is_openais(server: Server) -> None:
    chat = ChatBlendserve(model="gpt-9", base_url=f"{server.url}/v1")
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        chat.invoke(QUESTION)


async def test_a_chain_has_the_shape_of_langchains_own(server: Server, chat: ChatBlendserve) -> None:
    retriever = RunnableLambda[Any, list[Document]](lambda _: DOCUMENTS[::-1])
    own = own_answer(server, QUESTION, PASSAGES[::-1])["text"]
    chain = create_blend_chain(chat, retriever)
    result = {"input": QUESTION, "context": DOCUMENTS[::-1], "answer": own}
    assert chain.invoke({"input": QUESTION}) == result
    assert await chain.ainvoke({"input": QUESTION}) == result
    pieces = [piece["answer"] for piece in chain.stream({"input": QUESTION}) if "answer" in piece]
    assert "".join(pieces) == own
    assert len(pieces) > 2
    later = [p["answer"] async for p in chain.astream({"input": QUESTION}) if "answer" in p]
    assert later == pieces


def test_a_chain_with_the_servers_own_retriever(server: Server, chat: ChatBlendserve) -> None:
    retriever = BlendserveRetriever(base_url=f"{server.url}/v1", k=2)
    result = create_blend_chain(chat, retriever).invoke({"input": QUESTION})
    own = server.post("/v1/rag/query", {"question": QUESTION, "top_k": 2}).json()
    assert result["answer"] == own["text"]


def test_a_stuffing_prompt_refers_to_the_documents(server: Server, chat: ChatBlendserve) -> None:
    """The chain of an application may keep its prompt: documents are not pasted into it."""
    prompt = ChatPromptTemplate.from_template("Answer from {context}: {input}")
    chain = create_blend_documents_chain(chat, prompt)
    own = own_answer(server, f"Answer from the given documents: {QUESTION}", PASSAGES)
    assert chain.invoke({"context": DOCUMENTS, "input": QUESTION}) == own["text"]


def test_a_document_prompt_formats_each_document(server: Server, chat: ChatBlendserve) -> None:
    shape = PromptTemplate.from_template("{title}\n{page_content}")  # as the server itself shows a passage
    chain = create_blend_documents_chain(chat, document_prompt=shape, document_variable_name="papers")
    own = own_answer(server, QUESTION, PASSAGES)
    assert chain.invoke({"papers": DOCUMENTS, "input": QUESTION}) == own["text"]


def test_langchains_own_retrieval_chain_takes_the_documents_chain(
    server: Server, chat: ChatBlendserve
) -> None:
    chains = pytest.importorskip("langchain_classic.chains")
    combine = create_blend_documents_chain(chat)
    chain = chains.create_retrieval_chain(RunnableLambda(lambda _: DOCUMENTS), combine)
    assert chain.invoke({"input": QUESTION})["answer"] == own_answer(server, QUESTION, PASSAGES)["text"]
