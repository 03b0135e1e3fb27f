"""Write the generated part of the pages of docs/reference: commands and settings.

python -m scripts.make_reference
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from blendserve.cli.app import RESEARCH_COMMANDS, app
from blendserve.cli.options import choices_of, shown
from blendserve.config import Config, DeliverConfig, HttpConfig, Settings

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
WIDTH = 96  # and four spaces before
MARKER = "<!-- Generated from here on by scripts/make_reference.py; a test compares. -->"


def pages() -> dict[str, str]:
    """The text below MARKER of each page, by the page's name in docs/reference."""
    root: Any = typer.main.get_command(app)
    commands = list(_commands("blendserve", root))
    research = [(name, command) for name, command in commands if name.split()[1] in RESEARCH_COMMANDS]
    user = [(name, command) for name, command in commands if name.split()[1] not in RESEARCH_COMMANDS]
    root_help = f"## `blendserve`\n\n{_help('blendserve', root)}\n\n"
    settings = _table(("setting", "default", "description"), list(_settings(Config())))
    return {
        "cli-user.md": root_help + _page(user),
        "cli-research.md": _page(research),
        "settings.md": settings,
    }


def _page(commands: Sequence[tuple[str, Any]]) -> str:
    titles = [inspect.cleandoc(command.help).partition("\n\n")[0] for _, command in commands]
    links = [f"[`{name}`](#{name.replace(' ', '-')})" for name, _ in commands]
    parts = [f"## `{name}`\n\n{_help(name, command)}\n" for name, command in commands]
    return "\n".join([_table(("command", "description"), list(zip(links, titles, strict=True))), *parts])


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """The commands of a group, by their full names."""
    if hasattr(command, "list_commands"):
        for part in command.list_commands(None):
            yield from _commands(f"{name} {part}", command.get_command(None, part))
    else:
        yield name, command


def _help(name: str, command: Any) -> str:
    """The output of --help-all, as a code block."""
    for parameter in command.params:
        parameter.hidden = False
    with command.make_context(name, [], resilient_parsing=True, terminal_width=WIDTH) as context:
        lines = inspect.cleandoc(context.get_help()).splitlines()
    return "\n".join(f"    {line}".rstrip() for line in lines)


def _settings(section: Settings, above: str = "") -> Iterator[tuple[str, str, str]]:
    shared = HttpConfig.model_fields if isinstance(section, DeliverConfig) else {}  # described at `serve`
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Settings):
            yield from _settings(value, f"{above}{name}.")
        elif name not in shared:
            choices = ", ".join(choices_of(field))
            about = f"{type(section).description(name)}{f' One of {choices}.' if choices else ''}"
            yield f"`{above}{name}`", shown(value), about


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    for name, text in pages().items():
        page = REFERENCE / name
        page.write_text(f"{page.read_text().partition(MARKER)[0]}{MARKER}\n\n{text}")
