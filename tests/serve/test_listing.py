"""What the API tells the page: explanations, settings, documents, chunks, jobs."""

from __future__ import annotations

from typing import Any

import pytest

from blendserve.models.toy import toy_reader
from blendserve.serve.explained import token_texts
from tests.support.http import DOCUMENTS, OWN, PASSAGES, QUESTIONS, Server, TenantClient

ASK: dict[str, Any] = {"explain": True, "max_tokens": 3}


def test_tokens_of_an_explanation_are_the_prompts_text(client: TenantClient) -> None:
    client.warm()
    told = client.ask(**ASK)
    explanation, report = told["explanation"], told["report"]
    assert len(explanation["tokens"]) == sum(n for _, n in explanation["states"]) == report["tokens_prompt"]
    for part in explanation["parts"]:
        text = "".join(explanation["tokens"][part["start"] : part["stop"]])
        if part["kind"] == "passage":
            passage = told["passages"][part["passage"]]
            assert text == f"{passage['title']}\n{passage['text']}\n\n"
        elif part["kind"] == "suffix":
            assert QUESTIONS[0] in text
    states = explanation["states"]
    sums = {state: sum(n for s, n in states if s == state) for state, _ in states}
    assert sums["recomputed"] == report["tokens_recomputed"] > 0
    assert len([x for x in explanation["scores"] if x is not None]) == sums["recomputed"] + sums["corrected"]
    assert "explanation" not in client.ask(max_tokens=3)


def test_a_stream_explains_before_its_text(client: TenantClient) -> None:
    client.warm()
    whole = client.ask(**ASK)
    events = client.events("/v1/rag/query", {"question": QUESTIONS[0], **ASK})
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


def test_settings_are_the_defaults_the_choices_and_the_keys_rights(server: Server) -> None:
    reading, config = server.tenant(collections=("a",), read_only=True), server.engine.config
    own = reading.get("/v1/rag/settings").json()
    assert own["collections"] == [{"name": "a", "passages": 3}]
    assert own["key"] == {"needed": True, "admin": False, "read_only": True}
    assert own["defaults"]["ratio"] == config.blend.ratio
    assert own["defaults"]["top_k"] == config.retrieve.top_k
    reading.ask(method=own["methods"][-1], policy=own["policies"][-1], correction=own["corrections"][-1])


def test_documents_are_listed_by_page_and_by_text(client: TenantClient) -> None:
    of_a = [d.id for d in DOCUMENTS[0::2]]
    whole = client.get("/v1/documents?collection=a").json()
    assert [d["id"] for d in whole["data"]] == of_a
    assert all(d["passages"] == 1 for d in whole["data"])
    second = client.get("/v1/documents?collection=a&offset=1&limit=1").json()
    assert (second["total"], [d["id"] for d in second["data"]]) == (3, of_a[1:2])
    found = client.get(f"/v1/documents?collection=a&search={of_a[2].upper()}").json()
    assert [d["id"] for d in found["data"]] == of_a[2:]
    assert client.get("/v1/documents?collection=a&limit=0").status_code == 400


def test_chunks_are_listed_as_the_store_has_them(server: Server, client: TenantClient) -> None:
    client.warm(OWN[:4])  # of collection a: all but the last
    store, blender = server.engine.store, server.service.batch.blender(client.namespace)
    listed = client.get("/v1/cache/chunks?collection=a").json()["data"]
    assert [chunk["stored"] for chunk in listed] == [True, True, False]
    for chunk, passage in zip(listed, PASSAGES[0::2], strict=True):
        ids = server.engine.prompts.chunk(passage).ids
        known = store.info([blender.key(ids)]).get(blender.key(ids))
        assert (chunk["tokens"], chunk["bytes"]) == (len(ids), known.n_bytes if known else 0)
        assert (chunk["tier"], chunk["pinned"]) == (("local", True) if known else (None, False))
        assert chunk["text"] in passage.text
    found = client.get("/v1/cache/chunks?collection=a&search=MAT and").json()["data"]
    assert [chunk["title"] for chunk in found] == ["Cats"]


def test_deleted_chunks_leave_their_documents(server: Server, client: TenantClient) -> None:
    client.warm()
    one = client.get("/v1/cache/chunks?collection=a&limit=1").json()["data"][0]
    which = {"collection": "a", "ids": [one["id"]]}
    reading = server.tenant(namespace=client.namespace, read_only=True)
    assert reading.post("/v1/cache/delete", which).status_code == 403
    assert client.post("/v1/cache/delete", which).json() == {"chunks": 1, "deleted": 1}
    assert client.post("/v1/cache/lookup", which).json()["found"] == 0
    assert client.post("/v1/cache/delete", which).json() == {"chunks": 1, "deleted": 0}
    assert one["doc_id"] in server.service.library.collections["a"]
    job = client.job("/v1/cache/warm", which)
    assert job["computed"] == 1
    assert client.get("/v1/jobs").json()["data"][0]["id"] == job["id"]
