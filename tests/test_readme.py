"""The README and the pages that it leads to: examples run, links and options exist, pages are short."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blendserve.serve.config import Config, load_settings
from tests.support.pages import DOCS, README, RECIPES, ROOT, WRITTEN, anchors, blocks, links, name, options

EXPLANATION = sorted(DOCS.glob("explanation/*.md"))
LINKED = sorted({*WRITTEN, *EXPLANATION, *DOCS.glob("re*/*.md"), ROOT / "CONTRIBUTING.md"})
OTHERS = {"--no-deps", "--index-url", "--no-build-isolation", "--cpuset-cpus", "--cache-reuse"} | {
    "--head",
    "--address",
    "--generate",
}


def examples(page: Path) -> list[str]:
    return [block for block in blocks(page, "python") if re.search(r"^(from|import) blendserve", block, re.M)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the pages' index `docs` is built of a corpus of two documents."""
    made = tmp_path_factory.mktemp("pages")
    corpus = re.findall(r"> corpus\.jsonl <<'END'\n(.*?)END", README.read_text(), flags=re.DOTALL)[0]
    (made / "corpus.jsonl").write_text(corpus)
    for command in ("index build corpus.jsonl docs", "precompute docs"):
        subprocess.run([sys.executable, "-m", "blendserve", *command.split()], cwd=made, check=True)
    return made


@pytest.mark.parametrize(
    ("page", "number"),
    [pytest.param(page, i, id=f"{name(page)}-{i}") for page in RECIPES for i in range(len(examples(page)))],
)
def test_examples_of_the_python_api_run_as_written(folder: Path, page: Path, number: int) -> None:
    example = examples(page)[number]
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_example_of_the_readme_reuses_tokens(folder: Path) -> None:
    (example,) = examples(README)
    assert len([line for line in example.splitlines() if line.strip()]) <= 11
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, cwd=folder, check=True
    )
    assert re.search(r"[1-9]\d* tokens reused", done.stdout), done.stdout


@pytest.mark.parametrize("page", LINKED, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", [*WRITTEN, *EXPLANATION], ids=name)
def test_options_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", page.read_text()))
    assert named - options() - OTHERS == set()


@pytest.mark.parametrize("page", [*WRITTEN, *EXPLANATION], ids=name)
def test_pages_are_short(page: Path) -> None:
    assert len(page.read_text().split()) <= (900 if page != README else 1100)


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = {(DOCS / link.partition("#")[0]).resolve() for link in links(DOCS / "index.md")}
    pages = set(DOCS.glob("*/*.md"))
    assert {name(page) for page in pages - listed} == set()


def is_setting(path: str) -> bool:
    section: Any = Config
    for part in path.split("."):
        field = getattr(section, "model_fields", {}).get(part)
        if field is None:
            return False
        section = field.annotation
    return True


@pytest.mark.parametrize("page", [*WRITTEN, *EXPLANATION], ids=name)
def test_settings_that_are_named_exist(page: Path) -> None:
    sections = "|".join(Config.model_fields)
    named = re.findall(
        rf"`((?:{sections})\.[a-z_.]+)", re.sub(r"`[a-z_/]+\.(?:py|yaml)`", "", page.read_text())
    )
    assert [path for path in named if not is_setting(path)] == []


@pytest.mark.parametrize("page", RECIPES, ids=name)
def test_settings_files_of_pages_load(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(page, "yaml")):
        file = tmp_path / f"{number}.yaml"
        file.write_text(block)
        load_settings(file)


def test_configs_load() -> None:
    for file in (ROOT / "configs").glob("*.yaml"):
        load_settings(file)
