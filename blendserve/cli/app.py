"""`blendserve`: the file of each command, exit codes of errors, and the version."""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import typer
from typer.core import TyperGroup

import blendserve
from blendserve import console
from blendserve.cli.options import make_app, option
from blendserve.errors import BlendserveError
from blendserve.extras import extra_with, install_hint
from blendserve.registry import Registry

FILES = {  # command -> its file
    **{"demo": "core", "doctor": "research", "index": "core", "precompute": "core", "ask": "core"},
    **{"calibrate": "quality"},
    **{"evaluate": "research", "serve": "server", "keys": "server", "kdn": "kdn", "store": "store"},
    **{"codec": "store", "bench": "bench", "simulate": "research", "cost": "research"},
    **{"warm": "warm"},
}
COMMANDS = Registry("command", {name: f"blendserve.cli.{file}:{name}" for name, file in FILES.items()})


class Commands(TyperGroup):
    """Imports a command's file on first use, so `ask` does not wait for the imports of others."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS.names)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS.names:
            return None
        command = typer.main.get_command(COMMANDS.load(cmd_name))
        command.name = cmd_name
        return command


app = make_app()


def _print_version(wanted: bool) -> None:
    if wanted:
        print(
            f"blendserve {blendserve.__version__}, torch {version('torch')}, Python {platform.python_version()}"
        )
        raise typer.Exit


@app.callback(cls=Commands)
def options(
    version: bool = option(
        False,
        "Print the versions of blendserve, torch and Python and exit.",
        "--version",
        callback=_print_version,
        is_eager=True,
    ),
    quiet: bool = option(False, "Print warnings and errors only.", "--quiet", "-q"),
    verbose: bool = option(False, "Print debug messages, too.", "--verbose", "-v"),
) -> None:
    """Answer questions over documents with cached KV of text chunks.

    The KV cache of a chunk is reused wherever the chunk stands in the prompt, which cuts the time to first token.

    `blendserve COMMAND --help` describes a command and its options. Results go to stdout, progress and messages to
    stderr. Exit codes: 0 success, 1 done but something is missing or bad, 2 invalid input or settings (one line
    says what), 130 after Ctrl-C.
    """
    console.show_log(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, the process's own for None, and return its exit code."""
    return run(app, argv)


def run(commands: typer.Typer, argv: Sequence[str] | None = None) -> int:
    """Run `commands`: a BlendserveError or a missing extra prints one line and returns 2, Ctrl-C returns 130."""
    console.show_log()
    try:
        commands(list(sys.argv[1:] if argv is None else argv))
    except SystemExit as end:  # typer's way to end a command
        return int(end.code or 0)
    except BlendserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        extra = extra_with(error.name or "")
        if extra is None:
            raise
        print(f"error: this command needs the package {error.name}: {install_hint(extra)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 141
    return 0
