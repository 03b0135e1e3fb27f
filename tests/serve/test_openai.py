"""The official client against a real socket: answers are the engine's, errors have OpenAI's shape."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from blendserve.serve.config import ServeConfig
from tests.engine.helpers import PASSAGES, QUESTIONS, wait_for
from tests.serve.helpers import Server

OWN: dict[str, Any] = {"passages": [{"text": p.text, "title": p.title} for p in PASSAGES]}
MODEL = "tiny"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("serve"), ServeConfig(max_body_kb=64, gap_ms=0, prefill_share=0))
    yield made
    made.close()


def asked(text: str = QUESTIONS[0]) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_a_chat_completion_is_the_engines_answer(server: Server) -> None:
    server.engine.precompute(PASSAGES)
    done = server.client().chat.completions.create(
        model=MODEL, messages=asked(), max_tokens=7, extra_body={"x_blendserve": OWN}
    )
    answer = server.engine.answer(QUESTIONS[0], list(PASSAGES), max_new_tokens=7)
    assert done.choices[0].message.content == answer.text
    assert done.choices[0].finish_reason == answer.finish_reason == "length"
    assert done.usage is not None
    assert done.usage.prompt_tokens_details is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (answer.report.tokens_prompt, 7)
    cached = answer.report.tokens_exact + answer.report.tokens_reused
    assert done.usage.prompt_tokens_details.cached_tokens == cached > 0
    extras = done.model_extra["x_blendserve"]  # type: ignore[index]
    assert extras["report"] == answer.report.to_dict()
    assert [p["text"] for p in extras["passages"]] == [p.text for p in PASSAGES]


def test_a_streamed_chat_says_the_same(server: Server) -> None:
    stream = server.client().chat.completions.create(
        model=MODEL,
        messages=asked(),
        temperature=1.0,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"x_blendserve": OWN},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    answer = server.engine.answer(QUESTIONS[0], list(PASSAGES), temperature=1.0, seed=7)
    assert text == answer.text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == answer.finish_reason
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({c.id for c in chunks}) == 1
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(answer.token_ids)


def test_plain_completions(server: Server) -> None:
    answer = server.engine.answer(QUESTIONS[1], list(PASSAGES[:2]))
    body = {"x_blendserve": {"passages": OWN["passages"][:2]}}
    done = server.client().completions.create(model=MODEL, prompt=QUESTIONS[1], extra_body=body)
    assert done.choices[0].text == answer.text
    chunks = server.client().completions.create(
        model=MODEL, prompt=[QUESTIONS[1]], stream=True, extra_body=body
    )
    assert "".join(c.choices[0].text for c in chunks) == answer.text


def test_a_stop_string(server: Server) -> None:
    free = server.engine.answer(QUESTIONS[0], list(PASSAGES)).text
    stop = free[len(free) // 2 :][:3]
    done = server.client().chat.completions.create(
        model=MODEL, messages=asked(), stop=stop, extra_body={"x_blendserve": OWN}
    )
    assert done.choices[0].message.content == free[: free.index(stop)]
    assert done.choices[0].finish_reason == "stop"


def test_passages_are_retrieved_over_all_collections(server: Server) -> None:
    question = "Where did the snow fall on the hills?"
    body = {"question": question, "top_k": 3}
    found = server.post("/v1/rag/query", body).json()
    scores = [p["score"] for p in found["passages"]]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    assert found["passages"][0]["title"] == "Snow"
    only = server.post("/v1/rag/query", {**body, "collections": ["b"]}).json()
    assert {p["title"] for p in only["passages"]} == {"Dogs", "Bread", "Clocks"}
    same = server.engine.answer(question, [_passage(p) for p in found["passages"]])
    assert (same.text, same.report.tokens_prompt) == (found["text"], found["report"]["tokens_prompt"])


def _passage(values: dict[str, Any]) -> Any:
    from blendserve.core import Passage

    return Passage(**values)


def test_a_streamed_query_begins_with_the_passages(server: Server) -> None:
    body = {"question": QUESTIONS[3], "top_k": 2, "stream": True, "method": "full"}
    with server.http.stream("POST", "/v1/rag/query", json=body) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line]
    assert [e["event"] for e in events[:2]] == ["passages", "text"]
    assert "".join(e["text"] for e in events if e["event"] == "text") == events[-1]["text"]
    assert events[-1]["report"]["method"] == "full"


def test_models(server: Server) -> None:
    assert [m.id for m in server.client().models.list()] == [MODEL]
    assert server.client().models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="this server runs 'tiny'"):
        server.client().models.retrieve("gpt-9")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "assistant", "content": "Hm."}]}, "it must have role 'user'"),
    ({"messages": [{"role": "user", "content": "  "}]}, "question is empty"),
    ({"messages": [{"role": "user", "content": "a \ud800 b"}]}, "surrogate"),
    ({"n": 2}, "n:"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 5000}, "5000 are reserved"),
    ({"seed": 2**63}, "seed"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"logit_bias": {"7": 1}}, "logit_bias"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"modalities": ["text", "audio"]}, "modalities.1"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"messages": [{"role": "tool", "content": "4"}]}, "messages.0.role: role 'tool' is not supported"),
    (
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
        "messages.0.tool_calls: tool calls are not supported",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "content of type 'image_url' is not",
    ),
    ({"x_blendserve": {"ratio": 2}}, "ratio"),
    ({"x_blendserve": {"method": "both"}}, "method"),
    ({"x_blendserve": {"passages": [{"text": "word " * 3000}]}}, "too many for a context"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_what_cannot_be_is_400_in_openais_shape(server: Server, change: dict[str, Any], message: str) -> None:
    body = {"model": MODEL, "messages": asked(), "x_blendserve": {"passages": []}, **change}
    sent = json.dumps(body).encode()
    answer = server.http.post(
        "/v1/chat/completions", content=sent, headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert any(part in error["message"] for part in message.split("|")), error


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"{", 400), (b"\xff\xfe", 400), (b"[" * 100_000, 413), (b"[" * 60_000, 400), (b"1" * 10_000, 400)],
)
def test_bodies_that_are_no_requests(server: Server, content: bytes, status: int) -> None:
    for sent in (content, iter([content[:10], content[10:]])):  # with a length, and in parts without one
        headers = {"Content-Type": "application/json"}
        answer = server.http.post("/v1/chat/completions", content=sent, headers=headers)
        assert answer.status_code == status
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert any(
            part in error["message"]
            for part in ("JSON object", "parsing the body", "larger than", "elements")
        )


def test_routes_that_are_not_there(server: Server) -> None:
    for answer, status in (
        (server.get("/v1/nothing"), 404),
        (server.get("/v1/chat/completions"), 405),
        (server.get("/v1/jobs/job-1"), 404),
        (server.http.delete("/v1/documents/nobody?collection=a"), 404),
        (server.http.delete("/v1/documents/nobody"), 400),
    ):
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_slot(server: Server, stream: bool) -> None:
    body = {"model": MODEL, "messages": asked(), "max_tokens": 700, "stream": stream, "x_blendserve": OWN}
    sent = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(sent)}\r\n\r\n".encode()
            + sent
        )
        wait_for(lambda: server.service.scheduler.load[1] > 0)
        while stream and b'"content"' not in (got := connection.recv(4096)):
            assert got  # then its prefill is done, and text has come
    before = _generated(server)
    wait_for(lambda: server.service.scheduler.load == (0, 0))
    assert _generated(server) - before < 690


def _generated(server: Server) -> float:
    value = server.service.metrics.registry.get_sample_value("blendserve_generated_tokens_total")
    assert value is not None
    return value


def test_health_and_description(server: Server) -> None:
    assert server.get("/health").json() == {"status": "ok"}
    assert server.get("/ready").json() == {"status": "ready"}
    described = server.get("/openapi.json").json()
    routes = {"/v1/chat/completions", "/v1/rag/query", "/v1/documents", "/v1/cache/warm"}
    assert routes <= set(described["paths"])
    assert described["components"]["schemas"]["ChatRequest"]["properties"]["model"]["enum"] == [MODEL]
    answer = server.get("/v1/models")
    assert len(answer.headers["X-Request-Id"]) == 32
