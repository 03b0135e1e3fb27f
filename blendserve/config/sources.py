"""Where values of settings come from: a YAML file, the environment, words `a.b=value`.

pydantic-settings would drop a misspelt variable in silence and read the environment whenever a section is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from blendserve.errors import ConfigError


def read_yaml(path: Path, sections: list[str]) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}", path=path) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"config file {path} is not YAML: {reason}", path=path) from None
    if not isinstance(values, dict):
        message = f"config file {path} must hold sections ({', '.join(sections)}), not {values!r}"
        raise ConfigError(message, path=path)
    return values


def from_environment(environment: Mapping[str, str], prefix: str) -> dict[str, Any]:
    """The settings among environment variables: PREFIX, then the dotted name with __ in place of the dots."""
    found = {name: text for name, text in environment.items() if name.startswith(prefix)}
    return _parsed({n.removeprefix(prefix).lower().replace("__", "."): text for n, text in found.items()})


def from_words(words: Sequence[str]) -> dict[str, Any]:
    """The settings in words `a.b=value`. Raises ConfigError."""
    for word in words:
        if "=" not in word:
            raise ConfigError(
                f"--set {word!r} is no assignment: write --set SECTION.NAME=VALUE, as in store.cap_gb=8"
            )
    return _parsed({name.strip(): value for name, _, value in (word.partition("=") for word in words)})


def nested(name: str, value: Any) -> dict[str, Any]:
    """a.b and v -> {a: {b: v}}"""
    for part in reversed(name.split(".")):
        value = {part: value}
    return dict(value)


def _parsed(words: Mapping[str, str]) -> dict[str, Any]:
    """Dotted names and texts -> nested values; lists, mappings and null are written as in YAML."""
    values: dict[str, Any] = {}
    for name, text in words.items():
        is_yaml = text.startswith(("[", "{")) or text == "null"
        values = merge(values, nested(name, yaml.safe_load(text) if is_yaml else text))
    return values


def merge(values: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Put `more` into `values`, section by section."""
    for name, value in more.items():
        inner = values.get(name)
        values[name] = merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return values
