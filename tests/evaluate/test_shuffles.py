"""Shuffles: other orders, each once, the same whoever asks and however many; one question with the one they are of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.core import Passage
from blendserve.errors import CorpusError
from blendserve.evaluate.config import EvaluateConfig
from blendserve.evaluate.formats import Example
from blendserve.evaluate.prompts import Setting
from blendserve.evaluate.shuffles import in_order, with_shuffles
from tests.evaluate.helpers import predictions, run, tiny_engine, write_dataset

PASSAGES = tuple(Passage(f"Some text of passage {n}.", f"T{n}") for n in range(5))
EXAMPLE = Example("e", "Who?", ("x",), PASSAGES)

pytestmark = pytest.mark.usefixtures("undrawn")


@given(st.integers(1, 5), st.integers(0, 30), st.integers(0, 9))
def test_orders_are_all_different_and_no_more_than_there_are(n: int, shuffles: int, seed: int) -> None:
    example = replace(EXAMPLE, contexts=PASSAGES[:n])
    asked = with_shuffles([example], shuffles)
    orders = [in_order(e.contexts, e, seed) for e in asked]
    possible = {1: 1, 2: 2, 3: 6, 4: 24, 5: 120}[n]
    assert len(set(orders)) == len(orders) == min(shuffles + 1, possible)
    assert orders[0] == example.contexts
    assert all(sorted(o, key=lambda p: p.title) == list(example.contexts) for o in orders)
    assert [e.id for e in asked] == ["e", *(f"e~{k}" for k in range(1, len(asked)))]
    assert {e.shuffled for e in asked[1:]} <= {"e"}


def test_more_shuffles_leave_the_first_ones_as_they_are() -> None:
    few, many = with_shuffles([EXAMPLE], 2), with_shuffles([EXAMPLE, replace(EXAMPLE, id="f")], 7)
    assert [in_order(PASSAGES, e, 0) for e in few] == [in_order(PASSAGES, e, 0) for e in many[:3]]
    first = in_order(PASSAGES, few[1], 0)
    assert any(in_order(PASSAGES, few[1], seed) != first for seed in (1, 2, 3))
    assert [in_order(PASSAGES, e, 0) for e in many[1:8]] != [in_order(PASSAGES, e, 0) for e in many[9:]]


def test_retrieved_passages_have_as_many_orders_as_there_will_be_of_them() -> None:
    assert len(with_shuffles([replace(EXAMPLE, contexts=())], 9, passages=2)) == 2
    assert len(with_shuffles([replace(EXAMPLE, contexts=())], 9, passages=10)) == 10


def test_a_question_that_is_called_as_a_shuffle_is_refused() -> None:
    with pytest.raises(CorpusError, match="'e~1', which is what a shuffle of 'e' is called"):
        with_shuffles([EXAMPLE, replace(EXAMPLE, id="e~1")], 1)


def test_passages_are_shuffled_before_windows_are_cut() -> None:
    engine = tiny_engine()
    setting = Setting(engine, EvaluateConfig(window=7, seed=3))
    shuffled = with_shuffles([EXAMPLE], 1)[1]
    context = setting.context(shuffled)
    assert context.passages == in_order(PASSAGES, shuffled, 3) != PASSAGES
    plain = engine.prompts.build("Who?", context.passages)
    windows = setting.prompt("Who?", context).chunks
    assert [i for chunk in windows for i in chunk.ids] == [i for chunk in plain.chunks for i in chunk.ids]


def test_a_run_takes_more_shuffles_later_and_resamples_questions(tmp_path: Path) -> None:
    dataset, methods = write_dataset(tmp_path, 2), ("query", "query+shift")
    first = run(tmp_path, dataset, methods=methods, shuffles=1)
    before = predictions(first)
    more = run(tmp_path, dataset, methods=methods, shuffles=2)
    assert (first.figures["questions"], first.figures["prompts"]) == (2, 4)
    assert (more.figures["questions"], more.figures["prompts"]) == (2, 6)
    assert predictions(more)[: len(before)] == before  # kept, and not measured again
    assert len(predictions(more)) == 6 * 4
    kls = {line["id"]: line["mean_kl"] for line in predictions(more) if line["method"] == "reuse"}
    assert len(set(kls.values())) == 6  # other orders are other prompts
    found = more.figures["methods"]["query+shift@0.25"]
    assert found["mean_kl"]["n"] == found["tails"][1]["worse"]["n"] == 2
    assert [tail["against"] for tail in found["tails"]] == ["reuse", "query@0.25"]
    assert len(found["tails"][0]["prompts"]) == 5


def test_a_shuffle_stays_in_its_questions_half(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, 3)
    parts = [
        run(tmp_path, dataset, methods=(), shuffles=1, half=half, name="x") for half in ("first", "second")
    ]
    ids = [line["id"] for line in predictions(parts[1]) if line["method"] == "full"]
    assert ids == ["q0", "q0~1", "q2", "q2~1", "q1", "q1~1"]
    assert [part.figures["questions"] for part in parts] == [2, 1]
