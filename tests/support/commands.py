"""Runs a command line in this process, over a random model where the answer is not tested."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import torch

from blendserve.cli import main
from blendserve.config import ModelConfig
from blendserve.models import loader
from blendserve.models.loader import DTYPES, LoadedModel, fingerprint
from blendserve.models.model import DecoderModel
from blendserve.models.sources import BUNDLED
from tests.support.toy import toy_model

load_model = loader.load_model


@dataclass(frozen=True, slots=True)
class Result:
    """What a command returned and printed."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """The object on the last line of stdout: all that a command prints with --json."""
        return json.loads(self.out.strip().splitlines()[-1])


def cli(*argv: object, env: Mapping[str, str] | None = None) -> Result:
    """Run `blendserve ARGV`; `env` is added to the environment. An error that is a bug is raised."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, env or {}),
        mock.patch("sys.argv", ["blendserve"]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = main([str(word) for word in argv])
    return Result(code, out.getvalue(), err.getvalue())


def stand_in(put: Callable[[str, object], None]) -> None:
    """Commands load a random model in place of the bundled one; put(dotted name, value), as monkeypatch.setattr."""
    for module in ("blendserve.engine.engine", "blendserve.models.loader"):
        put(f"{module}.load_model", _load)


def _load(config: ModelConfig) -> LoadedModel:
    return _toy(config.name, config.dtype) if config.name in BUNDLED else load_model(config)


@cache
def _toy(name: str, dtype: str) -> LoadedModel:
    made = toy_model(8192)  # the context of the bundled model
    model = made.decoder.reference.to(DTYPES.get(dtype, torch.float32))
    return replace(made, name=name, decoder=DecoderModel.of(model), fingerprint=fingerprint(model))


def walk(command: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The words and the command, and those of all commands below it."""
    yield words, command
    for part in command.list_commands(None) if hasattr(command, "list_commands") else ():
        yield from walk(command.get_command(None, part), *words, part)
