"""Earlier revisions of passages: made by a seed, stored in place of them, and answered over."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from blendserve.core import Passage
from blendserve.errors import ConfigError
from blendserve.evaluate import edits
from blendserve.evaluate.config import EvaluateConfig
from blendserve.evaluate.datasets import load
from blendserve.evaluate.edits import ANSWER, EDITS, WINDOW, Fact, before, cut_elsewhere
from blendserve.evaluate.generated import facts
from blendserve.evaluate.tables import tables
from blendserve.evaluate.variants import variants
from tests.evaluate.helpers import predictions, run

PASSAGES = list(load("generated", limit=1).examples[0].contexts)


def words(passages: list[Passage]) -> list[str]:
    return [word for p in passages for word in p.text.split()]


@pytest.mark.parametrize("kind", [kind for kind in EDITS if kind != WINDOW])
def test_an_edit_follows_its_seed_and_changes_what_it_says(kind: str) -> None:
    old = before(kind, PASSAGES, "0:q")
    assert old == before(kind, PASSAGES, "0:q") != before(kind, PASSAGES, "1:q")
    assert [p.title for p in old] == [p.title for p in PASSAGES]
    assert sum(a.text != b.text for a, b in zip(old, PASSAGES, strict=True)) >= len(PASSAGES) - 1
    digits = [re.sub(r"\d+", "#", p.text) for p in old] == [re.sub(r"\d+", "#", p.text) for p in PASSAGES]
    assert digits == (kind == "numbers")
    more, fewer = (
        Counter(words(PASSAGES)) - Counter(words(old)),
        Counter(words(old)) - Counter(words(PASSAGES)),
    )
    if kind == "moved":
        assert not more | fewer
    if kind == "negations":
        assert set((more | fewer).elements()) == {"not"}
    if kind.startswith(edits.REVISED):
        share = float(kind.partition("@")[2])
        assert 0 < len(list(more.elements())) <= share * len(words(PASSAGES)) + len(PASSAGES)


def test_another_window_has_the_same_tokens() -> None:
    chunks = [tuple(range(n, n + length)) for n, length in ((0, 10), (20, 7), (40, 1), (50, 12))]
    cut = cut_elsewhere(chunks)
    assert [i for ids in cut for i in ids] == [i for ids in chunks for i in ids]
    assert not set(cut) & set(chunks)
    assert cut_elsewhere([]) == []


def test_every_fact_has_one_place_and_another_value_that_the_prompt_lacks() -> None:
    examples = load("facts").examples
    assert len(examples) == facts.FACTS >= 300
    assert load("facts", seed=1).examples != examples == load("facts").examples
    for example in examples:
        said = " ".join(p.text for p in example.contexts)
        (own,) = [p for p in example.contexts if p.title in example.supporting]
        assert own.text.count(example.question + example.answers[0]) == 1
        assert example.rival not in said
        fact = Fact(own.title, example.answers[0].strip(), example.rival)
        old = before(ANSWER, example.contexts, "0", fact)
        changed = [p for p, q in zip(old, example.contexts, strict=True) if p != q]
        assert [p.title for p in changed] == [own.title]
        assert changed[0].text == own.text.replace(example.answers[0].strip(), example.rival)
    forms = Counter(e.type for e in examples)
    assert set(forms) == set(facts.FORMS)
    assert min(forms.values()) >= 25


def test_words_with_an_edit_are_variants_over_earlier_revisions() -> None:
    (_, _, found) = variants(["query+shift@0.1/revised@0.05"], (), coded=True)
    assert (found.name, found.edit, found.blend.near) == (
        "query+shift@0.1/revised@0.05",
        "revised@0.05",
        True,
    )
    assert (found.unedited, found.uncorrected) == ("query+shift@0.1", "query@0.1/revised@0.05")
    for word, why in (("full/numbers", "no edit changes it"), ("query@0.1/numbrs", "did you mean 'numbers'")):
        with pytest.raises(ConfigError, match=why):
            variants([word], (), coded=True)
    with pytest.raises(ConfigError, match="bench near"):
        variants(["reuse/numbers"], ())
    with pytest.raises(ConfigError, match="data set facts"):
        before(ANSWER, PASSAGES, "0")


def test_a_run_compares_every_edit_with_exact_hits(tmp_path: Path) -> None:
    plan = EvaluateConfig(dataset="facts", setting="edited")
    assert [v.name for v in plan.variants][2:] == ["query+prior@0.05", "query+prior@0.05/answer"]
    assert {v.edit for v in plan.model_copy(update={"dataset": "lines"}).variants} == {None, *EDITS}
    options: Any = {"setting": "edited", "methods": ("query+shift",), "chunks": 3}
    done = run(tmp_path, Path("facts"), limit=1, **options)
    rows = {(row["id"], row["method"]): row for row in predictions(done)}
    name = "query+shift@0.25/answer"
    exact = "query+shift@0.25"
    assert [method for _, method in rows] == ["full", "reuse", exact, name]
    for (_, method), row in rows.items():
        assert {"says_gold", "says_rival"} <= set(row)
        if method in ("reuse", exact):
            assert row["tokens_computed"] == 0
    edited = [row for (_, method), row in rows.items() if method == name]
    assert any(0 < row["tokens_computed"] < 80 for row in edited)  # the edit, and a margin behind it
    figures = done.figures["methods"][name]
    assert figures["edited"]["kind"] == ANSWER
    assert figures["facts"]["questions"] <= 1
    titles = [sheet.title for sheet in tables(done.figures)]
    assert {"Edited passages", "Edited facts"} <= set(titles)
