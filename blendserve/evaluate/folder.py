"""A run on disk, so that it can be traced, killed and gone on with.

runs/<name>/
  config.yaml        what was asked for, and where it ran; written first
  prompts.jsonl      a line a question: its prompt in pieces, for the report
  predictions.jsonl  a line for each question and method, as they come
  metrics.json, pareto.svg, report.html     at the end, made of the above
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import yaml

from blendserve.config import Config
from blendserve.errors import ConfigError, InputError
from blendserve.evaluate.config import EvaluateConfig

Line = dict[str, Any]

EXTENSIBLE = {
    "limit",
    "half",
    "shuffles",
    "methods",
    "ratios",
    "store",
}  # what a run may be gone on with differently


class RunFolder:
    """One run's files; a context manager that keeps them open for appending."""

    def __init__(self, path: Path, plan: EvaluateConfig, settings: Config, environment: Line) -> None:
        """Create the folder, or go on with what is there.

        Raises ConfigError when that is a run over other prompts or by another reader, InputError when it is damaged.
        """
        self.path = path
        asked = {"run": plan.model_dump(mode="json"), "settings": settings.model_dump(mode="json")}
        self.began: Line = environment
        if (path / "config.yaml").exists():
            before = _load_yaml(path / "config.yaml")
            _check_same(path, before, asked)
            self.began = before.get("environment", {})
        _make(path)
        _replace(
            path / "config.yaml",
            yaml.safe_dump(
                {**asked, "environment": self.began}, sort_keys=False, allow_unicode=True
            ).encode(),
        )
        self.prompts = {line["id"]: line for line in _recover(path / "prompts.jsonl")}
        self.predictions = {(p["id"], p["method"]): p for p in _recover(path / "predictions.jsonl")}
        self._files: dict[str, TextIO] = {}

    def __enter__(self) -> RunFolder:
        for name in ("prompts", "predictions"):
            self._files[name] = (self.path / f"{name}.jsonl").open("a", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()

    def add_prompt(self, line: Line) -> None:
        """Keep a question's prompt. Raises InputError when the run has kept another one before: the data has changed."""
        known = self.prompts.setdefault(line["id"], line)
        if known is line:
            self._append("prompts", line)
        elif known != line:
            raise InputError(
                f"{self.path} was begun with another prompt for question {line['id']!r}: the data set, the index or the "
                "reader has changed since. Give this run another name, or delete that folder",
                path=self.path,
            )

    def add_prediction(self, line: Line) -> None:
        """Keep a prediction: on disk when this returns."""
        self._append("predictions", line)
        self.predictions[line["id"], line["method"]] = line

    def write(self, name: str, data: bytes) -> None:
        """A whole file; a kill leaves this one or the one before."""
        _replace(self.path / name, data)

    def _append(self, name: str, line: Line) -> None:
        file = self._files[name]
        file.write(json.dumps(line, ensure_ascii=False) + "\n")
        file.flush()


def _recover(path: Path) -> Iterator[Line]:
    """The lines of a file; what a kill left half-written at its end is cut off."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    for n, line in enumerate(whole.splitlines(), 1):
        try:
            yield json.loads(line)
        except ValueError:
            raise InputError(
                f"{path}, line {n}: not JSON; delete that line, and the run goes on with what it lost",
                path=path,
                line=n,
            ) from None


def _load_yaml(path: Path) -> Line:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise InputError(
            f"{path} cannot be read ({error}): delete the folder, or give another name"
        ) from None
    if not isinstance(values, dict) or not {"run", "settings"} <= set(values):
        raise InputError(f"{path} is not of an evaluation: give another name for this run")
    return values


def _check_same(path: Path, before: Line, asked: Line) -> None:
    for part in ("run", "settings"):
        old, new = _flat(before[part]), _flat(asked[part])
        for name in sorted(set(old) | set(new)):
            if name.split(".")[0] not in EXTENSIBLE and old.get(name) != new.get(name):
                raise ConfigError(
                    f"{path} holds a run with {name} = {old.get(name)!r}, not {new.get(name)!r}: "
                    "give this one another name, or delete that folder",
                    setting=name,
                    path=path,
                )


def _flat(values: Line, above: str = "") -> Line:
    """Nested settings by dotted name."""
    flat: Line = {}
    for name, value in values.items():
        flat |= _flat(value, f"{above}{name}.") if isinstance(value, dict) else {f"{above}{name}": value}
    return flat


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the run folder {path} cannot be made: {error.strerror}") from None


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    os.replace(part, path)
