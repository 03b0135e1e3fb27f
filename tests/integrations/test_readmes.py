"""The example of each integration's README, as it is written."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.conftest import INTEGRATIONS
from tests.engine.helpers import PASSAGES, QUESTIONS
from tests.serve.helpers import Server


def names_of_langchain(_: pytest.MonkeyPatch) -> dict[str, Any]:
    """A retriever, as an application has it."""
    pytest.importorskip("langchain_openai")
    from langchain_core.documents import Document
    from langchain_core.runnables import RunnableLambda

    documents = [Document(p.text) for p in PASSAGES]
    return {"retriever": RunnableLambda[Any, list[Document]](lambda _: documents)}


def names_of_llama_index(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An index, and no LLM."""
    pytest.importorskip("llama_index.core")
    from llama_index.core import MockEmbedding, Settings, VectorStoreIndex
    from llama_index.core.llms import MockLLM
    from llama_index.core.schema import TextNode

    monkeypatch.setattr(type(Settings), "llm", MockLLM())  # for this test alone
    nodes = [TextNode(text=p.text) for p in PASSAGES]
    return {"index": VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=8))}


def names_of_haystack(_: pytest.MonkeyPatch) -> dict[str, Any]:
    """A pipeline with a retriever, and a question."""
    pytest.importorskip("haystack.version")
    from haystack import Document, Pipeline
    from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
    from haystack.document_stores.in_memory import InMemoryDocumentStore

    store = InMemoryDocumentStore()
    store.write_documents([Document(content=p.text) for p in PASSAGES])
    pipeline = Pipeline()
    pipeline.add_component("retriever", InMemoryBM25Retriever(store))
    return {"pipeline": pipeline, "question": QUESTIONS[0]}


NAMES = {
    "langchain": names_of_langchain,
    "llama_index": names_of_llama_index,
    "haystack": names_of_haystack,
}


@pytest.mark.parametrize("folder", NAMES)
def test_the_example_of_a_readme_runs(
    server: Server, folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = NAMES[folder](monkeypatch)
    readme = (INTEGRATIONS / folder / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    code = example.replace("http://127.0.0.1:8000", server.url).replace("smollm2-135m", "tiny")
    assert code.count(server.url) == code.count("tiny") == 1
    capsys.readouterr()
    exec(compile(code, readme, "exec"), names)
    assert capsys.readouterr().out.strip()
