"""POST /v1/rerank against transformers' own forward pass of a small cross-encoder of random weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from blendserve.errors import ModelError
from blendserve.retrieve.reranker import Reranker
from tests.support.http import Server, serving

pytest.importorskip("sentence_transformers")
hf: Any = transformers

WORDS = [
    *("where", "is", "the", "snow", "on", "hills", "a", "dog"),
    *("barked", "in", "rain", "and", "bread", "was", "warm"),
]
TEXTS = ["the dog barked", "snow on the hills", "bread was warm and warm", "rain", "the dog barked"]
QUERY = "where is the snow"
URL = "/v1/rerank"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a cross-encoder."""
    made = tmp_path_factory.mktemp("cross-encoder")
    vocabulary = {word: i for i, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS))}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    special = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
    backend.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", pair, special)
    hf.BertTokenizerFast(tokenizer_object=backend, model_max_length=64).save_pretrained(made)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = hf.BertConfig(vocab_size=len(vocabulary), num_labels=1, initializer_range=0.9, **sizes)
        hf.BertForSequenceClassification(config).eval().save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    engine = {"retrieve": {"reranker": str(folder)}}
    with serving(tmp_path_factory.mktemp("rerank"), has_index=False, engine=engine) as made:
        yield made


def by_transformers(folder: Path) -> list[float]:
    """The sigmoid of each text's logit."""
    model, tokenizer = (
        hf.BertForSequenceClassification.from_pretrained(folder).eval(),
        hf.BertTokenizerFast.from_pretrained(folder),
    )
    with torch.no_grad():
        logits = [model(**tokenizer(QUERY, text, return_tensors="pt")).logits[0, 0] for text in TEXTS]
    scores: list[float] = torch.stack(logits).sigmoid().tolist()
    return scores


def ranked(server: Server, **fields: Any) -> dict[str, Any]:
    response = server.post(URL, {"query": QUERY, "documents": TEXTS, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_documents_are_in_the_order_of_transformers_scores(server: Server, folder: Path) -> None:
    """Equal ones keep their order."""
    expected, found = by_transformers(folder), ranked(server)
    order = sorted(range(len(TEXTS)), key=lambda i: -expected[i])
    assert len({round(score, 3) for score in expected}) > 2
    assert [result["index"] for result in found["results"]] == order
    assert [result["document"]["text"] for result in found["results"]] == [TEXTS[i] for i in order]
    scores = [result["relevance_score"] for result in found["results"]]
    assert scores == pytest.approx([expected[i] for i in order], abs=1e-4)
    n_words = sum(len(text.split()) + len(QUERY.split()) + 3 for text in TEXTS)
    assert found["usage"]["total_tokens"] == n_words
    assert found["model"] == folder.name


def test_documents_may_be_objects_many_and_few_of_them_asked_for(server: Server) -> None:
    whole = ranked(server)["results"]
    objects = ranked(server, documents=[{"text": text} for text in TEXTS], top_n=2)["results"]
    assert objects == whole[:2]
    many = ranked(server, documents=TEXTS * 8, return_documents=False, top_n=0)["results"]
    assert len(many) == 40
    assert all("document" not in result for result in many)
    assert many[0]["relevance_score"] == pytest.approx(whole[0]["relevance_score"], abs=1e-5)


def test_a_server_without_one_and_wrong_requests_are_refused(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for wrong, status in (({"documents": []}, 400), ({"query": ""}, 400), ({"model": "other"}, 404)):
        assert server.post(URL, {"query": QUERY, "documents": TEXTS, **wrong}).status_code == status
    with serving(tmp_path_factory.mktemp("none"), has_index=False) as other:
        assert other.post(URL, {"query": QUERY, "documents": TEXTS}).status_code == 404


def test_a_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        Reranker.load(str(tmp_path))
