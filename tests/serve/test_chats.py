"""Chats over an index: which messages are answered from passages, what is searched for, and tools beside passages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.http import MODEL, OWN, Client, Server, asked, serving
from tests.support.messages import FUNCTION, INPUT, SCRIPT
from tests.support.scripted import scripted_model

CHAT = "/v1/chat/completions"
QUESTION, FOLLOW_UP = "Where did the snow fall on the hills?", "Why so?"
TASK = f"### Task:\nSuggest follow-up questions.\n<chat_history>\nUSER: {QUESTION}\n</chat_history>"
TOOLS = [{"type": "function", "function": FUNCTION}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("chats"), engine={"decode": {"max_new_tokens": 8}}) as made:
        yield made


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An index server whose model always writes the same call of a tool."""
    options: dict[str, Any] = {"engine": {"decode": {"max_new_tokens": None}}}
    with serving(tmp_path_factory.mktemp("agent"), model=scripted_model(*SCRIPT), **options) as made:
        yield made


def chat(server: Client, messages: Any, model: str = MODEL, **fields: Any) -> dict[str, Any]:
    response = server.post(CHAT, {"model": model, "messages": messages, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def titles(found: dict[str, Any]) -> list[str]:
    return [passage["title"] for passage in found["x_blendserve"]["passages"]]


def turns(*said: str) -> list[dict[str, str]]:
    """A conversation that the user begins."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]


@pytest.mark.parametrize(
    "messages", [asked("Thanks."), turns(QUESTION, "It fell.", "Thanks."), asked(TASK)], ids=str
)
def test_a_message_about_nothing_in_the_index_is_a_plain_chat(server: Server, messages: Any) -> None:
    found, plain = chat(server, messages), chat(server, messages, f"{MODEL}:chat")
    assert titles(found) == []
    assert found["choices"] == plain["choices"]
    assert found["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_a_question_is_answered_from_passages(server: Server) -> None:
    assert titles(chat(server, asked(QUESTION)))[-1] == "Snow"
    assert titles(chat(server, asked(TASK), documents=OWN[:1])) == [OWN[0]["title"]]


@pytest.mark.parametrize("options", [{"collections": ["a"]}, {"top_k": 2}, {"min_score": -1}], ids=str)
def test_who_asks_for_passages_gets_them(server: Server, options: dict[str, Any]) -> None:
    assert titles(chat(server, asked("Thanks."), x_blendserve=options))


def test_a_server_can_always_retrieve(tmp_path_factory: pytest.TempPathFactory) -> None:
    engine = {"decode": {"max_new_tokens": 8}, "retrieve": {"chat_score": -1}}
    with serving(tmp_path_factory.mktemp("always"), engine=engine) as server:
        assert titles(chat(server, asked("Thanks.")))
        assert titles(chat(server, asked(TASK))) == []


def test_a_question_is_also_searched_with_the_one_before(server: Server) -> None:
    """Both rankings count in turns; a new topic has the first place."""
    fields: dict[str, Any] = {"top_k": 2}
    alone = titles(chat(server, asked(FOLLOW_UP), x_blendserve=fields))
    both = titles(chat(server, turns(QUESTION, "On the north side.", FOLLOW_UP), x_blendserve=fields))
    assert "Snow" not in alone
    assert both == ["Snow", alone[-1]]  # the best passage comes last
    history = turns(QUESTION, "On the north side.")
    found = server.post("/v1/rag/query", {"question": FOLLOW_UP, "history": history, **fields}).json()
    assert [passage["title"] for passage in found["passages"]] == both


def test_tools_and_passages_go_together(agent: Server) -> None:
    """The model may call a tool; its result is answered from what the user asked for."""
    done = chat(agent, asked(QUESTION), tools=TOOLS)
    choice = done["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == FUNCTION["name"]
    assert json.loads(call["function"]["arguments"]) == INPUT
    assert titles(done)[-1] == "Snow"
    results = [{"role": "tool", "tool_call_id": call["id"], "content": text} for text in ("Rain.", "Sun.")]
    messages = [*asked(QUESTION), {**choice["message"], "content": ""}, *results]
    after = chat(agent, messages, tools=TOOLS)
    assert titles(after) == titles(done)
    assert after["usage"]["prompt_tokens"] > done["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "messages", [[{"role": "tool", "tool_call_id": "a", "content": "Rain."}], turns("Hi", "Yes")]
)
def test_a_chat_without_a_question_is_400(server: Server, messages: Any) -> None:
    assert server.post(CHAT, {"model": MODEL, "messages": messages}).status_code == 400
