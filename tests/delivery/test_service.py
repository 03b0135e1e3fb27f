"""The service's HTTP: what any plain client may ask for, and who may read what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from blendserve.fetch.kdn.manifest import MAX_INTERLEAVED, Collection
from blendserve.serve.keys import KeyFile, Tenant
from blendserve.store import KVStore
from tests.support.http import bearer
from tests.support.peers import NAME, Service, some_key
from tests.support.stores import FaultyStore
from tests.support.waiting import ManualClock

ALL, NONE = slice(None), slice(0)
Made = tuple[KVStore, Collection]
ROWS: list[tuple[dict[str, str], int, slice]] = [  # headers, status, part of the body
    ({}, 200, ALL),
    ({"Range": "bytes=0-0"}, 206, slice(1)),
    *(({"Range": f"bytes={n}-{n * 3}"}, 206, slice(n, n * 3 + 1)) for n in (90, 600, 2500)),  # over layers
    ({"Range": "bytes=7-"}, 206, slice(7, None)),
    ({"Range": "bytes=7-999999999"}, 206, slice(7, None)),
    ({"Range": "bytes=-9"}, 206, slice(-9, None)),
    ({"Range": "bytes=0-"}, 200, ALL),
    ({"Range": "bytes=-999999999"}, 200, ALL),
    ({"Range": "bytes=999999999-"}, 416, NONE),
    ({"Range": "bytes=-0"}, 416, NONE),
    ({"Range": "bytes=9-3"}, 200, ALL),  # no range at all
    ({"Range": "bytes=-"}, 200, ALL),
    ({"Range": "bytes=0-1,5-6"}, 200, ALL),  # several are not supported
    ({"Range": "bytes=7-40", "If-Range": "{etag}"}, 206, slice(7, 41)),
    ({"Range": "bytes=7-40", "If-Range": '"another"'}, 200, ALL),
    ({"If-None-Match": "{etag}"}, 304, NONE),
    ({"If-None-Match": '"another", {etag}'}, 304, NONE),
    ({"If-None-Match": '"another"'}, 200, ALL),
]


@pytest.fixture(scope="module")
def path() -> str:
    return f"chunks/{some_key().hex()}"


@pytest.fixture(scope="module")
def whole(service: Service, path: str) -> httpx.Response:
    return service.get(path)


@pytest.mark.parametrize(("headers", "status", "part"), ROWS, ids=str)
def test_headers_choose_a_part(
    service: Service, path: str, whole: httpx.Response, headers: dict[str, str], status: int, part: slice
) -> None:
    etag, total = whole.headers["ETag"], len(whole.content)
    reply = service.get(path, **{name: value.replace("{etag}", etag) for name, value in headers.items()})
    begin, end, _ = part.indices(total)
    span = {206: f"bytes {begin}-{end - 1}/{total}", 416: f"bytes */{total}"}.get(status)
    assert (reply.status_code, reply.content) == (status, whole.content[part])
    assert (reply.headers["ETag"], reply.headers.get("Content-Range")) == (etag, span)


@pytest.mark.parametrize(
    ("below", "status"),
    [
        ("{path}?level=int8", 200),
        ("{path}?level=none", 404),
        ("chunks/00", 404),
        ("chunks/no-hex", 404),
        ("pieces/00", 404),
        ("layers?chunks=", 404),
        (f"layers?chunks={','.join(['{key}:raw'] * MAX_INTERLEAVED)}", 200),
        (f"layers?chunks={','.join(['{key}:raw'] * (MAX_INTERLEAVED + 1))}", 400),
    ],
)
def test_paths_name_what_there_is(service: Service, path: str, below: str, status: int) -> None:
    named = below.replace("{path}", path).replace("{key}", path.partition("/")[2])
    assert service.get(named).status_code == status


def test_each_level_has_its_own_bytes_and_etag_and_head_sends_no_body(
    service: Service, made: Made, whole: httpx.Response, path: str
) -> None:
    raw, int8 = [len(service.get(f"{path}?level={level}").content) for level in made[1].levels]
    assert raw > int8 > 0
    assert service.get(f"{path}?level=int8").headers["ETag"] != whole.headers["ETag"]
    head = service.http.head(f"/collections/{NAME}/{path}")
    assert (head.content, head.headers["ETag"]) == (b"", whole.headers["ETag"])
    assert head.headers["Content-Length"] == str(raw)


# Who may read what


@pytest.fixture(scope="module")
def guarded(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A service with keys, the keys, and its store, which counts calls."""
    file, store = KeyFile(tmp_path_factory.mktemp("keys") / "keys.json"), FaultyStore(made[0])
    keys = {
        "reader": file.create(Tenant("reader", collections=(NAME,))),
        "other": file.create(Tenant("other", collections=("another",))),
        "admin": file.create(Tenant("admin", admin=True)),
        "slow": file.create(Tenant("slow", max_per_minute=2)),
    }
    with Service(store, clock=ManualClock(), keys=file.path) as running:
        yield running, {name: bearer(key) for name, key in keys.items()}, store


@pytest.mark.parametrize(
    "below",
    ["", "/directory", "/{path}", "/layers?chunks={key}:raw", "/chunks/00", "/tables/00", "/pieces/00"],
)
def test_a_hidden_collection_looks_like_a_missing_one_and_costs_the_store_as_much(
    guarded: Any, path: str, below: str
) -> None:
    service, keys, store = guarded
    service.http.get("/collections", headers=keys["admin"])  # from now on the catalog is fresh
    store.calls.clear()
    below = below.replace("{path}", path).replace("{key}", path.partition("/")[2])
    replies = [
        service.http.get(f"/collections/{name}{below}", headers=keys["other"]) for name in (NAME, "x", "%00")
    ]
    assert not store.calls
    assert {reply.status_code for reply in replies} == {404}
    assert len({reply.text for reply in replies}) == 1
    assert len({tuple(sorted(reply.headers.keys() - {"x-request-id"})) for reply in replies}) == 1


def test_keys_open_what_they_are_for(guarded: Any) -> None:
    service, keys, store = guarded
    listed = {who: service.http.get("/collections", headers=keys[who]).json()["data"] for who in keys}
    assert [[c["name"] for c in listed[who]] for who in ("reader", "other")] == [[NAME], []]
    assert NAME in [c["name"] for c in listed["admin"]]
    assert service.get("").status_code == 401
    store.calls.clear()
    assert service.get("directory", **keys["reader"]).status_code == 200
    assert store.calls  # or the test above could not fail
    for verb, below in (("POST", "/pin"), ("POST", "/unpin"), ("DELETE", "")):
        for who, status in (("reader", 403), ("other", 404)):
            reply = service.http.request(verb, f"/collections/{NAME}{below}", headers=keys[who])
            assert reply.status_code == status
    assert service.http.post(f"/collections/{NAME}/pin", headers=keys["admin"]).json()["pinned"] > 0
    replies = [service.http.get("/collections", headers=keys["slow"]).status_code for _ in range(4)]
    assert replies[-1] == 429


def test_bytes_have_a_quota(made: Made, path: str) -> None:
    with Service(made[0], mb_per_minute=0.01) as service:
        replies = [service.get(path).status_code for _ in range(3)]
    assert (replies[0], replies[-1]) == (200, 429)
