"""A small index with its KV, built once by a random model under the bundled one's name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import cli, stand_in

TOPICS = ("owl", "bee", "ant", "eel", "elk", "yak")


def write_corpus(file: Path, n: int) -> Path:
    """n documents of about 120 tokens, no two alike."""
    docs = []
    for i in range(n):
        animal = TOPICS[i % len(TOPICS)]
        text = " ".join(
            f"The {animal} number {i} was seen {k} times near village {i * 7 + k}." for k in range(10)
        )
        docs.append({"id": f"doc-{i}", "title": f"{animal} {i}", "text": text})
    file.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    return file


@pytest.fixture(scope="package", autouse=True)
def toy() -> Iterator[None]:
    """Commands load the random model, which is quick."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch.setattr)
        yield


@pytest.fixture(scope="package")
def index(toy: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    write_corpus(folder / "corpus.jsonl", 4)
    assert cli("index", "build", folder / "corpus.jsonl", folder / "index").code == 0
    assert cli("precompute", folder / "index").code == 0
    return folder / "index"
