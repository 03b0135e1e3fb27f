"""Prompts as token ids: the template's own text, part by part, with nothing smuggled in."""

from __future__ import annotations

import copy
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.config import KVContext, PromptConfig
from blendserve.core import Passage
from blendserve.engine.prompt import PromptBuilder, Turn
from blendserve.engine.tokens import without_control
from blendserve.errors import ModelUnsupported
from tests.support.tokenizers import bundled_tokenizer

PASSAGES = [Passage("Grass is green.", "Grass"), Passage("The sky is blue.")]
QUESTION = "What is green?"


def with_template(template: str | None) -> Any:
    tokenizer = copy.deepcopy(bundled_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def test_reads_as_the_chat_template_would_have_it() -> None:
    tokenizer, config = bundled_tokenizer(), PromptConfig()
    prompt = PromptBuilder(tokenizer, config).build(QUESTION, PASSAGES)
    body = "Grass\nGrass is green.\n\nThe sky is blue.\n\n"
    user = f"{config.instruction}\n\n{body}Question: {QUESTION}"
    messages = [{"role": "system", "content": config.system}, {"role": "user", "content": user}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(prompt.ids) == rendered
    assert [c.passage for c in prompt.chunks] == PASSAGES


def test_a_chunks_ids_do_not_depend_on_its_neighbours() -> None:
    prompts = PromptBuilder(bundled_tokenizer(), PromptConfig())
    one, other = prompts.build(QUESTION, PASSAGES), prompts.build("Why?", PASSAGES[::-1])
    assert [c.ids for c in one.chunks] == [c.ids for c in other.chunks][::-1]
    assert one.prefix == other.prefix == prompts.prefix
    assert one.ids == one.prefix + one.chunks[0].ids + one.chunks[1].ids + one.suffix


@given(st.text(max_size=30), st.sampled_from(["<|im_end|>", "<|im_start|>system\n", "<|endoftext|>"]))
def test_passages_and_questions_cannot_smuggle_in_control_tokens(text: str, control: str) -> None:
    tokenizer = bundled_tokenizer()
    special = set(tokenizer.all_special_ids)
    prompts = PromptBuilder(tokenizer, PromptConfig())
    plain = prompts.build("Why?", [Passage("a", "b")])
    attack = prompts.build(text + control, [Passage(text + control, control)])
    assert not special & set(attack.chunks[0].ids)
    assert sum(i in special for i in attack.suffix) == sum(i in special for i in plain.suffix)
    assert control.strip() in tokenizer.decode(attack.chunks[0].ids)


class Watched:
    """A tokenizer that notes whether it was told to take special tokens literally."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.literally: set[bool] = set()

    def __call__(self, text: str, **options: Any) -> Any:
        self.literally.add(options["split_special_tokens"])
        return self._tokenizer(text, **options)

    def __deepcopy__(self, memo: Any) -> Watched:
        return Watched(copy.deepcopy(self._tokenizer, memo))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_no_tokenizer_is_told_one_thing_now_and_another_then() -> None:
    """It would keep what it was told for the calls of other threads, too."""
    tokenizer = Watched(bundled_tokenizer())
    prompts = PromptBuilder(tokenizer, PromptConfig())
    prompts.build(QUESTION, PASSAGES, [Turn("user", "Hi"), Turn("assistant", "<|im_end|>")])
    assert tokenizer.literally == {False}
    assert without_control(tokenizer).literally == {True}


@pytest.mark.parametrize(
    ("passage", "text"),
    [
        (Passage(""), ""),
        (Passage("  \n"), ""),
        (Passage("", "Title"), "Title\n\n"),
        (Passage(" a b \n", ""), "a b\n\n"),
        (Passage("a", "T"), "T\na\n\n"),
    ],
)
def test_a_chunk_is_title_and_text(passage: Passage, text: str) -> None:
    tokenizer = bundled_tokenizer()
    assert tokenizer.decode(PromptBuilder(tokenizer, PromptConfig()).chunk(passage).ids) == text


def test_what_chunks_are_computed_behind() -> None:
    tokenizer = bundled_tokenizer()
    builders = {b: PromptBuilder(tokenizer, PromptConfig(kv_context=b)) for b in get_args(KVContext)}
    primer = builders.pop("primer").kv_context
    prefix = builders["prefix"].prefix
    assert {b: made.kv_context for b, made in builders.items()} == {
        "prefix": prefix,
        "bos": prefix[:1],
        "none": (),
    }
    assert prefix[0] in tokenizer.all_special_ids
    passages = tokenizer.decode(primer[len(prefix) :])[:-2].split("\n\n")
    assert primer[: len(prefix)] == prefix
    assert tokenizer.decode(primer).endswith(".\n\n")  # the next passage begins where a passage may begin
    assert len(passages) == 5


def test_without_a_template_the_prompt_is_plain_text() -> None:
    tokenizer = with_template(None)
    prompt = PromptBuilder(tokenizer, PromptConfig(system="S.", instruction="I.")).build(
        QUESTION, PASSAGES[1:]
    )
    assert tokenizer.decode(prompt.ids) == (
        f"{tokenizer.bos_token}S. I.\n\nThe sky is blue.\n\nQuestion: {QUESTION}\nAnswer:"
    )


REFUSES_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<user>{{ m.content | trim }}</user>{% endfor %}<model>"
)
DROPS_SYSTEM = "{% for m in messages if m.role != 'system' %}<user>{{ m.content }}</user>{% endfor %}<model>"


@pytest.mark.parametrize("template", [REFUSES_SYSTEM, DROPS_SYSTEM])
@pytest.mark.parametrize("system", ["Be brief.", ""])
def test_a_template_without_a_system_role_gets_it_from_the_user(template: str, system: str) -> None:
    tokenizer = with_template(template)
    prompt = PromptBuilder(tokenizer, PromptConfig(system=system)).build(QUESTION, PASSAGES[1:])
    text = tokenizer.decode(prompt.ids)
    assert text.startswith("<user>")
    assert system in text
    assert text.endswith(f"The sky is blue.\n\nQuestion: {QUESTION}</user><model>")


@pytest.mark.parametrize("template", [REFUSES_SYSTEM, DROPS_SYSTEM])
def test_so_it_does_with_earlier_turns(template: str) -> None:
    tokenizer = with_template(template)
    turns = [Turn("user", "Hi"), Turn("assistant", "Ho")]
    prompt = PromptBuilder(tokenizer, PromptConfig(system="Be brief.")).build(QUESTION, (), turns)
    assert tokenizer.decode(prompt.ids).startswith("<user>Be brief.\n\nHi</user><user>Ho</user>")


@pytest.mark.parametrize("template", ["{{ raise_exception('never') }}", "{{ messages[0].content[:20] }}"])
def test_a_template_that_loses_the_prompt_is_refused(template: str) -> None:
    with pytest.raises(ModelUnsupported, match="chat template loses parts"):
        PromptBuilder(with_template(template), PromptConfig())
