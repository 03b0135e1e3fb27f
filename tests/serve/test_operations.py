"""What an operator sees: the log, notices about requests, metrics, and a process that is stopped and killed."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest

from blendserve.blend.blender import Blender
from blendserve.core import PromptSpan
from blendserve.serve.metrics import Metrics
from blendserve.serve.middleware import JsonFormatter
from blendserve.serve.notices import MAX_CHARS, MAX_LOGGED, MAX_NAMES, Notices
from blendserve.serve.openai_schemas import ChatRequest
from blendserve.store import LMDBStore, MemoryStore
from tests.support.commands import cli
from tests.support.engines import PASSAGES, QUESTIONS
from tests.support.http import CHUNK_TOKENS, MODEL, OWN, Client, Server, ToyServer, asked, events
from tests.support.waiting import eventually

ASK: dict[str, Any] = {"question": QUESTIONS[0], "passages": OWN[:1], "max_tokens": 2}
SECRET = "secret-value"
Lines = Callable[[int], list[dict[str, Any]]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    """The first n lines that the server would write to stderr; one is written after its response."""
    before = caplog.handler.formatter
    caplog.handler.setFormatter(JsonFormatter())
    caplog.set_level(logging.INFO, "blendserve.access")

    def first(n: int) -> list[dict[str, Any]]:
        eventually(lambda: caplog.text.count("\n") >= n)
        return [json.loads(line) for line in caplog.text.splitlines()[:n]]

    yield first
    caplog.handler.setFormatter(before)


def test_each_request_is_a_line_without_text_and_key_unless_text_is_asked_for(
    server: Server, client: Client, lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    answer = client.post("/v1/rag/query", ASK)
    client.post("/v1/rag/query", {**ASK, "top_k": SECRET})
    good, bad = lines(2)
    assert good["request"] == answer.headers["X-Request-Id"] != bad["request"]
    assert (good["path"], good["status"], good["tenant"]) == ("/v1/rag/query", 200, client.namespace)
    assert (bad["status"], bad["level"]) == (400, "info")
    for secret in (QUESTIONS[0], client.key, SECRET, OWN[0]["text"]):
        assert secret not in caplog.text
    with patch.object(server.backend, "http", server.serve.with_values(log_text=True)):
        client.post("/v1/rag/query", ASK)
    assert lines(3)[2]["text"] == QUESTIONS[0]
    assert OWN[0]["text"] not in caplog.text


def test_a_bug_is_one_500_with_the_id_of_its_traceback(
    client: Client, server: Server, lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    broken: dict[str, Any] = {"side_effect": RuntimeError(SECRET)}
    with (
        patch.object(server.engine.store, "stats", **broken),  # outside of the scheduler
        patch.object(Blender, "prefill", **broken),  # inside
    ):
        answers = [client.get("/v1/cache/stats"), client.post("/v1/rag/query", ASK)]
        streamed = client.post("/v1/rag/query", {**ASK, "stream": True})
    assert [answer.status_code for answer in answers] == [500, 500]
    assert events(streamed.text.splitlines())[-1]["error"]["type"] == "server_error"
    said = lines(6)
    for answer, bug, access in zip([*answers, streamed], said[::2], said[1::2], strict=True):
        assert SECRET not in answer.text
        assert answer.headers["X-Request-Id"] == bug["request"] == access["request"]
        assert (bug["level"], access["status"]) == ("error", answer.status_code)
        assert f"RuntimeError: {SECRET}" in bug["trace"]
    assert len(caplog.records) == 6


def ignored(notices: Notices, **fields: Any) -> Any:
    """Fields of a chat request that are ignored."""
    body = {"model": MODEL, "messages": asked(), "documents": OWN[:1], **fields}
    return notices.ignored(ChatRequest.model_validate(body))


def test_unknown_fields_are_named_by_path_but_labels_and_neutral_values_are_not() -> None:
    found = ignored(
        Notices(),
        messages=asked(foo=1),
        documents=[{"text": "Some."}, {"text": "More.", "score": 0.5}],
        **{"x_blendserve": {"bar": 1, "method": "full"}, "stream_options": {"x": True}, "temprature": 2.0},
        chat_template_kwargs={"thinking": False},
    )
    assert set(found["ignored"]) == {
        *("messages.0.foo", "x_blendserve.bar", "stream_options.x", "documents.1.score"),
        "temprature",
    }
    nothing: dict[str, Any] = {"refusal": None, "annotations": [], "tool_calls": None}
    neutral = ignored(
        Notices(),
        messages=[*asked(name="ann"), {"role": "assistant", "content": "Hm.", **nothing}, *asked()],
        **{"user": "ann", "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True},
        **{"service_tier": "auto", "tools": [], "functions": None, "top_k": -1, "min_p": 0},
        **{"repetition_penalty": 1.0, "n": 1, "logprobs": False, "frequency_penalty": 0},
        **{"response_format": {"type": "text"}, "modalities": ["text"]},
    )
    assert neutral == {}


def test_a_notice_is_short_and_the_log_has_it_once_and_not_endlessly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    notices = Notices()
    for _ in range(2):
        ignored(notices, documents=[{"text": text, "foo": 1} for text in ("One.", "Two.")])
        notices.long_question(CHUNK_TOKENS + 1, CHUNK_TOKENS)
    assert len(caplog.records) == 2
    names = ["y" * 1000, *(f"{i:04}" for i in range(MAX_LOGGED))]
    found = ignored(notices, **dict.fromkeys(names, 1))
    assert found == {"ignored": ["y" * MAX_CHARS, *names[1:MAX_NAMES]], "ignored_total": len(names)}
    for name in names:
        ignored(notices, **{name: 1})
    assert len(caplog.records) == MAX_LOGGED
    assert all(len(record.getMessage()) < 3 * MAX_CHARS for record in caplog.records)


def test_a_long_query_gets_a_hint(client: Client) -> None:
    """Not a short one, nor a request with passages, even with none of them."""
    long, none = "Who sat on the mat? " * CHUNK_TOKENS, {"passages": list[str]()}
    hint = client.chat(long, max_tokens=2).x_blendserve["hint"]
    assert next(iter(client.chat(long, max_tokens=2, stream=True))).x_blendserve["hint"] == hint
    others: list[Any] = [(QUESTIONS[0], {}), (long, {"documents": OWN[:1]}), (long, {"x_blendserve": none})]
    for message, fields in others:
        assert "hint" not in client.chat(message, max_tokens=2, **fields).x_blendserve


DASHBOARD = Path(__file__).parents[2] / "configs" / "grafana.json"
METRICS = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
NAME = re.compile(r"blendserve_\w+")
BY_LABEL = re.compile(r"by \(([^)]*)\)|(\w+)=~?\"")
SAMPLES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def test_requests_are_counted(server: Server, client: Client) -> None:
    names: dict[str, dict[str, str]] = {
        "ttft": {"name": "ttft_seconds_count", "method": "blend"},
        "gaps": {"name": "inter_token_seconds_count", "method": "blend"},
        "tokens": {"name": "generated_tokens_total"},
        "requests": {"name": "http_requests_total", "route": "/v1/rag/query", "status": "200"},
    }

    def values() -> dict[str, float]:
        return {what: server.sample(**labels) for what, labels in names.items()}

    before = values()
    for _ in range(2):
        done = client.ask(passages=OWN, max_tokens=5)
    n = done["tokens"]
    counted = {"ttft": 2, "gaps": 2 * (n - 1), "tokens": 2 * n, "requests": 2}
    eventually(lambda: {what: value - before[what] for what, value in values().items()} == counted)
    eventually(lambda: server.is_idle)
    assert server.sample("slots_in_use") == server.sample("queue_length") == 0
    eventually(lambda: server.sample("store_bytes") == server.engine.store.stats().bytes > 0)


def printed(*spans: dict[str, Any]) -> Iterator[PromptSpan]:
    """Spans that follow each other: how many tokens each has, and fields."""
    start = 0
    for n, span in enumerate(spans):
        fields = {"kind": "passage", "chunk": n, "begins_chunk": True, "state": "computed", "reason": ""}
        stop = start + span.pop("n")
        yield PromptSpan(start, stop, **{**fields, **span})
        start = stop


def test_reports_are_counted(server: Server) -> None:
    prefix: dict[str, Any] = {"kind": "prefix", "begins_chunk": False, "chunk": None}
    layout = printed(
        {**prefix, "n": 7, "state": "exact", "source": "local"},
        {**prefix, "n": 11, "state": "kept", "kind": "kept", "source": "local"},
        *({"n": 10, "state": "reused", "lookup": "hit", "source": "local", "donor": "aa"} for _ in range(2)),
        {"n": 20, "state": "reused", "lookup": "hit", "source": "local", "recomputed": (40, 42)},
        {"n": 30, "state": "reused", "lookup": "hit", "source": "remote", "donor": "bb", "learnt": True},
        {"n": 4, "lookup": "codec"},
        *({"n": n, "lookup": "corrupt", "seeks_donors": True} for n in (5, 6)),
        {"n": 8, "chunk": 9, "state": "reused", "lookup": "absent", "seeks_donors": True, "donor": "cc"},
        {"n": 2, "chunk": 9, "begins_chunk": False, "lookup": "absent", "seeks_donors": True},
        {**prefix, "n": 3, "kind": "suffix"},
    )
    report = server.engine.answer(QUESTIONS[0], list(PASSAGES), max_new_tokens=1).report
    report = replace(report, layout=tuple(layout), bytes_loaded=100)
    tokens = {"exact": 7, "reused": 76, "recomputed": 2, "kept": 11, "missing": 17, "suffix": 3}
    metrics = Metrics()
    for _ in range(2):
        metrics.prefilled(report, {"load": 0.25, "match": 0.5})
    for name, label, counts in (
        ("chunks", "found", {"hit": 4, "miss": 2, "corrupt": 2}),
        ("chunks_hit_by_tier", "tier", {"local": 3, "remote": 1}),
        ("chunks_unusable", "why", {"codec": 1}),
        ("near_chunks", "found", {"donor": 1, "none": 2}),
        ("near_tokens", "kind", {"stored": 8, "fresh": 2}),
        ("prompt_tokens", "kind", tokens),
        ("near_requests", "", {"": 1}),
        ("spans", "kind", {"learnt": 1, "precomputed": 2}),
        ("loaded_bytes", "", {"": 100}),
        ("load_seconds", "", {"": 0.25}),
    ):
        for value, n in counts.items():
            labels = {label: value} if label else {}
            found = metrics.registry.get_sample_value(f"blendserve_{name}_total", labels)
            assert found == 2 * n, (name, value)


def test_the_dashboard_has_every_metric_and_no_other_name_or_label() -> None:
    metrics = Metrics()
    metrics.watch(lambda: (0, 0), 1, MemoryStore(1))
    families = {family.name: family.type for family in metrics.registry.collect()}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    samples = {name: {name + end for end in SAMPLES[kind]} for name, kind in families.items()}
    names = {name for possible in samples.values() for name in possible}
    # such as counter: `kind`
    kinds = re.findall(r"^\| `\w+` \| ([^|]+) \|", METRICS.read_text(), re.MULTILINE)
    labels = {"le", *(label for kind in kinds for label in re.findall(r"`(\w+)`", kind))}
    for expression in expressions:
        assert set(NAME.findall(expression)) <= names, expression
        for grouped, chosen in BY_LABEL.findall(expression):
            assert {part.strip() for part in (grouped or chosen).split(",")} <= labels, expression
    shown = set(NAME.findall(" ".join(expressions)))
    assert [name for name, possible in samples.items() if not possible & shown] == []


@pytest.mark.timeout(180)  # a process that imports the engine
def test_sigterm_finishes_what_runs_and_keeps_what_it_stored(tmp_path: Path) -> None:
    asks: dict[str, Any] = {**ASK, "passages": OWN, "max_tokens": 150, "stream": True}
    with ToyServer(tmp_path) as server, httpx.Client(base_url=server.url, timeout=300) as http:
        with http.stream("POST", "/v1/rag/query", json=asks) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.terminate()
            told = events([*lines])
        assert told[-1]["event"] == "done"
        assert "".join(e["text"] for e in told[:-1]) == told[-1]["text"]
        assert server.wait() == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
    with LMDBStore(tmp_path / "kv", 2**27, read_only=True) as store:
        assert (store.verify().good, store.verify().bad) == (len(OWN), ())


def test_keys_by_commands(tmp_path: Path) -> None:
    file = ("--file", tmp_path / "keys.json")
    created, listed = cli("keys", "create", "ann", "--collection", "demo", *file), cli("keys", "list", *file)
    assert ["bsk-" in created.out, "demo" in listed.out, "bsk-" in listed.out] == [True, True, False]
    assert [cli("keys", "revoke", "ann", *file).code for _ in range(2)] == [0, 2]


def test_serve_reads_the_key_of_the_environment_and_prints_none(tmp_path: Path) -> None:
    serve = ("serve", "--host", "0.0.0.0", "--index", tmp_path / "missing")
    done = cli(*serve, env={"BLENDSERVE_API_KEY": "sk-one-key"})
    assert (done.code, "sk-one-key" in done.out + done.err) == (2, False)
    assert str(tmp_path / "missing") in done.err  # the index is missing, not a key
