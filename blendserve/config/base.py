"""A section of settings: frozen and checked. Values come from YAML, the environment and `--set`; errors name the setting.

pydantic-settings would ignore a misspelt variable, and would read the environment whenever a section is made.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError

from blendserve.errors import ConfigError
from blendserve.registry import nearest

AnySettings = TypeVar("AnySettings", bound="Settings")
SECRET = "secret"  # the type of a validation error whose value must not be repeated
UNION_MEMBERS = {"constrained-float", "float"}  # pydantic adds the type that it tried to a setting's path

_is_nested: ContextVar[bool] = ContextVar("is_nested", default=False)  # an outer section is being made


class Settings(BaseModel):
    """A frozen group of settings that refuses unknown names. The string below a field is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    prefix: ClassVar[str] = ""  # dotted name of the section that this one is a part of
    environment: ClassVar[str] = ""  # prefix of environment variables; "" reads none

    def __init__(self, **values: Any) -> None:
        outermost = None if _is_nested.get() else _is_nested.set(True)
        try:
            super().__init__(**values)
        except ValidationError as error:
            if outermost is None:
                raise  # the outer section knows the whole path
            raise _config_error(type(self), error) from None
        finally:
            if outermost is not None:
                _is_nested.reset(outermost)

    @classmethod
    def load(
        cls: type[AnySettings], path: str | Path | None = None, overrides: Sequence[str] = ()
    ) -> AnySettings:
        """Defaults, then a YAML file, nested or with dotted names, then the environment, then overrides `a.b=value`.

        The last one wins. Raises ConfigError with the setting, and the file if the value comes from it.
        """
        values: dict[str, Any] = {}
        for where, file, found in (
            (f"config file {path}", path, _read_yaml(path, cls.model_fields)),
            ("environment", None, _parse(cls, _variables(cls.environment))),
            ("--set", None, _parse(cls, _assignments(overrides))),
        ):
            try:
                cls(**_merge(values, found))
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}", setting=error.setting, path=file) from None
        return cls(**values)

    @classmethod
    def description(cls, name: str) -> str:
        """The description of a field: of its `Field`, or the string below it."""
        owner = next(c for c in cls.__mro__ if name in c.__annotations__)
        below = _descriptions(owner.__module__).get(f"{owner.__name__}.{name}", "")
        return " ".join((cls.model_fields[name].description or below).split())

    def replace(self: AnySettings, name: str, value: Any) -> AnySettings:
        """A copy with the setting of this dotted name replaced, and checked. Raises ConfigError."""
        first, _, rest = name.partition(".")
        if rest:
            inner = getattr(self, first, None)
            value = inner.replace(rest, value) if isinstance(inner, Settings) else _nest(rest, value)
        plain = value.model_dump() if isinstance(value, Settings) else value
        return type(self)(**{**self.model_dump(), first: plain})

    def with_values(self: AnySettings, **values: Any) -> AnySettings:
        """A checked copy with those of the values that are not None. Raises ConfigError."""
        given = {name: value for name, value in values.items() if value is not None}
        return type(self)(**{**self.model_dump(), **given}) if given else self


@cache
def _descriptions(module: str) -> dict[str, str]:
    """CLASS.FIELD -> the string below it. pydantic's use_attribute_docstrings would double the time of the import."""
    try:
        source = inspect.getsource(sys.modules[module])
    except OSError:  # the package was installed without its sources
        return {}
    classes = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef)]
    return {
        f"{node.name}.{ast.unparse(field.target)}": str(below.value.value)
        for node in classes
        for field, below in pairwise(node.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }


def _read_yaml(path: str | Path | None, sections: Mapping[str, Any]) -> dict[str, Any]:
    try:
        values = (yaml.safe_load(Path(path).read_text(encoding="utf-8")) if path else None) or {}
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}", path=path) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"config file {path} is not YAML: {str(error).splitlines()[0]}", path=path
        ) from None
    if not isinstance(values, dict):
        message = f"config file {path} must hold sections ({', '.join(sections)}), not {values!r}"
        raise ConfigError(message, path=path)
    nested: dict[str, Any] = {}
    for name, value in values.items():
        _merge(nested, _nest(str(name), value))
    return nested


def _variables(prefix: str) -> dict[str, str]:
    """Dotted names and values of the environment variables with this prefix; none for an empty one."""
    found = {n: text for n, text in os.environ.items() if prefix and n.startswith(prefix)}
    return {n.removeprefix(prefix).lower().replace("__", "."): text for n, text in found.items()}


def _assignments(words: Sequence[str]) -> dict[str, str]:
    for word in words:
        if "=" not in word:
            raise ConfigError(
                f"--set {word!r} is not an assignment: write --set SECTION.NAME=VALUE, as in store.cap_gb=8"
            )
    return {name.strip(): value for name, _, value in (word.partition("=") for word in words)}


def _parse(section: type[BaseModel], words: Mapping[str, str]) -> dict[str, Any]:
    """Dotted names and texts -> nested values.

    null, and lists and mappings of fields that are no texts, are written as in YAML. Raises ConfigError.
    """
    values: dict[str, Any] = {}
    for name, text in words.items():
        value: Any = None if text == "null" else text
        if text.startswith(("[", "{")) and not _takes_text(section, name):
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError:
                what = f"setting {name!r} cannot be {text!r}: it is not a list or mapping in YAML, such as [a, b]"
                raise ConfigError(what, setting=name) from None
        _merge(values, _nest(name, value))
    return values


def _takes_text(section: type[BaseModel], name: str) -> bool:
    """Whether any text is a value of this setting."""
    first, _, rest = name.partition(".")
    if first not in section.model_fields:
        return False
    kinds = list(_members(section.model_fields[first].annotation))
    if not rest:
        return str in kinds or SecretStr in kinds
    return any(
        _takes_text(kind, rest) for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)
    )


def _members(annotation: Any) -> Iterator[Any]:
    """The types that a field takes."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for part in get_args(annotation):
            yield from _members(part)
    else:
        yield annotation


def _nest(name: str, value: Any) -> dict[str, Any]:
    """a.b and v -> {a: {b: v}}"""
    for part in reversed(name.split(".")):
        value = {part: value}
    return dict(value)


def _merge(values: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Put `more` into `values`, section by section."""
    for name, value in more.items():
        inner = values.get(name)
        values[name] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return values


def _config_error(root: type[Settings], error: ValidationError) -> ConfigError:
    """The first problem of a validation error: its message is one line, its `setting` the dotted name."""
    problem = error.errors()[0]
    path = tuple(str(part) for part in problem["loc"] if part not in UNION_MEMBERS and "[" not in str(part))
    section = root.prefix + root.__name__.removesuffix("Config").lower()
    before = f"{section}." if section else ""
    setting = before + ".".join(path) if path else section
    reason = problem["msg"].removeprefix("Value error, ")
    reason = reason[0].lower() + reason[1:]
    if problem["type"] == "extra_forbidden":
        message = (
            f"unknown setting {setting!r}: {nearest(setting, [before + '.'.join(p) for p in _paths(root)])}"
        )
    elif not path:
        message = f"settings of {setting!r}: {reason}"
    elif problem["type"] == SECRET:
        message = f"setting {setting!r} {reason}"
    else:
        inner = [p[-1] for p in _paths(root) if p[:-1] == path]
        if problem["type"] == "model_type" and inner:
            reason = f"it has settings of its own: {', '.join(inner)}"
        message = f"setting {setting!r} cannot be {problem['input']!r}: {reason}"
    return ConfigError(message, setting=setting)


def _paths(section: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Every setting of a section and of its inner sections, as names from there."""
    for name, field in section.model_fields.items():
        yield (name,)
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from ((name, *path) for path in _paths(kind))
