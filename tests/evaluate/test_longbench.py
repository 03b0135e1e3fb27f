"""LongBench's forms: what each task's context is cut into, and what it is asked and scored by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blendserve.config import changed
from blendserve.errors import CorpusError
from blendserve.evaluate.config import settings_from
from blendserve.evaluate.datasets import load
from blendserve.evaluate.formats import STORY_WORDS, Example
from blendserve.evaluate.job import _asking
from blendserve.evaluate.tasks import LONGBENCH, QUESTIONS
from tests.evaluate.helpers import CONFIG, predictions, run, tiny_engine, write_dataset

NUMBERED = "Passage 1:\nOslo\nA town.\nBy a fjord.\n\nPassage 2:\nLima\nAnother.\n"
TRIVIA = (
    "Passage:\nBo painted boats.\nPassage: is not meant here.\nQuestion:\nWho painted?\nAnswer:\nBo\n\n\n"
    "Passage:\nAl swam.\nQuestion:\nWho swam?\nAnswer:\nAl"
).replace("\nPassage: is", "\nThe Passage: is")
DIALOGUES = "Dialogue: Bo: hi\r\nAl: late!\r\nSummary: Al is late.\n\nDialogue: Al: bye\nSummary: Al leaves."

pytestmark = pytest.mark.usefixtures("undrawn")


def record(task: str | None, context: str, asked: str = "Who?", **more: Any) -> dict[str, Any]:
    named = {} if task is None else {"dataset": task}
    return {
        "input": asked, "context": context, "answers": ["Bo"], "length": 9, "language": "en", "all_classes": None,
        "_id": "x", **named, **more,
    }  # fmt: skip


def read(folder: Path, values: dict[str, Any]) -> Example:
    path = folder / "task.jsonl"
    path.write_text(json.dumps(values))
    dataset = load(path)
    assert dataset.task.name == dataset.examples[0].task
    return dataset.examples[0]


@pytest.mark.parametrize("task", ["hotpotqa", "musique", "2wikimqa", "multi_news", "hotpotqa_e"])
def test_numbered_passages(tmp_path: Path, task: str) -> None:
    example = read(tmp_path, record(task, NUMBERED))
    assert example.task == task.removesuffix("_e")
    assert [(p.title, p.text) for p in example.contexts] == [
        ("Oslo", "A town.\nBy a fjord."),
        ("Lima", "Another."),
    ]


@pytest.mark.parametrize("task", ["triviaqa", None])
def test_trivia_is_examples_with_their_answers(tmp_path: Path, task: str | None) -> None:
    asked = "Passage:\nCy ran.\nQuestion:\nWho ran?\nAnswer:"
    example = read(tmp_path, record(task, TRIVIA, asked))
    assert (example.task, example.question) == ("triviaqa", asked)
    assert [p.text.split("\n")[0] for p in example.contexts] == ["Passage:", "Passage:"]
    assert [p.text.rsplit("\n", 1)[1] for p in example.contexts] == ["Bo", "Al"]
    assert "The Passage: is not meant here." in example.contexts[0].text


@pytest.mark.parametrize("task", ["samsum", None])
def test_dialogues_with_their_summaries(tmp_path: Path, task: str | None) -> None:
    example = read(tmp_path, record(task, DIALOGUES, "Dialogue: Cy: hm\nSummary: "))
    assert example.task == "samsum"
    assert [p.text for p in example.contexts] == [
        "Dialogue: Bo: hi\r\nAl: late!\r\nSummary: Al is late.",
        "Dialogue: Al: bye\nSummary: Al leaves.",
    ]
    assert example.question == "Dialogue: Cy: hm\nSummary:"


def test_a_story_is_cut_by_words(tmp_path: Path) -> None:
    story = "\n\n".join(f"In part {n} " + "they sail on, " * 80 for n in range(9))
    example = read(tmp_path, record("narrativeqa", story))
    words = [p.text.split() for p in example.contexts]
    assert [word for part in words for word in part] == story.split()
    assert {len(part) for part in words[:-1]} == {STORY_WORDS}
    assert 0 < len(words[-1]) <= STORY_WORDS


def test_news_have_no_input(tmp_path: Path) -> None:
    for task in ("multi_news", None):
        example = read(tmp_path, record(task, NUMBERED, ""))
        assert (example.task, example.question) == ("multi_news", "What do these news say?")
    with pytest.raises(CorpusError, match="field `input` must be a string"):
        read(tmp_path, record("hotpotqa", NUMBERED, ""))


def test_other_tasks_and_mixed_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="field `dataset` must be one of 2wikimqa, hotpotqa"):
        read(tmp_path, record("lcc", "x = 1"))
    for task in ("triviaqa", "samsum"):
        with pytest.raises(CorpusError, match="field `context` must be examples that start with `Passage:`"):
            read(tmp_path, record(task, "no examples"))
    path = tmp_path / "mixed.jsonl"
    lines = [record("hotpotqa", NUMBERED), record("musique", NUMBERED, _id="y")]
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(CorpusError, match=r"several tasks \(hotpotqa, musique\)"):
        load(path)


def test_a_task_asks_in_its_own_words_unless_the_user_has_others() -> None:
    said: list[str] = []
    ours = _asking(settings_from(), LONGBENCH["samsum"], said.append)
    assert ours.prompt.instruction.startswith("Summarise the last dialogue")
    assert said == ["answers of samsum may need 128 tokens: these end after 32 (--max-new-tokens)"]
    theirs = changed(settings_from(), prompt={"instruction": "Read."})
    assert _asking(theirs, LONGBENCH["triviaqa"], said.append) == theirs
    assert _asking(settings_from(), QUESTIONS, said.append) == settings_from()
    assert len(said) == 1


def test_a_run_scores_by_its_tasks_metric(tmp_path: Path) -> None:
    """The same passages and answers as CacheBlend's form has them, in LongBench's."""
    (plain,) = json.loads(write_dataset(tmp_path, 1).read_text())
    context = "\n".join(f"Passage {n}:\n{p['title']}\n{p['text']}" for n, p in enumerate(plain["ctxs"], 1))
    path = tmp_path / "news.jsonl"
    path.write_text(json.dumps(record("multi_news", context, "", answers=["painted 3 boats by the river"])))
    outcome = run(tmp_path, path, tiny_engine(config=CONFIG), methods=("query",))
    figures = outcome.figures
    assert (figures["task"], figures["metric"]) == ("multi_news", "LongBench's Rouge-L")
    for line in predictions(outcome):
        wanted = LONGBENCH["multi_news"].score(line["answer"], ["painted 3 boats by the river"])
        assert figures["methods"][line["method"]]["score"]["mean"] == line["score"] == wanted
