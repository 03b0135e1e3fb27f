"""Documents are added and deleted while questions are answered; the cache is warmed and pinned."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from blendserve.core import ChunkKV
from blendserve.engine.shared_loads import SharedLoads
from blendserve.store import ChunkKey, MemoryStore, chunk_key
from tests.support.http import OWN, PASSAGES, QUESTIONS, Server, TenantClient, index
from tests.support.waiting import eventually


def test_a_document_is_added_found_replaced_and_deleted(server: Server, client: TenantClient) -> None:
    text = "The heron stood on one leg in the shallow pond. " * 8
    body = {"collection": "a", "documents": [{"id": "heron/1", "title": "Heron", "text": text}]}
    job = client.job("/v1/documents", body)
    assert (job["state"], job["documents"]) == ("done", 1)
    assert job["chunks"] == job["computed"] > 1
    asked: dict[str, Any] = {"question": "Where stood the heron on one leg?", "top_k": 2, "max_tokens": 2}
    found = client.ask(**asked)
    assert found["passages"][0]["doc_id"] == "heron/1"
    assert found["report"]["chunks_missing"] == 0  # precomputed
    look = {"collection": "a", "documents": ["heron/1"]}
    assert client.post("/v1/cache/lookup", look).json()["found"] == job["chunks"]
    opened = index(server.folder / "a", server.engine.prompts, [])
    assert any("heron stood" in p.text for p in opened.passages)  # saved, for the next start

    body["documents"] = [
        {"id": "heron/1", "title": "Heron", "text": "It has flown from the heron in the pond."}
    ]
    old = {"passages": [{"text": p["text"], "title": p["title"]} for p in found["passages"]]}
    client.job("/v1/documents", body)
    assert client.post("/v1/cache/lookup", old).json()["found"] == 0  # the old text's KV is deleted
    assert client.post("/v1/cache/lookup", look).json() == {"chunks": 1, "found": 1, "there": [True]}

    gone = client.delete("/v1/documents/heron/1", collection="a").json()
    assert (gone["deleted"], gone["passages"]) == (True, 1)
    assert all(p["doc_id"] != "heron/1" for p in client.ask(**asked)["passages"])
    assert client.delete("/v1/documents/heron/1", collection="a").status_code == 404
    assert client.delete("/v1/documents/heron/1").status_code == 400  # of which collection?


def test_kv_of_a_text_that_two_documents_share_stays_until_both_are_deleted(client: TenantClient) -> None:
    text = "The same words stand in two documents."
    for name, collection in (("one", "a"), ("two", "b")):
        body = {"collection": collection, "documents": [{"id": name, "text": text}]}
        assert client.job("/v1/documents", body)["computed"] == 1
    for name, collection, left in (("one", "a", 1), ("two", "b", 0)):
        client.delete(f"/v1/documents/{name}", collection=collection).raise_for_status()
        assert client.post("/v1/cache/lookup", {"passages": [{"text": text}]}).json()["found"] == left


def test_warm_pin_and_unpin(client: TenantClient) -> None:
    def pins() -> int:
        return int(client.get("/v1/cache/stats").json()["pins"])

    which = {"collection": "a"}
    assert client.post("/v1/cache/lookup", which).json()["found"] == 0
    assert client.job("/v1/cache/warm", which)["computed"] == 3
    assert client.post("/v1/cache/lookup", which).json()["found"] == 3
    assert pins() == 4  # and the prefix
    assert client.post("/v1/cache/unpin", which).json() == {"chunks": 3, "unpinned": 3}
    assert pins() == 1
    assert client.post("/v1/cache/pin", which).json()["pinned"] == 3
    assert pins() == 4
    for wrong in ({}, {"passages": OWN, "collection": "a"}, {"passages": [], "ids": ["x"]}):
        assert client.post("/v1/cache/pin", wrong).status_code == 400


def together(server: Server, client: TenantClient, n: int, **fields: Any) -> list[dict[str, Any]]:
    """The answers of n requests that were all queued before the first one ran."""
    with server.busy() as release, ThreadPoolExecutor(n) as pool:
        asked = [pool.submit(client.ask, **fields) for _ in range(n)]
        server.wait_for_load(n)
        release.set()
        return [a.result() for a in asked]


def test_requests_that_miss_the_same_chunks_store_them_once(
    server: Server, client: TenantClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    puts: list[ChunkKey] = []
    put = server.engine.store.put_uncoded

    def counted(key: ChunkKey, kv: ChunkKV, pin: bool = False) -> bool:
        puts.append(key)
        return put(key, kv, pin)

    monkeypatch.setattr(server.engine.store, "put_uncoded", counted)
    answers = together(server, client, 8, passages=OWN, max_tokens=2)
    assert len({a["text"] for a in answers}) == 1
    client.warm(OWN[:1])
    assert len(puts) == len(set(puts)) == len(OWN) + 1


def test_queued_requests_share_loads(
    server: Server, client: TenantClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer of each chunk is read from the store once for all of them."""
    client.warm()
    reads: list[int] = []
    with server.engine.store.reading() as snapshot:
        chunk: Any = type(snapshot.get(next(server.engine.store.keys(None))))
    layer = chunk.layer

    def counted(self: Any, l: int) -> Any:
        reads.append(l)
        return layer(self, l)

    monkeypatch.setattr(chunk, "layer", counted)
    answers = together(server, client, 6, passages=OWN, max_tokens=2)
    layers = server.engine.reader.adapter.n_layers
    assert len(reads) == (len(OWN) + 6) * layers  # the small prefix once for each request
    assert all(a["report"]["chunks_hit"] == len(OWN) for a in answers)
    eventually(lambda: server.service.batch.store.n_bytes == 0)


def test_shared_loads_stay_while_they_are_needed_and_below_their_cap() -> None:
    kv = ChunkKV(torch.randn(2, 1, 4, 8), torch.randn(2, 1, 4, 8))
    store, keys = MemoryStore(2**20), [chunk_key("m", (), (n,), "float32") for n in range(3)]
    for key in keys:
        store.put(key, kv)
    shared = SharedLoads(store, kv.n_bytes)

    def load(key: ChunkKey) -> int:
        with shared.reading() as snapshot:
            view = snapshot.get(key)
            assert view is not None
            for l in range(2):
                torch.testing.assert_close(view.layer(l)[0], kv.keys[l])
        return shared.n_bytes

    shared.expect(set(), {keys[0]})
    assert load(keys[1]) == 0  # no queued request needs it
    assert load(keys[0]) == kv.n_bytes
    shared.expect({keys[0]}, {keys[2]})
    assert load(keys[2]) == kv.n_bytes  # no room: the next request is going to use the first one
    shared.expect({keys[2]}, set())
    assert shared.n_bytes == 0


def test_a_precompute_that_is_cancelled_at_its_last_chunk_harms_nothing(
    server: Server, client: TenantClient, caplog: pytest.LogCaptureFixture
) -> None:
    batch, chunks = server.service.batch, server.engine.prompts.chunk_ids(PASSAGES)

    def cancel(_: int) -> None:
        job.cancel()

    with server.busy() as release:
        job = batch.background.precompute(batch.blender(""), chunks[:1], cancel)
        release.set()
        eventually(job.cancelled)
    for some in (chunks, []):
        batch.background.precompute(batch.blender(""), some, lambda n: None).result(30)
    assert not caplog.records
    assert server.engine.store.stats("").chunks == len(PASSAGES) + 1


def test_a_full_queue_is_429_and_no_queued_request_is_lost(server: Server, client: TenantClient) -> None:
    body = {"question": QUESTIONS[0], "passages": OWN[:2], "max_tokens": 2}
    with server.busy() as release, ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(client.post, "/v1/rag/query", body) for _ in range(12)]
        server.wait_for_load(12)
        refused = client.post("/v1/rag/query", body)
        release.set()
        assert {a.result().status_code for a in asked} == {200}
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
