"""Pages of the documentation: their length, links, words and line width; and the words of --help."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from blendserve import errors
from blendserve.cli.app import app
from blendserve.serve.kdn.service import DeliveryMetrics
from blendserve.serve.metrics import Metrics
from blendserve.store import MemoryStore

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GUIDES = [page for part in ("tutorial", "how-to", "reference") for page in sorted((DOCS / part).glob("*.md"))]
GENERATED = {"cli-user.md", "cli-research.md", "settings.md"}
LINKED = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
# Texts still to be rewritten; their tests fail once they have been, so that they are removed here.
MOST_WORDS, WIDTH = 900, 100
PRIVATE = re.compile(
    r"\b(took|whoever|nobody|somebody|anybody|in company|how chunks move|what is there|what is here|to be had"
    r"|on its way|brought near|stands? still|of its own accord|so many|reckon|beforehand|by itself|those that"
    r"|who computes|who waits|who asks|left behind|at hand)\b",
    re.IGNORECASE,
)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_code(text: str) -> str:
    """A page without its fenced and indented blocks of code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)


def without_tables(text: str) -> str:
    return re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for part in command.list_commands(None) if hasattr(command, "list_commands") else ():
        yield from commands(f"{name} {part}", command.get_command(None, part))


COMMANDS = dict(commands("blendserve", typer.main.get_command(app)))


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *(p for p in GUIDES if p.name not in GENERATED)], ids=named
)
def test_a_page_takes_five_minutes_to_read(page: Path) -> None:
    text = page.read_text()
    text = without_tables(text) if page.name == "models.md" else text  # its table is generated
    assert len(re.findall(r"\S*\w\S*", text)) <= MOST_WORDS


@pytest.mark.parametrize("page", LINKED, ids=named)
def test_links_resolve(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *GUIDES], ids=named)
def test_pages_use_no_private_word(page: Path) -> None:
    assert PRIVATE.findall(page.read_text()) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_uses_no_private_word(name: str) -> None:
    command = COMMANDS[name]
    texts = [command.help or "", *(getattr(p, "help", None) or "" for p in command.params)]
    assert PRIVATE.findall("\n".join(texts)) == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *GUIDES], ids=named)
def test_prose_is_wrapped(page: Path) -> None:
    lines = without_tables(without_code(page.read_text())).splitlines()
    assert [line for line in lines if len(line) > WIDTH and "](" not in line and "<!--" not in line] == []


def test_the_python_example_runs_as_written(tmp_path: Path) -> None:
    example = re.findall(
        r"```python\n(.*?)```", (DOCS / "reference" / "python-api.md").read_text(), re.DOTALL
    )[0]
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert re.search(r"[1-9]\d* tokens reused", done.stdout), done.stdout


def test_every_error_is_listed() -> None:
    text = (DOCS / "reference" / "errors.md").read_text()
    named = [
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if kind.__module__ == errors.__name__
    ]
    assert [name for name in named if f"| `{name}` |" not in text] == []


def test_every_metric_is_listed() -> None:
    metrics = Metrics()
    metrics.watch(lambda: (0, 0), 1, MemoryStore(1))
    found = {family.name for each in (metrics, DeliveryMetrics()) for family in each.registry.collect()}
    listed = re.findall(
        r"^\| `(\w+)` \|", (DOCS / "reference" / "metrics.md").read_text(), flags=re.MULTILINE
    )
    assert {f"blendserve_{name}" for name in listed} == found


def test_every_environment_variable_is_listed() -> None:
    sources = "".join(file.read_text() for file in (ROOT / "blendserve").rglob("*.py"))
    text = (DOCS / "reference" / "settings.md").read_text()
    found = set(re.findall(r"\bBLENDSERVE_[A-Z_]+\b", sources))
    assert [name for name in sorted(found) if f"| `{name}` |" not in text] == []
