"""`blendserve`: the file of each command, exit codes of errors, and the version."""

from __future__ import annotations

import io
import logging
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import typer
from typer.core import TyperGroup

import blendserve
from blendserve import console
from blendserve.cli.options import make_app, option
from blendserve.errors import BlendserveError
from blendserve.extras import extra_with, install_hint
from blendserve.provenance import package_version
from blendserve.registry import Registry

USER_COMMANDS = {  # command -> its file
    "demo": "core",
    "index": "core",
    "precompute": "core",
    "ask": "core",
    "serve": "server",
    "doctor": "research",
    "store": "store",
    "codec": "store",
    "keys": "server",
    "calibrate": "quality",
    "kdn": "kdn",
}
RESEARCH_COMMANDS = {"evaluate": "research", "bench": "bench", "simulate": "research", "cost": "research"}
log = logging.getLogger(__name__)
COMMANDS = Registry(
    "command",
    {name: f"blendserve.cli.{file}:{name}" for name, file in (USER_COMMANDS | RESEARCH_COMMANDS).items()},
)


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

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Users' commands, then those that measure."""
        room = formatter.width - 6 - max(map(len, COMMANDS.names))
        for title, names in (("Commands", USER_COMMANDS), ("Commands for research", RESEARCH_COMMANDS)):
            rows = [(name, self.get_command(ctx, name).get_short_help_str(room)) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows)


app = make_app(add_completion=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        torch = package_version("torch") or "(not installed)"
        print(f"blendserve {blendserve.__version__}, torch {torch}, Python {platform.python_version()}")
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

    The KV cache of a chunk is reused at any position of a prompt, which cuts the time to first token.

    `blendserve COMMAND --help` describes a command and its options. Results go to stdout, progress and messages to
    stderr. Exit codes: 0 success, 1 done but something is missing or bad, 2 invalid input or settings (one line
    says what), 130 after Ctrl-C, 141 when the program that read stdout has closed it.
    """
    console.show_log(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)


def run(commands: typer.Typer, argv: Sequence[str] | None = None) -> int:
    """Run `commands`, the process's own command line for None, and return the exit code.

    A BlendserveError, a missing extra or an error of the system prints one line and returns 2. A reader of stdout that
    has gone returns 141, Ctrl-C 130.
    """
    console.show_log()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name or a text that this terminal cannot show
    try:
        code = _call(commands, list(sys.argv[1:] if argv is None else argv))
        if sys.stdout is not None:
            sys.stdout.flush()  # at exit, Python would print a traceback for what cannot be written
        return code
    except BlendserveError as error:
        log.debug("The error with its causes:", exc_info=error)  # shown by --verbose
        return _refuse(str(error))
    except ModuleNotFoundError as error:
        name = error.name or ""
        extra = extra_with(name)
        is_ours = name.partition(".")[0] in ("", "blendserve")
        if extra is None and is_ours:
            raise
        remedy = "install blendserve again with its dependencies" if extra is None else install_hint(extra)
        return _refuse(f"this command needs the package {name}: {remedy}")
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _discard_output()
        return 141
    except OSError as error:  # a full disk, permissions, a network: the machine's, not the program's
        log.debug("", exc_info=True)
        _discard_output()
        return _refuse(f"{error.filename or 'output or input'}: {error.strerror or error}")


def _call(commands: typer.Typer, words: list[str]) -> int:
    """The exit code. Raises what the command raises: also BrokenPipeError and KeyboardInterrupt, which typer hides."""
    try:
        commands(words)
    except SystemExit as end:  # typer's way to end a command
        hidden = end.__context__
        for error in (hidden, getattr(hidden, "__cause__", None)):
            if isinstance(error, (BrokenPipeError, KeyboardInterrupt)):
                raise error from None
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return int(end.code or 0)
    return 0


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _discard_output() -> None:
    """Send what stdout still buffers to nowhere."""
    with suppress(OSError, ValueError, AttributeError):  # a stdout that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
