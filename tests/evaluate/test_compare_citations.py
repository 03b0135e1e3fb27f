"""scripts/compare_citations.py: counts by hand."""

from __future__ import annotations

from typing import Any

from blendserve.core import Passage
from blendserve.evaluate.formats import Example
from scripts.compare_citations import rates, rows

CONTEXTS = tuple(Passage(f"{name} lives in {name}town. It rains.", name) for name in ("Ann", "Bob", "Cy"))
SAVED: dict[str, Any] = {"text": "Bobtown.", "attention": [[0.5, 0.1, 0.1], [0.1, 0.3, 0.2]]}
PAIRS = [
    (Example(f"q{n}", "Where lives Bob?", ("Bobtown",), CONTEXTS, supporting=("Bob",)), SAVED)
    for n in range(2)
]


def test_rates_are_counted_by_hand() -> None:
    found = rates(PAIRS, lambda example, _: {1, 2} if example.id == "q0" else set())
    assert found["questions"] == "1 of 2"
    assert found["precision"].startswith("0.500")
    assert found["recall"].endswith("(1 of 2)")


def test_each_way_names_passages() -> None:
    found = dict(rows(PAIRS))
    assert found["all passages"]["precision"].endswith("(2 of 6)")
    for way in ("by words", "by words, right answers", "by attention"):
        assert found[way]["precision"].endswith("(2 of 2)"), way
    assert found["sentences of other passages"]["cited"].endswith("of 12")
