"""What the server sends for every route and every kind of error, without what differs between machines and runs.

    python -m tests.golden.http record      writes tests/golden/http.json anew

Numbers become 0; ids, texts and messages, which are for people, become "str"; equal neighbours in a list become one.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
from prometheus_client.parser import text_string_to_metric_families

from blendserve import errors
from tests.support.engines import QUESTIONS
from tests.support.http import MODEL, Client, Server, asked, bearer, serving
from tests.support.waiting import eventually

ORIGIN = "http://a.page"
FILE = Path(__file__).with_name("http.json")
HEADERS = (
    *("content-type", "cache-control", "retry-after", "www-authenticate", "connection", "allow", "etag"),
    *("x-request-id", "content-security-policy", "x-content-type-options", "access-control-allow-origin"),
)
VARIES = {"id", "text", "content", "error", "message", "reason", "version", "etag", "x-request-id"}
LISTS = {"tokens", "states", "scores"}  # one item for each token of a prompt

OWN = [
    {"text": "A cat sat on the mat.", "title": "Cats", "id": "cats"},
    {"text": "A dog slept all morning long.", "title": "Dogs", "id": "dogs"},
]
CHAT: dict[str, Any] = {"model": MODEL, "messages": asked(), "documents": OWN, "max_tokens": 3, "foo": 1}
COMPLETION: dict[str, Any] = {**CHAT, "prompt": "What?"}
QUERY: dict[str, Any] = {"question": QUESTIONS[0], "documents": OWN, "max_tokens": 3, "foo": 1}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
NEW = {"id": "new", "title": "New", "text": "A heron stood in the pond."}
WHICH = {"passages": OWN, "foo": 1}
ONE = {"collection": "a", "documents": ["cats"], "foo": 1}

REQUESTS: dict[str, tuple[str, str, Any]] = {
    "chat": ("POST", "/v1/chat/completions", CHAT),
    "chat stream": ("POST", "/v1/chat/completions", {**CHAT, **STREAM}),
    "completion": ("POST", "/v1/completions", COMPLETION),
    "completion stream": ("POST", "/v1/completions", {**COMPLETION, **STREAM}),
    "models": ("GET", "/v1/models", None),
    "model": ("GET", f"/v1/models/{MODEL}", None),
    "query": ("POST", "/v1/rag/query", {**QUERY, "explain": True}),
    "query stream": ("POST", "/v1/rag/query", {**QUERY, "stream": True, "explain": True}),
    "retrieval": ("POST", "/v1/rag/query", {"question": QUESTIONS[0], "top_k": 2, "max_tokens": 1}),
    "settings": ("GET", "/v1/rag/settings", None),
    "add": ("POST", "/v1/documents", {"collection": "a", "documents": [NEW], "foo": 1}),
    "list documents": ("GET", "/v1/documents?collection=a&limit=1", None),
    "warm": ("POST", "/v1/cache/warm", WHICH),
    "fetch": ("POST", "/v1/cache/fetch", ONE),
    "lookup": ("POST", "/v1/cache/lookup", ONE),
    "pin": ("POST", "/v1/cache/pin", WHICH),
    "unpin": ("POST", "/v1/cache/unpin", WHICH),
    "list chunks": ("GET", "/v1/cache/chunks?collection=a&search=cat", None),
    "stats": ("GET", "/v1/cache/stats", None),
    "delete chunks": ("POST", "/v1/cache/delete", WHICH),
    "delete document": ("DELETE", "/v1/documents/new?collection=a", None),
    "jobs": ("GET", "/v1/jobs", None),
    "health": ("GET", "/health", None),
    "ready": ("GET", "/ready", None),
    "page": ("GET", "/", None),
    "page style": ("GET", "/page/style.css", None),
    "unknown route": ("GET", "/v1/nothing", None),
    "unknown method": ("GET", "/v1/chat/completions", None),
    "unknown model": ("POST", "/v1/chat/completions", {**CHAT, "model": "gpt-9"}),
    "unknown job": ("GET", "/v1/jobs/job-1", None),
    "unknown document": ("DELETE", "/v1/documents/nothing?collection=a", None),
    "unknown collection": ("GET", "/v1/documents?collection=c", None),
    "no collection": ("GET", "/v1/documents", None),
    "unknown page file": ("GET", "/page/nothing.js", None),
}
WRONG: dict[str, dict[str, Any]] = {  # changes of a chat request that are refused with 400
    "no messages": {"messages": []},
    "last role": {"messages": [{"role": "assistant", "content": "Hm."}]},
    "no question": {"messages": [{"role": "user", "content": "  "}]},
    "half a character": {"messages": [{"role": "user", "content": "a \ud800 b"}]},
    "half a character in a name": {"\ud800": 1},
    "tool role": {"messages": [{"role": "tool", "content": "4"}]},
    "tool calls": {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
    "image": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "n": {"n": 2},
    "temperature": {"temperature": -1},
    "temperature nan": {"temperature": float("nan")},
    "max_tokens": {"max_tokens": 10**30},
    "max_tokens of the context": {"max_tokens": 5000},
    "seed": {"seed": 2**63},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "presence_penalty": {"presence_penalty": 0.5},
    "logit_bias": {"logit_bias": {"7": 1}},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"top_logprobs": 3},
    "response_format": {"response_format": {"type": "json_object"}},
    "tool_choice": {"tool_choice": "required"},
    "named tool_choice": {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    "function_call": {"function_call": {"name": "f"}},
    "modalities": {"modalities": ["text", "audio"]},
    "audio": {"audio": {"voice": "alloy"}},
    "ratio": {"x_blendserve": {"ratio": 2}},
    "method": {"x_blendserve": {"method": "both"}},
    "documents and passages": {"x_blendserve": {"passages": []}},
    "document without text": {"documents": [*OWN, {"title": "Only a title"}]},
    "long documents": {"documents": [{"text": "word " * 3000}]},
}
BODIES: dict[str, bytes] = {
    "not JSON": b"{",
    "not UTF-8": b"\xff\xfe",
    "nested": b"[" * 60_000,
    "too large": b"[" * 100_000,
    "a number": b"1" * 10_000,
}
ERRORS: dict[str, Exception] = {  # each kind, raised by the store
    "invalid input": errors.InputError("m"),
    "not authenticated": errors.NotAuthenticated("m"),
    "not allowed": errors.NotAllowed("m"),
    "not found": errors.NotFound("m"),
    "slow body": errors.BodyTooSlow("m"),
    "large body": errors.BodyTooLarge("m"),
    "busy": errors.Busy("m", 7),
    "stopping": errors.Stopping("m"),
    "store": errors.StoreUnavailable("m"),
    "cluster": errors.ClusterUnavailable("m"),
    "index": errors.IndexDamaged("m"),
    "model": errors.ModelError("m"),
    "bug": RuntimeError("m"),
}


def transcript() -> dict[str, Any]:
    """All of it, of a server with keys that is started for this."""
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"keys": Path(folder) / "keys.json", "max_body_kb": 64}
        with serving(Path(folder) / "served", cors_origins=(ORIGIN,), **settings) as server:
            return dict(_recorded(server))


def _recorded(server: Server) -> Iterator[tuple[str, Any]]:
    root, reading = server.tenant(admin=True), server.tenant(read_only=True)
    for name, (method, path, body) in REQUESTS.items():
        eventually(lambda: server.is_idle)
        root.warm(OWN)  # after the write-back of earlier chunks
        yield name, _exchange(root, method, path, body)
    for name, change in WRONG.items():
        yield f"wrong: {name}", _exchange(root, "POST", "/v1/chat/completions", {**CHAT, **change})
    for name, content in BODIES.items():
        yield f"body: {name}", _exchange(root, "POST", "/v1/chat/completions", content)
    for name, error in ERRORS.items():
        with mock.patch.object(server.engine.store, "stats", side_effect=error):
            yield f"error: {name}", _exchange(root, "GET", "/v1/cache/stats", None)
    for key in ("", "wrong"):
        yield f"key: {key or 'none'}", _exchange(server.with_key(key), "GET", "/v1/models", None)
    for method, path, body in (
        ("GET", "/metrics", None),
        ("GET", "/v1/cache/stats", None),
        ("POST", "/v1/documents", {"documents": [NEW]}),
        ("DELETE", "/v1/documents/cats", None),
        ("POST", "/v1/cache/delete", WHICH),
    ):
        yield f"rights: {method} {path}", _exchange(reading, method, path, body)
    etag = root.get("/page/style.css").headers["etag"]
    again = server.http.get("/page/style.css", headers={"If-None-Match": etag})
    yield "page style again", _response(again)
    families = text_string_to_metric_families(root.get("/metrics").text)
    yield (
        "metrics",
        {
            f.name: [f.type, *sorted({label for sample in f.samples for label in sample.labels})]
            for f in families
            if not f.name.endswith("_created")
        },
    )
    yield "openapi", _described(root.get("/openapi.json").json())


def _exchange(client: Client, method: str, path: str, body: Any) -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Origin": ORIGIN, **bearer(client.key)}
    response = client.http.request(method, path, headers=headers, content=None if body is None else content)
    return {"request": f"{method} {path}", **_response(response)}


def _response(response: httpx.Response) -> dict[str, Any]:
    headers = {name: response.headers[name] for name in HEADERS if name in response.headers}
    kept = {"status": response.status_code, "headers": shape(headers)}
    if "json" in response.headers.get("content-type", ""):
        return {**kept, "body": shape(response.json())}
    if "event-stream" in response.headers.get("content-type", ""):
        lines = [line for line in response.text.splitlines() if line]
        return {**kept, "lines": shape([_line(line) for line in lines])}
    return kept


def _line(line: str) -> Any:
    """`data: {...}` as {"data": {...}}; any other line as it is."""
    return {"data": json.loads(line[6:])} if line.startswith("data: {") else line


def shape(value: Any, name: str = "") -> Any:
    """The value without what varies: see above."""
    if isinstance(value, dict):
        return {key: shape(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return ["..."] if name in LISTS else [item for item, _ in groupby(shape(item) for item in value)]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, (int, float)):
        return 0
    return "str" if name in VARIES else re.sub(r"(job|chatcmpl|cmpl)-[0-9a-f]+", r"\1-0", value)


def _described(openapi: dict[str, Any]) -> dict[str, Any]:
    """Each route's parameters and fields, and what a field may be."""
    schemas = openapi["components"]["schemas"]

    def fields(operation: dict[str, Any]) -> dict[str, Any]:
        content = operation.get("requestBody", {}).get("content", {})
        body = schemas[content["application/json"]["schema"]["$ref"].rpartition("/")[2]] if content else {}
        names = sorted(body.get("properties", {})) + [p["name"] for p in operation.get("parameters", [])]
        model = body.get("properties", {}).get("model", {}).get("enum")
        return {"fields": names, "required": body.get("required", []), **({"model": model} if model else {})}

    return {
        f"{method.upper()} {path}": fields(operation)
        for path, operations in openapi["paths"].items()
        for method, operation in operations.items()
    }


def pretty(value: Any, indent: int = 0, key: str = "") -> str:
    """JSON in which whatever fits into a line is one line."""
    text = json.dumps(value, ensure_ascii=False)
    if indent + len(key) + len(text) < 110 or not isinstance(value, (dict, list)):
        return text
    inner = " " * (indent + 1)
    if isinstance(value, list):
        lines = [inner + pretty(item, indent + 1) for item in value]
        return "[\n" + ",\n".join(lines) + "\n" + " " * indent + "]"
    lines = [f"{inner}{json.dumps(k)}: {pretty(item, indent + 1, k)}" for k, item in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"


if __name__ == "__main__":
    if sys.argv[1:] != ["record"]:
        sys.exit("usage: python -m tests.golden.http record")
    FILE.write_text(pretty(transcript()) + "\n", "utf-8")
