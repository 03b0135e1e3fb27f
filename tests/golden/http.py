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
from blendserve.blend.blender import Blender
from blendserve.errors import StoreUnavailable
from blendserve.serve.keys import KeyFile, Tenant
from tests.support.engines import QUESTIONS
from tests.support.http import MODEL, Client, Server, asked, bearer, serving
from tests.support.peers import Service as Delivery
from tests.support.peers import published, some_key
from tests.support.waiting import eventually

ORIGIN = "http://a.page"
FILE = Path(__file__).with_name("http.json")
DROPPED = {"date", "server", "content-length", "last-modified"}  # headers
VARIES = {
    *("id", "text", "content", "error", "message", "reason", "version", "etag", "x-request-id"),
    *("hash", "fingerprint", "reader_fingerprint", "namespace", "published"),
}
LISTS = {"tokens", "states", "scores", "pieces"}  # one item for each token of a prompt, or part of a file

OWN = [
    {"text": "A cat sat on the mat.", "title": "Cats", "id": "cats"},
    {"text": "A dog slept all morning long.", "title": "Dogs", "id": "dogs"},
]
CHAT: dict[str, Any] = {"model": MODEL, "messages": asked(), "documents": OWN, "max_tokens": 3, "foo": 1}
COMPLETION: dict[str, Any] = {**CHAT, "prompt": "What?"}
MESSAGES: dict[str, Any] = {"model": MODEL, "messages": asked(), "max_tokens": 3, "foo": 1}
QUERY: dict[str, Any] = {"question": QUESTIONS[0], "documents": OWN, "max_tokens": 3, "foo": 1}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
NEW = {"id": "new", "title": "New", "text": "A heron stood in the pond."}
WHICH = {"passages": OWN, "foo": 1}
ONE = {"collection": "a", "documents": ["cats"], "foo": 1}

Asked = tuple[str, str, Any]  # method, path, body or headers
REQUESTS: dict[str, Asked] = {
    "chat": ("POST", "/v1/chat/completions", CHAT),
    "chat stream": ("POST", "/v1/chat/completions", {**CHAT, **STREAM}),
    "completion": ("POST", "/v1/completions", COMPLETION),
    "completion stream": ("POST", "/v1/completions", {**COMPLETION, **STREAM}),
    "messages": ("POST", "/v1/messages", MESSAGES),
    "messages stream": ("POST", "/v1/messages", {**MESSAGES, "stream": True}),
    "messages, wrong": ("POST", "/v1/messages", {**MESSAGES, "system": 1}),
    "count tokens": ("POST", "/v1/messages/count_tokens", MESSAGES),
    "query": ("POST", "/v1/rag/query", {**QUERY, "explain": True}),
    "query stream": ("POST", "/v1/rag/query", {**QUERY, "stream": True, "explain": True}),
    "retrieval": ("POST", "/v1/rag/query", {"question": QUESTIONS[0], "top_k": 2, "max_tokens": 1}),
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
    "preflight": ("OPTIONS", "/v1/chat/completions", None),
    "unknown model": ("POST", "/v1/chat/completions", {**CHAT, "model": "gpt-9"}),
    "unknown document": ("DELETE", "/v1/documents/nothing?collection=a", None),
}
PLAIN = (  # GET
    *("/v1/models", f"/v1/models/{MODEL}", "/v1/rag/settings", "/v1/jobs", "/health", "/ready", "/"),
    *("/page/style.css", "/page/nothing.js", "/v1/nothing", "/v1/chat/completions", "/v1/jobs/job-1"),
    *("/v1/documents", "/v1/documents?collection=c"),
)
REQUESTS |= {path: ("GET", path, None) for path in PLAIN}
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
KINDS: tuple[Any, ...] = (
    *(errors.InputError, errors.NotAuthenticated, errors.PermissionDenied, errors.NotFound),
    *(errors.BodyTooSlow, errors.BodyTooLarge, errors.ShuttingDown, errors.StoreUnavailable),
    *(errors.ClusterUnavailable, errors.IndexDamaged, errors.ModelError, RuntimeError),
)
ERRORS: list[Exception] = [*(kind("m") for kind in KINDS), errors.RateLimited("m", 7)]  # of the store

COLLECTION = "/v1/kdn/collections/manual"
CHUNK = f"{COLLECTION}/chunks/{{key}}"
DELIVERED: dict[str, Asked] = {  # with headers; tests/delivery has the rest
    "chunk head": ("HEAD", CHUNK, {}),
    "chunk range": ("GET", CHUNK, {"Range": "bytes=7-40"}),
    "chunk wrong range": ("GET", CHUNK, {"Range": "bytes=999999999-"}),
    "unpin": ("POST", f"{COLLECTION}/unpin", {}),
    "pin": ("POST", f"{COLLECTION}/pin", {}),
    "no key": ("GET", "/v1/kdn/collections", {"Authorization": ""}),
}
PATHS = (
    "",
    "/directory",
    "/pieces/{piece}",
    "/chunks/{key}",
    "/chunks/00",
    "/layers",
    "/layers?chunks={key}:raw",
)
DELIVERED |= {
    path: ("GET", path, {})
    for path in ("/v1/kdn/collections", *(COLLECTION + p for p in PATHS), "/health", "/")
}


def transcript() -> dict[str, Any]:
    """All of it, of servers with keys that are started for this."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings: dict[str, Any] = {"keys": folder / "keys.json", "max_body_kb": 64}
        with serving(folder / "served", cors_origins=(ORIGIN,), **settings) as server:
            recorded = dict(_recorded(server))
        return recorded | {f"delivery: {name}": exchange for name, exchange in _delivered(folder)}


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
    for error in ERRORS:
        with mock.patch.object(server.engine.store, "stats", side_effect=error):
            yield f"error: {type(error).__name__}", _exchange(root, "GET", "/v1/cache/stats", None)
    for key in ("", "wrong"):
        yield f"key: {key or 'none'}", _exchange(server.with_key(key), "GET", "/v1/models", None)
    changes = (REQUESTS[name] for name in ("stats", "add", "delete document", "delete chunks"))
    for method, path, body in (("GET", "/metrics", None), *changes):
        yield f"rights: {method} {path}", _exchange(reading, method, path, body)
    etag = root.get("/page/style.css").headers["etag"]
    again = server.http.get("/page/style.css", headers={"If-None-Match": etag})
    yield "page style again", _response(again)
    job = root.post("/v1/cache/warm", WHICH).json()["id"]
    eventually(lambda: server.is_idle)
    yield "job", _response(root.get(f"/v1/jobs/{job}"))
    with mock.patch.object(Blender, "prefill", side_effect=RuntimeError("m")):
        for name in ("chat stream", "query stream"):
            yield f"bug in a {name}", _exchange(root, *REQUESTS[name])
    yield "metrics", _metrics(root.get("/metrics").text)
    yield "openapi", _described(root.get("/openapi.json").json())
    server.backend.drain()
    for name in ("/ready", "query"):
        yield f"stopping: {name.strip('/')}", _exchange(root, *REQUESTS[name])


def _delivered(folder: Path) -> Iterator[tuple[str, Any]]:
    """The same of a delivery service."""
    store, collection = published(folder)
    file = KeyFile(folder / "delivery.json")
    key = file.create(Tenant("admin", admin=True))
    names = {"key": some_key().hex(), "piece": collection.directory.pieces[0]}
    with Delivery(store, keys=file.path) as service, httpx.Client(base_url=service.url) as http:

        def sent(method: str, path: str, headers: dict[str, str]) -> httpx.Response:
            return http.request(method, path.format(**names), headers=bearer(key) | headers)

        for name, (method, path, headers) in DELIVERED.items():
            yield name, {"request": f"{method} {path}", **_response(sent(method, path, headers))}
        yield "metrics", _metrics(sent("GET", "/metrics", {}).text)
        yield "openapi", _described(sent("GET", "/openapi.json", {}).json())
        yield "withdrawn", _response(sent("DELETE", "/v1/kdn/collections/manual?chunks=true", {}))
    unavailable = mock.patch.object(store.blobs, "list", side_effect=StoreUnavailable("m"))
    with Delivery(store) as service, unavailable:
        yield "store", _response(service.http.get("/collections"))


def _exchange(client: Client, method: str, path: str, body: Any) -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Origin": ORIGIN, **bearer(client.key)}
    if method == "OPTIONS":
        headers["Access-Control-Request-Method"] = "POST"
    response = client.http.request(method, path, headers=headers, content=None if body is None else content)
    return {"request": f"{method} {path}", **_response(response)}


def _response(response: httpx.Response) -> dict[str, Any]:
    headers = {name: value for name, value in response.headers.items() if name not in DROPPED}
    if "content-range" in headers:
        headers["content-range"] = re.sub(r"\d+", "0", headers["content-range"])
    kept = {"status": response.status_code, "headers": shape(headers)}
    if "json" in response.headers.get("content-type", ""):
        return {**kept, "body": shape(response.json())}
    if "event-stream" in response.headers.get("content-type", ""):
        lines = filter(None, response.text.splitlines())
        found = [{"data": json.loads(s[6:])} if s.startswith("data: {") else s for s in lines]
        return {**kept, "lines": shape(found)}
    return kept


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


def _metrics(text: str) -> dict[str, list[str]]:
    """Each metric's type and labels."""
    return {
        f.name: [f.type, *sorted({label for sample in f.samples for label in sample.labels})]
        for f in text_string_to_metric_families(text)
        if not f.name.endswith("_created")
    }


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


if __name__ == "__main__":
    assert sys.argv[1:] == ["record"], __doc__
    lines = [f"{json.dumps(name)}: {json.dumps(exchange)}" for name, exchange in transcript().items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
