"""Answers over HTTP are the engine's: every route, whole and streamed, with the client's passages or retrieved ones."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from blendserve.core import Passage
from tests.support.engines import PASSAGES, QUESTIONS
from tests.support.http import DOCUMENTS as STORED
from tests.support.http import MODEL, OWN, SEPARATOR, Client, Server, asked, bearer
from tests.support.waiting import eventually

FULL = {"method": "full"}  # its answers do not depend on the cache
DOCUMENTS = [{"title": p.title, "text": p.text, "id": p.title.lower()} for p in PASSAGES[:4]]


def test_a_chat_completion_is_the_engines_answer(server: Server, client: Client) -> None:
    server.engine.precompute(PASSAGES)
    client.warm()
    done = client.chat(max_tokens=7, x_blendserve={"passages": OWN})
    answer = server.engine.answer(QUESTIONS[0], list(PASSAGES), max_new_tokens=7)
    assert done.choices[0].message.content == answer.text
    assert done.choices[0].finish_reason == answer.finish_reason == "length"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (answer.report.tokens_prompt, 7)
    cached = answer.report.tokens_exact + answer.report.tokens_reused
    assert done.usage.prompt_tokens_details.cached_tokens == cached > 0
    assert done.x_blendserve["report"] == answer.report.to_dict()
    assert [p["text"] for p in done.x_blendserve["passages"]] == [p.text for p in PASSAGES]


@pytest.mark.parametrize(
    "options", [{"temperature": 1.0, "seed": 7}, {"stop": ["Around"]}], ids=["sampled", "stop"]
)
def test_a_stream_with_options_says_the_same(server: Server, client: Client, options: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "documents": OWN,
        "x_blendserve": FULL,
        "stream_options": {"include_usage": True},
    }
    chunks = list(client.chat(stream=True, **options, **fields))
    answer = server.engine.answer(QUESTIONS[0], list(PASSAGES), **options, **FULL)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer.text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == answer.finish_reason
    assert len({c.id for c in chunks}) == 1
    assert chunks[-1].usage.completion_tokens == len(answer.token_ids)


def test_other_routes_say_the_same(client: Client) -> None:
    expected = client.chat(documents=DOCUMENTS, x_blendserve=FULL).choices[0].message.content
    body = {"documents": DOCUMENTS, "x_blendserve": FULL}
    done = client.openai.completions.create(model=MODEL, prompt=QUESTIONS[0], extra_body=body)
    assert done.choices[0].text == expected
    prompt = [QUESTIONS[0]]
    chunks = client.openai.completions.create(model=MODEL, prompt=prompt, stream=True, extra_body=body)
    assert "".join(c.choices[0].text for c in chunks) == expected
    fields: dict[str, Any] = {"documents": DOCUMENTS, **FULL}
    assert client.ask(**fields)["text"] == expected
    events = client.events("/v1/rag/query", {"question": QUESTIONS[0], **fields})
    assert "".join(e["text"] for e in events[1:-1]) == events[-1]["text"] == expected
    assert events[-1]["report"]["method"] == "full"


def test_ten_turns_are_full_prefill(client: Client) -> None:
    """With all tokens recomputed, blending is exact, while the KV of earlier turns is reused."""
    client.warm()
    messages: list[dict[str, str]] = []
    for turn in range(10):
        messages += asked(f"{QUESTIONS[turn % 4]} ({turn})")
        extras = {
            "passages": [
                {"text": p.text, "title": p.title} for p in (PASSAGES[turn % 6], PASSAGES[(turn + 2) % 6])
            ],
            "ratio": 1.0,
        }
        said = client.chat(messages, max_tokens=8, x_blendserve=extras)
        full = client.chat(messages, max_tokens=8, x_blendserve={**extras, **FULL})
        text = said.choices[0].message.content
        assert (text, said.usage.prompt_tokens) == (full.choices[0].message.content, full.usage.prompt_tokens)
        assert full.usage.prompt_tokens_details.cached_tokens == 0
        assert said.usage.prompt_tokens_details.cached_tokens > 25 * (turn - 1)
        messages.append({"role": "assistant", "content": text})


def test_passages_are_retrieved_over_all_collections(server: Server, client: Client) -> None:
    question = "Where did the snow fall on the hills?"
    found = client.ask(question, top_k=3, **FULL)
    scores = [p["score"] for p in found["passages"]]
    assert (found["passages"][0]["title"], scores) == ("Snow", sorted(scores, reverse=True))
    only = client.ask(question, top_k=3, collections=["b"])
    assert {p["title"] for p in only["passages"]} == {d.title for d in STORED[1::2]}
    same = server.engine.answer(question, [Passage(**p) for p in found["passages"]], **FULL)
    assert (same.text, same.report.tokens_prompt) == (found["text"], found["report"]["tokens_prompt"])


@pytest.mark.parametrize("name", ["text", "contents", "content"])
def test_names_of_a_documents_text(client: Client, name: str) -> None:
    done = client.chat(documents=[{name: PASSAGES[0].text}])
    assert [p["text"] for p in done.x_blendserve["passages"]] == [PASSAGES[0].text]


def test_a_message_is_cut_at_the_separator(client: Client) -> None:
    texts = [p.text for p in PASSAGES[:3]]
    cut = client.chat(SEPARATOR.join([*texts, QUESTIONS[0]]), x_blendserve=FULL)
    assert [p["text"] for p in cut.x_blendserve["passages"]] == texts
    same = client.chat(documents=[{"text": text} for text in texts], x_blendserve=FULL)
    assert cut.choices[0].message.content == same.choices[0].message.content
    behind = client.chat(SEPARATOR.join([texts[1], QUESTIONS[0]]), documents=DOCUMENTS[:1])
    assert [p["text"] for p in behind.x_blendserve["passages"]] == texts[:2]


@pytest.mark.parametrize("path", ["/v1/rag/query", "/v1/chat/completions"])
def test_a_streams_passages_come_before_its_prefill(server: Server, client: Client, path: str) -> None:
    asks = {"question": QUESTIONS[0]} if path.endswith("query") else {"model": MODEL, "messages": asked()}
    body = {**asks, "documents": OWN[:2], "max_tokens": 2, "stream": True}
    with (
        server.busy() as release,
        server.http.stream("POST", path, json=body, headers=bearer(client.key)) as response,
    ):
        lines = (line for line in response.iter_lines() if line)
        first = json.loads(next(lines).removeprefix("data: "))
        assert server.backend.scheduler.load == (1, 0)
        release.set()
        assert len([*lines]) > 2
    assert [p["text"] for p in first.get("x_blendserve", first)["passages"]] == [p["text"] for p in OWN[:2]]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_slot(server: Server, client: Client, stream: bool) -> None:
    body = {"model": MODEL, "messages": asked(), "max_tokens": 700, "stream": stream, "documents": OWN}
    sent = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {client.key}\r\nContent-Length: {len(sent)}\r\n\r\n"
    )
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + sent)
        eventually(lambda: server.backend.scheduler.load[1] > 0)
        while stream and b'"content"' not in (got := connection.recv(4096)):
            assert got  # prefill ends before the first text
    before = server.sample("generated_tokens_total")
    eventually(lambda: server.backend.scheduler.load == (0, 0))
    assert server.sample("generated_tokens_total") - before < 690
