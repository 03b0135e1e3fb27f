"""`blendserve`: which command is in which file, what an error does to the exit code, and the version."""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import blendserve
from blendserve.cli.options import make_app
from blendserve.errors import BlendserveError
from blendserve.registry import Registry

COMMANDS = Registry(
    "command",
    {
        name: f"blendserve.cli.{name}:app"
        for name in (
            *("demo", "doctor", "index", "precompute", "ask"),
            *("evaluate", "serve", "keys", "kdn", "store", "codec", "bench", "simulate", "cost"),
        )
    },
)


class Commands(TyperGroup):
    """Imports a command's file when it is asked for: `ask` need not wait for what others take."""

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
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the versions of blendserve, torch and Python and exit.",
        ),
    ] = False,
) -> None:
    """Answer questions over documents, several times faster, because nothing is read twice.

    `blendserve COMMAND --help` tells what a command does and takes. Results go to stdout, progress and remarks to
    stderr. The exit code is 0 when all is done, 1 when it is done but something is missing or bad, 2 for an error of the
    input, which one line explains, and 130 after Ctrl-C.
    """


def main(command: Sequence[str] = ()) -> None:
    """Entry point, and that of one command for a script."""
    run(app, command)


def run(commands: typer.Typer, command: Sequence[str] = ()) -> None:
    """Do what the arguments say: an error of ours is one line and exit code 2; Ctrl-C is 130."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        commands([*command, *sys.argv[1:]])
    except BlendserveError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)
