"""Runs a command line in this process: exit code, stdout and stderr, without a process and without SystemExit."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest import mock

from blendserve.cli import main


@dataclass(frozen=True, slots=True)
class Result:
    """What a command returned and printed."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """The object on the last line of stdout: all that a command prints with --json."""
        return json.loads(self.out.strip().splitlines()[-1])


def cli(*argv: object, stdin: str = "", env: Mapping[str, str] | None = None) -> Result:
    """Run `blendserve ARGV`; `env` is added to the environment. An error that is a bug is raised."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, env or {}),
        mock.patch("sys.stdin", io.StringIO(stdin)),
        mock.patch("sys.argv", ["blendserve"]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = _run([str(word) for word in argv])
    return Result(code, out.getvalue(), err.getvalue())


def _run(argv: list[str]) -> int:
    try:
        return int(main(argv) or 0)  # type: ignore[func-returns-value]  # it returns the code from the next step on
    except SystemExit as end:
        return int(end.code or 0)
