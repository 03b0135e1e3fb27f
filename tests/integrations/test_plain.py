"""Unchanged clients: the text that they paste into a plain prompt is found, and an agent's tools are called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

from benchmarks.support.clients import CLIENTS, Wire, user
from blendserve.blend.runs import EDGE
from blendserve.core import Passage
from tests.support.engines import PASSAGES, QUESTIONS
from tests.support.http import MODEL, Server, serving
from tests.support.scripted import scripted_model

TEXTS = [" ".join(p.text for p in (*PASSAGES[i:], *PASSAGES[:i])) for i in (0, 2, 4)]
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "mats"}}\n</tool_call>'
REPLY = "The cat did."
PACKAGES = {
    "langchain": ("langchain_openai", "langchain_classic"),
    "llama-index": ("llama_index.core", "llama_index.llms.openai_like"),
    "haystack": ("haystack.version",),
}


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without collections, whose model calls a tool, and then answers from what it found."""
    model = scripted_model(CALL, reply=REPLY, context=4096)
    with serving(tmp_path_factory.mktemp("agents"), model=model, has_index=False) as made:
        yield made


@pytest.fixture
def plain(server: Server, agents: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both servers have the KV of TEXTS, and find it at once."""
    monkeypatch.setattr("blendserve.blend.donors.FIRST_WAIT_S", 60.0)
    for each in (server, agents):
        each.engine.precompute([Passage(text) for text in TEXTS])


def check_found(server: Server, wire: Wire, texts: Sequence[str]) -> None:
    """The last spans of the last request are these texts, but for a few tokens at their ends."""
    prompts, tokenizer = server.engine.prompts, server.engine.model.tokenizer
    ids = prompts.plain(wire.sent.chat).ids
    spans = wire.report["spans"][-len(texts) :]
    for span, text in zip(spans, texts, strict=True):
        found = ids[span["start"] : span["stop"]]
        assert tokenizer.decode(found).strip() in text
        assert len(prompts.text_ids(text)) - len(found) <= 2 * EDGE


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.usefixtures("plain")
def test_pasted_passages_are_found(server: Server, client: str) -> None:
    for package in PACKAGES.get(client, ()):
        pytest.importorskip(package)
    wire = Wire(server.url, f"{MODEL}:chat", new_tokens=4)
    ask = CLIENTS[client].connect(wire)
    for texts in (TEXTS, TEXTS[::-1]):
        pieces: list[str] = []
        ask(texts, {}, pieces.append)
        assert "".join(pieces)
        check_found(server, wire, texts)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.usefixtures("plain")
def test_a_langgraph_agent_searches_and_answers(agents: Server, streaming: bool) -> None:
    pytest.importorskip("langgraph.graph")
    pytest.importorskip("langchain_openai")
    from langchain_core.embeddings import DeterministicFakeEmbedding
    from langchain_core.tools import create_retriever_tool
    from langchain_core.vectorstores import InMemoryVectorStore
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    store = InMemoryVectorStore.from_texts(TEXTS, DeterministicFakeEmbedding(size=8))
    search = create_retriever_tool(store.as_retriever(search_kwargs={"k": 3}), "search", "Find a text.")
    wire = Wire(agents.url, MODEL, new_tokens=50)
    chat = ChatOpenAI(
        base_url=wire.url,
        api_key="none",
        model=MODEL,
        http_client=wire.http,
        streaming=streaming,
        extra_body={"cache_salt": f"{streaming}"},  # else the first run's conversation is kept for the second
    )
    model = chat.bind_tools([search])
    graph: Any = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([search]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    messages = graph.compile().invoke({"messages": [("user", QUESTIONS[0])]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[1].tool_calls[0]["args"] == {"query": "mats"}
    assert messages[-1].content == REPLY
    found = [document.page_content for document in store.similarity_search("mats", k=3)]
    assert messages[2].content == "\n\n".join(found)
    check_found(agents, wire, found)


@pytest.mark.usefixtures("plain")
def test_openais_client_chats_with_a_tool_over_turns(agents: Server) -> None:
    wire = Wire(agents.url, MODEL, new_tokens=50)
    http: Any = wire.http
    client = openai.OpenAI(base_url=wire.url, api_key="none", max_retries=0, http_client=http)
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}}
    tool: Any = {"type": "function", "function": {"name": "search", "parameters": parameters}}
    messages: list[Any] = [{"role": "system", "content": "Answer from what the search finds."}]
    for turn, question in enumerate(QUESTIONS[:3]):
        texts = [*TEXTS[turn:], *TEXTS[:turn]]
        messages.append(user(question))
        for asked in range(2):
            create: Any = client.chat.completions.stream
            with create(model=MODEL, messages=messages, tools=[tool]) as events:
                streamed = "".join(event.delta for event in events if event.type == "content.delta")
                message = events.get_final_completion().choices[0].message
            messages.append(message.to_dict())
            if asked == 0:
                (call,) = message.tool_calls
                assert (call.function.name, streamed) == ("search", "")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "\n\n".join(texts)})
        assert (message.content, message.tool_calls) == (REPLY, None)
        assert streamed == REPLY
        check_found(agents, wire, texts)
