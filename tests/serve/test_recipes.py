"""The examples of docs/serving.md, run as they are written against a server; those of packages that are here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blendserve.serve.config import ServeConfig
from tests.engine.helpers import PASSAGES
from tests.serve.helpers import Server

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)


class Retriever:
    """What a LangChain retriever is to the example."""

    def invoke(self, question: str) -> list[Any]:
        return [SimpleNamespace(page_content=p.text, id=None) for p in PASSAGES[:2]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("recipes"), ServeConfig())
    yield made
    made.close()


@pytest.mark.parametrize(
    ("package", "examples"),
    [("openai", 1), ("langchain_openai", 2), ("llama_index.llms.openai_like", 1)],
)
def test_the_examples_run(
    server: Server, package: str, examples: int, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(package)
    found = [e for e in EXAMPLES if f"from {package} import" in e]
    if package == "langchain_openai":  # the second goes on from the first
        found += [e for e in EXAMPLES if "retriever.invoke" in e]
    assert len(found) == examples
    names: dict[str, Any] = {"retriever": Retriever(), "question": "Who sat on the mat?"}
    for example in found:
        here = example.replace("http://127.0.0.1:8000", server.url).replace("smollm2-135m", "tiny")
        exec(compile(here, str(DOCS), "exec"), names)
        assert capsys.readouterr().out.strip()
