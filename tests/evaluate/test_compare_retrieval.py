"""scripts/compare_retrieval.py: metrics by hand, and rankings of a real index."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from blendserve.core import Passage
from scripts.compare_retrieval import Question, by_document, measured, scores
from tests.support.engines import PASSAGES, toy_engine
from tests.support.http import DOCUMENTS, index


@pytest.mark.parametrize(
    ("found", "relevant", "expected"),
    [
        ("ab", "a", (1, 1, 1)),
        ("ba", "a", (1, 1, 1 / math.log2(3))),
        ("bcdefga", "a", (0, 0, 0)),
        ("bac", "ax", (1, 0.5, (1 / math.log2(3)) / (1 + 1 / math.log2(3)))),
    ],
)
def test_metrics_are_those_of_a_hand(found: str, relevant: str, expected: tuple[float, ...]) -> None:
    passages = [Passage(id, "", id) for id in found]
    assert scores(passages, frozenset(relevant)) == pytest.approx(expected)


def test_words_find_what_the_question_says(tmp_path: Path) -> None:
    made = index(tmp_path / "index", toy_engine().prompts, DOCUMENTS)
    ids = {passage.title: passage.doc_id for passage in made.passages}
    asked = [(passage.text, {ids[passage.title]}) for passage in PASSAGES]
    questions = by_document(made, [*asked, ("Nothing.", {"no such document"})])
    assert len(questions) == len(PASSAGES)
    rows = {(row["method"], row["metric"]): row for row in measured(made, questions)}
    assert rows["words", "nDCG"]["mean"] == rows["both", "hit"]["mean"] == 1
    assert rows["words - vectors", "recall"]["worse"] == 0
    wrong = [Question(question.text, frozenset(["none"])) for question in questions]
    assert all(row["mean"] == 0 for row in measured(made, wrong))
