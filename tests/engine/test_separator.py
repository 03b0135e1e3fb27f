"""`prompt.separator`: a question that contains it is cut into chunks and a question."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.config import Config, PromptConfig, changed
from blendserve.core import Passage
from blendserve.engine.request import MAX_PARTS, Request
from blendserve.errors import ConfigError, InputError
from tests.engine.helpers import CONFIG, PASSAGES, QUESTIONS, engine

SEPARATOR = " # # "


def test_a_cut_question_is_the_request_with_these_passages() -> None:
    texts = [p.text for p in PASSAGES[:3]]
    with engine(changed(CONFIG, prompt=changed(CONFIG.prompt, separator=SEPARATOR).model_dump())) as cutting:
        cut = cutting.answer(SEPARATOR.join([*texts, QUESTIONS[0]]))
    with engine() as plain:
        same = plain.answer(QUESTIONS[0], texts)
    assert (cut.text, cut.passages) == (same.text, same.passages)
    assert cut.report.tokens_prompt == same.report.tokens_prompt


def test_without_the_setting_a_question_stays_whole() -> None:
    asked = Request(SEPARATOR.join(["One.", "Two?"]))
    assert asked.split("") is asked
    assert asked.split("###") is asked


def test_empty_parts_are_dropped_and_others_follow_the_own_passages() -> None:
    own = (Passage("Own.", "Title"),)
    cut = Request(f"{SEPARATOR}One. {SEPARATOR} \n {SEPARATOR}Two?", own).split(SEPARATOR)
    assert cut == Request("Two?", (*own, Passage("One.")))
    assert Request(f"{SEPARATOR}Two?").split(SEPARATOR) == Request("Two?", ())


@given(st.text("#a "), st.sampled_from(["#", "##", " # ", SEPARATOR, "a#a"]))
def test_cutting_twice_is_cutting_once(text: str, separator: str) -> None:
    try:
        cut = Request(text).split(separator)
    except InputError:
        return
    assert separator not in cut.question
    assert cut.split(separator) is cut


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (f"One.{SEPARATOR}Two.{SEPARATOR}", "behind the last separator ' # # '"),
        (SEPARATOR * 3, "behind the last separator"),
        (f"One.{SEPARATOR}" * (MAX_PARTS + 1) + "What?", f"more than {MAX_PARTS} chunks"),
    ],
)
def test_a_question_is_needed_and_chunks_are_bounded(question: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Request(question).split(SEPARATOR)


def test_as_many_chunks_as_allowed() -> None:
    cut = Request(f"One.{SEPARATOR}" * MAX_PARTS + "What?").split(SEPARATOR)
    assert len(cut.passages or ()) == MAX_PARTS


@pytest.mark.parametrize("separator", [" ", "\n\n", "\t "])
def test_a_separator_of_white_space_alone_is_refused(separator: str) -> None:
    with pytest.raises(ConfigError, match=r"'prompt\.separator' cannot be .*white space"):
        PromptConfig(separator=separator)
    assert Config().prompt.separator == ""
