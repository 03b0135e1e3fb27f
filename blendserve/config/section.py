"""A section of settings: frozen, checked when it is made, and refused with the setting's dotted name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from blendserve.config.errors import config_error
from blendserve.config.sources import from_environment, from_words, merge, nested, read_yaml
from blendserve.errors import ConfigError

AnySection = TypeVar("AnySection", bound="Section")

_is_nested: ContextVar[bool] = ContextVar(
    "is_nested", default=False
)  # whether an outer section is being made


class Section(BaseModel):
    """A frozen group of settings that refuses unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    prefix: ClassVar[str] = ""  # dotted name of the section that this one is a part of
    environment: ClassVar[str] = ""  # what names of environment variables begin with; "": none are read

    def __init__(self, **values: Any) -> None:
        outermost = None if _is_nested.get() else _is_nested.set(True)
        try:
            super().__init__(**values)
        except ValidationError as error:
            if outermost is None:
                raise  # the outer section knows the whole path
            raise config_error(type(self), self.prefix, error) from None
        finally:
            if outermost is not None:
                _is_nested.reset(outermost)

    @classmethod
    def load(
        cls: type[AnySection], path: str | Path | None = None, overrides: Sequence[str] = ()
    ) -> AnySection:
        """Defaults, then a YAML file, then the environment, then overrides `a.b=value`; the last one wins.

        Raises ConfigError with the setting, and the file if the value comes from it.
        """
        values: dict[str, Any] = {}
        for where, file, found in (
            (f"config file {path}", path, read_yaml(Path(path), list(cls.model_fields)) if path else {}),
            ("environment", None, from_environment(os.environ, cls.environment) if cls.environment else {}),
            ("--set", None, from_words(overrides)),
        ):
            try:
                cls(**merge(values, cls.upgraded(found, values)))
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}", setting=error.setting, path=file) from None
        return cls(**values)

    @classmethod
    def upgraded(cls, values: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
        """The values of one source under the names of today. before: of the sources that it overrides."""
        return values

    def replace(self: AnySection, name: str, value: Any) -> AnySection:
        """A copy with the setting of this dotted name replaced, and checked. Raises ConfigError."""
        first, _, rest = name.partition(".")
        if rest:
            inner = getattr(self, first, None)
            value = inner.replace(rest, value) if isinstance(inner, Section) else nested(rest, value)
        plain = value.model_dump() if isinstance(value, Section) else value
        return type(self)(**{**self.model_dump(), first: plain})


def changed(section: AnySection, **values: Any) -> AnySection:
    """A checked copy with those of the values that are not None."""
    given = {name: value for name, value in values.items() if value is not None}
    return type(section)(**{**section.model_dump(), **given}) if given else section
