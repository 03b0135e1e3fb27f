"""What the API tells the page: explanations, settings, documents, chunks, jobs."""

from __future__ import annotations

from typing import Any

import pytest

from blendserve.serve.rag import token_texts
from tests.support.engines import PASSAGES, QUESTIONS, toy_reader
from tests.support.http import DOCUMENTS, OWN, Client, Server

ASK: dict[str, Any] = {"explain": True, "max_tokens": 3}


def test_tokens_of_an_explanation_are_the_prompts_text(client: Client) -> None:
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
    events = client.events("/v1/rag/query", {"question": QUESTIONS[0], **ASK})
    assert events[1]["explanation"] == explanation
    assert events[1]["report"] == events[-1]["report"]
    timings = events[-1]["timings"]
    assert 0 <= timings["queue"] <= timings["ttft"] - timings["prefill"]


@pytest.mark.parametrize(
    "text", ["naïve café", "日本語 and 🦉🦉", "a\u0301 \N{REPLACEMENT CHARACTER} b", "\n\n\ttabs"]
)
def test_texts_of_tokens_are_whole_characters(text: str) -> None:
    tokenizer = toy_reader().tokenizer
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
    assert (own["key"]["admin"], own["key"]["read_only"]) == (False, True)
    assert own["defaults"]["ratio"] == config.blend.ratio
    assert own["defaults"]["top_k"] == config.retrieve.top_k
    reading.ask(method=own["methods"][-1], policy=own["policies"][-1], correction=own["corrections"][-1])


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
