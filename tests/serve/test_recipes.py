"""The recipes of the README, the tutorial and the how-to pages: Python and curl against a server, commands by the CLI."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blendserve.serve.config import ServeConfig
from tests.engine.helpers import PASSAGES
from tests.pages import RECIPES, ROOT, SERVER, blocks, commands, name, parse
from tests.serve.helpers import Server


def needed(example: str) -> set[str]:
    """Modules that the example imports."""
    nodes = list(ast.walk(ast.parse(example)))
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return names | {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}


def is_client(example: str) -> bool:
    return not any(module.partition(".")[0] == "blendserve" for module in needed(example))


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


class Retriever:
    """What the pages call `retriever`, as LangChain's are asked."""

    def invoke(self, question: str) -> list[Any]:
        return [
            SimpleNamespace(page_content=p.text, id=None, metadata={"title": p.title}) for p in PASSAGES[:2]
        ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("recipes"), ServeConfig())
    yield made
    made.close()


def for_toy(text: str, server: Server) -> str:
    """The same for this server: its address, model and collection."""
    text = text.replace(SERVER, server.url).replace("smollm2-135m", "tiny")
    return text.replace('"docs"', '"a"').replace("collection=docs", "collection=a")


EXAMPLES = [(page, i) for page in RECIPES for i, e in enumerate(blocks(page, "python")) if is_client(e)]


@pytest.mark.parametrize(("page", "number"), EXAMPLES, ids=[f"{name(p)}-{i}" for p, i in EXAMPLES])
def test_python_against_a_server(
    server: Server, page: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    example = blocks(page, "python")[number]
    for module in sorted(needed(example)):
        if not installed(module):
            pytest.skip(f"{module} is not installed")
    names: dict[str, Any] = {"retriever": Retriever(), "question": "Who sat on the mat?"}
    exec(compile(for_toy(example, server), name(page), "exec"), names)
    assert capsys.readouterr().out.strip()


def request(words: list[str]) -> tuple[str, str, dict[str, str], str | None]:
    """Method, URL, headers and body of a curl command."""
    method, url, headers, body = "", "", {}, None
    rest = iter(words[1:])
    for word in rest:
        if word in ("-X", "--request"):
            method = next(rest)
        elif word in ("-H", "--header"):
            key, _, value = next(rest).partition(": ")
            headers[key] = value
        elif word in ("-d", "--data"):
            body = next(rest)
        elif not word.startswith("-"):
            url = word
    return method or ("GET" if body is None else "POST"), url, headers, body


CURLS = [(page, words) for page in RECIPES for words in commands(page) if words[0] == "curl"]


@pytest.mark.parametrize(("page", "words"), CURLS, ids=[f"{name(p)}-{i}" for i, (p, _) in enumerate(CURLS)])
def test_curl(server: Server, page: Path, words: list[str]) -> None:
    method, url, headers, body = request([for_toy(word, server) for word in words])
    if not url.startswith(server.url):
        pytest.skip(f"{url} is another service")
    answer = server.http.request(method, url, headers=headers, content=body)
    assert answer.status_code < 300, answer.text


COMMANDS = [(page, words) for page in RECIPES for words in commands(page) if words[0] == "blendserve"]


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{name(p)}-{' '.join(w)}" for p, w in COMMANDS])
def test_commands_parse(page: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    parse(words)
    for word in words:
        if re.match(r"configs/.*\.yaml", word):
            assert Path(word).exists(), word


def test_metrics_that_are_named_exist(server: Server) -> None:
    named = {metric for page in RECIPES for metric in re.findall(r"\bblendserve_[a-z_]+", page.read_text())}
    known = set(re.findall(r"^# HELP (\S+)", server.get("/metrics").text, flags=re.MULTILINE))
    assert named
    assert named - known == set()


def test_recipes_are_found() -> None:
    assert len(EXAMPLES) >= 5
    assert len(CURLS) >= 3
    assert len(COMMANDS) >= 30
