"""Vectors for OpenAI's client, and passages without an answer."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blendserve.retrieve import Embedder
from blendserve.serve.embeddings import embed
from tests.support.engines import PASSAGES, QUESTIONS
from tests.support.http import Client, Server, WordEmbedder, serving

TEXTS = 3 * [passage.text for passage in PASSAGES]  # more than one batch
URL = "/v1/embeddings"


def test_vectors_are_the_embedders(client: Client) -> None:
    """OpenAI's client asks for base64 unless it is told otherwise."""
    expected = np.stack([WordEmbedder().embed_question(f"\n{text}") for text in TEXTS])
    for options in ({}, {"encoding_format": "float"}):
        create: Any = client.openai.embeddings.create
        done = create(model="words", input=TEXTS, **options)
        assert [row.index for row in done.data] == [*range(len(TEXTS))]
        np.testing.assert_allclose([row.embedding for row in done.data], expected, atol=1e-6)
        assert done.model == "words"
    (row,) = client.post(URL, {"input": TEXTS[0], "encoding_format": "base64"}).json()["data"]
    np.testing.assert_allclose(
        np.frombuffer(base64.b64decode(row["embedding"]), "<f4"), expected[0], atol=1e-6
    )


@pytest.mark.parametrize(
    ("change", "status"),
    [
        *(({"input": given}, 400) for given in ("", [], [""], [1, 2], [[1, 2]], None)),
        *(({"dimensions": n}, status) for n, status in ((64, 200), (32, 400))),
        *(({"model": name}, status) for name, status in (("public", 200), ("text-embedding-3-small", 404))),
        ({"encoding_format": "int8"}, 400),
    ],
)
def test_what_cannot_be_embedded_is_refused(client: Client, change: dict[str, Any], status: int) -> None:
    assert client.post(URL, {"input": "Some text.", **change}).status_code == status


def test_a_long_text_is_the_mean_of_its_windows_and_usage_counts_its_tokens() -> None:
    embedder = Embedder.load()
    long = " ".join(f"{text} Number {n}." for n, text in enumerate(10 * TEXTS))
    (alone,), n_alone = embed(embedder, [TEXTS[0]], is_question=False)
    (first, second), n_tokens = embed(embedder, [TEXTS[0], long], is_question=False)
    np.testing.assert_allclose(first, alone, atol=1e-5)
    np.testing.assert_allclose(alone, embedder.embed_question(TEXTS[0]), atol=1e-5)
    assert n_tokens - n_alone > embedder.max_tokens
    assert np.linalg.norm(second) == pytest.approx(1.0, abs=1e-5)


def test_retrieved_passages_are_those_of_an_answer(client: Client) -> None:
    body: dict[str, Any] = {"question": QUESTIONS[0], "top_k": 2}
    found = client.post("/v1/rag/retrieve", body).json()["passages"]
    assert found[::-1] == client.ask(**body, max_tokens=1)["passages"]  # the best passage comes last
    assert len(client.post("/v1/rag/retrieve", {**body, "collections": ["b"]}).json()["passages"]) == 2
    for wrong, status in (({"question": " "}, 400), ({**body, "collections": ["c"]}, 404)):
        assert client.post("/v1/rag/retrieve", wrong).status_code == status


def test_passages_below_the_least_score_are_not_retrieved(client: Client) -> None:
    """An answer has none then."""
    body: dict[str, Any] = {"question": QUESTIONS[0], "top_k": 9}
    scores = sorted(p["score"] for p in client.post("/v1/rag/retrieve", body).json()["passages"])
    least = (scores[-2] + scores[-1]) / 2
    found = client.post("/v1/rag/retrieve", {**body, "min_score": least}).json()["passages"]
    assert [p["score"] for p in found] == scores[-1:]
    assert client.ask(**body, min_score=least, max_tokens=1)["passages"] == found
    answer = client.ask(**body, min_score=1, max_tokens=3)
    assert (answer["passages"], answer["report"]["chunks"]) == ([], 0)
    assert client.post("/v1/rag/retrieve", {**body, "min_score": 1.1}).status_code == 400


def test_a_key_retrieves_from_its_own_collections(server: Server) -> None:
    ann = server.tenant(collections=("a",))
    body = {"question": QUESTIONS[0], "top_k": 9}
    theirs = client_titles(server.tenant().post("/v1/rag/retrieve", {**body, "collections": ["a"]}).json())
    assert client_titles(ann.post("/v1/rag/retrieve", body).json()) == theirs


def client_titles(found: dict[str, Any]) -> list[str]:
    return [passage["title"] for passage in found["passages"]]


def test_a_server_without_an_index_has_the_embedder_of_its_settings(tmp_path: Path) -> None:
    with serving(tmp_path, has_index=False) as server:
        found = server.openai.embeddings.create(model="tiny", input=["A cat.", "A kitten.", "Tax law."])
        cat, kitten, law = (np.array(each.embedding) for each in found.data)
        assert cat @ kitten > cat @ law
        assert server.post("/v1/rag/retrieve", {"question": "Who?"}).status_code == 400
