"""Requests with a filter, and keys that may only read documents with their tags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.http import Client, Server

WORDS = "zebras graze"
DOCUMENTS = [
    {"text": f"{WORDS} in {place}.", "id": f"own-{place}", "metadata": {"tags": tags, "year": year}}
    for place, tags, year in (("kenya", ["a", "b"], 2024), ("chad", ["b"], 2025), ("mali", [], 2025))
]
RETRIEVE = "/v1/rag/retrieve"


@pytest.fixture
def admin(server: Server) -> Iterator[Client]:
    made = server.tenant(admin=True)
    job = made.job("/v1/documents", {"documents": DOCUMENTS, "collection": "a"})
    assert job["state"] == "done", job
    yield made
    for document in DOCUMENTS:
        assert made.delete(f"/v1/documents/{document['id']}", collection="a").status_code == 200


def places(client: Client, **fields: Any) -> set[str]:
    """The places of the zebras that a search finds."""
    found = client.post(RETRIEVE, {"question": WORDS, "top_k": 20, "collections": ["a"], **fields}).json()
    return {p["doc_id"].removeprefix("own-") for p in found["passages"] if WORDS in p["text"]}


def test_a_filter_selects_documents(admin: Client) -> None:
    assert places(admin) == {"kenya", "chad", "mali"}
    assert places(admin, filter={"year": 2025}) == {"chad", "mali"}
    assert places(admin, filter={"year": [2024, 2025], "tags": "b"}) == {"kenya", "chad"}
    assert places(admin, filter={"year": "2025"}) == set()
    asked: dict[str, Any] = {"question": WORDS, "top_k": 20, "collections": ["a"], "max_tokens": 1}
    answer = admin.ask(**asked, filter={"year": 2024})
    assert [p["doc_id"] for p in answer["passages"]] == ["own-kenya"]
    wrongs: list[Any] = [{"year": None}, {"year": []}, {"year": {"from": 1}}, [1]]
    for wrong in wrongs:
        body = {"question": WORDS, "filter": wrong}
        assert admin.post(RETRIEVE, body).status_code == 400, wrong


def test_a_key_with_tags_reads_documents_with_one_of_them(server: Server, admin: Client) -> None:
    ann, bob = (server.tenant(tags=tags) for tags in (("a",), ("b", "c")))
    assert (places(ann), places(bob)) == ({"kenya"}, {"kenya", "chad"})
    assert places(ann, filter={"tags": "b", "year": 2025}) == set()
    listed = ann.get("/v1/documents?collection=a").json()
    assert (listed["total"], [row["id"] for row in listed["data"]]) == (1, ["own-kenya"])
    chunks = ann.get("/v1/cache/chunks?collection=a").json()
    assert [row["doc_id"] for row in chunks["data"]] == ["own-kenya"]
    looked = {"collection": "a", "documents": ["own-kenya", "own-chad"]}
    assert [c.post("/v1/cache/lookup", looked).json()["chunks"] for c in (ann, admin)] == [1, 2]
    body = {"documents": DOCUMENTS, "collection": "a"}
    assert ann.post("/v1/documents", body).status_code == 403
    assert ann.delete("/v1/documents/own-kenya", collection="a").status_code == 403
    none = ann.post("/v1/rag/query", {"question": WORDS, "collections": ["b"], "max_tokens": 1}).json()
    assert none["passages"] == []
