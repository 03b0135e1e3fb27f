"""Every name in back-ticks in a page, a help text or a message is one that the program has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from blendserve.config import Config
from tests.support.names import ROOT, commands, unknown

HISTORY = {ROOT / "docs" / "research" / "decisions.md"}  # names that are gone belong there
PAGES = sorted(
    {
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "indexes/README.md")),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "integrations").glob("*/README.md"),
    }
    - HISTORY
)
PACKAGE = ROOT / "blendserve"
WRONG = (
    "`kdn.level: auto`",
    "`serve.strip`",
    "`blend.ratio: 7`",
    "`report.tokens_stolen`",
    "`report.quality.colour`",
    "`x_blendserve.report.nothing`",
    "`tokens_stolen`",
    "`GET /v1/nothing`",
    "`/v1/cache/nothing`",
    "`blendserve_nothing_total`",
    "`blendserve store nothing`",
    "`blendserve ask --repair`",
    "`store nothing`",
    "    blendserve nothing docs",
    "`--nothing`",
    "`query+nothing@0.05`",
    "`nothing@0.05`",
    "`X-Blendserve-Nothing`",
    "`BLENDSERVE_NOTHING`",
    "`BLENDSERVE__STORE__NOTHING`",
    "`NothingError`",
)


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_name_of_each_kind_is_found(text: str) -> None:
    assert unknown(f"Before. {text} after." if text.startswith("`") else f"Before:\n\n{text}\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_in_pages_exist(page: Path) -> None:
    assert unknown(page.read_text("utf-8")) == set()


def test_names_in_help_texts_exist() -> None:
    texts = [help_ for words in commands() for help_ in _help(words)]
    assert len(texts) > 100
    assert {name for text in texts for name in unknown(text)} == set()


def _help(words: tuple[str, ...]) -> Iterator[str]:
    """The texts of a command and of its options, which are those of the settings."""
    command = commands()[words]
    yield command.help or ""
    yield from (getattr(parameter, "help", None) or "" for parameter in command.params)


def test_names_in_descriptions_of_settings_exist() -> None:
    sections = [(name, type(getattr(Config(), name))) for name in Config.model_fields]
    texts = [section.description(field) for _, section in sections for field in section.model_fields]
    assert {name for text in texts for name in unknown(text)} == set()


def test_names_in_messages_exist() -> None:
    """In every string of the package that is no docstring."""
    found = {
        (str(file.relative_to(ROOT)), name)
        for file in PACKAGE.rglob("*.py")
        for text in _strings(ast.parse(file.read_text("utf-8")))
        if "`" in text
        for name in unknown(text)
    }
    assert found == set()


def _strings(tree: ast.Module) -> Iterator[str]:
    """Strings, with NAME in the place of each value of an f-string."""
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            constants = (part.value if isinstance(part, ast.Constant) else "NAME" for part in node.values)
            yield "".join(text for text in constants if isinstance(text, str))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            yield node.value
