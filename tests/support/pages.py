"""The README and the pages of docs/: their code blocks and links, and `blendserve` commands parsed by the real CLI."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import typer

from blendserve.cli.app import app

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
RECIPES = [README, *sorted(DOCS.glob("tutorial/*.md")), *sorted(DOCS.glob("how-to/*.md"))]
WRITTEN = [*RECIPES, DOCS / "index.md"]
SERVER = "http://127.0.0.1:8000"


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """The contents of the page's ```language blocks."""
    return re.findall(
        rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def commands(page: Path) -> Iterator[list[str]]:
    """The simple commands of the page's bash blocks, as lists of words; redirections and here-documents are dropped."""
    for block in blocks(page, "bash"):
        text = re.sub(r"<<'(\w+)'\n.*?^\1$", "", block, flags=re.DOTALL | re.MULTILINE)
        lines = re.sub(  # comments go and newlines end a command, but for what is in quotes
            r"""('[^']*'|"[^"]*")|(?:(?<=\s)|^)#[^\n]*|\n""",
            lambda found: found[1] or (" ; " if found[0] == "\n" else ""),
            text.replace("\\\n", " "),
        )
        lexer = shlex.shlex(lines, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split, lexer.commenters = True, ""
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word and set(word) <= set(";&|"):
                while words and re.match(r"[A-Z_]+=", words[0]):  # environment
                    del words[0]
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def parse(words: list[str]) -> None:
    """Parse `blendserve ...` as the command line does, without running it. Raises click's UsageError."""
    if words[1:] == ["--version"]:
        return
    command: Any = typer.main.get_command(app)
    context, rest = command.make_context("blendserve", list(words[1:])), words[1:]
    while hasattr(command, "list_commands"):
        _, command, rest = command.resolve_command(context, list(rest))
        context = command.make_context(command.name, list(rest), parent=context)


def walk(command: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The words and the command, and those of all commands below it."""
    yield words, command
    for part in command.list_commands(None) if hasattr(command, "list_commands") else ():
        yield from walk(command.get_command(None, part), *words, part)


@cache
def options() -> frozenset[str]:
    """All long options of all commands."""
    known = (p for _, command in walk(typer.main.get_command(app)) for p in command.params)
    found = {o for p in known for o in (*p.opts, *p.secondary_opts) if o.startswith("--")}
    return frozenset(found) | {"--help", "--version"}


def links(page: Path) -> list[str]:
    return re.findall(
        r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    )


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
