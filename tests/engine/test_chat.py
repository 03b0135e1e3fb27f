"""Plain chats: the ids of transformers' chat template, whatever is said, and no control token of a text among them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.config import PromptConfig, ServeConfig
from blendserve.core import PLAIN_SUFFIX
from blendserve.engine.chat import MIN_TEXT, Chat
from blendserve.engine.prompt import PromptBuilder
from blendserve.errors import InputError
from blendserve.models.tokenizer import Tokenizer, agree
from tests.support.tokenizers import bundled_tokenizer

# In the manner of Qwen's and Hermes' templates, of Llama's and of Mistral's, with what these do to texts.
HERMES = """{% if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif not (tools and loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TRIMMED = """{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}

{{ m.content | trim }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant

{% endif %}"""
ALTERNATING = """{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}[INST]{{ m.content }}[/INST]{% endfor %}"""
TEMPLATES = {"hermes": HERMES, "trimmed": TRIMMED, "alternating": ALTERNATING, "own": ""}

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "What to find"}},
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "find", "description": "Find.", "parameters": PARAMETERS},
}
CALL: dict[str, Any] = {
    "id": "1",
    "type": "function",
    "function": {"name": "find", "arguments": {"query": "caf\u00e9"}},
}

texts = st.text(max_size=40) | st.sampled_from(
    ["", " ", "\n", "\nDocuments:\n    a\n", "<tool_call>", "{{ x }}"]
)
turns = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": texts}),
    min_size=1,
    max_size=5,
)


@cache
def tokenizers(template: str) -> tuple[Any, Tokenizer]:
    """transformers' tokenizer with this template, and ours."""
    theirs = copy.deepcopy(bundled_tokenizer())
    theirs.chat_template = TEMPLATES[template] or theirs.chat_template
    return theirs, Tokenizer.of(theirs)


def rendered(tokenizer: Any, chat: Chat) -> tuple[int, ...]:
    return PromptBuilder(tokenizer, PromptConfig()).plain(chat).ids


@pytest.mark.parametrize("template", TEMPLATES)
@given(messages=turns, system=st.none() | texts, tools=st.booleans())
def test_a_chat_has_the_ids_of_transformers(
    template: str, messages: list[Mapping[str, Any]], system: str | None, tools: bool
) -> None:
    theirs, ours = tokenizers(template)
    said: list[Any] = [{"role": "system", "content": system}] * (system is not None) + list(messages)
    if tools and template == "hermes":
        said += [{"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "a"}]
        offered = [TOOL]
    else:
        offered = []
    chat = Chat(tuple(said), tuple(offered))
    try:
        expected = theirs.apply_chat_template(
            said, tools=offered or None, tokenize=True, add_generation_prompt=True, return_dict=False
        )
    except Exception:  # the template's own refusal
        for tokenizer in (theirs, ours):
            with pytest.raises(InputError):
                rendered(tokenizer, chat)
        return
    assert rendered(theirs, chat) == rendered(ours, chat) == tuple(expected)


WORDS = st.text("abc de", min_size=70, max_size=90).filter(lambda text: len(text.strip()) >= MIN_TEXT)


@pytest.mark.parametrize("template", ["hermes", "own"])
@given(said=st.lists(WORDS, min_size=1, max_size=5))
def test_the_places_of_texts_hold_what_clients_wrote_and_no_answer(template: str, said: list[str]) -> None:
    """Every other message is the assistant's, in capitals; tokens that hold some of the template, too, are left out."""
    roles = ("user", "assistant")
    messages = tuple(
        {"role": roles[i % 2], "content": text.upper() if i % 2 else text} for i, text in enumerate(said)
    )
    ours = tokenizers(template)[1]
    prompt = PromptBuilder(ours, PromptConfig()).plain(Chat(messages))
    found = [ours.decode(prompt.ids[span.start : span.stop]) for span in prompt.texts]
    for text, own in zip(found, said[::2], strict=True):
        assert text.strip() in own
        assert len(text.strip()) > len(own.strip()) - 20


class Placeless:
    """A tokenizer that does not know where in a text its tokens are, as those without a Rust backend."""

    backend_tokenizer = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False) -> Any:
        return self._tokenizer(text, add_special_tokens, split_special_tokens)

    def __deepcopy__(self, memo: Any) -> Placeless:
        return Placeless(copy.deepcopy(self._tokenizer, memo))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_without_places_of_tokens_a_chat_has_the_same_ids_and_nothing_to_learn() -> None:
    ours, chat = (
        tokenizers("own")[1],
        Chat(({"role": "user", "content": f"{'Some words, ' * 9}<|im_end|> more."},)),
    )
    placed, without = (
        PromptBuilder(tokenizer, PromptConfig()).plain(chat) for tokenizer in (ours, Placeless(ours))
    )
    assert without.ids == placed.ids
    assert placed.texts
    assert without.texts == ()


@pytest.mark.parametrize("template", ["hermes", "trimmed", "own"])
@given(text=texts, control=st.sampled_from(["<|im_end|>", "<|im_start|>system\n", "<|endoftext|>"]))
def test_no_text_of_a_chat_becomes_a_control_token(template: str, text: str, control: str) -> None:
    theirs, ours = tokenizers(template)
    special, tools = set(theirs.all_special_ids), [TOOL] if template == "hermes" else []

    def controls(said: str) -> list[int]:
        call = {**CALL, "function": {"name": "find", "arguments": {"query": said}}}
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": said},
            {"role": "user", "content": said},
            {"role": "assistant", "content": said, "tool_calls": [call]},
        ]
        described = [{**tool, "function": {**TOOL["function"], "description": said}} for tool in tools]
        return [i for i in rendered(ours, Chat(tuple(messages), tuple(described))) if i in special]

    assert controls(f"{text}{control}{text}") == controls("a")


def test_tools_without_a_place_in_the_template_are_described_in_words() -> None:
    """Calls and their results, too: no template is asked for a role that it does not know."""
    ours = tokenizers("trimmed")[1]
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    )
    text = ours.decode(rendered(ours, Chat(messages, (TOOL,))))
    said = ("Be brief.", json.dumps(TOOL["function"]), "Hi", json.dumps(call["function"]), "4")
    places = [text.index(each) for each in said]
    assert places == sorted(places)


def test_variables_reach_the_template_but_replace_nothing_of_the_call() -> None:
    ours = copy.deepcopy(tokenizers("trimmed")[1])
    ours.chat_template = "{{ 'quiet' if enable_thinking is false else 'loud' }} {{ messages[0].content }}"
    said = ({"role": "user", "content": "Hi"},)
    assert "loud" in ours.decode(rendered(ours, Chat(said)))
    assert "quiet" in ours.decode(rendered(ours, Chat(said, variables={"enable_thinking": False})))
    for name in ("chat_template", "tokenize", "tools"):
        with pytest.raises(InputError):
            rendered(ours, Chat(said, variables={name: "x"}))


@pytest.mark.parametrize("template", TEMPLATES)
def test_our_tokenizer_renders_tools_as_transformers_does(template: str) -> None:
    theirs, ours = tokenizers(template)
    assert agree(ours, theirs)
    other = copy.deepcopy(ours)
    other.chat_template = str(ours.chat_template).replace("tojson", "tojson(indent=1)")
    assert agree(other, theirs) == (template != "hermes")


def test_a_text_is_read_with_its_control_tokens_and_ends_in_a_suffix() -> None:
    theirs, ours = tokenizers("own")
    text = "<|im_start|>user\nWhere does the otter sleep?<|im_end|>\n<|im_start|>assistant\nIn the river, as all do"
    for tokenizer in (theirs, ours):
        prompt = PromptBuilder(tokenizer, PromptConfig()).plain(text)
        assert list(prompt.ids) == theirs(text)["input_ids"]
        assert (prompt.is_plain, prompt.chunks, len(prompt.suffix)) == (True, (), PLAIN_SUFFIX)
        assert len(PromptBuilder(tokenizer, PromptConfig()).plain("a").prefix) == 0
        with pytest.raises(InputError):
            PromptBuilder(tokenizer, PromptConfig()).plain("")


@pytest.mark.parametrize(
    ("system", "left", "removed"),
    [
        (
            "x-anthropic-billing-header: cch=1;\nYou help.",
            "You help.",
            ["x-anthropic-billing-header: cch=1;"],
        ),
        (
            "x-anthropic-billing-header: a\n\nYou help.\nx-anthropic-billing-header: b",
            "You help.\nx-anthropic-billing-header: b",
            ["x-anthropic-billing-header: a"],
        ),
        ("x-anthropic-billing-header: a", None, ["x-anthropic-billing-header: a"]),
        ("You help.", "You help.", []),
    ],
)
def test_volatile_lines_are_removed_from_the_start_alone(
    system: str, left: str | None, removed: list[str]
) -> None:
    hello = {"role": "user", "content": "x-anthropic-billing-header: mine"}
    chat, lines = Chat(({"role": "system", "content": system}, hello)).without_lines(
        ServeConfig().volatile_lines
    )
    kept = [] if left is None else [{"role": "system", "content": left}]
    assert (list(chat.messages), lines) == ([*kept, hello], removed)
    assert Chat((hello,)).without_lines(ServeConfig().volatile_lines)[1] == []
    assert Chat(({"role": "system", "content": system}, hello)).without_lines(())[1] == []
