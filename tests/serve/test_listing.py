"""What the API tells for a page to be made of it: explanations, settings, documents, chunks, jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blendserve.models.toy import toy_reader
from blendserve.serve.config import ServeConfig
from blendserve.serve.explained import token_texts
from blendserve.serve.keys import KeyFile, Tenant
from tests.engine.helpers import PASSAGES, QUESTIONS
from tests.serve.helpers import DOCUMENTS, Server

ASK: dict[str, Any] = {"question": QUESTIONS[0], "explain": True, "max_tokens": 3}


class Shop:
    """A server with two keys of one namespace."""

    def __init__(self, folder: Path) -> None:
        file = KeyFile(folder / "keys.json")
        self.ann = file.create(Tenant("ann", "", ("a",), read_only=True))
        self.root = file.create(Tenant("root", "", admin=True))
        self.server = Server(folder, ServeConfig(keys=file.path))
        self.server.engine.precompute(PASSAGES[:4])


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    made = Shop(tmp_path_factory.mktemp("listing"))
    yield made
    made.server.close()


def test_tokens_of_an_explanation_are_the_prompts_text(shop: Shop) -> None:
    told = shop.server.post("/v1/rag/query", ASK, shop.ann).json()
    explanation, report = told["explanation"], told["report"]
    assert len(explanation["tokens"]) == sum(n for _, n in explanation["states"]) == report["tokens_prompt"]
    for part in explanation["parts"]:
        text = "".join(explanation["tokens"][part["start"] : part["stop"]])
        if part["kind"] == "passage":
            passage = told["passages"][part["passage"]]
            assert text == f"{passage['title']}\n{passage['text']}\n\n"
        elif part["kind"] == "suffix":
            assert QUESTIONS[0] in text
    sums = {
        state: sum(n for s, n in explanation["states"] if s == state) for state, _ in explanation["states"]
    }
    assert sums["recomputed"] == report["tokens_recomputed"] > 0
    assert len([x for x in explanation["scores"] if x is not None]) == sums["recomputed"] + sums["corrected"]
    assert "explanation" not in shop.server.post("/v1/rag/query", {**ASK, "explain": False}, shop.ann).json()


def test_a_stream_explains_before_its_text(shop: Shop) -> None:
    whole = shop.server.post("/v1/rag/query", ASK, shop.ann).json()
    lines = shop.server.post("/v1/rag/query", {**ASK, "stream": True}, shop.ann).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert [event["event"] for event in events[:3]] == ["passages", "prefill", "text"]
    assert events[1]["explanation"] == whole["explanation"]
    assert events[1]["report"] == events[-1]["report"]
    timings = events[-1]["timings"]
    assert 0 <= timings["queue"] <= timings["ttft"] - timings["prefill"]


@pytest.mark.parametrize(
    "text", ["naïve café", "日本語 and 🦉🦉", "a\u0301 \N{REPLACEMENT CHARACTER} b", "\n\n\ttabs"]
)
def test_texts_of_tokens_are_whole_characters(text: str) -> None:
    tokenizer = toy_reader(64).tokenizer
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = list(token_texts(tokenizer, ids))
    assert len(found) == len(ids)
    assert "".join(found) == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in part for part in found)


def test_settings_say_what_holds_and_what_a_key_may(shop: Shop) -> None:
    ann, root = (shop.server.get("/v1/rag/settings", key).json() for key in (shop.ann, shop.root))
    assert ann["collections"] == [{"name": "a", "passages": 3}]
    assert [c["name"] for c in root["collections"]] == ["a", "b"]
    assert ann["key"] == {"needed": True, "admin": False, "read_only": True}
    assert root["key"]["admin"]
    config = shop.server.engine.config
    assert ann["defaults"]["ratio"] == config.blend.ratio
    assert ann["defaults"]["top_k"] == config.retrieve.top_k
    asked = {
        **ASK,
        "method": ann["methods"][-1],
        "policy": ann["policies"][-1],
        "correction": ann["corrections"][-1],
    }
    assert shop.server.post("/v1/rag/query", asked, shop.ann).status_code == 200


def test_documents_by_page_and_by_text(shop: Shop) -> None:
    of_a = [d.id for d in DOCUMENTS[0::2]]
    whole = shop.server.get("/v1/documents?collection=a", shop.ann).json()
    assert [d["id"] for d in whole["data"]] == of_a
    assert all(d["passages"] == 1 for d in whole["data"])
    second = shop.server.get("/v1/documents?collection=a&offset=1&limit=1", shop.ann).json()
    assert (second["total"], [d["id"] for d in second["data"]]) == (3, of_a[1:2])
    found = shop.server.get(f"/v1/documents?collection=a&search={of_a[2].upper()}", shop.ann).json()
    assert [d["id"] for d in found["data"]] == of_a[2:]
    assert shop.server.get("/v1/documents?collection=b", shop.ann).status_code == 404
    assert shop.server.get("/v1/documents?limit=0", shop.ann).status_code == 400


def test_chunks_are_listed_as_the_store_has_them(shop: Shop) -> None:
    store, blender = shop.server.engine.store, shop.server.engine.blender
    store.delete(blender.key(shop.server.engine.prompts.chunk(PASSAGES[4]).ids))
    listed = shop.server.get("/v1/cache/chunks?collection=a", shop.root).json()
    assert [chunk["stored"] for chunk in listed["data"]] == [True, True, False]
    for chunk, passage in zip(listed["data"], PASSAGES[0::2], strict=True):
        ids = shop.server.engine.prompts.chunk(passage).ids
        known = store.info([blender.key(ids)]).get(blender.key(ids))
        assert chunk["tokens"] == len(ids)
        assert chunk["bytes"] == (known.n_bytes if known else 0)
        assert chunk["tier"] == ("local" if known else None)
        assert chunk["text"] in passage.text
    found = shop.server.get("/v1/cache/chunks?collection=a&search=MAT and", shop.root).json()
    assert [chunk["title"] for chunk in found["data"]] == ["Cats"]


def test_chunks_are_deleted_by_who_may_write_and_documents_stay(shop: Shop) -> None:
    one = shop.server.get("/v1/cache/chunks?collection=a&limit=1", shop.root).json()["data"][0]
    which = {"collection": "a", "ids": [one["id"]]}
    assert shop.server.post("/v1/cache/delete", which, shop.ann).status_code == 403
    assert shop.server.post("/v1/cache/delete", which, shop.root).json() == {"chunks": 1, "deleted": 1}
    assert shop.server.post("/v1/cache/lookup", which, shop.root).json()["found"] == 0
    assert shop.server.post("/v1/cache/delete", which, shop.root).json() == {"chunks": 1, "deleted": 0}
    assert one["doc_id"] in shop.server.service.library.collections["a"]
    job = shop.server.job(shop.server.post("/v1/cache/warm", which, shop.root), shop.root)
    assert job["computed"] == 1
    jobs = shop.server.get("/v1/jobs", shop.root).json()["data"]
    assert jobs[0]["id"] == job["id"]
    both = {"passages": [], "ids": ["x"]}
    assert shop.server.post("/v1/cache/lookup", both, shop.root).status_code == 400


def test_the_whole_stores_figures_are_an_admins(shop: Shop) -> None:
    ann, root = (shop.server.get("/v1/cache/stats", key).json() for key in (shop.ann, shop.root))
    assert "store" not in ann
    assert not {"cap_bytes", "evictions", "path"} & ann.keys()
    whole = shop.server.engine.store.stats()
    assert (root["store"]["cap_bytes"], root["store"]["evictions"]) == (whole.cap_bytes, whole.evictions)
    assert "path" not in root["store"]
