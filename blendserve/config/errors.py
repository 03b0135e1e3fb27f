"""Turns a validation error into a ConfigError that names the setting, and the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import get_args

from pydantic import BaseModel, ValidationError

from blendserve.errors import ConfigError
from blendserve.registry import nearest

SECRET = "secret"  # the type of a problem whose value is not to be repeated
UNION_MEMBERS = {"constrained-float", "float"}  # pydantic adds the type that it tried to a setting's path


def config_error(root: type[BaseModel], prefix: str, error: ValidationError) -> ConfigError:
    """The first problem of a validation error: its message is one line, its `setting` the dotted name."""
    problem = error.errors()[0]
    path = tuple(str(part) for part in problem["loc"] if part not in UNION_MEMBERS and "[" not in str(part))
    section = prefix + root.__name__.removesuffix("Config").lower()
    before = f"{section}." if section else ""
    setting = before + ".".join(path or ("?",))
    reason = problem["msg"].removeprefix("Value error, ")
    reason = reason[0].lower() + reason[1:]
    if problem["type"] == "extra_forbidden":
        message = f"unknown setting {setting!r}: {_hint(root, before, path)}"
    elif problem["type"] == SECRET:
        message = f"setting {setting!r} {reason}"
    else:
        inner = [p[-1] for p in _paths(root) if p[:-1] == path]
        if problem["type"] == "model_type" and inner:
            reason = f"it has settings of its own: {', '.join(inner)}"
        message = f"setting {setting!r} cannot be {problem['input']!r}: {reason}"
    return ConfigError(message, setting=setting)


def _hint(root: type[BaseModel], before: str, path: tuple[str, ...]) -> str:
    """The setting with the most similar name; of equals, the one with the most similar path."""
    *parents, name = path
    paths = [p for p in _paths(root) if _likeness(name, p[-1]) >= 0.6]
    if not paths:
        return nearest(name, [p[-1] for p in _paths(root) if list(p[:-1]) == parents])
    best = max(paths, key=lambda p: (_likeness(name, p[-1]), _likeness(".".join(path), ".".join(p))))
    return f"did you mean {before + '.'.join(best)!r}?"


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _paths(section: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Every setting of a section and of those in it, as its names from there."""
    for name, field in section.model_fields.items():
        yield (name,)
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from ((name, *path) for path in _paths(kind))
