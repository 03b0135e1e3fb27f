"""Four forms, one Example; what is broken is named with record and field; names work offline or say what to fetch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import huggingface_hub
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.core import Passage
from blendserve.errors import CorpusError
from blendserve.evaluate import datasets
from blendserve.evaluate.datasets import load, with_distractors
from blendserve.evaluate.formats import Example
from blendserve.evaluate.tasks import LONGBENCH as LONGBENCH_TASKS

OFFICIAL = {
    "_id": "a1",
    "type": "compositional",
    "question": "Who is the mother of the director of film Polish-Russian War?",
    "context": [
        ["Polish-Russian War (film)", ["It is a 2009 film", " directed by Xawery. "]],
        ["Empty", []],
        ["Xawery", ["He is the son of Małgorzata."]],
    ],
    "supporting_facts": [["Polish-Russian War (film)", 1], ["Xawery", 0], ["Xawery", 1]],
    "evidences": [["Xawery", "mother", "Małgorzata"]],
    "answer": "Małgorzata Braunek",
}
LONGBENCH = {
    "input": "Where was he born?",
    "context": "Passage 1:\nFirst title\nLine one, see Passage 9:\nas said.\n\nPassage 2:\nOnly a text without a title\n",
    "answers": ["Warsaw", "Warszawa"],
    "length": 12,
    "_id": "lb",
}
CACHEBLEND = {
    "question": "Who?",
    "answers": [["Jane", "J. Doe"], ["Jane"]],
    "ctxs": [{"title": "", "text": " one "}, {"title": "T", "text": "two", "score": 1}, {"text": "three"}],
}
CORPUS = [{"title": f"Title {n}", "text": f"Text {n}."} for n in range(25)]
QUESTION = {"id": "q1", "question": "Which?", "answers": ["This"], "mentioned_titles": ["Title 3", "Title 7"]}


def written(path: Path, records: Any, lines: bool = False) -> Path:
    text = "\n".join(json.dumps(r, ensure_ascii=False) for r in records) if lines else json.dumps(records)
    path.write_text(text, encoding="utf-8")
    return path


def shown(passages: Sequence[Passage]) -> list[tuple[str, str]]:
    return [(p.title, p.text) for p in passages]


@pytest.mark.parametrize("lines", [False, True])
def test_official_form(tmp_path: Path, lines: bool) -> None:
    dataset = load(written(tmp_path / "dev.json", [OFFICIAL], lines))
    example = dataset.examples[0]
    assert (example.id, example.type, example.question) == ("a1", "compositional", OFFICIAL["question"])
    assert example.answers == ("Małgorzata Braunek",)
    assert example.supporting == ("Polish-Russian War (film)", "Xawery")
    assert shown(example.contexts) == [
        ("Polish-Russian War (film)", "It is a 2009 film directed by Xawery."),
        ("Xawery", "He is the son of Małgorzata."),
    ]
    assert dataset.corpus == example.contexts


def test_longbench_form(tmp_path: Path) -> None:
    example = load(written(tmp_path / "2wikimqa.jsonl", [LONGBENCH], lines=True)).examples[0]
    assert (example.id, example.question, example.answers) == (
        "lb",
        "Where was he born?",
        ("Warsaw", "Warszawa"),
    )
    assert shown(example.contexts) == [
        ("First title", "Line one, see Passage 9:\nas said."),
        ("", "Only a text without a title"),
    ]
    assert (example.type, example.supporting) == ("", ())


def test_cacheblend_form(tmp_path: Path) -> None:
    dataset = load(written(tmp_path / "musique_s.json", [CACHEBLEND, {**CACHEBLEND, "answers": ["flat"]}]))
    assert [e.answers for e in dataset.examples] == [("Jane", "J. Doe"), ("flat",)]
    assert [e.id for e in dataset.examples] == ["musique_s-1", "musique_s-2"]
    assert shown(dataset.examples[0].contexts) == [("", "one"), ("T", "two"), ("", "three")]
    assert len(dataset.corpus) == 3  # each passage once, though two questions have it


@pytest.mark.parametrize(
    ("questions", "corpus"), [("questions.json", "corpus.json"), ("my_questions.jsonl", "my_corpus.jsonl")]
)
def test_questions_find_their_corpus_beside_them(tmp_path: Path, questions: str, corpus: str) -> None:
    written(tmp_path / corpus, CORPUS, lines=corpus.endswith("l"))
    dataset = load(written(tmp_path / questions, [QUESTION], lines=questions.endswith("l")))
    example = dataset.examples[0]
    assert len(dataset.corpus) == 25
    assert len({p.title for p in example.contexts}) == 10
    assert {"Title 3", "Title 7"} <= {p.title for p in example.contexts}
    assert example.supporting == ("Title 3", "Title 7")


def test_contexts_given_by_title_keep_their_order(tmp_path: Path) -> None:
    elsewhere = written(tmp_path / "passages.json", CORPUS)
    record = {**QUESTION, "contexts": ["Title 9", "Title 7", "Title 3"], "type": "comparison"}
    dataset = load(written(tmp_path / "q.json", [record]), corpus=elsewhere)
    assert [p.title for p in dataset.examples[0].contexts] == ["Title 9", "Title 7", "Title 3"]
    assert dataset.examples[0].type == "comparison"


def test_a_corpus_can_be_searched_behind_closed_contexts(tmp_path: Path) -> None:
    dataset = load(written(tmp_path / "dev.json", [OFFICIAL]), corpus=written(tmp_path / "all.json", CORPUS))
    assert len(dataset.corpus) == 25
    assert len(dataset.examples[0].contexts) == 2


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


def test_seed_and_question_change_the_draw() -> None:
    first, other = with_distractors(ASKING[0], POOL), with_distractors(ASKING[0], POOL, seed=1)
    assert first.contexts != other.contexts
    places = {[p.title for p in with_distractors(e, POOL).contexts].index(e.supporting[0]) for e in ASKING}
    assert len(places) > 3  # what is needed does not stand in a fixed place


def test_distractors_can_be_retrieved() -> None:
    asked = []

    def nearest(question: str, n: int) -> list[Passage]:
        asked.append((question, n))
        return POOL[:n]

    example = with_distractors(ASKING[2], POOL, nearest=nearest)
    assert asked == [("Question 2?", 12)]
    assert {p.title for p in example.contexts} == {f"Title {n}" for n in range(10)}
    assert [p.title for p in example.contexts] != [f"Title {n}" for n in range(10)]


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({**OFFICIAL, "answer": ""}, r"field `answer` must be a string with something in it, but is ''"),
        ({k: v for k, v in OFFICIAL.items() if k != "question"}, r"field `question` .* but is missing"),
        (
            {**OFFICIAL, "context": [["Title", "no list"]]},
            r"field `context` must be a list of \[title, \[sentence",
        ),
        ({**OFFICIAL, "context": [["Title", []]]}, r"field `context` must be passages with text"),
        ({**OFFICIAL, "context": None}, r"field `context` must be a list, but is None"),
        ({**OFFICIAL, "supporting_facts": ["x"]}, r"field `supporting_facts` must be"),
        ({**OFFICIAL, "type": 5}, r"field `type` must be a string"),
    ],
)
def test_a_broken_official_record_is_named(tmp_path: Path, record: dict[str, Any], problem: str) -> None:
    for lines, where in ((False, "record"), (True, "line")):
        path = written(tmp_path / "dev.json", [{**OFFICIAL, "_id": "fine"}, record], lines)
        with pytest.raises(CorpusError, match=rf"dev\.json, {where} 2: {problem}"):
            load(path)
        assert len(load(path, limit=1).examples) == 1


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (
            {**LONGBENCH, "context": "no passages"},
            "field `context` must be passages that start with `Passage 1:`",
        ),
        ({**LONGBENCH, "answers": []}, "field `answers` must be a list of at least one string, but is "),
        ({**CACHEBLEND, "answers": "Jane"}, "field `answers` must be a list"),
        ({**CACHEBLEND, "answers": [["Jane"], [5]]}, "field `answers` must be a list"),
        ({**CACHEBLEND, "ctxs": [{"title": "no text"}]}, "field `ctxs` must be a list of"),
        (
            {"question": "x", "answers": ["y"]},
            "has the fields question, answers and is of no known form: bring",
        ),
        ({}, r"has the fields \(none\) and is of no known form"),
    ],
)
def test_other_broken_records_are_named(tmp_path: Path, record: dict[str, Any], problem: str) -> None:
    with pytest.raises(CorpusError, match=f"record 1: {problem}"):
        load(written(tmp_path / "data.json", [record]))


def test_titles_must_be_in_the_corpus(tmp_path: Path) -> None:
    written(tmp_path / "corpus.json", CORPUS)
    for field in ("mentioned_titles", "contexts"):
        path = written(
            tmp_path / "questions.json", [{**QUESTION, "contexts": ["Title 1"], field: ["Nowhere"]}]
        )
        with pytest.raises(
            CorpusError, match=rf"record 1: field `{field}` must be titles .*'Nowhere' is none"
        ):
            load(path)
    (tmp_path / "corpus.json").unlink()
    with pytest.raises(
        CorpusError, match="passages of a corpus that is not there: give it, or put it beside"
    ):
        load(path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "holds no questions"),
        (b"[]", "holds no questions"),
        (b'{"a": 1}\n{broken', "line 2: not JSON"),
        (b'[{"a": 1}, ', "not JSON"),
        (b'[{"a": 1}, 7]', "record 2: is no object but 7"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_files_that_are_no_datasets_are_refused(tmp_path: Path, text: bytes, problem: str) -> None:
    (tmp_path / "x.json").write_bytes(text)
    with pytest.raises(CorpusError, match=problem):
        load(tmp_path / "x.json")


def test_ids_must_differ(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="two questions have the id 'a1'"):
        load(written(tmp_path / "x.json", [OFFICIAL, OFFICIAL]))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        CorpusError, match="known names: generated, lines, facts, reference, 2wikimqa, hotpotqa, musique"
    ):
        load("2wikimq")


def test_offline_a_name_says_which_file_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = tmp_path / "blendserve" / "datasets" / "2wikimqa.jsonl"
    with pytest.raises(
        CorpusError, match=rf"get data/2wikimqa\.jsonl out of its data\.zip .* put it here as {here}"
    ):
        load("2wikimqa")
    here.parent.mkdir(parents=True)
    written(here, [LONGBENCH], lines=True)
    assert load("2wikimqa").examples[0].id == "lb"  # and having done that, it works


def test_online_the_member_of_the_archive_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub stands still here; everything behind its two calls is real."""
    with ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/2wikimqa.jsonl", json.dumps(LONGBENCH))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(tmp_path / "data.zip"))
    assert load("2wikimqa").examples[0].id == "lb"
    (tmp_path / "data.zip").unlink()
    assert load("2wikimqa").examples[0].id == "lb"
    assert [p.name for p in (tmp_path / "blendserve" / "datasets").iterdir()] == ["2wikimqa.jsonl"]
    assert set(datasets.HOSTED) == {*LONGBENCH_TASKS, "2wikimultihopqa"}
