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
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from blendserve.errors import InputError
from blendserve.serve.middleware import check_json_complexity

OPEN, CLOSE = "<tool_call>", re.compile(r"\s*(?:</tool_call>|\Z)")
MARKERS = "[TOOL_CALLS]", "<|python_tag|>"
MAX_SPACE = 8  # characters of white space between two tokens of the beginning of a call
N_SPACES = 8  # places of white space in such a beginning, at most
OPENINGS = ("{", "[ARGS]")  # of a call that begins with its name
HEADS = (OPEN + "{", *MARKERS)
OBJECTS = tuple(
    f'{bracket}{{{kind}"name":' for bracket in ("", "[") for kind in ("", '"type":"function",')
)  # without white space; a name follows
_GAP = rf"\s{{0,{MAX_SPACE}}}"
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_KIND = rf'"type"{_GAP}:{_GAP}"function"{_GAP},{_GAP}'
_MARKED = re.compile("|".join((rf"{OPEN}{_GAP}\{{", *map(re.escape, MARKERS))))
_OBJECT = re.compile(rf'(?:\[{_GAP})?\{{{_GAP}(?:{_KIND})?"name"{_GAP}:{_GAP}({_QUOTED})')
_OPENING = re.compile(r"\{|\[ARGS\]")  # behind a name
_ARGUMENTS = re.compile(r"(?:\[ARGS\])?\s*(?=\{)")
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
        self._lengths = sorted({len(name) for name in self._names}, reverse=True)
        self._quoted = {json.dumps(name, ensure_ascii=False) for name in self._names}
        squeezed = {"".join(name.split()) for name in self._names}
        self._direct = Beginnings(name + opening for name in squeezed for opening in OPENINGS)
        self._objects = Beginnings("".join(name.split()) for name in self._quoted)
        self._first = {"<", "[", "{", *(name[0] for name in self._names if name)}
        longest = max(map(len, (*OBJECTS, *HEADS))) + max(map(len, (*self._quoted, "")))
        self._longest = longest + N_SPACES * MAX_SPACE
        self._seen = ""  # the last character of the text, and white space behind it
        self._n_shown = 0  # characters of it that were shown
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
        self._held = text[start:]
        self._pieces = [""] if is_call else []
        return shown

    def finish(self) -> tuple[str, list[Call]]:
        """The rest of the text, and the calls."""
        text = "".join((self._seen, self._held, *self._pieces))
        at, calls, kept = self._n_shown, list[Call](), list[str]()
        search_at = len(self._seen)
        while self._names and (head := self._head(text, search_at)):
            end, found = self._calls(text, head[0])
            if found:
                kept.append(text[at : head[0]].rstrip())
                calls += found
                at = end
            search_at = max(at, head[1])
        rest = text[at:]
        return "".join((*kept, "" if calls and rest.isspace() else rest)), calls

    def _candidate(self, text: str, at: int) -> tuple[int, bool]:
        """Where a call may begin in text[at:], and whether its whole beginning is there."""
        head = self._head(text, at)
        stop = head[0] if head else len(text)
        for start in range(max(at, len(text) - self._longest), stop):
            if text[start] in self._first and self._may_begin("".join(text[start:].split())):
                return start, False
        return stop, head is not None

    def _head(self, text: str, at: int) -> tuple[int, int] | None:
        """Where the first beginning of a call in text[at:] starts and stops."""
        found = [marked.span()] if (marked := _MARKED.search(text, at)) else []
        named = _OBJECT.search(text, at)
        while named and named[1] not in self._quoted:
            named = _OBJECT.search(text, named.start() + 1)
        found += [named.span()] if named else []
        for opening in _OPENING.finditer(text, at):
            before = text[max(at, opening.start() - self._lengths[0]) : opening.start()]
            name = next((before[-n:] for n in self._lengths if before[-n:] in self._names), None)
            if name and not _is_within_word(text, opening.start() - len(name)):
                found.append((opening.start() - len(name), opening.end()))
                break
        return min(found, default=None)

    def _may_begin(self, squeezed: str) -> bool:
        """Whether a text without white space is the beginning of a call's beginning."""
        for head in OBJECTS:
            if squeezed.startswith(head) and self._objects.has(squeezed[len(head) :]):
                return True
        return any(head.startswith(squeezed) for head in (*HEADS, *OBJECTS)) or self._direct.has(squeezed)

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
        name = next((text[at : at + n] for n in self._lengths if text[at : at + n] in self._names), "")
        if name and (arguments := _ARGUMENTS.match(text, at + len(name))):
            value, end = _decode(text, arguments.end())
            calls = [self._call({"name": name, "arguments": value} if isinstance(value, dict) else None)]
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


class Beginnings:
    """Texts, by their beginnings."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = sorted(texts)

    def has(self, beginning: str) -> bool:
        """Whether a text begins so."""
        at = bisect_left(self._texts, beginning)
        return at < len(self._texts) and self._texts[at].startswith(beginning)


def _is_within_word(text: str, at: int) -> bool:
    """Whether the character in front of `at` belongs to a word."""
    return at > 0 and (text[at - 1].isalnum() or text[at - 1] in "_-")


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
