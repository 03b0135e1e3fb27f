"""Answers over HTTP are the engine's: every route, whole and streamed, with the client's passages or retrieved ones."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from blendserve.config import ServeConfig
from blendserve.core import Passage
from blendserve.serve.rag import token_texts
from blendserve.serve.responses import PING
from tests.support.engines import PASSAGES, QUESTIONS, toy_model
from tests.support.http import DOCUMENTS, MODEL, OWN, SEPARATOR, Client, Server, asked, bearer
from tests.support.waiting import eventually

FULL = {"method": "full"}  # its answers do not depend on the cache


@pytest.mark.parametrize("refine", [0.0, 0.5])
def test_a_chat_completion_is_the_engines_answer(server: Server, client: Client, refine: float) -> None:
    server.engine.precompute(PASSAGES)
    client.warm()
    done = client.chat(max_tokens=7, x_blendserve={"passages": OWN, "refine": refine})
    answer = server.engine.answer(QUESTIONS[0], list(PASSAGES), max_new_tokens=7, refine=refine)
    assert done.choices[0].message.content == answer.text
    assert done.choices[0].finish_reason == answer.finish_reason == "length"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (answer.report.tokens_prompt, 7)
    cached = answer.report.tokens_exact + answer.report.tokens_reused
    assert done.usage.prompt_tokens_details.cached_tokens == cached > 0
    assert done.x_blendserve["report"] == answer.report.to_dict()
    assert (answer.report.tokens_refined > 0) == (done.x_blendserve["timings"]["refine"] > 0) == (refine > 0)
    assert [p["text"] for p in done.x_blendserve["passages"]] == [p.text for p in PASSAGES]


@pytest.mark.parametrize(
    "options", [{"temperature": 1.0, "seed": 7}, {"stop": ["Around"]}], ids=["sampled", "stop"]
)
def test_a_stream_with_options_says_the_same(server: Server, client: Client, options: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"documents": OWN, "x_blendserve": FULL, "stream": True, **options}
    chunks = list(client.chat(stream_options={"include_usage": True}, **fields))
    answer = server.engine.answer(QUESTIONS[0], list(PASSAGES), **options, **FULL)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer.text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == answer.finish_reason
    assert len({c.id for c in chunks}) == 1
    assert chunks[-1].usage.completion_tokens == len(answer.token_ids)


def test_other_routes_say_the_same(client: Client) -> None:
    expected = client.chat(documents=OWN, x_blendserve=FULL).choices[0].message.content
    body = {"documents": OWN, "x_blendserve": FULL}
    done = client.openai.completions.create(model=MODEL, prompt=QUESTIONS[0], extra_body=body)
    assert done.choices[0].text == expected
    prompt = [QUESTIONS[0]]
    chunks = client.openai.completions.create(model=MODEL, prompt=prompt, stream=True, extra_body=body)
    assert "".join(c.choices[0].text for c in chunks) == expected
    fields: dict[str, Any] = {"documents": OWN, **FULL}
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
        extras = {"passages": [OWN[turn % 6], OWN[(turn + 2) % 6]], "ratio": 1.0}
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
    assert (found["passages"][-1]["title"], scores) == ("Snow", sorted(scores))
    only = client.ask(question, top_k=3, collections=["b"])
    assert {p["title"] for p in only["passages"]} == {d.title for d in DOCUMENTS[1::2]}
    same = server.engine.answer(question, [Passage(**p) for p in found["passages"]], **FULL)
    assert (same.text, same.report.tokens_prompt) == (found["text"], found["report"]["tokens_prompt"])


def test_a_message_is_cut_at_the_separator(client: Client) -> None:
    """Its chunks come after `documents`, whose texts have one of three names."""
    texts = [p.text for p in PASSAGES[:3]]
    cut = client.chat(SEPARATOR.join([*texts[1:], QUESTIONS[0]]), documents=OWN[:1], x_blendserve=FULL)
    assert [p["text"] for p in cut.x_blendserve["passages"]] == texts
    named = [OWN[0], {"contents": texts[1]}, {"content": texts[2]}]
    same = client.chat(documents=named, x_blendserve=FULL)
    assert cut.choices[0].message.content == same.choices[0].message.content


@pytest.mark.parametrize("plain", [False, True])
def test_a_question_follows_the_turns_before_it(client: Client, plain: bool) -> None:
    """The prompt is that of a chat of the same messages."""
    history = [*asked(QUESTIONS[1]), {"role": "assistant", "content": "It barked."}]
    fields = {"plain": True} if plain else {"documents": OWN}
    found = client.ask(history=history, max_tokens=8, **fields, **FULL)
    body = {"model": f"{MODEL}:chat" if plain else MODEL, "messages": [*history, *asked()], "max_tokens": 8}
    documents = {} if plain else {"documents": OWN}
    same = client.post("/v1/chat/completions", {**body, **documents, "x_blendserve": FULL}).json()
    assert found["text"] == same["choices"][0]["message"]["content"]
    assert found["report"]["tokens_prompt"] == same["usage"]["prompt_tokens"]
    refused = client.post("/v1/rag/query", {"question": "?", "history": [{"role": "tool", "content": ""}]})
    assert refused.status_code == 400


def test_an_explained_stream_counts_the_layers_of_its_prefill(client: Client) -> None:
    body = {"question": QUESTIONS[0], "documents": OWN, **FULL}
    passages, *events = client.events("/v1/rag/query", {**body, "explain": True})
    n_layers = toy_model().decoder.n_layers
    progress = [{"event": "progress", "layers": n, "n_layers": n_layers} for n in range(n_layers)]
    assert events[:n_layers] == progress
    assert events[n_layers]["event"] == "prefill"
    assert passages["tokens"] == events[-1]["report"]["tokens_prompt"]
    kinds = {event["event"] for event in client.events("/v1/rag/query", body)}
    assert kinds == {"passages", "text", "done"}


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
    fields = {"question": QUESTIONS[0], "max_tokens": 700, "stream": stream, "passages": OWN}
    body = json.dumps(fields).encode()
    with client.sent("/v1/rag/query", f"Content-Length: {len(body)}", body=body) as connection:
        eventually(lambda: server.backend.scheduler.load[1] > 0)
        while stream and b'"event": "text"' not in (got := connection.recv(4096)):
            assert got  # prefill ends before the first text
    before = server.sample("generated_tokens_total")
    eventually(lambda: server.backend.scheduler.load == (0, 0))
    assert server.sample("generated_tokens_total") - before < 690


def test_a_waiting_stream_pings_and_then_says_the_same(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pings are comments, which OpenAI's client skips."""
    monkeypatch.setattr(ServeConfig, "ping_s", 0.02)
    whole, content = client.ask(passages=OWN, **FULL)["text"], ""
    body = {"model": MODEL, "messages": asked(), "documents": OWN, "stream": True, "x_blendserve": FULL}
    url, headers = "/v1/chat/completions", bearer(client.key)
    with server.busy() as release, server.http.stream("POST", url, json=body, headers=headers) as response:
        for text in response.iter_text():
            content += text
            if content.count(PING) >= 2:  # no prefill before two pings
                release.set()
    events = httpx.Response(200, content=content, headers={"Content-Type": "text/event-stream"})
    http: Any = httpx.Client(transport=httpx.MockTransport(lambda _: events))
    replay: Any = openai.OpenAI(base_url="http://replay/v1", api_key="none", http_client=http)
    chunks = replay.chat.completions.create(model=MODEL, messages=asked(), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    with server.busy(), server.http.stream("POST", url, json=body, headers=headers) as response:
        assert any(PING in text for text in response.iter_text())
    eventually(lambda: server.is_idle)  # the client has disconnected


def test_tokens_of_an_explanation_are_the_prompts_text(client: Client) -> None:
    client.warm()
    told = client.ask(explain=True, max_tokens=3)
    explanation, report = told["explanation"], told["report"]
    assert len(explanation["tokens"]) == sum(n for _, n in explanation["states"]) == report["tokens_prompt"]
    for part in explanation["parts"]:
        text = "".join(explanation["tokens"][part["start"] : part["stop"]])
        if part["kind"] == "passage":
            passage = told["passages"][part["passage"]]
            assert text == f"{passage['title']}\n{passage['text']}\n\n"
        elif part["kind"] == "suffix":
            assert QUESTIONS[0] in text
    events = client.events("/v1/rag/query", {"question": QUESTIONS[0], "explain": True, "max_tokens": 3})
    (prefill,) = (event for event in events if event["event"] == "prefill")
    assert prefill["explanation"] == explanation
    assert prefill["report"] == events[-1]["report"]
    timings = events[-1]["timings"]
    assert 0 <= timings["queue"] <= timings["ttft"] - timings["prefill"]


@pytest.mark.parametrize(
    "text", ["naïve café", "日本語 and 🦉🦉", "a\u0301 \N{REPLACEMENT CHARACTER} b", "\n\n\ttabs"]
)
def test_texts_of_tokens_are_whole_characters(text: str) -> None:
    tokenizer = toy_model().tokenizer
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = list(token_texts(tokenizer, ids))
    assert len(found) == len(ids)
    assert "".join(found) == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in part for part in found)
