"""The recipes of the README, the tutorial and the how-to pages: Python and curl against a server, commands by the CLI."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.engines import PASSAGES
from tests.support.http import Server, serving
from tests.support.pages import RECIPES, ROOT, SERVER, blocks, commands, name, parse

IMPORT = re.compile(r"^(?:from|import) ([\w.]+)", re.MULTILINE)
OF_THE_PACKAGE = re.compile(r"^(?:from|import) blendserve\b", re.MULTILINE)  # those run in tests/test_docs.py
EXAMPLES = [(name(page), example) for page in RECIPES for example in blocks(page, "python")]
PYTHON = [(page, example) for page, example in EXAMPLES if not OF_THE_PACKAGE.search(example)]
WORDS = [(name(page), words) for page in RECIPES for words in commands(page)]
CURL_OPTIONS = ArgumentParser()
CURL_OPTIONS.add_argument("url")
CURL_OPTIONS.add_argument("-X", "--request")
CURL_OPTIONS.add_argument("-d", "--data")
CURL_OPTIONS.add_argument("-H", "--header", action="append", default=[])
CURL, COMMANDS = ([(p, w) for p, w in WORDS if w[0] == program] for program in ("curl", "blendserve"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One without keys."""
    with serving(tmp_path_factory.mktemp("recipes")) as made:
        yield made


def for_toy(text: str, server: Server) -> str:
    """The same for this server: its address, model and collection."""
    text = text.replace(SERVER, server.url).replace("smollm2-135m", "tiny")
    return text.replace('"docs"', '"a"').replace("collection=docs", "collection=a")


@pytest.mark.parametrize(("page", "example"), PYTHON, ids=[f"{p}-{i}" for i, (p, _) in enumerate(PYTHON)])
def test_python(server: Server, page: str, example: str, capsys: pytest.CaptureFixture[str]) -> None:
    for module in IMPORT.findall(example):
        pytest.importorskip(module)
    found = [SimpleNamespace(page_content=p.text, id=None, metadata={"title": p.title}) for p in PASSAGES[:2]]
    retriever = SimpleNamespace(invoke=lambda question: found)
    names: dict[str, Any] = {"retriever": retriever, "question": "Who sat on the mat?"}
    exec(compile(for_toy(example, server), page, "exec"), names)
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(("page", "words"), CURL, ids=[f"{p}-{i}" for i, (p, _) in enumerate(CURL)])
def test_curl(server: Server, page: str, words: list[str]) -> None:
    asked, _ = CURL_OPTIONS.parse_known_args([for_toy(word, server) for word in words[1:]])
    if not asked.url.startswith(server.url):
        pytest.skip(f"{asked.url} is another service")
    method = asked.request or ("POST" if asked.data else "GET")
    headers = dict(header.split(": ", 1) for header in asked.header)
    answer = server.http.request(method, asked.url, headers=headers, content=asked.data)
    assert answer.status_code < 300, answer.text


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{p}-{' '.join(w)}" for p, w in COMMANDS])
def test_commands_parse(page: str, words: list[str]) -> None:
    parse(words)
    for word in words:
        if re.match(r"configs/.*\.yaml", word):
            assert (ROOT / word).exists(), word


def test_metrics_that_are_named_exist(server: Server) -> None:
    named = {metric for page in RECIPES for metric in re.findall(r"\bblendserve_[a-z_]+", page.read_text())}
    known = set(re.findall(r"^# HELP (\S+)", server.get("/metrics").text, flags=re.MULTILINE))
    assert named
    assert named - known == set()


def test_recipes_are_found() -> None:
    assert (len(PYTHON) >= 5, len(CURL) >= 3, len(COMMANDS) >= 30) == (True, True, True)
