"""Chat templates with names, and ones that would compute for hours or fill the memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from blendserve.config import ModelConfig
from blendserve.engine.chat import Chat, chat_ids
from blendserve.errors import ModelError
from blendserve.models.chat_templates import MAX_LENGTH, MAX_STEPS, TemplateLimit, render
from blendserve.models.loader import load_tokenizer
from tests.support.files import own_cache
from tests.support.models import config
from tests.support.tokenizers import bundled_tokenizer

MESSAGES = [{"role": "user", "content": "Hello"}]
TOO_MUCH = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop that calls itself": (
        "{% for a in range(9999) recursive %}{% if loop.depth < 3 %}{{ loop(range(9999)) }}{% endif %}{% endfor %}"
    ),
    "a macro of macros": (
        "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}"
    ),
    "endless macros": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "text times": "{{ 'a' * 20000000000 }}",
    "times text": "{{ 20000000000 * 'a' }}",
    "list times": "{{ [1] * 20000000000 }}",
    "doubled by ~": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubled by +": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "power": "{{ 9 ** 9999999999 }}",
    "power of powers": "{{ ((9 ** 999) ** 999) ** 999 }}",
    "format": "{{ '%20000000000d' % 1 }}",
    "format by a star": "{{ '%*d' % (20000000000, 1) }}",
    "format method": "{{ '{:20000000000}'.format(1) }}",
    "format filter": "{{ '%20000000000d' | format(1) }}",
    "center": "{{ 'a' | center(20000000000) }}",
    "ljust": "{{ 'a'.ljust(20000000000) }}",
    "indent": "{{ 'a' | indent(20000000000) }}",
    "indented JSON": "{{ [1] | tojson(indent=20000000000) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "replace filter": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "join": "{{ ([1] * 1000000) | join('b' * 1000000) }}",
    "join method": "{{ ('b' * 1000000).join(['a'] * 1000000) }}",
    "batch": "{{ 'a' | batch(20000000000, 'b') | list }}",
}


@pytest.mark.parametrize("kind", TOO_MUCH)
def test_a_template_that_computes_too_much_is_stopped(kind: str) -> None:
    with pytest.raises(TemplateLimit) as error:
        render(TOO_MUCH[kind], messages=MESSAGES)
    assert not isinstance(error.value.__context__, MemoryError)  # before it asks for the memory


def test_what_templates_do_is_far_below_the_limits() -> None:
    text = "a b\n" * (MAX_LENGTH // 64)
    steps = "{% for i in range(9000) %}{{ 'x' if i % 3000 == 0 }}{% endfor %}"
    assert render(steps) == "xxx"
    assert MAX_STEPS > 9000
    many = (
        "{{ m ~ '!' }}{{ m | replace('a', 'bc') | indent(2) | length }}{{ '%s' % m | length }}{{ '-' * 10 }}"
    )
    assert render(many, m=text).startswith(text + "!")
    assert (
        render(
            "{% set x = namespace(n=1) %}{% for i in m %}{% set x.n = x.n * 2 %}{% endfor %}{{ x.n }}",
            m="abc",
        )
        == "8"
    )


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ missing.part }}", "{% for %}", "{{ 'a' + 1 }}"])
def test_whatever_fails_in_a_template_is_a_template_error(template: str) -> None:
    with pytest.raises(TemplateError) as error:
        render(template)
    assert not isinstance(error.value, TemplateLimit)


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
NAMED = {"default": TEMPLATE, "tool_use": TEMPLATE + "{{ tools | length }} tools\n", "rag": "never"}


def tokenizer_with(folder: Path, template: Any) -> Any:
    config("llama").save_pretrained(folder)
    bundled_tokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return load_tokenizer(ModelConfig(name=str(folder)))


def listed(*names: str) -> list[dict[str, str]]:
    return [{"name": name, "template": NAMED[name]} for name in names]


def rendered(tokenizer: Any, *tools: dict[str, Any]) -> str:
    def tokenize(text: str, is_literal: bool, before: int) -> Any:
        return tokenizer(text, add_special_tokens=False)["input_ids"], []

    return str(tokenizer.decode(chat_ids(tokenizer, Chat(tuple(MESSAGES), tools), tokenize)[0]))


TOOL = {"type": "function", "function": {"name": "find", "description": "", "parameters": {"type": "object"}}}


def test_of_several_templates_the_default_and_the_one_for_tools_are_used(tmp_path: Path) -> None:
    both = tokenizer_with(tmp_path / "both", listed("default", "tool_use", "rag"))
    plain = tokenizer_with(tmp_path / "plain", TEMPLATE)
    assert rendered(both) == rendered(plain)
    assert rendered(both, TOOL) == rendered(plain) + "\n1 tools"
    described = rendered(tokenizer_with(tmp_path / "default", listed("default")), TOOL)
    assert '"name": "find"' in described  # by words, where no template has a place for them


def test_templates_without_a_default_and_ones_that_cost_too_much_are_model_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache(tmp_path / "cache", monkeypatch)
    for n, template in enumerate(
        (listed("tool_use", "rag"), TOO_MUCH["nested loops"], TOO_MUCH["text times"])
    ):
        with pytest.raises(ModelError):
            tokenizer_with(tmp_path / str(n), template)
