"""langchain-blendserve: LangChain's standard tests, the retriever and the chains."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from blendserve.core import Passage
from tests.integrations.conftest import own_answer
from tests.support.engines import PASSAGES, QUESTIONS
from tests.support.http import MODEL, Server

pytest.importorskip("langchain_openai")
pytest.importorskip("langchain_tests")

from langchain_blendserve import BlendserveRetriever, ChatBlendserve
from langchain_blendserve import create_blend_chain as blend_chain
from langchain_blendserve import create_blend_documents_chain as documents_chain
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_tests.integration_tests import ChatModelIntegrationTests, RetrieversIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

DOCUMENTS = [Document(p.text, metadata={"title": p.title}, id=p.title.lower()) for p in PASSAGES]
QUESTION = QUESTIONS[0]
RETRIEVER = RunnableLambda[Any, list[Document]](lambda _: DOCUMENTS)


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


class WithServer:
    """Standard tests declare their parameters as properties."""

    @pytest.fixture(autouse=True)
    def with_server(self, server: Server) -> None:
        self.url = f"{server.url}/v1"


class TestChat(WithServer, ChatModelIntegrationTests):
    """LangChain's standard tests against a server with a random model, which answers nonsense but no tool calls."""

    chat_model_class = ChatBlendserve
    has_tool_calling = False
    has_structured_output = False
    supports_model_override = False  # the server has one model
    supported_usage_metadata_details = {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}  # noqa: RUF012

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


class TestRetriever(WithServer, RetrieversIntegrationTests):
    """LangChain's standard tests over two collections of three passages each."""

    retriever_constructor = BlendserveRetriever
    retriever_query_example = QUESTION

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"base_url": self.url}


def test_a_retriever_finds_what_the_server_retrieves(server: Server) -> None:
    question = "Where did the snow fall on the hills?"
    found = BlendserveRetriever(base_url=f"{server.url}/v1", k=3).invoke(question)
    own = server.ask(question, top_k=3)["passages"][::-1]  # a prompt ends with the best one
    assert [(d.id, d.page_content) for d in found] == [(p["id"], p["text"]) for p in own]
    assert found[0].metadata == {"title": "Snow", "doc_id": "snow", "score": own[0]["score"]}
    only = BlendserveRetriever(base_url=f"{server.url}/v1", k=3, collections=["b"]).invoke(question)
    assert {d.metadata["title"] for d in only} == {"Dogs", "Bread", "Clocks"}


async def test_a_retrievers_error_is_the_servers(server: Server) -> None:
    retriever = BlendserveRetriever(base_url=f"{server.url}/v1", collections=["nothing"])
    with pytest.raises(httpx.HTTPStatusError) as now:
        retriever.invoke(QUESTION)
    with pytest.raises(httpx.HTTPStatusError) as later:
        await retriever.ainvoke(QUESTION)
    assert [error.value.response.status_code for error in (now, later)] == [404, 404]


def test_documents_of_the_constructor_of_bind_and_of_a_call(server: Server, chat: ChatBlendserve) -> None:
    own, url = own_answer(server, PASSAGES), f"{server.url}/v1"
    documents = [{"text": p.text, "title": p.title} for p in PASSAGES]
    made = ChatBlendserve(model=MODEL, base_url=url, documents=documents)
    for same in (made, chat.bind(documents=DOCUMENTS)):
        said = same.invoke(QUESTION)
        assert said.content == own["text"]
        assert said.usage_metadata is not None
        assert said.usage_metadata["input_token_details"]["cache_read"] == own["cached_tokens"] > 0
    said = made.invoke(QUESTION, documents=DOCUMENTS[:1])
    assert [p["title"] for p in said.response_metadata["x_blendserve"]["passages"]] == ["Cats"]
    assert chat.invoke(QUESTION, documents=[]).content == own_answer(server, [])["text"]


def test_a_cached_answer_belongs_to_its_documents(server: Server) -> None:
    cache, url = InMemoryCache(), f"{server.url}/v1"
    for passages in (PASSAGES[:1], PASSAGES[1:2]):
        documents = [{"text": p.text, "title": p.title} for p in passages]
        own = own_answer(server, passages)["text"]
        chat = ChatBlendserve(model=MODEL, base_url=url, cache=cache, documents=documents)
        assert [chat.invoke(QUESTION).content for _ in range(2)] == [own] * 2
        plain = ChatBlendserve(model=MODEL, base_url=url, cache=cache)
        assert plain.invoke(QUESTION, documents=documents).content == own


def test_a_key_of_openai_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of another service")
    monkeypatch.setenv("OPENAI_API_BASE", "https://example.invalid/v1")
    chat = ChatBlendserve(model=MODEL)
    assert chat.root_client.api_key == "none"
    assert chat.root_client.base_url.host == "127.0.0.1"


async def test_a_chain_has_the_shape_of_langchains_own(server: Server, chat: ChatBlendserve) -> None:
    own = own_answer(server, PASSAGES)["text"]
    chain = blend_chain(chat, RETRIEVER)
    result = {"input": QUESTION, "context": DOCUMENTS, "answer": own}
    assert chain.invoke({"input": QUESTION}) == result
    assert await chain.ainvoke({"input": QUESTION}) == result
    pieces = [piece["answer"] for piece in chain.stream({"input": QUESTION}) if "answer" in piece]
    assert "".join(pieces) == own
    later = [p["answer"] async for p in chain.astream({"input": QUESTION}) if "answer" in p]
    assert later == pieces
    with_servers = blend_chain(chat, BlendserveRetriever(base_url=f"{server.url}/v1", k=2))
    best_first = server.ask(QUESTION, top_k=2)["passages"][::-1]
    own = own_answer(server, [Passage(p["text"], p["title"]) for p in best_first])["text"]
    assert with_servers.invoke({"input": QUESTION})["answer"] == own


def test_documents_chains(server: Server, chat: ChatBlendserve) -> None:
    """Prompts may refer to the documents and format each of them; LangChain's own retrieval chain accepts these."""
    own = own_answer(server, PASSAGES)["text"]
    prompt = ChatPromptTemplate.from_template("Answer from {context}: {input}")  # they are not pasted into it
    chain = documents_chain(chat, prompt)
    given = own_answer(server, PASSAGES, f"Answer from the given documents: {QUESTION}")["text"]
    assert chain.invoke({"context": DOCUMENTS, "input": QUESTION}) == given
    shape = PromptTemplate.from_template("{title}\n{page_content}")  # as the server itself shows a passage
    chain = documents_chain(chat, document_prompt=shape, document_variable_name="papers")
    assert chain.invoke({"papers": DOCUMENTS, "input": QUESTION}) == own
    chains = pytest.importorskip("langchain_classic.chains")
    chain = chains.create_retrieval_chain(RETRIEVER, documents_chain(chat))
    assert chain.invoke({"input": QUESTION})["answer"] == own
