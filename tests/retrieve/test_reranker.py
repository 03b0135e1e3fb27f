"""A cross-encoder orders what was found: a tiny one of random weights, whose scores transformers computes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig
from transformers import BertForSequenceClassification as Classifier

from blendserve.retrieve.reranker import Reranker
from tests.support.engines import PASSAGES, QUESTIONS, toy_engine
from tests.support.http import DOCUMENTS, index

pytest.importorskip("sentence_transformers")


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    made = tmp_path_factory.mktemp("cross") / "encoder"
    torch.manual_seed(0)
    sizes: Any = {
        "num_labels": 1,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    tokenizer = AutoTokenizer.from_pretrained(folder)
    Classifier(BertConfig(vocab_size=len(tokenizer), initializer_range=0.5, **sizes)).save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


def by_hand(folder: Path, question: str, texts: list[str]) -> list[float]:
    """The sigmoids of the logits, each pair alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        pairs = [tokenizer(question, text, return_tensors="pt") for text in texts]
        return [float(model(**pair).logits.sigmoid()) for pair in pairs]


def test_scores_are_the_models(cross_encoder: Path) -> None:
    made = Reranker.load(str(cross_encoder))
    texts = [passage.chunk_text for passage in PASSAGES]
    assert made.scores(QUESTIONS[0], texts) == pytest.approx(
        by_hand(cross_encoder, QUESTIONS[0], texts), abs=1e-4
    )
    assert made.scores(QUESTIONS[0], []) == []


def test_an_engine_retrieves_in_its_order(cross_encoder: Path, tmp_path: Path) -> None:
    """Also what the vectors rank behind `top_k`."""
    engine = toy_engine(retrieve={"reranker": str(cross_encoder)})
    engine.index = index(tmp_path / "index", engine.prompts, DOCUMENTS)
    passages = engine.index.passages
    scores = by_hand(cross_encoder, QUESTIONS[0], [passage.chunk_text for passage in passages])
    best = [passages[n].id for n in sorted(range(len(scores)), key=lambda n: -scores[n])[:2]]
    answer = engine.answer(QUESTIONS[0], top_k=2, max_new_tokens=1)
    assert [passage.id for passage in answer.passages] == best[::-1]  # the best passage comes last
    assert best != [passage.id for passage in engine.index.search(QUESTIONS[0], 2)]
