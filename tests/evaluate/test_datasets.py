"""Data sets: files of every form, names, what is made; what is broken is named by its place."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import huggingface_hub
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.core import Passage
from blendserve.errors import ConfigError, CorpusError
from blendserve.evaluate import edits, lines, words
from blendserve.evaluate.datasets import BUNDLED, continuations, load, with_distractors
from blendserve.evaluate.edits import ANSWER, EDITS, WINDOW, Fact, before, cut_elsewhere
from blendserve.evaluate.formats import Example
from blendserve.evaluate.generated import facts, make
from blendserve.evaluate.workload import zipf_blocks

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
    assert len(dataset.corpus) == len(dataset.examples[0].contexts)  # each passage once
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
    assert with_distractors(example, POOL, total=1, seed=seed).contexts  # what is needed stays


def test_distractors_are_drawn_to_any_place_or_retrieved() -> None:
    assert with_distractors(ASKING[0], POOL).contexts != with_distractors(ASKING[0], POOL, seed=1).contexts
    places = {[p.title for p in with_distractors(e, POOL).contexts].index(e.supporting[0]) for e in ASKING}
    assert len(places) > 3
    near = {"Question 2?": POOL}
    example = with_distractors(ASKING[2], POOL, nearest=lambda question, n: near[question][:n])
    titles = [f"Title {n}" for n in range(10)]
    assert sorted(p.title for p in example.contexts) == titles != [p.title for p in example.contexts]


@pytest.mark.parametrize(
    ("good", "broken", "field"),
    [
        (OFFICIAL, {**OFFICIAL, "answer": ""}, "answer"),
        (OFFICIAL, {**OFFICIAL, "question": None}, "question"),
        (OFFICIAL, {**OFFICIAL, "context": [["Title", "no list"]]}, "context"),
        (OFFICIAL, {**OFFICIAL, "context": [["Title", []]]}, "context"),
        (OFFICIAL, {**OFFICIAL, "context": None}, "context"),
        (OFFICIAL, {**OFFICIAL, "supporting_facts": ["x"]}, "supporting_facts"),
        (OFFICIAL, {**OFFICIAL, "type": 5}, "type"),
        (LONGBENCH, {**LONGBENCH, "context": "no passages"}, "context"),
        (LONGBENCH, {**LONGBENCH, "answers": []}, "answers"),
        (LONGBENCH, {**LONGBENCH, "input": "", "dataset": "hotpotqa"}, "input"),
        (LONGBENCH, {**LONGBENCH, "dataset": "lcc"}, "dataset"),
        (LONGBENCH, {**LONGBENCH, "dataset": "triviaqa"}, "context"),
        (LONGBENCH, {**LONGBENCH, "dataset": "samsum"}, "context"),
        (LONGBENCH, 7, None),
        (CACHEBLEND, {**CACHEBLEND, "answers": "Jane"}, "answers"),
        (CACHEBLEND, {**CACHEBLEND, "answers": [["Jane"], [5]]}, "answers"),
        (CACHEBLEND, {**CACHEBLEND, "ctxs": [{"title": "no text"}]}, "ctxs"),
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


def test_a_name_is_fetched_once_or_the_file_to_bring_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the hub's two calls everything is real."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = tmp_path / "blendserve" / "datasets" / "2wikimqa.jsonl"
    with pytest.raises(CorpusError) as offline:
        load("2wikimqa")
    assert offline.value.path == str(here)
    with ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/2wikimqa.jsonl", json.dumps(LONGBENCH))
    with monkeypatch.context() as online:
        online.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
        online.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(tmp_path / "data.zip"))
        assert load("2wikimqa").examples[0].id == "lb"
    assert load("2wikimqa").examples[0].id == "lb"  # as if the file had been put there by hand
    assert [p.name for p in here.parent.iterdir()] == ["2wikimqa.jsonl"]


def test_every_made_line_is_in_its_record_once() -> None:
    examples = load("lines").examples
    assert len(examples) == lines.RECORDS
    places = set()
    for example in examples:
        name = example.question.partition(" in line ")[2].partition("?")[0]
        record = "\n".join(p.text for p in example.contexts)
        assert record.count(f"line {name}:") == 1
        assert len(record.split("\n")) == lines.CHUNKS * lines.PER_CHUNK
        line = f"line {name}: REGISTER_CONTENT is <{example.answers[0]}>"
        places |= {n for n, p in enumerate(example.contexts) if line in p.text.split("\n")}
    assert places == set(range(lines.CHUNKS))
    assert load("lines", limit=2) == load("lines", limit=2)
    assert load("lines", limit=2, seed=1).examples != load("lines", limit=2).examples


def test_excerpts_follow_each_other_and_a_rest_is_left() -> None:
    whole = words.PIECES * words.PIECE + words.LEAD + words.CONTINUATION
    text = " ".join(f"w{i}" + ("\n\n" if i % 50 == 49 else "") for i in range(2 * whole + 5))
    found = words.excerpts(text)
    assert text.startswith("".join("".join([*pieces, lead, answer]) for pieces, lead, answer in found))
    sizes = ([words.PIECE] * words.PIECES, words.LEAD, words.CONTINUATION)
    assert [([len(p.split()) for p in ps], len(l.split()), len(a.split())) for ps, l, a in found] == [
        sizes
    ] * 2
    with pytest.raises(CorpusError):
        continuations("few words", "short")
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
    assert {e.type for e in examples} == set(facts.FORMS)
    assert load("facts", seed=1).examples != examples
    for example in examples:
        (own,) = [p for p in example.contexts if p.title in example.supporting]
        assert own.text.count(example.question + example.answers[0]) == 1
        assert example.rival not in " ".join(p.text for p in example.contexts)
        fact = Fact(own.title, example.answers[0].strip(), example.rival)
        old = before(ANSWER, example.contexts, "0", fact)
        changed = [p for p, q in zip(old, example.contexts, strict=True) if p != q]
        assert [(p.title, p.text) for p in changed] == [(own.title, own.text.replace(fact.now, fact.before))]
    with pytest.raises(ConfigError):
        before(ANSWER, PASSAGES, "0")


def test_the_generated_set_is_the_one_that_was_solved() -> None:
    """By its digest: a solver that reads the passages alone answered every question of it."""
    corpus, questions = make()
    path = BUNDLED["generated"]
    shipped = path.read_bytes(), path.with_name("generated_corpus.jsonl").read_bytes()
    for content, made in zip(shipped, (questions, corpus), strict=True):
        assert [json.loads(line) for line in content.decode().splitlines()] == made
    assert hashlib.sha256(b"".join(shipped)).hexdigest().startswith("a9e8448bdce5092d")


def test_blocks_have_one_mix_and_no_query_twice() -> None:
    blocks = zipf_blocks(400, 10, 50, 6, seed=3)
    queries = {query for block in blocks for query in block}
    assert {len(set(query)) for query in queries} == {6}
    assert len(queries) == 500
    mixes = [Counter(chunk for query in block for chunk in query) for block in blocks]
    assert all(abs(mixes[0][n] - mix[n]) <= 1 for mix in mixes for n in range(400))
    assert blocks == zipf_blocks(400, 10, 50, 6, seed=3) != zipf_blocks(400, 10, 50, 6, seed=4)
