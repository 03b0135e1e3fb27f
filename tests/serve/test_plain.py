"""Plain chats of unchanged OpenAI clients: read by the model's own template, with nothing added and nothing retrieved."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from blendserve.core import PLAIN_SUFFIX
from blendserve.engine.chat import Chat
from blendserve.engine.request import Request
from tests.support.engines import QUESTIONS, toy_model
from tests.support.http import MODEL, OWN, SEPARATOR, Client, Server, asked

CHAT, EXACT = f"{MODEL}:chat", f"{MODEL}:exact"
SYSTEM = {
    "role": "system",
    "content": "You know the animals of this valley.\n" + "\n".join(p["text"] for p in OWN),
}
FULL = {"method": "full"}


def plain(client: Client, messages: list[Any], model: str = CHAT, **fields: Any) -> Any:
    body = {name: fields.pop(name) for name in ("documents", "x_blendserve") if name in fields}
    create: Any = client.openai.chat.completions.create
    return create(model=model, messages=messages, extra_body=body, **{"max_tokens": 8, **fields})


def test_a_plain_chat_is_the_models_own_prompt(server: Server, client: Client) -> None:
    messages = [SYSTEM, *asked(QUESTIONS[0], name="kim")]
    done = plain(client, messages, x_blendserve=FULL)
    chat = Chat((SYSTEM, {"role": "user", "content": QUESTIONS[0], "name": "kim"}))
    prepared = server.engine.prepare(Request("", plain=chat, blend=FULL, decode={"max_new_tokens": 8}))
    theirs = toy_model().tokenizer.apply_chat_template(
        list(chat.messages), tokenize=False, add_generation_prompt=True
    )
    assert toy_model().tokenizer.decode(prepared.prompt.ids) == theirs
    answer = server.engine.run(prepared).answer()
    assert (done.choices[0].message.content, done.usage.prompt_tokens) == (answer.text, len(prepared.prompt))
    assert (done.model, done.x_blendserve["passages"]) == ("public:chat", [])


@pytest.mark.parametrize("model", [CHAT, EXACT])
def test_ten_turns_compute_only_what_is_new(client: Client, model: str) -> None:
    """Exact reuse: the answers are those of full prefill."""
    messages, before = [SYSTEM], 0
    for turn in range(10):
        messages += asked(f"{QUESTIONS[turn % 4]} ({turn})")
        said = plain(client, messages, model)
        full = plain(client, messages, model.replace(EXACT, CHAT), x_blendserve=FULL)
        text, n_cached = said.choices[0].message.content, said.usage.prompt_tokens_details.cached_tokens
        assert (text, said.usage.prompt_tokens) == (full.choices[0].message.content, full.usage.prompt_tokens)
        assert full.usage.prompt_tokens_details.cached_tokens == 0
        assert n_cached >= before - PLAIN_SUFFIX
        before = said.usage.prompt_tokens
        messages.append({"role": "assistant", "content": text})


def test_a_stream_and_a_completion_say_the_same(client: Client) -> None:
    messages = asked("  A sentence with\n\nits own spaces ")
    done = plain(client, messages)
    chunks = list(plain(client, messages, stream=True))
    assert (
        "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        == done.choices[0].message.content
    )
    assert {c.model for c in chunks} == {"public:chat"}
    text = toy_model().tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    again = client.openai.completions.create(model=CHAT, prompt=text, max_tokens=8)
    assert again.choices[0].text == done.choices[0].message.content
    assert again.usage is not None
    assert again.usage.prompt_tokens == done.usage.prompt_tokens


def test_names_choose_between_passages_and_plain_prompts(client: Client) -> None:
    names = [model.id for model in client.openai.models.list()]
    assert names == ["public", "public:chat", "public:exact"]
    assert client.openai.models.retrieve(EXACT).id == "public:exact"
    with pytest.raises(openai.NotFoundError):
        client.openai.models.retrieve(f"{MODEL}:other")
    assert plain(client, asked(), MODEL).x_blendserve["passages"]
    given = plain(client, asked(), EXACT, documents=OWN)
    assert len(given.x_blendserve["passages"]) == len(OWN)
    assert given.x_blendserve["report"]["method"] == "prefix"
    cut = plain(client, asked(f"One.{SEPARATOR}Two?"))
    assert [p["text"] for p in cut.x_blendserve["passages"]] == ["One."]


def test_volatile_lines_are_left_out_and_named(client: Client) -> None:
    line = "x-anthropic-billing-header: cch=fa690;"
    volatile = {"role": "system", "content": f"{line}\n{SYSTEM['content']}"}
    first, second = (plain(client, [system, *asked()]) for system in (SYSTEM, volatile))
    assert second.choices[0].message.content == first.choices[0].message.content
    assert second.usage.prompt_tokens_details.cached_tokens > 0
    assert second.x_blendserve["removed"] == [line]
    assert "removed" not in first.x_blendserve


CALL = {"id": "a", "type": "function", "function": {"name": "find", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([], {}, "messages"),
        ([{"role": "user", "content": None}], {}, "messages.0"),
        ([{"role": "user"}], {}, "messages.0"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], {}, "messages.0"),
        ([{"role": "function", "content": "a"}], {}, "messages.0.role"),
        (asked([{"type": "image_url", "image_url": {"url": "data:,"}}]), {}, "messages.0.content"),
        (asked(), {"n": 0}, "n"),
        (asked(), {"tools": [{"type": "function"}]}, "tools.0.function"),
        (asked(), {"tool_choice": "required"}, "tool_choice"),
        (asked() * 1001, {}, "messages"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_field(
    client: Client, messages: list[Any], fields: dict[str, Any], param: str
) -> None:
    response = client.post("/v1/chat/completions", {"model": CHAT, "messages": messages, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"] or error["message"]).startswith(param)


PARTS = [{"type": "text", "text": "Be"}, {"type": "text", "text": " brief."}]
UNUSUAL: dict[str, list[Any]] = {
    "empty": asked(""),
    "control tokens": asked("<|im_end|>" * 50),
    "last assistant": [*asked(), {"role": "assistant", "content": "Well,"}],
    "tool": [
        *asked(),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "[]"},
    ],
    "developer": [{"role": "developer", "content": PARTS}, *asked()],
    "repeats": asked("a " * 700),
}


@pytest.mark.parametrize("messages", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_chats_are_answered_as_by_full_prefill(client: Client, messages: list[Any]) -> None:
    answers = [plain(client, messages, x_blendserve=x) for x in ({}, FULL)]
    assert len({(a.choices[0].message.content, a.usage.prompt_tokens) for a in answers}) == 1


def test_a_long_chat_and_variables_that_are_none_are_400(server: Server, client: Client) -> None:
    other = {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
    for messages, fields in ((asked("word " * 9000), {}), (asked(), other)):
        response = client.post("/v1/chat/completions", {"model": CHAT, "messages": messages, **fields})
        assert response.status_code == 400, response.text
    assert server.is_idle
