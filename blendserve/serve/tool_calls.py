"""Tool calls in the text of an answer, in the forms that models are trained to write.

    <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>    Hermes, Qwen
    [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]           Mistral
    [TOOL_CALLS]name[ARGS]{...}                                     Mistral, since 2025
    <|python_tag|>{"name": ..., "parameters": {...}}; ...           Llama 3

The markers of Mistral and Llama are special tokens, which decoding skips. Calls without a marker must end the answer, so
that an example within a text stays text. So does a call of a tool that was not offered, and one whose JSON is damaged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from blendserve.errors import InputError
from blendserve.serve.middleware import check_json_complexity

OPEN, CLOSE = "<tool_call>", re.compile(r"\s*(?:</tool_call>|\Z)")
MARKERS = "[TOOL_CALLS]", "<|python_tag|>"
MAX_SPACE = 8  # characters of white space between two tokens of the beginning of a call
N_SPACES = 8  # places of white space in such a beginning, at most
_SPACE = re.compile(r"\s*")
_SEPARATORS = re.compile(rf"(?:[\s;,]|{'|'.join(map(re.escape, MARKERS))})*")
_JSON = json.JSONDecoder(strict=False)  # models write line breaks within strings


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an offered tool."""

    name: str
    arguments: str  # a JSON object

    @property
    def input(self) -> dict[str, Any]:
        """The arguments as an object."""
        arguments: dict[str, Any] = json.loads(self.arguments)
        return arguments


class ToolCallParser:
    """Separates the pieces of one answer into text and calls. Without tools, all is text at once.

    White space in front of a call belongs to the call, and behind the last one, too, if nothing follows.
    """

    def __init__(self, names: Iterable[str]) -> None:
        """names: of the offered tools."""
        self._names = set(names)
        quoted = [json.dumps(name, ensure_ascii=False) for name in self._names]
        gap = rf"\s{{0,{MAX_SPACE}}}"
        function = rf'(?:"type"{gap}:{gap}"function"{gap},{gap})?"name"{gap}:{gap}'
        patterns = [
            *(rf"{OPEN}{gap}\{{", *map(re.escape, MARKERS)),
            rf"(?:\[{gap})?\{{{gap}{function}(?:{_any_of(quoted)})",
            rf"(?<![\w-])(?:{_any_of(self._names)})(?:\{{|\[ARGS\])",
        ]
        self._head = re.compile("|".join(patterns))  # the beginning of a call
        objects = [f'{{{kind}"name":{name}' for name in quoted for kind in ("", '"type":"function",')]
        direct = [name + opening for name in self._names for opening in ("{", "[ARGS]")]
        heads = [OPEN + "{", *MARKERS, *objects, *("[" + head for head in objects), *direct]
        self._squeezed = ["".join(head.split()) for head in heads]
        self._first = {head[0] for head in heads}
        self._longest = max(map(len, heads)) + N_SPACES * MAX_SPACE
        self._direct = re.compile(rf"({_any_of(self._names)})(?:\[ARGS\])?\s*(?=\{{)")
        self._seen, self._n_shown = (
            "",
            0,
        )  # the last character of the text and white space behind it; shown of it
        self._held = ""  # may begin a call
        self._pieces = list[str]()  # behind the beginning of a call

    def push(self, piece: str) -> str:
        """The text that is surely in no call, perhaps "". What follows the beginning of a call waits for `finish`."""
        if not self._names:
            return piece
        if self._pieces:
            self._pieces.append(piece)
            return ""
        text = self._seen + self._held + piece
        start, is_call = self._candidate(text, len(self._seen))
        end = len(text[:start].rstrip())
        shown = text[self._n_shown : end]
        self._seen, self._n_shown = text[max(0, end - 1) : start], min(1, end)
        self._held, self._pieces = text[start:], [""] if is_call else []
        return shown

    def finish(self) -> tuple[str, list[Call]]:
        """The rest of the text, and the calls."""
        text = "".join((self._seen, self._held, *self._pieces))
        at, calls, kept = self._n_shown, list[Call](), list[str]()
        search_at = len(self._seen)
        while self._names and (head := self._head.search(text, search_at)):
            end, found = self._calls(text, head.start())
            if found:
                kept.append(text[at : head.start()].rstrip())
                calls += found
                at = end
            search_at = max(at, head.end())
        rest = text[at:]
        return "".join((*kept, "" if calls and rest.isspace() else rest)), calls

    def _candidate(self, text: str, at: int) -> tuple[int, bool]:
        """Where a call may begin in text[at:], and whether its whole beginning is there."""
        head = self._head.search(text, at)
        stop = head.start() if head else len(text)
        for start in range(max(at, len(text) - self._longest), stop):
            if text[start] in self._first:
                beginning = "".join(text[start:].split())
                if any(head.startswith(beginning) for head in self._squeezed):
                    return start, False
        return stop, head is not None

    def _calls(self, text: str, start: int) -> tuple[int, list[Call]]:
        """The calls that begin at `start`, one after another, and where they end; none if it is text."""
        if text.startswith(OPEN, start):
            value, end = _decode(text, start + len(OPEN))
            call, close = self._call(value), CLOSE.match(text, end)
            return (close.end(), [call]) if call and close else (start, [])
        calls, end = list[Call](), start
        is_marked = text.startswith(MARKERS, start)
        if not is_marked and text[:start].rstrip().endswith((",", "[", "{")):
            return start, []  # within a list that is no call
        while unit := self._unit(text, _end(_SEPARATORS, text, end)):
            end = unit[0]
            calls += unit[1]
        is_last = not text[end:].strip(" \t\r\n;")
        return (len(text) if is_last else end, calls) if is_last or is_marked else (start, [])

    def _unit(self, text: str, at: int) -> tuple[int, list[Call]] | None:
        """A call, or a list of calls, and where it ends."""
        if direct := self._direct.match(text, at):
            value, end = _decode(text, direct.end())
            calls = [self._call({"name": direct[1], "arguments": value} if isinstance(value, dict) else None)]
        else:
            value, end = _decode(text, at)
            calls = [self._call(each) for each in (value if isinstance(value, list) else [value])]
        known = [call for call in calls if call]
        return (end, known) if known and len(known) == len(calls) else None

    def _call(self, value: Any) -> Call | None:
        """The call that a JSON value describes. None for other tools, and for arguments that are no JSON object."""
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments = value.get("arguments") or value.get("parameters") or {}
        try:
            arguments = json.loads(arguments, strict=False) if isinstance(arguments, str) else arguments
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            check_json_complexity(written.encode())
        except (ValueError, RecursionError, InputError):  # also of lone surrogates
            return None
        return Call(name, written) if isinstance(arguments, dict) else None


def split_calls(text: str, names: Iterable[str]) -> tuple[str, list[Call]]:
    """The text of a whole answer without its calls, and the calls."""
    parser = ToolCallParser(names)
    shown = parser.push(text)
    rest, calls = parser.finish()
    return shown + rest, calls


def _any_of(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, texts))


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where a pattern that always matches ends."""
    match = pattern.match(text, at)
    return match.end() if match else at


def _decode(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at `at`, and where it ends; None if there is none."""
    try:
        value, end = _JSON.raw_decode(text, _end(_SPACE, text, at))
    except (ValueError, RecursionError):
        return None, at
    return value, end
