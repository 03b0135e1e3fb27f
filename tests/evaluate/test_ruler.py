"""RULER's tasks: a reader of the passages by pattern finds what the questions expect."""

from __future__ import annotations

import re

import pytest

from blendserve.errors import CorpusError
from blendserve.evaluate.datasets import load
from blendserve.evaluate.formats import Example

MAGIC = re.compile(r"One of the special magic numbers for (\w+) is: (\d+)\.")
VARIABLE = re.compile(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.")


def read(example: Example) -> set[str]:
    """The answer of somebody who reads every passage."""
    text = " ".join(passage.text for passage in example.contexts)
    if pairs := MAGIC.findall(text):
        return {value for key, value in pairs if re.search(rf"\b{key}\b", example.question)}
    known = dict[str, str]()
    for name, value in VARIABLE.findall(text):  # each is assigned before it is used
        known[name] = known.get(value, value)
    return {name for name, value in known.items() if value in example.question}


@pytest.mark.parametrize("task", ["multivalue", "multiquery", "variables"])
def test_the_passages_hold_what_a_question_expects_and_no_more(task: str) -> None:
    dataset = load(f"ruler/{task}/4k")
    assert dataset == load(f"ruler/{task}/4k")
    assert len({example.contexts for example in dataset.examples}) == len(dataset.examples)
    for example in dataset.examples:
        (gold,) = example.answers
        assert read(example) == set(gold.split())
        assert dataset.task.score(gold, example.answers) == 1.0
        assert dataset.task.score(gold.split()[0], example.answers) == 1 / len(gold.split())
        assert dataset.task.score("", example.answers) == 0.0


@pytest.mark.parametrize("name", ["ruler/", "ruler/variables", "ruler/variables/5k", "ruler/needle/4k"])
def test_other_tasks_are_refused(name: str) -> None:
    with pytest.raises(CorpusError) as raised:
        load(name)
    assert raised.value.setting == "evaluate.dataset"
