"""Documents come and go while questions are answered; the cache can be warmed, pinned and looked at; figures add up."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from blendserve.core import ChunkKV, Passage
from blendserve.engine.shared_loads import SharedLoads
from blendserve.serve.config import ServeConfig
from blendserve.store import ChunkKey, MemoryStore, chunk_key
from blendserve.store.codecs.base import ChunkShape, Coding
from blendserve.store.codecs.raw import Raw
from blendserve.store.record import Coded
from tests.engine.helpers import PASSAGES, QUESTIONS, wait_for
from tests.serve.helpers import Server, hold

OWN = [{"text": p.text, "title": p.title} for p in PASSAGES]


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("library"), ServeConfig(slots=2, queue=12))
    yield made
    made.close()


@pytest.fixture
def looking(tmp_path: Path) -> Iterator[Server]:
    """One that looks for near-duplicates."""
    made = Server(tmp_path, ServeConfig(slots=2), blend={"method": "blend", "near": True})
    yield made
    made.close()


def sample(server: Server, name: str, **labels: str) -> float:
    value = server.service.metrics.registry.get_sample_value(f"blendserve_{name}", labels)
    return value or 0.0


def test_a_document_comes_is_found_blended_replaced_and_goes(server: Server) -> None:
    text = "The heron stood on one leg in the shallow pond. " * 8
    body = {"collection": "a", "documents": [{"id": "heron/1", "title": "Heron", "text": text}]}
    job = server.job(server.post("/v1/documents", body))
    assert (job["state"], job["documents"]) == ("done", 1)
    assert job["chunks"] == job["computed"] > 1
    ask = {"question": "Where stood the heron on one leg?", "top_k": 2, "max_tokens": 2}
    found = server.post("/v1/rag/query", ask).json()
    assert found["passages"][0]["doc_id"] == "heron/1"
    assert found["report"]["chunks_missing"] == 0  # there before anybody asked
    look = {"collection": "a", "documents": ["heron/1"]}
    assert server.post("/v1/cache/lookup", look).json()["found"] == job["chunks"]

    body["documents"] = [
        {"id": "heron/1", "title": "Heron", "text": "It has flown away to the heron in the pond."}
    ]
    old = {"passages": [{"text": p["text"], "title": p["title"]} for p in found["passages"]]}
    server.job(server.post("/v1/documents", body))
    assert server.post("/v1/cache/lookup", old).json()["found"] == 0  # the old text's KV went with it
    assert server.post("/v1/cache/lookup", look).json() == {"chunks": 1, "found": 1, "there": [True]}

    gone = server.http.delete("/v1/documents/heron/1", params={"collection": "a"}).json()
    assert (gone["deleted"], gone["passages"]) == (True, 1)
    again = server.post("/v1/rag/query", ask).json()
    assert all(p["doc_id"] != "heron/1" for p in again["passages"])
    assert server.http.delete("/v1/documents/heron/1", params={"collection": "a"}).status_code == 404


def test_kv_of_a_text_that_another_document_has_too_stays(server: Server) -> None:
    text = "The same words stand in two documents."
    for name, collection in (("one", "a"), ("two", "b")):
        body = {"collection": collection, "documents": [{"id": name, "text": text}]}
        assert server.job(server.post("/v1/documents", body))["computed"] == 1
    same = {"passages": [{"text": text}]}
    for name, collection, left in (("one", "a", 1), ("two", "b", 0)):
        server.http.delete(f"/v1/documents/{name}", params={"collection": collection}).raise_for_status()
        assert server.post("/v1/cache/lookup", same).json()["found"] == left


def test_what_is_added_is_there_after_a_restart(server: Server) -> None:
    from blendserve.retrieve import VectorIndex
    from tests.engine.helpers import reader
    from tests.serve.helpers import WordEmbedder

    body = {"collection": "b", "documents": [{"text": "A lighthouse keeper counts ships."}]}
    assert server.job(server.post("/v1/documents", body))["state"] == "done"
    opened = VectorIndex.open(
        server.folder / "b",
        WordEmbedder(),  # type: ignore[arg-type]
        reader=reader().name,
        reader_fingerprint=reader().fingerprint,
        count=lambda p: 1,
    )
    assert any("lighthouse" in p.text for p in opened.passages)


def test_warm_pin_and_unpin(server: Server) -> None:
    which = {"collection": "a"}
    assert server.post("/v1/cache/lookup", which).json()["found"] == 0
    assert server.job(server.post("/v1/cache/warm", which))["computed"] == 3
    assert server.post("/v1/cache/lookup", which).json()["found"] == 3
    assert server.get("/v1/cache/stats").json()["pins"] == 4  # and the prefix
    assert server.post("/v1/cache/unpin", which).json() == {"chunks": 3, "unpinned": 3}
    assert server.get("/v1/cache/stats").json()["pins"] == 1
    assert server.post("/v1/cache/pin", which).json()["pinned"] == 3
    assert server.get("/v1/cache/stats").json()["pins"] == 4
    assert server.post("/v1/cache/warm", {}).status_code == 400  # which of two collections?
    assert server.post("/v1/cache/pin", {"passages": OWN, "collection": "a"}).status_code == 400


def test_figures_add_up(server: Server) -> None:
    for _ in range(2):
        done = server.post(
            "/v1/rag/query", {"question": QUESTIONS[0], "passages": OWN, "max_tokens": 5}
        ).json()
        wait_for(lambda: server.service.scheduler.load == (0, 0))
        server.job(server.post("/v1/cache/warm", {"passages": OWN[:1]}))  # behind the write-backs
    report = done["report"]
    assert sample(server, "chunks_total", found="miss") == len(OWN)
    assert sample(server, "chunks_total", found="hit") == len(OWN)
    assert sample(server, "prompt_tokens_total", kind="reused") == report["tokens_reused"] > 0
    assert sample(server, "prompt_tokens_total", kind="recomputed") == report["tokens_recomputed"] > 0
    assert sample(server, "loaded_bytes_total") == report["bytes_loaded"]
    assert sample(server, "ttft_seconds_count", method="blend") == 2
    assert sample(server, "inter_token_seconds_count", method="blend") == 2 * (done["tokens"] - 1)
    assert sample(server, "generated_tokens_total") == 2 * done["tokens"]
    assert sample(server, "http_requests_total", route="/v1/rag/query", status="200") == 2
    assert sample(server, "slots_in_use") == sample(server, "queue_length") == 0
    text = server.get("/metrics").text
    assert f"blendserve_store_bytes {float(server.engine.store.stats().bytes)}" in text


def test_an_edited_passage_starts_from_the_old_one_and_is_its_own_afterwards(looking: Server) -> None:
    server = looking
    text = " ".join(p.text for p in PASSAGES)
    old, new = ({"text": said} for said in (text, text.replace("nine sailors", "ten sailors")))

    def ask(*passages: dict[str, str]) -> dict[str, Any]:
        body = {"question": QUESTIONS[0], "passages": passages, "max_tokens": 5, "explain": True}
        done: dict[str, Any] = server.post("/v1/rag/query", body).json()
        wait_for(lambda: server.service.scheduler.load == (0, 0))
        server.job(server.post("/v1/cache/warm", {"passages": OWN[:1]}))  # behind the write-backs
        return done

    ask(OWN[0], old)
    near = ask(OWN[0], new)
    (chunk,) = near["report"]["near"]
    part = near["explanation"]["parts"][2]
    assert {donor["key"] for donor in part["donors"]} == set(chunk["donors"])
    assert sum(donor["stop"] - donor["start"] for donor in part["donors"]) == chunk["tokens_stored"] > 0
    again = ask(OWN[0], new)
    assert (again["report"]["near"], again["report"]["chunks_hit"]) == ([], 2)
    ask(OWN[0], {"text": "Nothing like it was ever said before."})
    assert sample(server, "near_requests_total") == 1
    assert sample(server, "near_chunks_total", found="donor") == 1
    assert sample(server, "near_chunks_total", found="none") == 3  # the first two, and the last
    assert sample(server, "near_tokens_total", kind="stored") == chunk["tokens_stored"]
    assert sample(server, "near_tokens_total", kind="fresh") == chunk["tokens_fresh"]

    store, by = server.engine.store, server.engine.blender
    ids = server.engine.prompts.chunk(Passage(new["text"])).ids
    with store.reading() as snapshot:
        view = snapshot.get(by.key(ids))
        assert view is not None
        alone = by.computer(server.engine.prompts.kv_context).compute([ids])[0]
        for l in range(view.n_layers):
            assert torch.equal(view.layer(l)[0], alone.keys[l])
            assert torch.equal(view.layer(l)[1], alone.values[l])


def test_requests_that_miss_the_same_chunks_store_them_once(server: Server) -> None:
    puts: list[ChunkKey] = []
    put = server.engine.store.put_uncoded  # where `put` of an uncoded store goes, too

    def counted(key: ChunkKey, kv: ChunkKV, pin: bool = False) -> bool:
        puts.append(key)
        return put(key, kv, pin)

    server.engine.store.put_uncoded = counted  # type: ignore[method-assign]
    busy = threading.Event()
    hold(server.service.scheduler, busy)
    body = {"question": QUESTIONS[0], "passages": OWN, "max_tokens": 2}
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(server.post, "/v1/rag/query", body) for _ in range(8)]
        wait_for(lambda: server.service.scheduler.load[0] == 8)
        busy.set()
        assert len({a.result().json()["text"] for a in asked}) == 1
    server.job(server.post("/v1/cache/warm", {"passages": OWN[:1]}))
    assert len(puts) == len(set(puts)) == len(OWN) + 1


def test_waiting_requests_share_loads(server: Server) -> None:
    """Each layer of each chunk is read from the store once for all that wait."""
    server.engine.precompute(PASSAGES)
    reads: list[int] = []
    chunk = type(next(iter(server.engine.store._chunks.values())))  # type: ignore[attr-defined]
    layer = chunk.layer

    def counted(self: Any, l: int) -> Any:
        reads.append(l)
        return layer(self, l)

    chunk.layer = counted
    try:
        busy = threading.Event()
        hold(server.service.scheduler, busy)
        body = {"question": QUESTIONS[0], "passages": OWN, "max_tokens": 2}
        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(server.post, "/v1/rag/query", body) for _ in range(6)]
            wait_for(lambda: server.service.scheduler.load[0] == 6)
            busy.set()
            reports = [a.result().json()["report"] for a in asked]
    finally:
        chunk.layer = layer
    layers = server.engine.reader.adapter.n_layers
    prefix = 6 * layers  # one for each: small, and not counted among chunks
    assert len(reads) == len(OWN) * layers + prefix
    assert all(r["chunks_hit"] == len(OWN) for r in reports)
    wait_for(lambda: server.service.batch.store.n_bytes == 0)


def test_a_precompute_that_is_cancelled_at_its_last_chunk_harms_nothing(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    service = server.service
    busy = threading.Event()
    hold(service.scheduler, busy)
    chunks = service.engine.prompts.chunk_ids(PASSAGES)

    def cancel(_: int) -> None:
        job.cancel()

    job = service.batch.background.precompute(service.batch.blender(""), chunks[:1], cancel)
    busy.set()
    wait_for(job.cancelled)
    service.batch.background.precompute(service.batch.blender(""), chunks, lambda n: None).result(30)
    service.batch.background.precompute(service.batch.blender(""), [], lambda n: None).result(30)
    assert "failed" not in caplog.text
    assert server.get("/v1/cache/stats").json()["chunks"] == len(PASSAGES) + 1


def test_shared_loads_are_kept_while_wanted_and_below_their_cap() -> None:
    kv = ChunkKV(torch.randn(2, 1, 4, 8), torch.randn(2, 1, 4, 8))
    store, keys = MemoryStore(2**20), [chunk_key("m", (), (n,), "float32") for n in range(3)]
    for key in keys:
        store.put(key, kv)
    shared = SharedLoads(store, kv.n_bytes)

    def load(key: ChunkKey) -> None:
        with shared.reading() as snapshot:
            view = snapshot.get(key)
            assert view is not None
            for l in range(2):
                torch.testing.assert_close(view.layer(l)[0], kv.keys[l])

    shared.expect(set(), {keys[0]})
    load(keys[1])
    assert shared.n_bytes == 0  # nobody else wants it
    load(keys[0])
    assert shared.n_bytes == kv.n_bytes
    shared.expect({keys[0]}, {keys[2]})
    load(keys[2])
    assert shared.n_bytes == kv.n_bytes  # no room, while the next one is to use the first
    shared.expect({keys[2]}, set())
    assert shared.n_bytes == 0


@pytest.mark.parametrize("path", ["/v1/rag/query", "/v1/chat/completions"])
def test_a_streams_passages_come_before_its_prefill(server: Server, path: str) -> None:
    busy = threading.Event()
    hold(server.service.scheduler, busy)
    rag: dict[str, Any] = {"question": QUESTIONS[0], "passages": OWN[:2], "max_tokens": 2, "stream": True}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": QUESTIONS[0]}], "stream": True}
    body = rag if path.endswith("query") else {**chat, "x_blendserve": {"passages": OWN[:2]}}
    with server.http.stream("POST", path, json=body) as response:
        lines = (line for line in response.iter_lines() if line)
        first = json.loads(next(lines).removeprefix("data: "))
        assert server.service.scheduler.load == (1, 0)
        busy.set()
        assert len([*lines]) > 2
    assert [p["text"] for p in first.get("x_blendserve", first)["passages"]] == [p["text"] for p in OWN[:2]]


def test_a_full_queue_is_429_and_nothing_is_lost(server: Server) -> None:
    busy = threading.Event()
    hold(server.service.scheduler, busy)
    body = {"question": QUESTIONS[0], "passages": OWN[:2], "max_tokens": 2}
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(server.post, "/v1/rag/query", body) for _ in range(12)]
        wait_for(lambda: server.service.scheduler.load[0] == 12)
        refused = server.post("/v1/rag/query", body)
        busy.set()
        assert {a.result().status_code for a in asked} == {200}
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["Retry-After"]) <= 60


def test_why_stored_chunks_were_of_no_use_is_told_and_counted(server: Server) -> None:
    engine, text = server.service.engine, "A kingfisher dives from its branch."
    ids = engine.prompts.chunk(Passage(text)).ids
    key, shape = engine.blender.key(ids), engine.reader.adapter
    kv = ChunkKV(*(torch.zeros(shape.n_layers, shape.n_kv_heads, len(ids), shape.head_dim) for _ in range(2)))
    foreign = Coding("alien", 0, bytes(16))
    engine.store.put_coded(key, Coded(ChunkShape.of(kv), foreign, Raw().encode(kv)))
    before = sample(server, "chunks_unusable_total", why="codec")
    body = {"question": "What dives?", "passages": [{"text": text}], "method": "reuse", "max_tokens": 2}
    report = server.post("/v1/rag/query", body).json()["report"]
    assert (report["chunks_hit"], report["chunks_missing"]) == (0, 1)
    (unusable,) = report["unusable"]
    assert (unusable["chunk"], unusable["kind"]) == (0, "codec")
    assert "no codec 'alien'" in unusable["reason"]
    assert sample(server, "chunks_unusable_total", why="codec") == before + 1
    assert "blendserve_store_undecodable_total" in server.get("/metrics").text
    assert sample(server, "store_raw_bytes") > 0
