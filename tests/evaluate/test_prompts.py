"""Examples to prompts: methods by their words, passages in other orders, windows, retrieval, and a task's own words."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.config import changed
from blendserve.core import Passage
from blendserve.errors import ConfigError, CorpusError
from blendserve.evaluate.config import EvaluateConfig, settings_from
from blendserve.evaluate.formats import Example
from blendserve.evaluate.job import with_task_prompt
from blendserve.evaluate.prompts import Setting
from blendserve.evaluate.shuffles import in_order, with_shuffles
from blendserve.evaluate.tasks import LONGBENCH, QUESTIONS
from blendserve.evaluate.variants import split_list, variants
from blendserve.retrieve import Embedder, VectorIndex
from tests.support.evaluations import tiny_engine

PASSAGES = tuple(Passage(f"Some text of passage {n}.", f"T{n}") for n in range(5))
EXAMPLE = Example("e", "Who?", ("x",), PASSAGES)


def test_method_strings_become_variants_and_back() -> None:
    text = "query+shift, deviation[1,2]@0.1,query@.05/bos,reuse/none, none+shift,full,exact/int8,query@0.1/bos/int8"
    found = variants(split_list(f"{text},query+shift@0.1/revised@0.05"), (0.05, 0.3), seed=7, coded=True)
    names = [v.name for v in found]
    assert names == [
        "full", "reuse", "query+shift@0.05", "query+shift@0.3", "deviation[1,2]@0.1", "query@0.05/bos", "reuse/none",
        "none+shift", "exact/int8", "query@0.1/bos/int8", "query+shift@0.1/revised@0.05",
    ]  # fmt: skip
    assert [v.name for v in variants(names, (0.9,), seed=7, coded=True)] == names
    assert [v.curve for v in found][2:6] == ["query+shift", "query+shift", "deviation[1,2]", "query/bos"]
    by_name = dict(zip(names, found, strict=True))
    layers = by_name["deviation[1,2]@0.1"].blend
    assert (layers.policy, layers.check_layers, layers.ratio, layers.seed) == ("deviation", (1, 2), 0.1, 7)
    assert by_name["query@0.1/bos/int8"].uncoded == "query@0.1/bos"
    edited = by_name["query+shift@0.1/revised@0.05"]
    assert (edited.edit, edited.blend.near) == ("revised@0.05", True)
    assert (edited.unedited, edited.uncorrected) == ("query+shift@0.1", "query@0.1/revised@0.05")


@pytest.mark.parametrize(
    "word",
    [
        *("query@", "query", "qeury@0.1", "query+shfit@0.1", "query@1.5", "query@0.1/boss", "full@0.1"),
        *("query[1]@0.1", "deviation[0]@0.1", "full/int8", "query@0.1/int8@4", "query@0.1/int8/bos"),
        *("query@0.1/int9", "exact@0.1", "full/numbers", "query@0.1/numbrs"),
    ],
)
def test_a_word_that_is_no_method(word: str) -> None:
    with pytest.raises(ConfigError):
        variants([word], (), coded=True)


@pytest.mark.parametrize("word", ["reuse/int8", "reuse/numbers", "exact"])
def test_codecs_and_edits_are_for_the_evaluation(word: str) -> None:
    assert variants([word], (), coded=True)[-1].name == word
    with pytest.raises(ConfigError):
        variants([word], ())


@given(st.integers(1, 5), st.integers(0, 30), st.integers(0, 9))
def test_orders_are_all_different_and_no_more_than_possible(n: int, shuffles: int, seed: int) -> None:
    """More shuffles leave the first ones as they are."""
    example = replace(EXAMPLE, contexts=PASSAGES[:n])
    asked = with_shuffles([example], shuffles)
    orders = [in_order(e.contexts, e, seed) for e in asked]
    assert len(set(orders)) == len(orders) == min(shuffles + 1, math.factorial(n))
    assert orders[0] == example.contexts
    assert all(sorted(o, key=lambda p: p.title) == list(example.contexts) for o in orders)
    assert [(e.id, e.shuffled) for e in asked[1:]] == [(f"e~{k}", "e") for k in range(1, len(asked))]
    more = with_shuffles([example, replace(example, id="f")], shuffles + 2)
    assert [in_order(e.contexts, e, seed) for e in more[: len(asked)]] == orders


def test_orders_follow_question_and_seed() -> None:
    one, other = with_shuffles([EXAMPLE, replace(EXAMPLE, id="f")], 1)[1::2]
    assert len({in_order(PASSAGES, e, seed) for e in (one, other) for seed in range(4)}) > 4
    retrieved = replace(EXAMPLE, contexts=())
    assert [len(with_shuffles([retrieved], 9, passages=n)) for n in (2, 10)] == [2, 10]
    with pytest.raises(CorpusError):
        with_shuffles([EXAMPLE, replace(EXAMPLE, id="e~1")], 1)  # called as a shuffle is


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize(("window", "chunks"), [(None, None), (None, 2), (7, None), (7, 3), (1000, None)])
def test_windows_are_the_passages_joined_and_cut(
    window: int | None, chunks: int | None, goes_on: bool
) -> None:
    """After the passages have been shuffled; of a text to go on with, the last chunks are kept."""
    engine = tiny_engine()
    setting = Setting(engine, EvaluateConfig(window=window, chunks=chunks, seed=3))
    shuffled = with_shuffles([EXAMPLE], 1)[1]
    context = setting.context(shuffled)
    assert context.passages == in_order(PASSAGES, shuffled, 3) != PASSAGES
    prompt = setting.prompt("Who?", context, goes_on)
    whole = Setting(engine, EvaluateConfig()).prompt("Who?", context, goes_on)
    if not goes_on:
        assert whole == engine.prompts.build("Who?", context.passages)
    assert (prompt.prefix, prompt.suffix) == (whole.prefix, whole.suffix)
    cut = [chunk.ids for chunk in whole.chunks]
    if window is not None:
        joined = tuple(i for ids in cut for i in ids)
        cut = [joined[at : at + window] for at in range(0, len(joined), window)]
    kept = slice(-(chunks or 0), None) if goes_on else slice(chunks)
    assert [chunk.ids for chunk in prompt.chunks] == cut[kept]


def test_open_retrieves_and_reports_recall(tmp_path: Path) -> None:
    engine = tiny_engine()
    about: Any = {"reader": "tiny", "reader_fingerprint": "", "chunk_tokens": 64}
    engine.index = VectorIndex.create(tmp_path, Embedder.load("minilm-l6"), count=lambda _: 1, **about)
    texts = ("Maria Lund built the lighthouse.", "Bees dance.", "Tea is grown in Assam.")
    engine.index.add([{"text": text, "title": text.split()[0]} for text in texts])
    setting = Setting(engine, EvaluateConfig(setting="open", top_k=1))
    asked = Example("e", "Who built the lighthouse?", ("Lund",), (), supporting=("Maria", "Tea"))
    found = setting.context(asked)
    assert ([p.title for p in found.passages], found.recall, found.seconds > 0) == (["Maria"], 0.5, True)
    assert setting.context(replace(asked, supporting=())).recall is None


def test_a_task_asks_in_its_own_words_unless_the_user_has_others() -> None:
    ours = with_task_prompt(settings_from(), LONGBENCH["samsum"], print)
    assert ours.prompt.instruction == LONGBENCH["samsum"].prompt.instruction
    theirs = changed(settings_from(), prompt={"instruction": "Read."})
    assert with_task_prompt(theirs, LONGBENCH["triviaqa"], print) == theirs
    assert with_task_prompt(settings_from(), QUESTIONS, print) == settings_from()
