"""POST /v1/messages: Anthropic's requests become the model's own chat, answers and errors have Anthropic's form."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from blendserve.errors import InputError
from blendserve.serve.message_schemas import CountRequest
from tests.support.engines import PASSAGES, QUESTIONS, toy_model
from tests.support.http import KEY, MODEL, OWN, Client, Server, asked, bearer
from tests.support.messages import COUNT, FUNCTION, TOOL, URL, USE, assembled, body, same, stream

# The prompt


TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "What is the weather?"},
    {
        "role": "user",
        "content": [{"type": "text", "text": "In Paris.", "cache_control": {"type": "ephemeral"}}],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"},
            {"type": "text", "text": "I look "},
            {"type": "text", "text": "it up."},
            USE,
            {**USE, "id": "toolu_2", "input": {"city": "Rome"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Rain."},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "Sun."}]},
            {"type": "text", "text": "And now?"},
        ],
    },
    {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "AA=="}]},
    {"role": "user", "content": "Go on."},
]


def test_turns_tools_and_results_are_openais() -> None:
    fields = {"system": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]}
    request = CountRequest(model=MODEL, messages=TURNS, tools=[TOOL], **fields)
    calls = [
        {"id": id, "type": "function", "function": {"name": "get_weather", "arguments": {"city": city}}}
        for id, city in (("toolu_1", "Paris"), ("toolu_2", "Rome"))
    ]
    chat = request.chat()
    assert list(chat.messages) == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "What is the weather?\n\nIn Paris."},
        {"role": "assistant", "content": "I look it up.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "toolu_1", "name": "get_weather", "content": "Rain."},
        {"role": "tool", "tool_call_id": "toolu_2", "name": "get_weather", "content": "Sun."},
        {"role": "user", "content": "And now?\n\nGo on."},
    ]
    assert list(chat.tools) == [{"type": "function", "function": FUNCTION}]
    none = CountRequest(model=MODEL, messages=TURNS, tools=[TOOL], tool_choice={"type": "none"})
    assert none.chat().tools == ()


def test_search_results_and_documents_are_their_text() -> None:
    """Title and text stand as in a stored passage, and a blank line ends them."""
    cats, dogs, snow = PASSAGES[:3]
    parts = [
        {"type": "text", "text": "Read."},
        {
            "type": "search_result",
            "source": "https://example.org/cats",
            "title": cats.title,
            "content": [{"type": "text", "text": cats.text}],
            "citations": {"enabled": True},
        },
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": dogs.text}},
        {
            "type": "document",
            "source": {"type": "content", "content": snow.text},
            "title": snow.title,
            "context": "Old.",
        },
        {"type": "text", "text": "Who?"},
    ]
    found = "\n\n".join(
        [
            *("Read.", f"https://example.org/cats\n{cats.title}\n{cats.text}", dogs.text),
            *(f"Old.\n{snow.title}\n{snow.text}", "Who?"),
        ]
    )
    request = CountRequest(model=MODEL, messages=asked(parts))
    assert [message["content"] for message in request.chat().messages] == [found]
    result = [USE | {"id": "1"}], [{"type": "tool_result", "tool_use_id": "1", "content": parts[1:3]}]
    turns = [{"role": role, "content": c} for role, c in zip(("assistant", "user"), result, strict=True)]
    told = CountRequest(model=MODEL, messages=[*asked(), *turns]).chat().messages[-1]
    assert told["content"] == "\n\n".join(found.split("\n\n")[1:3])


def test_the_prompt_is_the_models_own_chat(scripted: Server) -> None:
    tokenizer = scripted.engine.model.tokenizer
    request = {**body(), "messages": TURNS, "tools": [TOOL]}
    chat = CountRequest(**request).chat()
    messages, tools = [dict(m) for m in chat.messages], [dict(t) for t in chat.tools]
    ids = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    del request["max_tokens"]
    assert scripted.post(COUNT, request).json() == {"input_tokens": len(ids)}


# Answers


def test_an_answer_is_the_one_to_openais_chat(server: Server, client: Client) -> None:
    """Plain on a server with collections, too; lines that differ by request are left out, and tokens counted once."""
    request = body(system="Be brief.", top_k=5)
    told = client.post(URL, request).json()
    messages = [{"role": "system", "content": "Be brief."}, *asked()]
    chat = {"model": f"{MODEL}:chat", "messages": messages, "max_tokens": 8}
    done = client.post("/v1/chat/completions", chat).json()
    text = done["choices"][0]["message"]["content"]
    assert text
    assert told["content"] == [{"type": "text", "text": text}]
    assert (told["type"], told["role"], told["model"]) == ("message", "assistant", "public")
    assert told["id"].startswith("msg_")
    assert (told["stop_reason"], told["stop_sequence"]) == ("max_tokens", None)
    n_prompt = client.post(COUNT, {k: v for k, v in request.items() if k != "max_tokens"}).json()[
        "input_tokens"
    ]
    usage = told["usage"]
    assert (
        usage["input_tokens"] + usage["cache_read_input_tokens"] == n_prompt == done["usage"]["prompt_tokens"]
    )
    assert usage["output_tokens"] == 8
    assert told["x_blendserve"]["report"]["tokens_prompt"] == n_prompt
    header = "x-anthropic-billing-header: cc_version=2; cch=fa690;"
    blocks = [{"type": "text", "text": text} for text in (header, "Be brief.")]
    again = client.post(URL, {**request, "system": blocks}).json()
    assert (again["content"], again["x_blendserve"]["removed"]) == (told["content"], [header])


def test_a_repeated_prompt_is_read_from_the_cache(client: Client) -> None:
    request = body("A long word " * 40, max_tokens=2)
    first, second = (client.post(URL, request).json()["usage"] for _ in range(2))
    assert second["cache_read_input_tokens"] > 100 > first["cache_read_input_tokens"]
    assert second["input_tokens"] < 40
    exact = client.post(URL, {**request, "model": f"{MODEL}:exact"}).json()
    assert exact["model"] == "public:exact"
    assert exact["x_blendserve"]["report"]["method"] == "prefix"
    full = client.post(URL, {**request, "x_blendserve": {"method": "full"}}).json()
    assert full["usage"]["cache_read_input_tokens"] == 0


@pytest.mark.parametrize("kind", ["search_result", "document"])
def test_stored_passages_are_found_in_blocks(
    client: Client, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, in any order, whatever source or context stands in front of their titles."""
    monkeypatch.setattr("blendserve.blend.donors.FIRST_WAIT_S", 60.0)
    texts = [" ".join(p.text for p in PASSAGES[i : i + 4]) for i in range(3)]
    passages = [{"title": PASSAGES[i].title, "text": text} for i, text in enumerate(texts)]
    client.warm(passages)
    blocks = []
    for i, passage in enumerate(reversed(passages)):
        text, names = {"type": "text", "text": passage["text"]}, {"type": kind, "title": passage["title"]}
        result = {**names, "source": f"https://example.org/{i}", "content": [text]}
        source = {"type": "text", "media_type": "text/plain", "data": passage["text"]}
        document = {**names, "source": source, "context": f"Of page {i}."}
        blocks.append(result if kind == "search_result" else document)
    request = body([*blocks, {"type": "text", "text": QUESTIONS[0]}], x_blendserve={"method": "blend"})
    told = client.post(URL, request).json()
    report = told["x_blendserve"]["report"]
    assert len({span["donor"] for span in report["spans"]}) == len(passages)
    assert all(span["missing_head"] == 0 for span in report["spans"])
    reused = sum(span["stop"] - span["start"] for span in report["spans"])
    assert reused > 0.7 * report["tokens_prompt"]
    assert told["usage"]["cache_read_input_tokens"] > 0.7 * reused


@pytest.mark.parametrize(
    "content", [QUESTIONS[0], [{"type": "text", "text": QUESTIONS[1]}]], ids=["text", "blocks"]
)
def test_a_stream_is_the_same_message(client: Client, content: Any) -> None:
    request = body(content, x_blendserve={"method": "full"})
    whole, events = client.post(URL, request).json(), stream(client, request)
    message = assembled(events)
    assert same(message) == same(whole)
    assert message["x_blendserve"]["report"] == whole["x_blendserve"]["report"]
    assert events[0]["message"]["usage"]["input_tokens"] == whole["usage"]["input_tokens"]


# Errors and keys


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"messages": asked("long " * 2000)},
        {"messages": []},
        {"messages": [{"role": "system", "content": "Be brief."}]},
        {"messages": [*asked(), {"role": "assistant", "content": "It was"}]},
        {"messages": asked([])},
        {"messages": asked("\ud800")},
        {"messages": asked([{"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}])},
        {"messages": asked([{"type": "document", "source": {"type": "base64", "data": "AA=="}}])},
        {"messages": asked([USE])},
        {"messages": asked([{"type": "tool_result", "tool_use_id": "1", "content": [USE]}])},
        {"messages": asked([{"text": "no type"}])},
        {"messages": asked([7])},
        {
            "messages": [
                *asked(),
                {"role": "assistant", "content": [{**USE, "input": {"a": "\ud800"}}]},
                *asked(),
            ]
        },
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{"name": "f"}]},
        {"tools": [{"name": "f", "input_schema": {"description": "\ud800"}}]},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}},
        {"stop_sequences": [""]},
        {"temperature": -1},
        {"x_blendserve": {"passages": OWN}},
        {"x_blendserve": {"method": "both"}},
    ],
    ids=range(23),
)
def test_what_cannot_be_answered_is_refused(scripted: Server, change: dict[str, Any]) -> None:
    content = json.dumps({**body(), **change})
    response = scripted.http.post(URL, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    found = response.json()
    assert found.keys() == {"type", "error"}
    assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
    assert found["error"].keys() == {"type", "message"}


def test_unsupported_content_is_named(scripted: Server) -> None:
    for part in ("image", "container_upload"):
        nested = [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": part}]}]
        for content in ([{"type": part}], nested):
            assert part in scripted.post(URL, body(content)).json()["error"]["message"]


def test_tools_without_a_place_in_the_template_are_in_the_system_message(client: Client) -> None:
    assert "tools" not in toy_model().tokenizer.chat_template
    counts = [
        client.post(COUNT, {k: v for k, v in body(**fields).items() if k != "max_tokens"}).json()[
            "input_tokens"
        ]
        for fields in ({}, {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": {"type": "none"}})
    ]
    assert counts[0] == counts[2] < counts[1]
    assert client.post(URL, body(tools=[TOOL])).status_code == 200


def test_an_answers_beginning_is_refused() -> None:
    with pytest.raises(InputError) as error:
        CountRequest(model=MODEL, messages=TURNS[:3]).chat()
    assert error.value.setting == "messages"


def test_errors_and_keys_are_anthropics(server: Server, client: Client) -> None:
    def kind(response: httpx.Response) -> tuple[int, str]:
        found = response.json()
        assert found["type"] == "error"
        return response.status_code, found["error"]["type"]

    key = {"x-api-key": KEY}
    assert server.http.post(URL, json=body(), headers=key).status_code == 200
    assert server.http.get("/v1/models", headers=key).status_code == 200
    both = {**key, **bearer("wrong")}
    for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": ""}, both, {"Authorization": f"Basic {KEY}"}):
        assert kind(server.http.post(URL, json=body(), headers=headers)) == (401, "authentication_error")
    assert server.http.get("/v1/models", headers={"x-api-key": "wrong"}).json().keys() == {"error"}
    assert kind(client.post(URL, body(model="claude"))) == (404, "not_found_error")
    assert kind(client.post(COUNT, body(model="claude"))) == (404, "not_found_error")
    assert kind(client.http.post(URL, content="{", headers=bearer(client.key))) == (
        400,
        "invalid_request_error",
    )
    assert kind(client.post(URL, body("long " * 220_000))) == (413, "request_too_large")
    assert kind(client.get(URL)) == (405, "invalid_request_error")
    limited = server.tenant(max_per_minute=1)
    assert limited.post(COUNT, body()).status_code == 200
    assert kind(limited.post(COUNT, body())) == (429, "rate_limit_error")


def test_a_bug_in_a_stream_is_its_last_event(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("blendserve.blend.blender.Blender.prefill", broken)
    (only,) = stream(client, body())
    assert (only["type"], only["error"]["type"]) == ("error", "api_error")
    assert "secret" not in only["error"]["message"]
    assert client.post(URL, body()).json()["error"]["type"] == "api_error"
