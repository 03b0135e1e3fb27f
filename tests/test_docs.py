"""The README and docs/: examples run, links resolve, and every option, setting, error and metric named exists."""

from __future__ import annotations

import inspect
import re
import tokenize
from pathlib import Path
from typing import Any, get_args

import pytest

from blendserve import errors
from blendserve.config import Config
from blendserve.registry import POLICIES
from blendserve.serve.delivery import DeliveryMetrics
from blendserve.serve.metrics import Metrics
from blendserve.store import MemoryStore
from tests.support.commands import stand_in
from tests.support.pages import DOCS, README, RECIPES, ROOT, WRITTEN, anchors, blocks, links, name, options

REFERENCE = DOCS / "reference"
LINKED = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
GUIDES = sorted({*WRITTEN, *DOCS.glob("explanation/*.md")})
OTHERS = {"--no-deps", "--index-url", "--no-build-isolation", "--cpuset-cpus", "--cache-reuse"} | {
    *("--head", "--address", "--generate")  # options of other programs
}
EXAMPLES = [
    pytest.param(block, id=f"{name(page)}-{i}")
    for page in (*RECIPES, REFERENCE / "python-api.md")
    for i, block in enumerate(blocks(page, "python"))
    if re.search(r"^(from|import) blendserve", block, re.MULTILINE)
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_of_the_python_api_run_as_written(
    example: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch.setattr)
    before = set(POLICIES.names)
    try:
        exec(compile(example, "example", "exec"), {"__name__": "example"})
    finally:
        for added in set(POLICIES.names) - before:
            POLICIES.remove(added)
    out = capsys.readouterr().out
    assert out.strip()
    if "tokens_reused" in example:
        assert re.search(r"[1-9]\d* tokens reused", out)


@pytest.mark.parametrize("page", LINKED, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not re.match(r"[a-z]+:", link):
            assert target.exists(), link
            assert not anchor or target.suffix != ".md" or anchor in anchors(target), link


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = {(DOCS / link.partition("#")[0]).resolve() for link in links(DOCS / "index.md")}
    assert {name(page) for page in set(DOCS.glob("*/*.md")) - listed} == set()


def is_setting(path: str) -> bool:
    section: Any = Config
    for part in path.split("."):
        field = getattr(section, "model_fields", {}).get(part)
        if field is None:
            return False
        kinds = (field.annotation, *get_args(field.annotation))
        section = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
    return True


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_options_and_settings_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text)) - options() - OTHERS == set()
    without_files = re.sub(r"`[a-z_/]+\.(?:py|yaml)`", "", text)
    named = re.findall(rf"`((?:{'|'.join(Config.model_fields)})\.[a-z_.]+)", without_files)
    assert [path for path in named if not is_setting(path)] == []


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", *GUIDES], ids=name)
def test_files_that_are_named_exist(page: Path) -> None:
    """From the root of the repository, the package or configs/."""
    named = re.findall(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|yaml|cpp))`", page.read_text())
    tops = ROOT, ROOT / "blendserve", ROOT / "configs"
    assert [file for file in named if not any((top / file).exists() for top in tops)] == []


@pytest.mark.parametrize("page", GUIDES, ids=name)
def test_pages_take_five_minutes_to_read(page: Path) -> None:
    text = re.sub(r"^\|.*$", "", page.read_text(), flags=re.MULTILINE)
    assert len(re.findall(r"\S*\w\S*", text)) <= 900


def test_settings_files_load(tmp_path: Path) -> None:
    for n, block in enumerate(block for page in RECIPES for block in blocks(page, "yaml")):
        (tmp_path / f"{n}.yaml").write_text(block)
    files = [*tmp_path.glob("*.yaml"), *(ROOT / "configs").glob("*.yaml")]
    assert len(files) > 5
    for file in files:
        Config.load(file)


def test_every_error_and_metric_is_listed() -> None:
    text = (REFERENCE / "errors.md").read_text()
    kinds = [
        n for n, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__
    ]
    assert [kind for kind in kinds if f"| `{kind}` |" not in text] == []
    metrics = Metrics()
    metrics.watch(lambda: (0, 0), 1, MemoryStore(1))
    found = {family.name for each in (metrics, DeliveryMetrics()) for family in each.registry.collect()}
    listed = re.findall(r"^\| `(\w+)` \|", (REFERENCE / "metrics.md").read_text(), flags=re.MULTILINE)
    assert {f"blendserve_{metric}" for metric in listed} == found


def test_every_name_of_the_glossary_is_in_the_code() -> None:
    """As a name, a string, or a file; not in a comment or as a part of a docstring."""
    package, found = ROOT / "blendserve", set[str]()
    for file in package.rglob("*.py"):
        found.add(str(file.relative_to(package)))
        with file.open("rb") as lines:
            found |= {token.string.strip("\"'") for token in tokenize.tokenize(lines.readline)}
    rows = re.findall(
        r"^\| ([^|]+) \|[^|]+\| (`[^|]+) \|$", (REFERENCE / "glossary.md").read_text(), re.MULTILINE
    )
    assert len(rows) >= 40
    assert [term for term, _ in rows] == list(dict.fromkeys(term for term, _ in rows))
    assert {name for _, names in rows for name in re.findall(r"`([^`]+)`", names)} - found == set()
