"""Data sets of every form, what is made, and their prompts: methods, orders, windows, retrieval, a task's own words."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import huggingface_hub
import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.generate_world import __main__ as generate_world
from blendserve.cli.options import split_list
from blendserve.core import Passage
from blendserve.errors import ConfigError, CorpusError
from blendserve.evaluate import datasets as module
from blendserve.evaluate import edits, tasks
from blendserve.evaluate.config import EvaluateConfig, settings_from
from blendserve.evaluate.datasets import BUNDLED, load, with_distractors
from blendserve.evaluate.edits import ANSWER, EDITS, WINDOW, Fact, before, cut_elsewhere
from blendserve.evaluate.formats import Example
from blendserve.evaluate.job import with_task
from blendserve.evaluate.methods import parse_methods
from blendserve.evaluate.prompts import PromptSource, permuted, with_permutations
from blendserve.retrieve import Embedder, TokenCounter, VectorIndex
from tests.support.evaluations import tiny_engine

DATA = Path(__file__).parent / "data"  # a small file of each form, and what is to be read of it
EXPECTED = json.loads((DATA / "expected.json").read_text("utf-8"))
OFFICIAL, LONGBENCH, CACHEBLEND, QUESTION = (
    json.loads((DATA / file).read_text("utf-8"))[0]
    for file in ("official.json", "longbench.json", "cacheblend.json", "questions.json")
)


@pytest.mark.parametrize("file", EXPECTED)
def test_every_form_is_read(file: str) -> None:
    dataset = load(DATA / file)
    found = [
        {
            **{name: getattr(e, name) for name in ("id", "question", "type", "task")},
            **{"answers": [*e.answers], "supporting": [*e.supporting]},
            "contexts": [[p.title, p.text] for p in e.contexts],
        }
        for e in dataset.examples
    ]
    assert found == EXPECTED[file]
    distinct = {(p.title, p.text) for e in dataset.examples for p in e.contexts}
    assert len(dataset.corpus) == len(distinct)  # each passage once
    assert len(load(DATA / file, corpus=DATA / "corpus.json").corpus) == 12


def test_questions_find_their_corpus_in_the_same_folder() -> None:
    filled, given = load(DATA / "questions.json").examples
    titles = {p.title for p in filled.contexts}
    assert len(titles) == 10
    assert filled.supporting == ("Title 3", "Title 7")
    assert {*filled.supporting} <= titles
    assert [p.title for p in given.contexts] == ["Title 9", "Title 7", "Title 3"]


POOL = [Passage(f"Text {n}.", f"Title {n}", id=str(n)) for n in range(40)]
ASKING = [
    Example(f"id{n}", f"Question {n}?", ("x",), (), supporting=(f"Title {n}", f"Title {n + 1}"))
    for n in range(9)
]


@given(st.integers(0, 5), st.integers(2, 40), st.integers(0, 8))
def test_distractors_fill_up_and_follow_seed_and_question_alone(seed: int, total: int, n: int) -> None:
    example = with_distractors(ASKING[n], POOL, total=total, seed=seed)
    titles = [p.title for p in example.contexts]
    assert len(set(titles)) == len(titles) == total
    assert set(ASKING[n].supporting) <= set(titles)
    assert with_distractors(example, POOL, total=total, seed=seed) == example
    needed = with_distractors(example, POOL, total=1, seed=seed)
    assert sorted(p.title for p in needed.contexts) == sorted(example.supporting)


def test_distractors_come_in_any_place() -> None:
    drawn = [[p.title for p in with_distractors(ASKING[0], POOL, seed=seed).contexts] for seed in range(9)]
    assert len({titles.index("Title 0") for titles in drawn}) > 3


@pytest.mark.parametrize(
    ("good", "broken", "field"),
    [
        (OFFICIAL, {**OFFICIAL, "answer": ""}, "answer"),
        (OFFICIAL, {**OFFICIAL, "context": [["Title", "no list"]]}, "context"),
        (OFFICIAL, {**OFFICIAL, "context": [["Title", []]]}, "context"),
        (OFFICIAL, {**OFFICIAL, "supporting_facts": ["x"]}, "supporting_facts"),
        (LONGBENCH, {**LONGBENCH, "context": "no passages"}, "context"),
        (LONGBENCH, {**LONGBENCH, "input": "", "dataset": "hotpotqa"}, "input"),
        (LONGBENCH, {**LONGBENCH, "dataset": "lcc"}, "dataset"),
        (LONGBENCH, 7, None),
        (CACHEBLEND, {**CACHEBLEND, "answers": [["Jane"], [5]]}, "answers"),
        (QUESTION, {**QUESTION, "mentioned_titles": ["Nowhere"]}, "mentioned_titles"),
        (QUESTION, {**QUESTION, "contexts": ["Nowhere"]}, "contexts"),
    ],
)
def test_a_broken_record_is_named(tmp_path: Path, good: Any, broken: Any, field: str | None) -> None:
    shutil.copy(DATA / "corpus.json", tmp_path)
    path = tmp_path / "dev.json"
    for text in (json.dumps([good, broken]), f"{json.dumps(good)}\n{json.dumps(broken)}"):
        path.write_text(text)
        with pytest.raises(CorpusError) as error:
            load(path)
        assert (error.value.path, error.value.line, error.value.setting) == (str(path), 2, field)
        assert broken == 7 or len(load(path, limit=1).examples) == 1


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", None),
        (b"[]", None),
        (b"\xff\xfe", None),
        (b'{"question": "x"}\n{broken', 2),
        (b'[{"question": "x"}, ', None),
        (b'{"question": "x", "answers": ["y"]}', 1),  # of no known form
        (b"{}", 1),
        (json.dumps(QUESTION).encode(), None),  # its corpus is missing
        (json.dumps([OFFICIAL, OFFICIAL]).encode(), None),  # two questions with one id
        (json.dumps([{**LONGBENCH, "dataset": d, "_id": d} for d in ("hotpotqa", "musique")]).encode(), None),
    ],
)
def test_files_that_are_no_datasets_are_refused(tmp_path: Path, content: bytes, line: int | None) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(CorpusError) as error:
        load(tmp_path / "x.json")
    assert (error.value.path, error.value.line) == (str(tmp_path / "x.json"), line)


def test_a_name_is_downloaded_by_the_hub_s_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the hub's two calls everything is real."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CorpusError) as offline:
        load("2wikimqa")
    assert offline.value.setting == "evaluate.dataset"
    with ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/2wikimqa.jsonl", json.dumps(LONGBENCH))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(tmp_path / "data.zip"))
    assert load("2wikimqa").examples[0].id == "lb"


def test_excerpts_follow_each_other_and_a_rest_is_left() -> None:
    sizes = [module.PIECE_WORDS] * module.PIECES + [module.LEAD_WORDS, module.CONTINUATION_WORDS]
    text = " ".join(f"w{i}" + ("\n\n" if i % 50 == 49 else "") for i in range(2 * sum(sizes) + 5))
    found = module.continuations(text, "book")
    parts = [[*(p.text for p in e.contexts), e.question, *e.answers] for e in found]
    assert text.startswith("".join(map("".join, parts)))
    assert [[len(part.split()) for part in excerpt] for excerpt in parts] == [sizes] * 2
    with pytest.raises(CorpusError):
        module.continuations("few words", "short")
    dataset = load("reference", limit=3)  # the bundled text is long enough
    assert (len(dataset.examples), dataset.task.metric) == (3, "perplexity")


PASSAGES = list(load("generated", limit=1).examples[0].contexts)


@pytest.mark.parametrize("kind", [kind for kind in EDITS if kind != WINDOW])
def test_an_edit_follows_its_seed_and_changes_what_it_says(kind: str) -> None:
    old = before(kind, PASSAGES, "0:q")
    assert old == before(kind, PASSAGES, "0:q") != before(kind, PASSAGES, "1:q")
    assert [p.title for p in old] == [p.title for p in PASSAGES]
    assert sum(a.text != b.text for a, b in zip(old, PASSAGES, strict=True)) >= len(PASSAGES) - 1
    digits = [[re.sub(r"\d+", "#", p.text) for p in passages] for passages in (old, PASSAGES)]
    assert (digits[0] == digits[1]) == (kind == "numbers")
    was, now = (Counter(word for p in passages for word in p.text.split()) for passages in (old, PASSAGES))
    if kind == "moved":
        assert was == now
    if kind == "negations":
        assert {*(was - now), *(now - was)} == {"not"}
    if kind.startswith(edits.REVISED):
        share = float(kind.partition("@")[2])
        assert 0 < (now - was).total() <= share * now.total() + len(PASSAGES)


def test_another_window_has_the_same_tokens() -> None:
    chunks = [tuple(range(n, n + length)) for n, length in ((0, 10), (20, 7), (40, 1), (50, 12))]
    cut = cut_elsewhere(chunks)
    assert [i for ids in cut for i in ids] == [i for ids in chunks for i in ids]
    assert not set(cut) & set(chunks)
    assert cut_elsewhere([]) == []


def test_every_fact_has_one_place_and_another_value_that_the_prompt_lacks() -> None:
    examples = load("facts").examples
    assert {e.type for e in examples} == set(generate_world.FORMS)
    for example in examples:
        (own,) = [p for p in example.contexts if p.title in example.supporting]
        assert own.text.count(example.question + example.answers[0]) == 1
        assert example.counterfactual not in " ".join(p.text for p in example.contexts)
        fact = Fact(own.title, example.answers[0].strip(), example.counterfactual)
        old = replace(own, text=own.text.replace(fact.now, fact.before))
        assert before(ANSWER, example.contexts, "0", fact) == [
            old if p == own else p for p in example.contexts
        ]
    with pytest.raises(ConfigError):
        before(ANSWER, PASSAGES, "0")


def test_the_script_remakes_the_bundled_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their digest is that of the set of which a solver answered every question from the passages alone."""
    monkeypatch.setattr(sys, "argv", ["generate_world", "--out", str(tmp_path)])
    generate_world.main()
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_bytes() for path in BUNDLED["facts"].parent.glob("*.jsonl")}
    digest = hashlib.sha256(made["generated_questions.jsonl"] + made["generated_corpus.jsonl"]).hexdigest()
    assert digest.startswith("a9e8448bdce5092d")


FIVE = tuple(Passage(f"Some text of passage {n}.", f"T{n}") for n in range(5))
EXAMPLE = Example("e", "Who?", ("x",), FIVE)


def test_method_strings_become_variants_and_back() -> None:
    text = "query+shift, deviation[1,2]@0.1,query@.05/bos,reuse/none, none+shift,full,exact/int8,query@0.1/bos/int8"
    found = parse_methods(
        split_list(f"{text},query+shift@0.1/revised@0.05,query+prior@.05~0.15/int8"), (0.05, 0.3), coded=True
    )
    names = [v.name for v in found]
    assert names == [
        "full", "reuse", "query+shift@0.05", "query+shift@0.3", "deviation[1,2]@0.1", "query@0.05/bos", "reuse/none",
        "none+shift", "exact/int8", "query@0.1/bos/int8", "query+shift@0.1/revised@0.05",
        "query+prior@0.05~0.15/int8",
    ]  # fmt: skip
    assert [v.name for v in parse_methods(names, (0.9,), coded=True)] == names
    assert [v.series for v in found][2:6] == ["query+shift", "query+shift", "deviation[1,2]", "query/bos"]
    by_name = dict(zip(names, found, strict=True))
    layers = by_name["deviation[1,2]@0.1"].blend
    assert (layers.policy, layers.ratio) == ("deviation[1,2]", 0.1)
    assert by_name["query@0.1/bos/int8"].uncoded == "query@0.1/bos"
    refined = by_name["query+prior@0.05~0.15/int8"]
    assert (refined.blend.ratio, refined.blend.refine, refined.series) == (
        0.05,
        0.15,
        "query+prior~0.15/int8",
    )
    edited = by_name["query+shift@0.1/revised@0.05"]
    assert (edited.edit, edited.blend.near) == ("revised@0.05", True)
    assert (edited.unedited, edited.uncorrected) == ("query+shift@0.1", "query@0.1/revised@0.05")


@pytest.mark.parametrize(
    "word",
    [
        *("query@", "query", "qeury@0.1", "query+shfit@0.1", "query@1.5", "query@0.1/boss", "full@0.1"),
        *("query[1]@0.1", "deviation[0]@0.1", "full/int8", "query@0.1/int8@4", "query@0.1/int8/bos"),
        *("query@0.1/int9", "exact@0.1", "full/numbers", "query@0.1/numbrs", "query@0.1~2", "reuse~0.1"),
    ],
)
def test_a_word_that_is_no_method(word: str) -> None:
    with pytest.raises(ConfigError):
        parse_methods([word], (), coded=True)
    for of_evaluations in ("reuse/int8", "reuse/numbers", "exact"):  # codecs and edits are not for benches
        with pytest.raises(ConfigError):
            parse_methods([of_evaluations], ())


@given(st.integers(1, 5), st.integers(0, 30), st.integers(0, 9))
def test_orders_are_all_different_and_no_more_than_possible(n: int, permutations: int, seed: int) -> None:
    """More permutations leave the first ones as they are."""
    example = replace(EXAMPLE, contexts=FIVE[:n])
    orders = [permuted(e.contexts, e, seed) for e in with_permutations([example], permutations)]
    assert len(set(orders)) == len(orders) == min(permutations + 1, math.factorial(n))
    assert orders[0] == example.contexts
    assert all(sorted(o, key=lambda p: p.title) == list(example.contexts) for o in orders)


def test_orders_follow_question_and_seed() -> None:
    one, other = with_permutations([EXAMPLE, replace(EXAMPLE, id="f")], 1)[1::2]
    assert len({permuted(FIVE, e, seed) for e in (one, other) for seed in range(4)}) > 4
    retrieved = replace(EXAMPLE, contexts=())
    assert [len(with_permutations([retrieved], 9, passages=n)) for n in (2, 10)] == [2, 10]
    with pytest.raises(CorpusError):
        with_permutations([EXAMPLE, replace(EXAMPLE, id="e~1")], 1)  # the id of a permutation


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize(("window", "chunks"), [(None, None), (None, 2), (7, None), (7, 3), (1000, None)])
def test_windows_are_the_passages_joined_and_cut(
    window: int | None, chunks: int | None, goes_on: bool
) -> None:
    """After their permutation; of a text to continue, the last chunks are kept."""
    engine, task = tiny_engine(), tasks.CONTINUATION.name if goes_on else EXAMPLE.task
    source = PromptSource(engine, EvaluateConfig(window=window, chunks=chunks, seed=3))
    other = with_permutations([replace(EXAMPLE, task=task)], 1)[1]
    found, _, _ = source.with_passages(other)
    assert found.contexts == permuted(FIVE, other, 3) != FIVE
    prompt, whole = (s.build(found) for s in (source, PromptSource(engine, EvaluateConfig())))
    if not goes_on:
        assert whole == engine.prompts.build("Who?", found.contexts)
    assert (prompt.prefix, prompt.suffix) == (whole.prefix, whole.suffix)
    cut = [chunk.ids for chunk in whole.chunks]
    if window is not None:
        joined = tuple(i for ids in cut for i in ids)
        cut = [joined[at : at + window] for at in range(0, len(joined), window)]
    kept = slice(-(chunks or 0), None) if goes_on else slice(chunks)
    assert [chunk.ids for chunk in prompt.chunks] == cut[kept]


def test_open_retrieves_and_reports_recall(tmp_path: Path) -> None:
    engine = tiny_engine()
    tokens = TokenCounter("tiny", "", lambda _: 1)
    engine.index = VectorIndex.create(tmp_path, Embedder.load("minilm-l6"), tokens, chunk_tokens=64)
    texts = ("Maria Lund built the lighthouse.", "Bees dance.", "Tea is grown in Assam.")
    engine.index.add([{"text": text, "title": text.split()[0]} for text in texts])
    source = PromptSource(engine, EvaluateConfig(setting="open", top_k=1))
    asked = Example("e", "Who built the lighthouse?", ("Lund",), (), supporting=("Maria", "Tea"))
    found, recall, seconds = source.with_passages(asked)
    assert ([p.title for p in found.contexts], recall, seconds > 0) == (["Maria"], 0.5, True)
    assert source.with_passages(replace(asked, supporting=()))[1] is None


def test_a_task_asks_in_its_own_words_unless_the_user_has_others(tmp_path: Path) -> None:
    ours, samsum = settings_from(), tasks.LONGBENCH["samsum"]
    assert with_task(ours, samsum).prompt.instruction == samsum.prompt.instruction
    assert with_task(ours, samsum).decode.max_new_tokens == 128
    assert with_task(ours, samsum, 32).decode.max_new_tokens == 32  # given, and equal to the default
    assert with_task(ours, tasks.QUESTIONS) == ours
    file = tmp_path / "c.yaml"
    file.write_text("decode: {max_new_tokens: 5}\nprompt: {instruction: Read.}\nblend: {ratio: 0.3}")
    theirs = settings_from(file)
    assert with_task(theirs, samsum) == theirs
    assert (theirs.decode.max_new_tokens, theirs.prompt.instruction) == (5, "Read.")
