"""Tool calls in the text of an answer, in the forms that models are trained to write.

    <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>                    Hermes, Qwen
    <tool_call>\n<function=NAME>\n<parameter=KEY>\n...\n</parameter>\n</function>   Qwen3-Coder
    <tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>...</arg_value>             GLM
    [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]                           Mistral
    [TOOL_CALLS]NAME[ARGS]{...}                                                     Mistral, since 2025
    <|python_tag|>{"name": ..., "parameters": {...}}; ...                           Llama 3
    [NAME(KEY=..., ...), ...]                                                       Llama 3.2 and 4, LFM2
    <|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]                       Command R
    <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>                  DeepSeek
    commentary to=functions.NAME json{...}                                          gpt-oss
    ```tool_code\nNAME(KEY=...)\n```                                                Gemma
    ```json\n{"name": ..., "arguments": {...}}\n```                                 many models, untrained

Markers that are special tokens are skipped by decoding. Calls without a marker must end the answer, so that an example
within a text stays text. So does a call of a tool that was not offered, and one that is damaged.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import regex  # searches for the beginning of a match, too

from blendserve.engine.grammar import MAX_INDENT
from blendserve.errors import InputError
from blendserve.serve.middleware import check_json_complexity

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of the offered tools' arguments, by name."""
Found = tuple[int, list["Call"]]
"""Where calls end, and they."""

GAP = rf"\s{{0,{MAX_INDENT + 1}}}"  # white space between two tokens of the beginning of a call
OBJECT = rf'(?:\[{GAP})?\{{{GAP}(?:"tool_call_id"{GAP}:{GAP}"[^"]{{0,20}}"{GAP},{GAP})?'
OBJECT += rf'(?:"type"{GAP}:{GAP}"function"{GAP},{GAP})?"(?:tool_)?name"{GAP}:{GAP}"(?P<name>[^"\\\n]{{1,LONGEST}})"'
NAME = r"(?P<name>[\w.-]{1,LONGEST})"  # LONGEST: characters of the longest offered name
OPENINGS = {
    "hermes": rf"<tool_call>{GAP}\{{",
    "xml": rf"(?:<tool_call>{GAP})?<function=NAME>",
    "pairs": rf"<tool_call>{GAP}NAME{GAP}(?:<arg_key>|</tool_call>)",
    "deepseek": rf"(?:<｜tool▁calls▁begin｜>{GAP})?<｜tool▁call▁begin｜>"
    rf"(?:function<｜tool▁sep｜>NAME(?=\s)|NAME(?=<｜tool▁sep｜>{GAP}\{{))",
    "marked": r"\[TOOL_CALLS\]|<\|python_tag\|>|<\|START_ACTION\|>",
    "harmony": rf"(?:assistant)?commentary{GAP}to=functions\.NAME(?=[^\w.-])",
    "fence": rf"```(?:json|tool_call)?{GAP}(?:{OBJECT})",
    "code": rf"```(?:tool_code|python)?{GAP}NAME\(",
    "python": rf"(?:<\|tool_call_start\|>)?\[{GAP}NAME\(",
    "json": OBJECT,
    "direct": r"(?<![\w-])NAME(?:\{|\[ARGS\])",
}
WORD = regex.compile(r"[\w.-]+")
HARMONY = "commentary", "assistantcommentary"
CLOSED = {"hermes": "</tool_call>", "xml": "</function>", "pairs": "</tool_call>"}
CLOSED |= {"deepseek": "<｜tool▁calls▁end｜>"}  # of all its calls
UNMARKED = {"json", "direct", "fence", "code", "python"}  # their calls must end the answer
# between calls; a list is read call by call, so that a cut one has those before the cut
_SEPARATORS = regex.compile(r"(?:\[TOOL_CALLS\]|<\|python_tag\|>|<\|START_ACTION\|>|[\s;,\[\]])*")
_FENCE = regex.compile(r"```\w*\s*")
_PARAMETER = regex.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", regex.DOTALL)
_PAIR = regex.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", regex.DOTALL)
_END = {
    "hermes": regex.compile(r"\s*(?:</tool_call>|\Z)"),
    "xml": regex.compile(r"\s*</function>\s*(?:</tool_call>)?"),
    "pairs": regex.compile(r"\s*(?:</tool_call>|\Z)"),
    "deepseek": regex.compile(r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>|\Z)\s*(?:<｜tool▁calls▁end｜>)?"),
    "harmony": regex.compile(r"\s*(?:<\|call\|>)?"),
}
_BEFORE_JSON = {
    "deepseek": regex.compile(r"(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*"),
    "harmony": regex.compile(r"\s*(?:<\|constrain\|>)?(?:json)?\s*(?:<\|message\|>)?"),
}
_ARGUMENTS = regex.compile(r"(?:\[ARGS\])?\s*(?=\{)")
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

    def __init__(self, tools: Schemas) -> None:
        self._tools = tools
        self._openings = _openings(max(map(len, tools), default=0))
        self._names = sorted(tools, key=len, reverse=True)
        self._text = ""  # from the last character that was shown on
        self._n_shown = 0  # characters of it that were shown: 0 or 1
        self._tried = 0  # characters of it in which no closed call was found
        self._is_behind_call = False  # whether no text was shown since

    def push(self, piece: str) -> tuple[str, list[Call]]:
        """The text that is surely in no call, perhaps "", and the calls that are complete.

        A call without a marker at its end waits for `finish`.
        """
        if not self._tools:
            return piece, []
        self._text += piece
        shown = ""
        calls: list[Call] = []
        while True:
            head = self._head(self._text, self._n_shown, partial=True)
            shown += self._show(head.start() if head else len(self._text))
            if head is None or head.partial:
                return shown, calls
            found = self._closed()
            if found is None:
                return shown, calls
            calls += found[1]
            self._skip(found[0])

    def finish(self) -> tuple[str, list[Call]]:
        """The rest of the text, and the calls in it."""
        text = self._text
        at = self._n_shown
        calls: list[Call] = []
        kept: list[str] = []
        search_at = at
        while self._tools and (head := self._head(text, search_at)):
            end, found = self._calls(text, head, is_whole=True)
            if found:
                kept.append(text[at : head.start()].rstrip())
                calls += found
                at = end
            search_at = max(at, head.end())
        rest = text[at:]
        is_blank = (calls or self._is_behind_call) and not rest.strip()
        return "".join((*kept, "" if is_blank else rest)), calls

    def _head(self, text: str, at: int, partial: bool = False) -> Any:
        """The first match of an opening with an offered tool's name. partial: or of the beginning of one."""
        while head := self._openings.search(text, at, partial=partial):
            if head.partial and WORD.fullmatch(head[0]):  # the name of a call without a marker, or of gpt-oss
                is_opening = any(each.startswith(head[0]) for each in (*HARMONY, *self._tools))
            else:
                is_opening = head.partial or head["name"] in (None, *self._tools)
            if is_opening:
                return head
            at = head.start() + 1
        return None

    def _show(self, end: int) -> str:
        """The text up to `end`, without white space at its end, which may belong to a call."""
        end = max(self._n_shown, len(self._text[:end].rstrip()))
        shown = self._text[self._n_shown : end]
        start = max(0, end - 1)
        if shown:
            self._tried = 0
            self._is_behind_call = False
        self._text = self._text[start:]
        self._n_shown = end - start
        return shown

    def _skip(self, end: int) -> None:
        """Go on behind calls that were found."""
        self._text = self._text[end:]
        self._n_shown = 0
        self._tried = 0
        self._is_behind_call = True

    def _closed(self) -> Found | None:
        """The call at the beginning of the text that has not been shown, if its end is there."""
        head = self._head(self._text, self._n_shown)
        if not head or _form(head) not in CLOSED:
            return None
        close = "</tool_call>" if head[0].startswith("<tool_call>") else CLOSED[_form(head)]
        if self._text.find(close, max(head.end() - len(close), self._tried)) < 0:
            return None
        self._tried = max(0, len(self._text) - len(close))
        end, found = self._calls(self._text, head, is_whole=False)
        return (end, found) if found else None

    def _calls(self, text: str, head: Any, is_whole: bool) -> Found:
        """The calls that begin at a match of an opening, and where they end; none if it is text.

        is_whole: whether the answer ends with the text.
        """
        form = _form(head)
        start = head.start()
        if form in CLOSED or form == "harmony":
            call, end = CALL_OF[form](text, head, self._tools)
            close = _END[form].match(text, end) if call else None
            if not close or (not is_whole and not close[0].strip()):
                return start, []
            return close.end(), [call] if call else []
        if form in ("code", "python"):
            return len(text), _python_calls(text[start:], self._tools)
        if form in UNMARKED and text[:start].rstrip().endswith((",", "[", "{")):
            return start, []  # within a list that is no call
        calls: list[Call] = []
        end = _FENCE.match(text, start).end() if form == "fence" else start
        while unit := self._unit(text, _SEPARATORS.match(text, end).end()):
            end = unit[0]
            calls += unit[1]
        is_last = not text[end:].strip("` \t\r\n;]" if form == "fence" else " \t\r\n;]")
        return (len(text) if is_last else end, calls) if is_last or form == "marked" else (start, [])

    def _unit(self, text: str, at: int) -> Found | None:
        """A call and where it ends."""
        name = next((name for name in self._names if text.startswith(name, at)), "")
        if name and (arguments := _ARGUMENTS.match(text, at + len(name))):
            value, end = _decode(text, arguments.end())
            call = _call(name, value, self._tools)
        else:
            value, end = _decode(text, at)
            call = _named(value, self._tools)
        return (end, [call]) if call else None


@cache
def _openings(longest: int) -> Any:
    """The pattern of all beginnings of calls, a group for each form. longest: characters of a name."""
    forms = (f"(?P<{form}>{pattern})" for form, pattern in OPENINGS.items())
    return regex.compile("|".join(forms).replace("NAME", NAME).replace("LONGEST", str(max(1, longest))))


def _form(head: Any) -> str:
    """Which opening was found."""
    return next(form for form in OPENINGS if head[form] is not None)


def _hermes(text: str, head: Any, tools: Schemas) -> tuple[Call | None, int]:
    value, end = _decode(text, head.end() - 1)
    return _named(value, tools), end


def _by_json(text: str, head: Any, tools: Schemas) -> tuple[Call | None, int]:
    value, end = _decode(text, _BEFORE_JSON[_form(head)].match(text, head.end()).end())
    return _call(head["name"], value, tools), end


def _by_pairs(text: str, head: Any, tools: Schemas) -> tuple[Call | None, int]:
    """Arguments as texts, which their schema reads."""
    name = head["name"]
    is_xml = _form(head) == "xml"
    pair, end = (_PARAMETER, head.end()) if is_xml else (_PAIR, head.end("name"))
    kinds = tools[name].get("properties") or {}
    arguments: dict[str, Any] = {}
    while found := pair.match(text, end):
        arguments[found[1].strip()] = _value(found[2], kinds.get(found[1].strip()))
        end = found.end()
    return _call(name, arguments, tools), end


CALL_OF: dict[str, Callable[[str, Any, Schemas], tuple[Call | None, int]]] = {
    "hermes": _hermes,
    "xml": _by_pairs,
    "pairs": _by_pairs,
    "deepseek": _by_json,
    "harmony": _by_json,
}


def _value(text: str, schema: Any) -> Any:
    """An argument that was written as a text: JSON, unless its schema wants a text."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _python_calls(text: str, tools: Schemas) -> list[Call]:
    """The calls of Python code that is all of a text; none if it is anything else."""
    fence = _FENCE.match(text)
    code = text[fence.end() :].rstrip().removesuffix("```") if fence else text
    code = code.strip().removeprefix("<|tool_call_start|>").removesuffix("<|tool_call_end|>")
    try:
        lines = [line.value for line in ast.parse(code.strip()).body if isinstance(line, ast.Expr)]
        nodes = [node for line in lines for node in (line.elts if isinstance(line, ast.List) else [line])]
        calls = [_of_node(node, tools) for node in nodes]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    known = [call for call in calls if call]
    return known if len(known) == len(calls) else []


def _of_node(node: ast.expr, tools: Schemas) -> Call | None:
    """A call of Python code with literal arguments. Raises ValueError for others."""
    if not isinstance(node, ast.Call) or node.args:
        return None
    arguments = {each.arg or "": ast.literal_eval(each.value) for each in node.keywords}
    return _call(ast.unparse(node.func), arguments, tools)


def _named(value: Any, tools: Schemas) -> Call | None:
    """The call that a JSON value describes."""
    if not isinstance(value, dict):
        return None
    arguments = value.get("arguments") or value.get("parameters") or {}
    return _call(value.get("name") or value.get("tool_name"), arguments, tools)


def _call(name: Any, arguments: Any, tools: Schemas) -> Call | None:
    """None for other tools, and for arguments that are no JSON object."""
    if not isinstance(name, str) or name not in tools:
        return None
    try:
        arguments = json.loads(arguments, strict=False) if isinstance(arguments, str) else arguments
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        check_json_complexity(written.encode())
    except (TypeError, ValueError, RecursionError, InputError):  # also of lone surrogates
        return None
    return Call(name, written) if isinstance(arguments, dict) else None


def _decode(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at `at`, behind white space, and where it ends; None if there is none."""
    start = len(text) - len(text[at:].lstrip())
    try:
        value, end = _JSON.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, at
    return value, end
