"""Splits an answer into parts: the model's thought, its text, and its tool calls.

A thought is between <think> and </think> at the beginning of an answer, as Qwen, DeepSeek and GLM write it. The prompt
may end with <think> already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from blendserve.answer import Answer
from blendserve.engine.request import Completed, Event, TextDelta
from blendserve.serve.tool_calls import Call, Schemas, ToolCallParser

OPEN, CLOSE = "<think>", "</think>"
N_LAST = 8  # tokens at the end of a prompt that are searched for <think>


class AnswerParts(NamedTuple):
    """The next parts of an answer, in this order."""

    thought: str = ""
    text: str = ""
    calls: Sequence[Call] = ()


class AnswerParser:
    """Separates the pieces of one answer into parts."""

    def __init__(self, tools: Schemas, is_thinking: bool | None) -> None:
        """is_thinking: whether the prompt has begun a thought; None: the answer has none."""
        self._calls = ToolCallParser(tools)
        self._is_thinking = bool(is_thinking)
        self._is_first = is_thinking is False
        self._is_blank = False  # whether a thought has ended, and no text came since
        self._held = ""  # may begin OPEN or CLOSE

    def read(self, event: Event) -> AnswerParts:
        """Return the parts that are complete after an event."""
        if isinstance(event, TextDelta):
            return self.push(event.text)
        return self.finish() if isinstance(event, Completed) else AnswerParts()

    def whole(self, text: str) -> AnswerParts:
        """Return the parts of a whole answer."""
        first = self.push(text)
        last = self.finish()
        return AnswerParts(first.thought + last.thought, first.text + last.text, [*first.calls, *last.calls])

    def push(self, piece: str) -> AnswerParts:
        """Return the parts that are complete after a piece of text."""
        self._held += piece
        if self._is_first:
            start = self._held.lstrip()
            if OPEN.startswith(start):
                return AnswerParts()
            self._is_first = False
            self._is_thinking = start.startswith(OPEN)
            self._held = start.removeprefix(OPEN) if self._is_thinking else self._held
        if not self._is_thinking:
            text, self._held = self._held, ""
            return AnswerParts("", *self._say(text))
        thought, close, text = self._held.partition(CLOSE)
        if close:
            self._is_thinking = False
            self._is_blank = True
            self._held = ""
            return AnswerParts(thought, *self._say(text))
        n_held = next(n for n in range(len(CLOSE) - 1, -1, -1) if thought.endswith(CLOSE[:n]))
        end = len(thought) - n_held
        self._held = thought[end:]
        return AnswerParts(thought[:end])

    def finish(self) -> AnswerParts:
        """Return the parts that were held back, at the end of the answer."""
        held, self._held = self._held, ""
        if self._is_thinking:
            return AnswerParts(held)
        shown, first = self._say(held)
        rest, last = self._calls.finish()
        return AnswerParts("", shown + rest, [*first, *last])

    def _say(self, text: str) -> tuple[str, list[Call]]:
        """Return text and calls after the thought, without the white space between thought and text."""
        if self._is_blank:
            text = text.lstrip()
            self._is_blank = not text
        return self._calls.push(text)


def url_citations(answer: Answer, said: str) -> list[dict[str, Any]]:
    """Return the citations of an answer's text in OpenAI's format. A passage's URL is its document's id."""
    offset = answer.text.rfind(said)
    found: list[dict[str, Any]] = []
    for each in answer.citations:
        passage = answer.passages[each.passage]
        start = each.start - offset
        if 0 <= start < len(said):
            place = {"start_index": start, "end_index": each.end - offset}
            found.append({**place, "url": passage.doc_id or passage.id, "title": passage.title})
    return found


def begins_thought(tokenizer: Any, prompt_ids: Sequence[int]) -> bool:
    """Return whether a prompt ends with the beginning of a thought."""
    return str(tokenizer.decode(prompt_ids[-N_LAST:])).rstrip().endswith(OPEN)
