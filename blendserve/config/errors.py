"""Turns a validation error into a ConfigError that names the setting, and the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from blendserve.errors import ConfigError
from blendserve.registry import nearest

SECRET = "secret"  # the type of a problem whose value is not to be repeated


def config_error(root: type[BaseModel], prefix: str, error: ValidationError) -> ConfigError:
    """The first problem of a validation error: its message is one line, its `setting` the dotted name."""
    problem = error.errors()[0]
    # Of a setting that takes several types, pydantic adds the type that it tried: no setting has such a name.
    tried = {"constrained-float", "float"}
    *parents, name = [str(part) for part in problem["loc"] if part not in tried and "[" not in str(part)] or [
        "?"
    ]
    section = prefix + root.__name__.removesuffix("Config").lower()
    before = f"{section}." if section else ""
    where = before + ".".join([*parents, name])
    why = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        message = f"unknown setting {where!r}: {_hint(root, before, parents, name)}"
    elif problem["type"] == "model_type" and (known := _fields_at(root, [*parents, name])):
        message = f"setting {where!r} cannot be {problem['input']!r}: it has settings of its own: {', '.join(known)}"
    elif problem["type"] == SECRET:
        message = f"setting {where!r} {why}"
    else:
        message = f"setting {where!r} cannot be {problem['input']!r}: {why[0].lower()}{why[1:]}"
    return ConfigError(message, setting=where)


def _hint(root: type[BaseModel], before: str, parents: Sequence[str], name: str) -> str:
    """The nearest setting beside it, or else the nearest anywhere, by its whole name."""
    known = _fields_at(root, parents)
    if not difflib.get_close_matches(name, known, cutoff=0.6):
        paths = [path for path in _paths(root) if _likeness(name, path[-1]) >= 0.6]
        if paths:
            best = max(paths, key=lambda path: (_likeness(name, path[-1]), _shared(parents, path)))
            return f"did you mean {before + '.'.join(best)!r}?"
    return nearest(name, known)


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _shared(parents: Sequence[str], path: Sequence[str]) -> int:
    """How many sections two settings are both in."""
    same = [a == b for a, b in zip(parents, path, strict=False)]
    return [*same, False].index(False)


def _paths(root: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Every setting of a section and of those in it, as its names from there."""
    for name, field in root.model_fields.items():
        yield (name,)
        if inner := _section(field.annotation):
            yield from ((name, *path) for path in _paths(inner))


def _fields_at(root: type[BaseModel], parents: Sequence[str]) -> list[str]:
    for parent in parents:
        field = root.model_fields.get(parent)
        inner = _section(field.annotation) if field else None
        if inner is None:
            return []
        root = inner
    return list(root.model_fields)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that a setting is, alone or among other types that it takes."""
    types = (annotation, *get_args(annotation))
    return next((t for t in types if isinstance(t, type) and issubclass(t, BaseModel)), None)
