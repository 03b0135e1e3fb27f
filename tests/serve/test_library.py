"""Documents are added and deleted while questions are answered; the cache is warmed and pinned."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from blendserve.store import ChunkKey, ChunkRecord
from blendserve.store.view import RecordView
from tests.support.engines import PASSAGES
from tests.support.http import OWN, Client, Server, index
from tests.support.waiting import eventually


def test_a_document_is_added_found_replaced_and_deleted(server: Server, client: Client) -> None:
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

    body["documents"] = [{"id": "heron/1", "title": "Heron", "text": "It has flown from the pond."}]
    old = {"passages": [{"text": p["text"], "title": p["title"]} for p in found["passages"]]}
    client.job("/v1/documents", body)
    assert client.post("/v1/cache/lookup", old).json()["found"] == 0  # the old text's KV is deleted
    assert client.post("/v1/cache/lookup", look).json() == {
        "chunks": 1,
        "found": 1,
        "cached": [True],
        "there": [True],
    }

    gone = client.delete("/v1/documents/heron/1", collection="a").json()
    assert (gone["deleted"], gone["passages"]) == (True, 1)
    assert all(p["doc_id"] != "heron/1" for p in client.ask(**asked)["passages"])


def test_kv_of_a_text_that_two_documents_share_stays_until_both_are_deleted(client: Client) -> None:
    text = "The same words stand in two documents."
    for name, collection in (("one", "a"), ("two", "b")):
        body = {"collection": collection, "documents": [{"id": name, "text": text}]}
        assert client.job("/v1/documents", body)["computed"] == 1
    for name, collection, left in (("one", "a", 1), ("two", "b", 0)):
        client.delete(f"/v1/documents/{name}", collection=collection).raise_for_status()
        assert client.post("/v1/cache/lookup", {"passages": [{"text": text}]}).json()["found"] == left


def test_chunks_are_warmed_pinned_unpinned_and_deleted(client: Client) -> None:
    def pins() -> int:
        return int(client.get("/v1/cache/stats").json()["pins"])

    which = {"collection": "a"}
    assert client.post("/v1/cache/lookup", which).json()["found"] == 0
    assert client.job("/v1/cache/warm", which)["computed"] == 3
    assert client.post("/v1/cache/lookup", which).json()["found"] == 3
    assert pins() == 3
    assert client.post("/v1/cache/unpin", which).json() == {"chunks": 3, "unpinned": 3}
    assert pins() == 0
    assert client.post("/v1/cache/pin", which).json()["pinned"] == 3
    assert pins() == 3
    for deleted in (3, 0):
        assert client.post("/v1/cache/delete", which).json() == {"chunks": 3, "deleted": deleted}
    assert client.post("/v1/cache/lookup", which).json()["found"] == 0
    assert client.get("/v1/documents?collection=a").json()["total"] == 3
    for wrong in ({}, {"passages": OWN, "collection": "a"}, {"passages": [], "ids": ["x"]}):
        assert client.post("/v1/cache/pin", wrong).status_code == 400


def together(server: Server, client: Client, n: int, **fields: Any) -> list[dict[str, Any]]:
    """The answers of n requests that were all queued before the first one ran."""
    with server.busy() as release, ThreadPoolExecutor(n) as pool:
        asked = [pool.submit(client.ask, **fields) for _ in range(n)]
        server.wait_for_load(n)
        release.set()
        return [a.result() for a in asked]


def test_requests_that_miss_the_same_chunks_store_them_once_and_those_that_hit_load_them_once(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    puts, reads, put = list[ChunkKey](), list[int](), server.engine.store.put

    def counted(key: ChunkKey, record: ChunkRecord, pin: bool = False) -> bool:
        puts.append(key)
        return put(key, record, pin)

    monkeypatch.setattr(server.engine.store, "put", counted)
    answers = together(server, client, 8, passages=OWN, max_tokens=2)
    assert len({a["text"] for a in answers}) == 1
    client.warm()
    assert len(puts) == len(set(puts)) == len(OWN)

    chunk: Any = RecordView
    layer = chunk.layer

    def read(self: Any, l: int) -> Any:
        reads.append(l)
        return layer(self, l)

    monkeypatch.setattr(chunk, "layer", read)
    answers = together(server, client, 6, passages=OWN, max_tokens=2)
    assert len(reads) == len(OWN) * server.engine.reader.adapter.n_layers
    assert all(a["report"]["chunks_hit"] == len(OWN) for a in answers)
    eventually(lambda: server.backend.batch.fetcher.copies.shared.n_bytes == 0)


def test_a_precompute_that_is_cancelled_at_its_last_chunk_harms_nothing(
    server: Server, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    batch, chunks = server.backend.batch, server.engine.prompts.chunk_ids(PASSAGES)

    def cancel(_: int) -> None:
        job.cancel()

    with server.busy() as release:
        job = batch.precompute(batch.blender("").writer, chunks[:1], cancel, "")
        release.set()
        eventually(job.cancelled)
    for some in (chunks, []):
        batch.precompute(batch.blender("").writer, some, lambda n: None, "").result(30)
    assert not caplog.records
    assert server.engine.store.stats("").chunks == len(PASSAGES)
