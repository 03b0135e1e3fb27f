"""Thoughts are told apart from what is said, wherever the text is cut, in each API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.serve.answer_parts import AnswerParser, AnswerParts, begins_thought
from tests.support.http import MODEL, Server, asked, serving
from tests.support.messages import URL as MESSAGES
from tests.support.messages import assembled, body, stream
from tests.support.scripted import scripted_model
from tests.support.tokenizers import bundled_tokenizer

PIECES = ["<think>", "Hm, 2", " < 3.", "</think>", "\n\nIt is", " less."]
THOUGHT, TEXT = "Hm, 2 < 3.", "It is less."
CUTS = st.lists(st.integers(1, 9), max_size=40)
WRITTEN = st.text(st.sampled_from("ab<>/ \nthink"), max_size=20)


def parsed(text: str, cuts: Sequence[int], is_thinking: bool = False) -> AnswerParts:
    """The parts of a text that comes in pieces of these lengths."""
    parser, found = AnswerParser({}, is_thinking), list[AnswerParts]()
    for length in (*cuts, len(text)):
        found.append(parser.push(text[:length]))
        text = text[length:]
    found.append(parser.finish())
    return AnswerParts("".join(each.thought for each in found), "".join(each.text for each in found))


@given(WRITTEN, WRITTEN, CUTS, st.booleans())
def test_a_thought_ends_at_its_first_mark(thought: str, text: str, cuts: list[int], is_open: bool) -> None:
    whole = f"{'' if is_open else '<think>'}{thought}</think>\n\n{text}"
    if "</think>" not in thought + "</think"[: len(thought)]:
        assert parsed(whole, cuts, is_open)[:2] == (thought, text.lstrip())


@given(WRITTEN, CUTS)
def test_text_without_a_thought_stays(text: str, cuts: list[int]) -> None:
    if not text.lstrip().startswith("<think>"):
        assert parsed(text, cuts)[:2] == ("", text)


@given(WRITTEN, CUTS, st.booleans())
def test_cuts_change_nothing(text: str, cuts: list[int], is_open: bool) -> None:
    assert parsed(text, cuts, is_open)[:2] == AnswerParser({}, is_open).whole(text)[:2]


def test_a_thought_that_is_cut_off_is_no_text() -> None:
    assert parsed("<think>Hm </thi", [3, 4])[:2] == ("Hm </thi", "")


def test_a_prompt_may_begin_the_thought() -> None:
    tokenizer = bundled_tokenizer()
    for prompt, expected in (("Why?<think>\n", True), ("<think></think>\n", False), ("Why?", False)):
        assert begins_thought(tokenizer, tokenizer(prompt)["input_ids"]) is expected


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options: dict[str, Any] = {"engine": {"decode": {"max_new_tokens": None}}, "has_index": False}
    with serving(tmp_path_factory.mktemp("thinking"), model=scripted_model(*PIECES), **options) as made:
        yield made


def test_each_api_has_a_place_for_thoughts(server: Server) -> None:
    chat = server.post("/v1/chat/completions", {"model": MODEL, "messages": asked()}).json()
    message = chat["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, TEXT)
    chunks = [chunk.choices[0].delta for chunk in server.chat(stream=True)]
    for name, expected in (("reasoning_content", THOUGHT), ("content", TEXT)):
        assert "".join(getattr(delta, name, None) or "" for delta in chunks) == expected
    request = body(max_tokens=50)
    for told in (server.post(MESSAGES, request).json(), assembled(stream(server, request))):
        thinking, text = told["content"]
        assert (thinking["type"], thinking["thinking"], text["text"]) == ("thinking", THOUGHT, TEXT)
    response = server.openai.responses.create(model=MODEL, input="Is it?")
    with server.openai.responses.stream(model=MODEL, input="Is it?") as events:
        streamed = events.get_final_response()
    for found in (response, streamed):
        reasoning: Any = found.output[0]
        assert (reasoning.type, reasoning.content[0].text, found.output_text) == ("reasoning", THOUGHT, TEXT)
    plain = server.post("/v1/completions", {"model": MODEL, "prompt": "Is it?"}).json()
    assert plain["choices"][0]["text"] == "".join(PIECES)
