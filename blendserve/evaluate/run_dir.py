"""The folder of a run: resumable after a kill at any moment.

runs/<name>/
  config.yaml        settings and environment; written first
  prompts.jsonl      a line per prompt, in pieces for the report
  predictions.jsonl  a line for each prompt and method, as they come
  metrics.json, pareto.svg, report.html     at the end, from the above
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from blendserve.config import Config
from blendserve.errors import ConfigError, InputError
from blendserve.evaluate.config import EvaluateConfig

Record = dict[str, Any]

# May change when a run is resumed. The length of answers is compared as decode.max_new_tokens.
EXTENSIBLE = {"limit", "half", "shuffles", "methods", "ratios", "store", "max_new_tokens"}


class RunDir:
    """A run's files."""

    def __init__(self, path: Path, config: EvaluateConfig, settings: Config, environment: Record) -> None:
        """Create the folder, or resume its run.

        Raises ConfigError where that has other prompts or another model, InputError where it is damaged.
        """
        self.path = path
        file = path / "config.yaml"
        values = {"run": config.model_dump(mode="json"), "settings": settings.model_dump(mode="json")}
        if file.exists():
            before = _read_config(file)
            self._check_same(_flat(before), _flat(values))
            environment = before.get("environment", {})  # that the run began in
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot create the run folder {path}: {error.strerror}") from None
        text = yaml.safe_dump({**values, "environment": environment}, sort_keys=False, allow_unicode=True)
        self.write(file.name, text.encode())
        self.prompts: dict[str, Record] = {line["id"]: line for line in read_lines(path / "prompts.jsonl")}
        self.predictions = {(p["id"], p["method"]): p for p in read_lines(path / "predictions.jsonl")}

    def add_prompt(self, prompt: Record) -> None:
        """Append a prompt. Raises InputError if the run has another one with its id: the data has changed."""
        known = self.prompts.setdefault(prompt["id"], prompt)
        if known is prompt:
            self._append("prompts.jsonl", prompt)
        elif known != prompt:
            raise InputError(
                f"{self.path} has another prompt for question {prompt['id']!r}: the data set, the index or the model has "
                "changed since. Give this run another --name, or delete that folder",
                path=self.path,
            )

    def add_prediction(self, prediction: Record) -> None:
        """Append a prediction; it is on disk on return."""
        self._append("predictions.jsonl", prediction)
        self.predictions[prediction["id"], prediction["method"]] = prediction

    def write(self, name: str, data: bytes) -> None:
        """Replace a file atomically."""
        part = self.path / f".{name}.part"
        part.write_bytes(data)
        os.replace(part, self.path / name)

    def _append(self, name: str, record: Record) -> None:
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def _check_same(self, old: Record, new: Record) -> None:
        for name in sorted(old.keys() | new.keys()):
            part, _, setting = name.partition(".")
            if part == "environment" or setting.split(".")[0] in EXTENSIBLE or old.get(name) == new.get(name):
                continue
            raise ConfigError(
                f"{self.path} holds a run with {setting} = {old.get(name)!r}, not {new.get(name)!r}: "
                "give this one another --name, or delete that folder",
                setting=setting,
                path=self.path,
            )


def read_lines(file: Path) -> list[Record]:
    """The objects of a JSON Lines file, none without a file; an incomplete last line is removed. Raises InputError."""
    data = file.read_bytes() if file.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(file, len(whole))
    found = []
    for n, line in enumerate(whole.splitlines(), 1):
        try:
            found.append(json.loads(line))
        except ValueError:
            raise InputError(f"{file}, line {n}: not JSON; delete that line", path=file, line=n) from None
    return found


def _read_config(file: Path) -> dict[str, Any]:
    """Raises InputError for what is no YAML mapping."""
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        values = None
    if not isinstance(values, dict):
        raise InputError(f"{file} is damaged: give this run another --name, or delete its folder", path=file)
    return values


def _flat(values: Record, prefix: str = "") -> Record:
    """Nested settings by dotted name."""
    flat: Record = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
