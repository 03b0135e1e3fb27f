"""The bundled embedder, loaded once in fp32 and once as this machine has it, and two ways of counting tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from blendserve.core import Passage
from blendserve.retrieve import Embedder
from blendserve.retrieve.bert import Bert
from blendserve.retrieve.bert_folder import BertFolder
from blendserve.retrieve.embedder import DEFAULT, _fingerprint, _folder


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return _folder(DEFAULT)


@pytest.fixture(scope="session")
def embedder(model_folder: Path) -> Embedder:
    """In fp32, whose rounding no assertion here sees."""
    encoder = Bert(BertFolder(model_folder), torch.float32, by_kernels=False)
    return Embedder(encoder, DEFAULT, _fingerprint(model_folder))


@pytest.fixture(scope="session")
def fast_embedder() -> Embedder:
    """As a user gets it: in bf16 where this CPU is faster with it."""
    return Embedder.load(DEFAULT)


@pytest.fixture(scope="session")
def word_pieces(embedder: Embedder) -> Callable[[Passage], int]:
    """A real tokenizer's count of a passage as a prompt would show it."""

    def count(passage: Passage) -> int:
        text = f"{passage.title}\n{passage.text}\n\n"
        return len(embedder._tokenizer.encode(text, add_special_tokens=False).ids)

    return count


def words(passage: Passage) -> int:
    """One token a word, and one for the separator."""
    return 1 + len(passage.title.split()) + len(passage.text.split())
