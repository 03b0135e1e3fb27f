"""The README and docs/: examples run, links resolve, files that are named exist, errors and metrics are all listed.

Python and curl run against a server, `blendserve` commands are parsed by the command line.
"""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
import tokenize
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer

from blendserve import errors
from blendserve.cli.app import app
from blendserve.config import Config
from blendserve.registry import POLICIES
from blendserve.serve.metrics import Metrics
from blendserve.store import MemoryStore
from tests.support.commands import stand_in
from tests.support.engines import PASSAGES
from tests.support.http import Server, serving

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
RECIPES = [README, *sorted(DOCS.glob("tutorial/*.md")), *sorted(DOCS.glob("how-to/*.md"))]
WRITTEN = [*RECIPES, DOCS / "index.md"]
SERVER = "http://127.0.0.1:8000"
REFERENCE = DOCS / "reference"
LINKED = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
GUIDES = sorted({*WRITTEN, *DOCS.glob("explanation/*.md")})


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


def links(page: Path) -> list[str]:
    return re.findall(
        r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    )


IMPORT = re.compile(r"^(?:from|import) ([\w.]+)", re.MULTILINE)
OWN = re.compile(r"^(?:from|import) blendserve\b", re.MULTILINE)
PYTHON = [
    pytest.param(block, id=f"{name(page)}-{i}")
    for page in (*RECIPES, REFERENCE / "python-api.md")
    for i, block in enumerate(blocks(page, "python"))
]
OF_PACKAGE, OF_CLIENTS = (
    [e for e in PYTHON if bool(OWN.search(str(e.values[0]))) is own] for own in (True, False)
)
WORDS = [(name(page), words) for page in RECIPES for words in commands(page) if words[1:] != ["--version"]]
CURL_OPTIONS = ArgumentParser()
CURL_OPTIONS.add_argument("url")
CURL_OPTIONS.add_argument("-X", "--request")
CURL_OPTIONS.add_argument("-d", "--data")
CURL_OPTIONS.add_argument("-H", "--header", action="append", default=[])
CURL_OPTIONS.add_argument("-F", "--form", action="append", default=[])
CURL, COMMANDS = ([(p, w) for p, w in WORDS if w[0] == program] for program in ("curl", "blendserve"))


@pytest.mark.parametrize("example", OF_PACKAGE)
def test_examples_of_the_python_api_run_as_written(
    example: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch.setattr)
    before, module = set(POLICIES.names), ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)
    try:
        exec(compile(example, "example", "exec", dont_inherit=True), module.__dict__)
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
            if anchor and target.suffix == ".md":  # GitHub makes anchors of headings
                headings = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE)
                assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}, (
                    link
                )


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = {(DOCS / link.partition("#")[0]).resolve() for link in links(DOCS / "index.md")}
    assert {name(page) for page in set(DOCS.glob("*/*.md")) - listed} == set()


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", *GUIDES], ids=name)
def test_files_that_are_named_exist(page: Path) -> None:
    """From the root of the repository, the package or configs/."""
    named = re.findall(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|yaml|cpp))`", page.read_text())
    tops = ROOT, ROOT / "blendserve", ROOT / "configs"
    assert [file for file in named if not any((top / file).exists() for top in tops)] == []


def test_the_examples_of_the_integrations_are_those_of_their_pages() -> None:
    """tests/serve runs these."""
    of_python = [page for page in (ROOT / "integrations").glob("*/README.md") if blocks(page, "python")]
    assert len(of_python) > 2
    for readme in of_python:
        page = DOCS / "how-to" / f"{readme.parent.name.replace('_', '-')}.md"
        assert blocks(readme, "python") == blocks(page, "python")[:1]


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
    found = {family.name for family in metrics.registry.collect()}
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One without keys."""
    with serving(tmp_path_factory.mktemp("recipes")) as made:
        yield made


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the tutorial."""
    monkeypatch.chdir(tmp_path)
    subprocess.run(["bash", "-c", blocks(DOCS / "tutorial" / "2-your-documents.md", "bash")[0]], check=True)


def for_toy(text: str, server: Server) -> str:
    """The same for this server: its address, model and collection."""
    text = re.sub("smollm2-135m(-reader)?", "tiny", text.replace(SERVER, server.url))
    return text.replace('"docs"', '"a"').replace("collection=docs", "collection=a")


@pytest.mark.parametrize("example", OF_CLIENTS)
@pytest.mark.usefixtures("notes")
def test_python(server: Server, example: str, capsys: pytest.CaptureFixture[str]) -> None:
    for module in IMPORT.findall(example):
        pytest.importorskip(module)
    found = [SimpleNamespace(page_content=p.text, id=None, metadata={"title": p.title}) for p in PASSAGES[:2]]
    retriever = SimpleNamespace(invoke=lambda question: found)
    names: dict[str, Any] = {"retriever": retriever, "question": "Who sat on the mat?"}
    exec(compile(for_toy(example, server), "example", "exec"), names)
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(("page", "words"), CURL, ids=[f"{p}-{i}" for i, (p, _) in enumerate(CURL)])
def test_curl(server: Server, page: str, words: list[str]) -> None:
    asked, _ = CURL_OPTIONS.parse_known_args([for_toy(word, server) for word in words[1:]])
    if not asked.url.startswith(server.url):
        pytest.skip(f"{asked.url} is another service")
    method = asked.request or ("POST" if asked.data or asked.form else "GET")
    headers = dict(header.split(": ", 1) for header in asked.header)
    body: dict[str, Any] = {"content": asked.data}
    if asked.form:
        pytest.importorskip("python_multipart")
        fields = [field.split("=", 1) for field in asked.form]
        files = [(name, (value[1:], b"text")) for name, value in fields if value.startswith("@")]
        body = {"files": files, "data": dict(field for field in fields if not field[1].startswith("@"))}
    answer = server.http.request(method, asked.url, headers=headers, **body)
    assert answer.status_code < 300, answer.text


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{p}-{' '.join(w)}" for p, w in COMMANDS])
def test_commands_parse(page: str, words: list[str]) -> None:
    """As the command line parses them, without running them: click's UsageError names what is wrong."""
    command: Any = typer.main.get_command(app)
    context, rest = command.make_context("blendserve", list(words[1:])), words[1:]
    while hasattr(command, "list_commands"):
        _, command, rest = command.resolve_command(context, list(rest))
        context = command.make_context(command.name, list(rest), parent=context)
    assert [w for w in words if re.match(r"configs/.*\.yaml", w) and not (ROOT / w).exists()] == []


def test_recipes_are_found() -> None:
    assert (len(OF_CLIENTS) >= 5, len(CURL) >= 3, len(COMMANDS) >= 30) == (True, True, True)
