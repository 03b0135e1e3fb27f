"""Unchanged clients of OpenAI's and Anthropic's APIs work, and the page of clients says what was found of all of them.

The others of integrations/clients/ run by `make test-clients`, each in an environment of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from blendserve.bench.server_process import serve_command
from tests.support.http import CommandServer

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "integrations" / "clients"


def load_runner() -> Any:
    spec = spec_from_file_location("run_clients", CLIENTS / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


runner = load_runner()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the bundled model: the clients ask it for answers that no random model gives."""
    log = tmp_path_factory.mktemp("clients") / "log"
    command = serve_command("--no-index", "--set", f"decode.max_new_tokens={runner.CAP}")
    with CommandServer(command, log) as server:
        yield server.url


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("client", "package"),
    [
        ("openai_python", "openai"),
        ("anthropic_python", "anthropic"),
        ("langchain_openai", "langchain_openai"),
    ],
)
def test_all_features_of_a_client_work(url: str, client: str, package: str) -> None:
    pytest.importorskip(package)
    found = runner.outcomes([sys.executable, str(CLIENTS / f"try_{client}.py")], url)
    assert found
    assert {feature: outcome for feature, outcome in found.items() if outcome != "ok"} == {}


def test_the_page_and_the_readme_say_what_was_found() -> None:
    text = runner.page_text()
    assert text == runner.PAGE.read_text("utf-8")
    figures = next(line for line in text.splitlines() if line.endswith("clients work."))
    assert figures.removesuffix(".") in (ROOT / "README.md").read_text("utf-8")
