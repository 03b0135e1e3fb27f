"""Prompts as token ids: the template's own text, part by part, with nothing smuggled in; questions cut by a separator."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.config import KVContext, PromptConfig
from blendserve.core import Passage
from blendserve.engine.prompt import ChatMessage, PromptBuilder, literal_tokenizer
from blendserve.engine.request import MAX_PARTS, Request
from blendserve.errors import ConfigError, InputError, ModelUnsupported
from tests.support.tokenizers import bundled_tokenizer

PASSAGES = [Passage("Grass is green.", "Grass"), Passage("The sky is blue.")]
QUESTION, SEPARATOR = "What is green?", " # # "


@cache
def copied_tokenizer() -> Any:
    """For other chat templates."""
    return copy.deepcopy(bundled_tokenizer())


def with_template(template: str | None, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(copied_tokenizer(), "chat_template", template)
    return copied_tokenizer()


def test_reads_as_the_chat_template_has_it_and_a_chunk_has_the_same_ids_anywhere() -> None:
    tokenizer, config = bundled_tokenizer(), PromptConfig()
    prompts = PromptBuilder(tokenizer, config)
    prompt, other = prompts.build(QUESTION, PASSAGES), prompts.build("Why?", PASSAGES[::-1])
    body = "Grass\nGrass is green.\n\nThe sky is blue.\n\n"
    user = f"{config.instruction}\n\n{body}Question: {QUESTION}"
    messages = [{"role": "system", "content": config.system}, {"role": "user", "content": user}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(prompt.ids) == rendered
    assert [c.passage for c in prompt.chunks] == PASSAGES
    assert prompt.chunks == other.chunks[::-1]
    assert prompt.prefix == other.prefix == prompts.prefix


@given(st.text(max_size=30), st.sampled_from(["<|im_end|>", "<|im_start|>system\n", "<|endoftext|>"]))
def test_passages_questions_and_turns_cannot_smuggle_in_control_tokens(text: str, control: str) -> None:
    tokenizer = bundled_tokenizer()
    special = set(tokenizer.all_special_ids)
    prompts = PromptBuilder(tokenizer, PromptConfig())
    turns = [ChatMessage("user", "Hi"), ChatMessage("assistant", "Ho")]
    honest = prompts.build("Why?", [Passage("a", "b")], turns)
    turns = [ChatMessage("user", text + control), ChatMessage("assistant", control + text)]
    attack = prompts.build(text + control, [Passage(text + control, control)], turns)
    assert not special & set(attack.chunks[0].ids)
    for part, expected in ((attack.prefix, honest.prefix), (attack.suffix, honest.suffix)):
        assert sum(i in special for i in part) == sum(i in special for i in expected)
    assert control.strip() in tokenizer.decode(attack.chunks[0].ids)
    assert not tokenizer.backend_tokenizer.encode_special_tokens  # other threads' calls would find it set
    assert literal_tokenizer(tokenizer).backend_tokenizer.encode_special_tokens


def test_turns_stand_between_the_system_text_or_its_own_and_the_question() -> None:
    tokenizer, system = bundled_tokenizer(), PromptConfig().system
    prompts = PromptBuilder(tokenizer, PromptConfig())

    def text(*turns: tuple[str, str]) -> Any:
        prompt = prompts.build(QUESTION, (), [ChatMessage(*turn) for turn in turns])
        return tokenizer.decode(prompt.ids)

    talk = text(("user", "Hello"), ("assistant", "Good day"))
    places = [talk.index(part) for part in (system, "Hello", "Good day", QUESTION)]
    assert places == sorted(places)
    assert text(("system", system)) == text()
    assert "Speak Latin." in text(("system", "Speak Latin."))
    assert system not in text(("system", "Speak Latin."))


def test_a_chunk_is_title_and_text() -> None:
    tokenizer, prompts = bundled_tokenizer(), PromptBuilder(bundled_tokenizer(), PromptConfig())
    passages = [Passage("  \n"), Passage("", "Title"), Passage(" a b \n"), Passage("a", "T")]
    texts = [tokenizer.decode(prompts.chunk(passage).ids) for passage in passages]
    assert texts == ["", "Title\n\n", "a b\n\n", "T\na\n\n"]


def test_chunks_are_computed_after_each_context() -> None:
    tokenizer = bundled_tokenizer()
    contexts = {c: PromptBuilder(tokenizer, PromptConfig(), c).kv_context for c in get_args(KVContext)}
    prefix, primer = contexts["prefix"], contexts.pop("primer")
    assert contexts == {"prefix": prefix, "bos": prefix[:1], "none": ()}
    assert primer[: len(prefix)] == prefix == PromptBuilder(tokenizer, PromptConfig()).prefix
    assert tokenizer.decode(primer).endswith(".\n\n")  # the next passage begins where a passage may begin


# Chat templates


def test_without_a_template_the_prompt_is_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, config = with_template(None, monkeypatch), PromptConfig(system="S.", instruction="I.")
    prompt = PromptBuilder(tokenizer, config).build(QUESTION, PASSAGES[1:])
    text = f"{tokenizer.bos_token}S. I.\n\nThe sky is blue.\n\nQuestion: {QUESTION}\nAnswer:"
    assert tokenizer.decode(prompt.ids) == text


REFUSES_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "<user>{{ m.content | trim }}</user>{% endfor %}<model>"
)
DROPS_SYSTEM = "{% for m in messages if m.role != 'system' %}<user>{{ m.content }}</user>{% endfor %}<model>"


@pytest.mark.parametrize("template", [REFUSES_SYSTEM, DROPS_SYSTEM])
@pytest.mark.parametrize("system", ["Be brief.", ""])
def test_a_template_without_a_system_role_gets_it_from_the_user(
    template: str, system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = with_template(template, monkeypatch)
    prompts = PromptBuilder(tokenizer, PromptConfig(system=system))
    text = tokenizer.decode(prompts.build(QUESTION, PASSAGES[1:]).ids)
    assert text.startswith(f"<user>{system}")
    assert text.endswith(f"The sky is blue.\n\nQuestion: {QUESTION}</user><model>")
    turns = [ChatMessage("user", "Hi"), ChatMessage("assistant", "Ho")]
    text = tokenizer.decode(prompts.build(QUESTION, (), turns).ids)
    assert text.replace("\n", "").startswith(f"<user>{system}Hi</user><user>Ho</user>")
    if template == REFUSES_SYSTEM:  # turns that do not alternate, too
        with pytest.raises(InputError):
            prompts.build(QUESTION, (), [ChatMessage("user", "Hi")])


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('never') }}",
        "{{ messages[0].content[:20] }}",
        "{{ range(100000) | random }}{% for m in messages %}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_loses_the_prompt_or_never_writes_it_twice_is_refused(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelUnsupported):
        PromptBuilder(with_template(template, monkeypatch), PromptConfig())


DATED = "{{ strftime_now('%d %b %Y, %H:%M:%S.%f') }} {% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def test_a_template_that_writes_the_time_gives_every_builder_the_same_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunk KV of yesterday has today's key."""
    tokenizer = with_template(DATED, monkeypatch)
    first, second = (PromptBuilder(tokenizer, PromptConfig()) for _ in range(2))
    turns = [ChatMessage("user", "Hi"), ChatMessage("assistant", "Ho")]
    assert first.kv_context == second.kv_context
    assert first.build(QUESTION, PASSAGES, turns) == second.build(QUESTION, PASSAGES, turns)
    other = PromptBuilder(tokenizer, PromptConfig(date="2026-03-04"))
    assert tokenizer.decode(other.prefix).startswith("04 Mar 2026, 00:00:00.000000")
    assert (first.writes_date, other.writes_date) == (True, True)


def test_other_templates_write_no_date() -> None:
    assert not PromptBuilder(bundled_tokenizer(), PromptConfig()).writes_date


# A separator


def test_parts_in_front_of_the_last_separator_are_passages() -> None:
    """Behind the request's own; empty ones are dropped."""
    own, both = (PASSAGES[0],), (PASSAGES[0], Passage("One."))
    asked = Request(f"{SEPARATOR}One. {SEPARATOR} \n {SEPARATOR}Two?", own)
    assert asked.split("") == asked.split("###") == asked
    assert asked.split(SEPARATOR) == asked.split(SEPARATOR).split(SEPARATOR) == Request("Two?", both)
    assert Request(f"{SEPARATOR}Two?").split(SEPARATOR) == Request("Two?", ())
    assert len(Request(f"One.{SEPARATOR}" * MAX_PARTS + "What?").split(SEPARATOR).passages or ()) == MAX_PARTS


@pytest.mark.parametrize(
    "question", [f"One.{SEPARATOR}" * 2, SEPARATOR * 3, "too many" + SEPARATOR * (MAX_PARTS + 1) + "?"]
)
def test_a_question_is_needed_and_parts_are_bounded(question: str) -> None:
    with pytest.raises(InputError) as error:
        Request(question).split(SEPARATOR)
    assert error.value.setting == "question"
    with pytest.raises(ConfigError):
        PromptConfig(separator="\n\t ")  # white space would cut any question
