"""Chat templates of a model folder, in jinja2's sandbox with limits on steps and sizes: a folder may be anybody's."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache, wraps
from itertools import count
from typing import Any

import jinja2.ext
from jinja2 import Template, TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from blendserve.errors import ModelError

MAX_STEPS = 100_000  # of loops and macros in one rendering
MAX_LENGTH = 1 << 26  # of a text or list
MAX_NUMBER = 1_000_000  # of an argument; the digits of a width in a format are fewer than its own
MAX_BITS = 10_000  # of a number
WIDE_FORMAT = re.compile(r"\*|\d{6,}")
GROWING = {"replace", "join", "center", "indent", "format", "batch", "slice", "wordwrap", "tojson"}
# filters and methods of a text
GROWING |= {
    "ljust",
    "rjust",
    "zfill",
    "expandtabs",
    "format_map",
    "translate",
}


class TemplateLimit(TemplateError):
    """The template computes for too long, or makes a text that is too long."""


def choose(template: Any, has_tools: bool) -> str | None:
    """The template for a chat: of several named ones `tool_use` where tools are offered, else `default`.

    Raises ModelError where there is no default.
    """
    if not isinstance(template, Mapping):
        return template or None
    if has_tools and "tool_use" in template:
        return str(template["tool_use"])
    if "default" not in template:
        raise ModelError(
            f"the model has chat templates named {', '.join(sorted(map(str, template)))} and none named 'default': "
            "name one so in its tokenizer_config.json",
            setting="chat_template",
        )
    return str(template["default"])


def render(template: str, **values: Any) -> str:
    """Return the template's text. Raises jinja2.TemplateError, whatever fails; TemplateLimit for too much work."""
    compiled, tick = _compiled(template)
    steps = count(1)

    def step() -> None:
        if next(steps) > MAX_STEPS:
            raise TemplateLimit(f"the chat template runs more than {MAX_STEPS:,} steps")

    try:
        return str(compiled.render(**values, **{tick: step}))
    except TemplateError:
        raise
    except (RecursionError, MemoryError, OverflowError) as error:
        raise TemplateLimit(f"the chat template computes too much: {type(error).__name__}") from None
    except Exception as error:
        raise TemplateError(f"{type(error).__name__}: {error}") from None


@lru_cache(maxsize=8)
def _compiled(template: str) -> tuple[Template, str]:
    """The template, and the name under which it wants a function that it calls at each step."""

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = _Bounded(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    environment.filters["tojson"] = lambda x, ensure_ascii=False, indent=None: json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent
    )
    environment.filters |= {n: _bounded(n, environment.filters[n]) for n in GROWING & {*environment.filters}}
    environment.filters["concatenated"] = _concatenated
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    del environment.globals["lipsum"]
    tick = f"step_{secrets.token_hex(8)}"  # a template cannot set it
    tree = _Steps(tick).visit(environment.parse(template))
    return Template.from_code(environment, environment.compile(tree), environment.make_globals(None)), tick


class _Steps(NodeTransformer):
    """Counts each turn of a loop and call of a macro, and makes `~` a filter."""

    def __init__(self, tick: str) -> None:
        self._tick = tick

    def _counted(self, node: Any) -> Any:
        self.generic_visit(node)
        call = nodes.Call(nodes.Name(self._tick, "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _counted  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "concatenated", [], [], None, None, lineno=node.lineno)


class _Bounded(ImmutableSandboxedEnvironment):
    """Refuses operators and methods whose result would be too large, before they compute it."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check("format", left, ())
        elif operator == "+":
            _check_length(_length(left) + _length(right))
        elif operator == "*":
            sizes = [_length(x) or (x if isinstance(x, int) else 1) for x in (left, right)]
            _check_length(abs(sizes[0] * sizes[1]) if _length(left) or _length(right) else 0)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise TemplateLimit("the chat template makes a number that is too large")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, *args: Any, **named: Any) -> Any:
        method = getattr(called, "__wrapped__", called)  # the sandbox wraps `format`
        subject = getattr(method, "__self__", None)
        name = getattr(method, "__name__", "")
        if isinstance(subject, str) and name in GROWING:
            _check(name, subject, (*args, *named.values()))
        return super().call(context, called, *args, **named)


def _bounded(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses what would be too large."""
    n_own = 1 if hasattr(made, "jinja_pass_arg") else 0  # jinja2 passes its context first

    @wraps(made)
    def checked(*args: Any, **named: Any) -> Any:
        own, (subject, *others) = args[:n_own], args[n_own:]
        if name == "join" and not isinstance(subject, str):
            subject = list(subject)
        _check(name, subject, (*others, *named.values()))
        return made(*own, subject, *others, **named)

    return checked


def _check(name: str, subject: Any, args: tuple[Any, ...]) -> None:
    """Raise TemplateLimit if this filter or method of a text would make too much."""
    if any(isinstance(x, int) and abs(x) > MAX_NUMBER for x in args):
        raise TemplateLimit(f"the chat template calls {name} with a number above {MAX_NUMBER:,}")
    if name in ("format", "format_map") and WIDE_FORMAT.search(str(subject)):
        raise TemplateLimit("the chat template has a format of too many characters")
    if name == "replace" and len(args) > 1:
        old, new = map(str, args[:2])
        _check_length(len(str(subject)) + (str(subject).count(old) * len(new)))
    elif name == "join":
        parts = args[0] if isinstance(subject, str) and args else subject  # a method's, a filter's
        glue = subject if isinstance(subject, str) else next(iter(args), "")
        if isinstance(parts, list | tuple):
            _check_length(sum(_length(part) for part in parts) + len(parts) * _length(glue))
    elif args:
        sizes = [x if isinstance(x, int) else max(1, _length(x)) for x in args]
        _check_length(_length(subject) * max(sizes) if name in ("expandtabs", "indent", "translate") else 0)


def _concatenated(parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    _check_length(sum(map(len, texts)))
    return "".join(texts)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _check_length(length: int) -> None:
    if length > MAX_LENGTH:
        raise TemplateLimit(f"the chat template makes a text of more than {MAX_LENGTH:,} characters")
