"""What keys may do to the store that they share, and what they learn of it: rights, quotas, messages without places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fastapi.routing import APIRoute

from benchmarks.support.valkey import free_port
from blendserve.config import ValkeyConfig
from blendserve.errors import (
    BlendserveError,
    ClusterUnavailable,
    ModelError,
    StoreFull,
    StoreUnavailable,
    StoreVersion,
    VectorIndexError,
)
from blendserve.fetch.tiered import TieredStore
from blendserve.serve import cache, documents
from blendserve.store import KVStore, LMDBStore, MemoryStore
from blendserve.store.valkey import ValkeyStore
from tests.support.http import OWN, Client, Server, serving
from tests.support.valkey import needs_server, store_at
from tests.support.waiting import eventually

CAP_CHUNKS = 16
READING = {"/v1/cache/lookup"}  # which are sent by POST for their body
BODY: dict[str, Any] = {"collection": "a", "documents": [{"text": "Owls hunt at night.", "id": "owl"}]}


def text(n: int) -> dict[str, str]:
    """One of many passages of one length."""
    return {
        "text": f"Fact {n:03}: the lake is deep and cold, and nobody has ever seen its bottom.",
        "title": "Lake",
    }


def test_a_read_only_key_changes_nothing(server: Server) -> None:
    reader = server.tenant(read_only=True)
    routes = [
        (r.methods or set(), r.path)
        for router in (cache.router, documents.router)
        for r in router.routes
        if isinstance(r, APIRoute)
    ]
    changing = [
        (methods, path.replace("{doc_id:path}", "owl"))
        for methods, path in routes
        if methods & {"POST", "DELETE"} and path not in READING
    ]
    assert len(changing) == 8
    for methods, path in changing:
        verb = "DELETE" if "DELETE" in methods else "POST"
        body = BODY if path == "/v1/documents" else {"passages": OWN}
        headers = {"Authorization": f"Bearer {reader.key}"}
        reply = server.http.request(verb, path, json=None if verb == "DELETE" else body, headers=headers)
        assert (path, reply.status_code) == (path, 403)


# Pins: no key but an admin's can pin the store full


Stores = Callable[[Path, int], KVStore]
STORES: dict[str, Stores] = {
    "memory": lambda path, cap: MemoryStore(cap),
    "lmdb": lambda path, cap: LMDBStore(path / "kv", cap),
    "valkey": lambda path, cap: store_at(path, cap),
    "tiered": lambda path, cap: TieredStore(LMDBStore(path / "kv", cap), MemoryStore(2**30)),
}
KINDS = [pytest.param(kind, marks=needs_server if kind == "valkey" else ()) for kind in STORES]


@contextmanager
def sharing(folder: Path, store: KVStore) -> Iterator[Server]:
    with serving(
        folder / "served", keys=folder / "keys.json", has_index=False, engine={"kv_store": store}
    ) as made:
        yield made


@pytest.fixture(scope="module")
def chunk_bytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    with sharing(tmp_path_factory.mktemp("one"), MemoryStore(2**30)) as server:
        root = server.tenant(admin=True)
        assert root.warm([text(0)])["state"] == "done"
        return int(root.get("/v1/cache/stats").json()["bytes"])


def pin(client: Client, n: int) -> bool:
    """Pin a passage -> whether it is pinned, or the quota is used up."""
    reply = client.post("/v1/cache/pin", {"passages": [text(n)]})
    return reply.status_code == 403 or reply.json()["pinned"] == 1


def pin_all(client: Client, first: int, through: str) -> int:
    """Pin passages one by one, as many as the store may hold -> how many are pinned."""
    for n in range(first, first + CAP_CHUNKS):
        if through == "pin":
            client.ask(passages=[text(n)], method="blend", max_tokens=1)
            eventually(partial(pin, client, n))  # it is stored after the answer
        else:
            client.warm([text(n)])
    return int(client.get("/v1/cache/stats").json()["pins"])


@pytest.mark.parametrize("kind", KINDS)
def test_no_namespace_pins_the_store_full(tmp_path: Path, chunk_bytes: int, kind: str) -> None:
    """Two that try leave room for a third one's pins, and for what it only asks with."""
    store = STORES[kind](tmp_path, CAP_CHUNKS * chunk_bytes)
    with sharing(tmp_path, store) as server:
        greedy = [server.tenant(), server.tenant()]
        assert 0 < pin_all(greedy[0], 0, "warm") <= CAP_CHUNKS // 2
        assert 0 < pin_all(greedy[1], 100, "pin") <= CAP_CHUNKS // 2
        other, admin = server.tenant(), server.tenant(admin=True)
        assert other.warm([text(200)])["state"] == "done"
        other.ask(passages=[text(201)], method="blend", max_tokens=1)
        both = {"passages": [text(200), text(201)]}
        eventually(lambda: other.post("/v1/cache/lookup", both).json()["found"] == 2)
        assert admin.warm([text(300)])["state"] == "done"


# Messages name no place


REQUESTS: dict[str, tuple[str, str, Any]] = {
    "query": ("POST", "/v1/rag/query", {"question": "What?", "passages": OWN, "max_tokens": 1}),
    "query stream": (
        "POST",
        "/v1/rag/query",
        {"question": "What?", "passages": OWN, "max_tokens": 1, "stream": True},
    ),
    "messages": (
        "POST",
        "/v1/messages",
        {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]},
    ),
    **{
        name: ("POST", f"/v1/cache/{name}", {"passages": OWN})
        for name in ("lookup", "pin", "unpin", "delete")
    },
    "warm": ("POST", "/v1/cache/warm", {"passages": OWN}),
    "fetch": ("POST", "/v1/cache/fetch", {"passages": OWN}),
    "add": ("POST", "/v1/documents", BODY),
    "delete document": ("DELETE", "/v1/documents/cats?collection=a", None),
    "chunks": ("GET", "/v1/cache/chunks?collection=a", None),
    "stats": ("GET", "/v1/cache/stats", None),
}
METHODS = "snapshot", "put", "delete", "pin", "contains", "describe", "stats", "lease", "admits"
PLACE, SECRET = "/home/operator/kv", "open-sesame"
MESSAGE = f"the KV store {PLACE} at valkey://ann:{SECRET}@cache.internal:6379 cannot be used"
KINDS_OF_ERROR: tuple[Callable[[], BlendserveError], ...] = (
    *(lambda kind=kind: kind(MESSAGE) for kind in (StoreUnavailable, StoreFull, StoreVersion)),
    *(lambda kind=kind: kind(MESSAGE) for kind in (VectorIndexError, ModelError, ClusterUnavailable)),
    lambda: BlendserveError(MESSAGE, path=PLACE),
)


def said(client: Client) -> Iterator[str]:
    """Everything that a client can read while something fails."""
    for verb, path, body in REQUESTS.values():
        reply = client.http.request(verb, path, json=body, headers={"Authorization": f"Bearer {client.key}"})
        yield reply.text
        if reply.status_code == 202:
            yield str(client.job(path, body))


@pytest.mark.parametrize("made", KINDS_OF_ERROR, ids=lambda made: type(made()).__name__)
def test_an_error_names_no_place_and_no_password(tmp_path: Path, made: Callable[[], BlendserveError]) -> None:
    store = MemoryStore(2**30)
    with serving(tmp_path / "served", keys=tmp_path / "keys.json", engine={"kv_store": store}) as server:
        client = server.tenant(admin=True)
        with mock.patch.multiple(store, **{name: mock.Mock(side_effect=made()) for name in METHODS}):
            texts = list(said(client))
    assert len(texts) >= len(REQUESTS)
    for part in (PLACE, SECRET, "cache.internal", "operator"):
        assert not [text for text in texts if part in text]


def test_a_server_that_is_down_and_a_full_store_are_not_named(tmp_path: Path, chunk_bytes: int) -> None:
    """Real ones: in reports of answers, in jobs, in refusals."""
    away = ValkeyStore(ValkeyConfig(url=f"valkey://127.0.0.1:{free_port()}"), 2**30)
    small = LMDBStore(tmp_path / "kv", 2 * chunk_bytes)
    store = TieredStore(small, away)
    with serving(tmp_path / "served", keys=tmp_path / "keys.json", engine={"kv_store": store}) as server:
        client = server.tenant(admin=True)
        texts = list(said(client))
        texts += [str(client.warm([text(n) for n in range(4)]))]
    assert any("unreachable" in text for text in texts)
    for part in (str(tmp_path), away.config.where, str(Path.home())):
        assert not [text for text in texts if part in text]
