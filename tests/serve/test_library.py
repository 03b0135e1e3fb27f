"""Documents are added and deleted while questions are answered; the cache is warmed and pinned."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest

from blendserve.core import Document, Steps
from blendserve.retrieve.encoder import Window
from blendserve.store.view import RecordView
from tests.support.engines import PASSAGES
from tests.support.http import DOCUMENTS, OWN, PATIENT_S, Client, Server, WordEmbedder, index, serving
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
    assert client.post("/v1/cache/lookup", look).json()["cached"] == [True]

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


def test_documents_are_listed_by_page_and_by_text(client: Client) -> None:
    of_a = [d.id for d in DOCUMENTS[0::2]]
    whole = client.get("/v1/documents?collection=a").json()
    assert [d["id"] for d in whole["data"]] == of_a
    second = client.get("/v1/documents?collection=a&offset=1&limit=1").json()
    assert (second["total"], [d["id"] for d in second["data"]]) == (3, of_a[1:2])
    found = client.get(f"/v1/documents?collection=a&search={of_a[2].upper()}").json()
    assert [d["id"] for d in found["data"]] == of_a[2:]


def test_chunks_are_listed_as_the_store_has_them(server: Server, client: Client) -> None:
    client.warm(OWN[:4])  # of collection a: all but the last
    store, blender = server.engine.store, server.backend.batch.blender(client.namespace)
    listed = client.get("/v1/cache/chunks?collection=a").json()["data"]
    assert [chunk["stored"] for chunk in listed] == [True, True, False]
    for chunk, passage in zip(listed, PASSAGES[0::2], strict=True):
        ids = server.engine.prompts.chunk(passage).ids
        known = store.describe([blender.key(ids)]).get(blender.key(ids))
        assert (chunk["tokens"], chunk["bytes"]) == (len(ids), known.n_bytes if known else 0)
        assert (chunk["tier"], chunk["pinned"]) == (("local", True) if known else (None, False))
        assert chunk["text"] in passage.text
    found = client.get("/v1/cache/chunks?collection=a&search=MAT and").json()["data"]
    assert [chunk["title"] for chunk in found] == ["Cats"]


def together(server: Server, client: Client, n: int, **fields: Any) -> list[dict[str, Any]]:
    """The answers of n requests that were all queued before the first one ran."""
    with server.busy() as release, ThreadPoolExecutor(n) as pool:
        asked = [pool.submit(client.ask, **fields) for _ in range(n)]
        server.wait_for_load(n)
        release.set()
        return [a.result() for a in asked]


def test_requests_that_miss_the_same_chunks_store_them_once_and_those_that_hit_load_them_once(
    server: Server, client: Client
) -> None:
    with patch.object(server.engine.store, "put", wraps=server.engine.store.put) as put:
        answers = together(server, client, 8, passages=OWN, max_tokens=2)
        assert len({a["text"] for a in answers}) == 1
        client.warm()
    keys = [call.args[0] for call in put.call_args_list]
    assert len(keys) == len(set(keys)) == len(OWN)

    with patch.object(RecordView, "layer", autospec=True, side_effect=RecordView.layer) as layer:
        answers = together(server, client, 6, passages=OWN, max_tokens=2)
    assert layer.call_count == len(OWN) * server.engine.model.decoder.n_layers
    assert all(a["report"]["chunks_hit"] == len(OWN) for a in answers)
    eventually(lambda: server.backend.batch.fetcher.copies.shared.n_bytes == 0)


def test_a_background_task_that_is_cancelled_while_it_waits_harms_nothing(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    batch, writer = server.backend.batch, server.backend.batch.blender("").writer
    with server.busy():
        assert batch.in_background(writer.precompute_one((5, 6), "skip"), "").cancel()
    for ids in server.engine.prompts.chunk_ids(PASSAGES):
        assert not batch.in_background(writer.precompute_one(ids, "skip"), "").result(30)
    assert not caplog.records
    assert server.engine.store.stats("").chunks == len(PASSAGES)


class HeldEncoder(WordEmbedder):
    """Embeds until it comes to a text with `word`; then it waits for `release`."""

    def __init__(self, word: str) -> None:
        self.word, self.reached, self.release = word, threading.Event(), threading.Event()

    def encode(self, windows: Sequence[Window], *rest: Any) -> Steps[np.ndarray]:
        if any(self.word in window.text for window in windows):
            self.reached.set()
            assert self.release.wait(PATIENT_S)
        return (yield from super().encode(windows, *rest))


def test_documents_that_are_embedded_when_the_server_stops_are_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    documents = [{"id": f"new{n}", "text": f"Text number{n} of the job."} for n in range(4)]
    with serving(tmp_path) as server:
        held = server.backend.collections.indexes["a"].embedder = cast("Any", HeldEncoder("number2"))
        server.post("/v1/documents", {"collection": "a", "documents": documents}).raise_for_status()
        assert held.reached.wait(PATIENT_S)
        stop = threading.Thread(target=server.listener.close)
        stop.start()
        # the job has ended
        eventually(lambda: "blendserve.serve.jobs" in {record.name for record in caplog.records})
        held.release.set()
        stop.join()
    saved = {p.doc_id for p in index(tmp_path / "a", server.engine.prompts, []).passages}
    assert {d["id"] for d in documents} & saved == {"new0", "new1"}
    assert "2 of 4" in caplog.text  # allow: how many are kept is the point of the line
    with serving(tmp_path) as again:
        (job,) = again.get("/v1/jobs").json()["data"]
    assert (job["state"], job["documents"], job["total_documents"]) == ("failed", 2, 4)


def test_a_collection_whose_file_cannot_be_written_is_warmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blendserve.retrieve.database.LOCK_TIMEOUT_S", 0.01)
    with serving(tmp_path) as server, index(tmp_path / "a", server.engine.prompts, []).database.write():
        job = server.job("/v1/cache/warm", {"collection": "a"})
    assert (job["state"], job["computed"]) == ("done", 3)


def test_jobs_outlive_the_server(tmp_path: Path) -> None:
    added = {"collection": "a", "documents": [{"id": "yak", "text": "Yaks live high up."}]}
    with serving(tmp_path) as server:
        jobs = [server.job("/v1/documents", added), server.job("/v1/cache/warm", {"collection": "b"})]
        server.warm(OWN[:1])  # of no collection: known to this server alone
        killed = {**jobs[0], "id": "job-killed", "state": "running", "namespace": "", "created": 0.0}
        server.backend.collections.indexes["b"].save_job(killed)
    with serving(tmp_path) as server:
        listed = server.get("/v1/jobs").json()["data"]
        assert listed[:2] == jobs[::-1]
        assert [(job["id"], job["state"]) for job in listed[2:]] == [("job-killed", "failed")]
        assert server.get(f"/v1/jobs/{jobs[0]['id']}").json() == jobs[0]


@pytest.mark.parametrize("is_deleted", [False, True])
def test_changes_of_other_processes_are_served_and_a_refused_change_is_not(
    is_deleted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blendserve.retrieve.database.LOCK_TIMEOUT_S", 0.01)

    def listed() -> set[str]:
        return {d["id"] for d in server.get("/v1/documents?collection=a").json()["data"]}

    with serving(tmp_path) as server:
        first, *others = (str(d.id) for d in DOCUMENTS[0::2])
        other = index(tmp_path / "a", server.engine.prompts, [])
        other.add([Document("Ants carry leaves.", id="ants")])
        assert listed() == {first, *others, "ants"}
        asked = server.ask("What do ants carry?", collection="a", top_k=1, max_tokens=1)
        assert asked["passages"][0]["doc_id"] == "ants"
        added = {"collection": "a", "documents": [{"id": "yak", "text": "Yaks live high up."}]}

        def change() -> bool:
            if is_deleted:
                return server.delete(f"/v1/documents/{first}", collection="a").is_success
            return bool(server.job("/v1/documents", added)["state"] == "done")

        with other.database.write():
            assert not change()
        assert listed() == {first, *others, "ants"}
        assert change()
        wanted = {*others, "ants", *(() if is_deleted else (first, "yak"))}
        assert listed() == wanted
    saved = {p.doc_id for p in index(tmp_path / "a", server.engine.prompts, []).passages}
    assert saved == wanted


def test_a_text_that_no_prompt_can_hold_is_not_computed(client: Client) -> None:
    long = " ".join(f"Word {n} of many." for n in range(2000))
    job = client.job("/v1/cache/warm", {"passages": [*OWN, {"text": long}]})
    assert job["state"] == "failed"
    assert "Word 0 of many" in str(job)
