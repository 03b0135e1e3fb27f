"""Chats of OpenAI's API -> token ids, as the model's own chat template gives them.

PromptBuilder puts passages into words of the settings. Here nothing is added: the ids are those of transformers'
`apply_chat_template(messages, tools, add_generation_prompt=True)`, so stored text is found where any other server would
have it. One difference: control tokens inside a text are read as text, so no message can end its turn.
"""

from __future__ import annotations

import inspect
import json
import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from blendserve.core import Span, TokenIds
from blendserve.errors import InputError
from blendserve.models.chat_templates import choose

MIN_TEXT = 64  # characters of a text that is looked for; a shorter one may be a word of the template

CALL_A_TOOL = """\
You can call these tools. To call one, answer with one line of JSON alone: {"name": its name, "arguments": an object}. \
If no tool helps, answer in words."""

Tokenized = tuple[TokenIds, list[tuple[int, int]]]
"""Ids, and where each starts and stops in the text; no places if the tokenizer does not know them."""
Tokenize = Callable[[str, bool, int], Tokenized]
"""(text, is_literal, number of tokens before it); is_literal: control tokens are read as text."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages and tools of a client, as chat templates take them."""

    # role, content and, for tools, tool_calls or tool_call_id and name
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # as in OpenAI's API
    variables: Mapping[str, Any] = field(default_factory=dict)  # further ones of the template

    @property
    def texts(self) -> list[str]:
        """Texts that every template repeats; some leave out parts of what the assistant said."""
        return [m["content"] for m in self.messages if m["role"] != "assistant"]

    def in_words(self) -> Chat:
        """The chat for a template without a place for tools: they are described in the system message, calls are JSON,
        and their results, several in a row, are what the user says.
        """
        messages = list[Mapping[str, Any]]()
        for is_result, group in groupby(self.messages, lambda message: message["role"] == "tool"):
            plain = [_without_calls(message) for message in group]
            results = {"role": "user", "content": "\n".join(message["content"] for message in plain)}
            messages += [results] if is_result else plain
        if not self.tools:
            return Chat(tuple(messages), variables=self.variables)
        has_system = bool(messages) and messages[0]["role"] == "system"
        said = [messages.pop(0)["content"]] if has_system else []
        system = {"role": "system", "content": "\n\n".join((*said, tools_text(self.tools)))}
        return Chat((system, *messages), variables=self.variables)

    def without_lines(self, beginnings: Sequence[str]) -> tuple[Chat, list[str]]:
        """The chat without the lines at the start of its system message that begin so -> it, and these lines."""
        if not self.messages or self.messages[0]["role"] != "system" or not beginnings:
            return self, []
        system, *others = self.messages
        lines = system["content"].splitlines(keepends=True)
        n = next((i for i, line in enumerate(lines) if not line.startswith(tuple(beginnings))), len(lines))
        if not n:
            return self, []
        left = "".join(lines[n:]).lstrip("\n")
        first = [{**system, "content": left}] if left else []
        return replace(self, messages=(*first, *others)), [line.rstrip("\n") for line in lines[:n]]


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Describe tools to a model, and how to call one. tools: as in OpenAI's API."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return f"{CALL_A_TOOL}\n{listed}"


def _without_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same message in words: calls as JSON, a tool's result as what the user says."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    role = "user" if message["role"] == "tool" else message["role"]
    return {"role": role, "content": "\n".join(filter(None, (message["content"], *calls)))}


def chat_ids(tokenizer: Any, chat: Chat, tokenize: Tokenize) -> tuple[TokenIds, tuple[Span, ...]]:
    """The whole prompt, and where in it the texts of all but the assistant are, if the tokenizer tells.

    Tools that the template has no place for are described in words. Raises InputError for what the template refuses.
    """
    if chat.tools and "tools" not in (choose(tokenizer.chat_template, True) or ""):
        chat = chat.in_words()
    controls = control_tokens(tokenizer)
    marks = dict[str, str]()
    nonce = secrets.token_hex(8)

    def mark(found: re.Match[str]) -> str:
        marks[f"<{nonce}-{len(marks)}>"] = found[0]
        return next(reversed(marks))

    given = chat.messages, chat.tools, chat.variables
    messages, tools, variables = _map_texts(given, lambda text: controls.sub(mark, text))
    rendered = _render(tokenizer, messages, tools, variables)
    ids = list[int]()
    starts = list[int]()
    stops = list[int]()
    at = 0
    for part in filter(None, re.split(f"(<{nonce}-[0-9]+>)", rendered)):
        is_control = part in marks
        new, places = tokenize(marks[part] if is_control else part, is_control, len(ids))
        ids += new
        starts += [at if part in marks else at + start for start, _ in places]
        at += len(part)
        stops += [at if part in marks else at - len(part) + stop for _, stop in places]
    if len(starts) < len(ids):
        return tuple(ids), ()
    texts = ((bisect_left(starts, a), bisect_right(stops, b)) for a, b in _texts_in(rendered, messages))
    return tuple(ids), tuple(Span(start, stop) for start, stop in texts if start < stop)


def _texts_in(rendered: str, messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int]]:
    """Where the texts of all but the assistant are, but for short ones and ones that the template changes."""
    at = 0
    for message in messages:
        text = (message["content"] or "").strip()
        if len(text) >= MIN_TEXT and (start := rendered.find(text, at)) >= 0:
            at = start + len(text)
            if message["role"] != "assistant":
                yield start, at


def control_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Matches the tokenizer's special tokens, the longest first."""
    tokens = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
) -> str:
    """Render messages by the model's own template, or as lines `Role: text` where it has none."""
    if not tokenizer.chat_template:
        lines = "".join(f"{m['role'].title()}: {m['content']}\n" for m in messages)
        return f"{tokenizer.bos_token or ''}{lines}Assistant:"
    from jinja2 import TemplateError  # not at the top: only chat templates need it

    taken = inspect.signature(tokenizer.apply_chat_template).parameters.keys() & variables.keys()
    if refused := taken - {"add_generation_prompt"}:  # such as another template
        raise InputError(f"chat_template_kwargs: {sorted(refused)[0]!r} is no variable of a template")

    try:
        return str(
            tokenizer.apply_chat_template(
                [dict(m) for m in messages],
                tools=[dict(t) for t in tools] or None,
                tokenize=False,
                **{"add_generation_prompt": True, **variables},
            )
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise InputError(f"the model's chat template refuses these messages: {error}") from None


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The same structure with every text changed, names of fields excepted."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _map_texts(each, change) for name, each in value.items()}
    if isinstance(value, Sequence):
        return [_map_texts(each, change) for each in value]
    return value
