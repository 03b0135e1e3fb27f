"""A request that cannot fit is refused before it costs anything: no thread does more work than a request that fits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import regex

from blendserve.serve.fields import MAX_TOOL_NAME, MAX_TOOLS
from blendserve.serve.tool_calls import ToolCallParser
from tests.support.http import MODEL, Server, asked, serving
from tests.support.scripted import scripted_model

CONTROL = "<|im_end|>"  # tokenised apart from the text around it
SIZE = 600_000  # characters
CHAT, MESSAGES, COUNT = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"
WORD = "government "  # one token of more characters than most
LONG = {
    "words": "word " * (SIZE // 5),
    "long words": WORD * (SIZE // len(WORD)),
    "control tokens": CONTROL * (SIZE // len(CONTROL)),
    "one": "x" * SIZE,
}
MOST = 100_000  # characters that are tokenised for a request; the context has 1,024 tokens


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its template has a place for tools."""
    model, folder = scripted_model("Hm."), tmp_path_factory.mktemp("expensive")
    with serving(folder, model=model, has_index=False) as made:
        yield made


def call(text: str) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": text}
    return [{"id": "1", "type": "function", "function": function}]


def tool(name: str = "f", text: str = "") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": text}}


def own_tool(name: str = "f", text: str = "") -> dict[str, Any]:
    return {"name": name, "description": text, "input_schema": {"type": "object"}}


def requests(text: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Path and fields of a request with this text, by where it stands."""
    said, called = {"role": "assistant", "content": text}, {"role": "assistant", "content": None}
    result = {"role": "tool", "tool_call_id": "1", "content": "Rain."}
    return {
        "question": (CHAT, {"messages": asked(text)}),
        "system": (CHAT, {"messages": [{"role": "system", "content": text}, *asked()]}),
        "assistant": (CHAT, {"messages": [*asked(), said, *asked()]}),
        "tool call": (CHAT, {"messages": [*asked(), {**called, "tool_calls": call(text)}, result]}),
        "tool": (CHAT, {"messages": asked(), "tools": [tool(text=text)]}),
        "document": (CHAT, {"messages": asked(), "documents": [{"text": text}]}),
        "history": (CHAT, {"messages": [*asked(), said, *asked()], "documents": [{"text": "Some."}]}),
        "prompt": ("/v1/completions", {"prompt": text}),
        "message": (MESSAGES, {"messages": [*asked(), said, *asked()]}),
        "large answer": (MESSAGES, {"messages": [*asked(), said, *asked()], "max_tokens": 10**5}),
        "count": (COUNT, {"messages": [*asked(), said, *asked()]}),
        "tool of messages": (MESSAGES, {"messages": asked(), "tools": [own_tool(text=text)]}),
    }


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("where", requests(""))
def test_a_text_that_cannot_fit_is_hardly_tokenised(
    server: Server, where: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never on the event loop's thread."""
    tokenizer = type(server.engine.model.tokenizer)
    tokenise, n_characters, threads = tokenizer.__call__, [], set[str]()

    def counted(self: Any, text: Any, *args: Any, **options: Any) -> Any:
        n_characters.append(len(text))
        threads.add(threading.current_thread().name)
        return tokenise(self, text, *args, **options)

    path, fields = requests(LONG[kind])[where]
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "__call__", counted)
        response = server.post(path, {"model": MODEL, "max_tokens": 8, **fields})
    assert response.status_code == 400, response.text[:500]
    assert sum(n_characters) + 10 * len(n_characters) < MOST
    assert threads <= {"retrieval"}


@pytest.mark.parametrize(
    ("path", "made"), [(CHAT, tool), (MESSAGES, own_tool)], ids=["OpenAI's", "Anthropic's"]
)
def test_tools_are_limited_in_number_and_name(server: Server, path: str, made: Any) -> None:
    longest = "n" * MAX_TOOL_NAME
    for tools, status in (
        ([made(longest)], 200),
        ([made(longest + "n")], 400),
        ([made(f"t{n}") for n in range(MAX_TOOLS + 1)], 400),
    ):
        body = {"model": MODEL, "messages": asked(), "max_tokens": 1, "tools": tools}
        response = server.post(path, body)
        assert response.status_code == status, response.text[:500]


def test_names_of_tools_are_no_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern of them would be compiled for each request, by the event loop."""
    tools: dict[str, dict[str, Any]] = {f"tool{n:03}": {} for n in range(MAX_TOOLS)}
    ToolCallParser(tools)
    monkeypatch.setattr(regex, "compile", Mock(side_effect=AssertionError))
    parser = ToolCallParser({name.replace("tool", "call"): {} for name in tools})
    assert parser.push("Say call007{}") == ("Say", [])
    assert [call.name for call in parser.finish()[1]] == ["call007"]
