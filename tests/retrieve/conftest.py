"""The bundled embedder, and one of toy vectors for what does not depend on the model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers as tk
import torch

from blendserve.core import Passage, Steps, run
from blendserve.retrieve import Embedder
from blendserve.retrieve.bert import Bert, BertFolder
from blendserve.retrieve.embedder import DEFAULT, fingerprint_of, model_folder
from blendserve.retrieve.encoder import Window


@pytest.fixture(scope="session")
def folder() -> Path:
    return model_folder(DEFAULT)


def exact_embedder(folder: Path) -> Embedder:
    """In fp32, whose rounding no assertion sees, for a folder whose model we run ourselves."""
    plain = BertFolder.read(folder)
    assert plain is not None
    return Embedder(Bert(plain, torch.float32), DEFAULT, fingerprint_of(folder))


@pytest.fixture(scope="session")
def embedder(folder: Path) -> Embedder:
    return exact_embedder(folder)


def words(passage: Passage) -> int:
    """One token a word, and one for the separator."""
    return 1 + len(passage.title.split()) + len(passage.text.split())


@cache
def word_vector(word: str) -> np.ndarray:
    return np.random.default_rng(list(word.encode())).normal(size=WordEncoder.dimension)


class WordEncoder:
    """An encoder whose vector of a text is the sum of its words'; it counts the windows that it reads."""

    dimension, max_tokens, overhead, batch_tokens = 16, 12, 2, 60

    def __init__(self) -> None:
        self.tokenizer = tk.Tokenizer(tk.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
        self.tokenizer.pre_tokenizer = tk.pre_tokenizers.WhitespaceSplit()
        self.windows = 0

    def encode(self, windows: Sequence[Window], is_question: bool) -> Steps[np.ndarray]:
        yield
        self.windows += len(windows)
        none = np.zeros(self.dimension)
        return np.array([sum(map(word_vector, w.text.split()), none) for w in windows], np.float32)


def toy_embedder(name: str = "toy", fingerprint: str = "toy") -> Embedder:
    return Embedder(WordEncoder(), name, fingerprint)


def windows_of(embedder: Embedder, text: str, title: str = "") -> list[str]:
    """The windows that a passage is cut into."""
    return [window.text for window in run(embedder.cut([Passage(text, title)]))[0]]


def embed(embedder: Embedder, texts: Sequence[str]) -> np.ndarray:
    """Unit vectors, [n, dimension]: of each text, the mean of its windows'."""
    cut = run(embedder.cut([Passage(text) for text in texts]))
    means = [run(embedder.encode(windows)).sum(0) for windows in cut]
    return np.array([mean / max(np.linalg.norm(mean), 1e-30) for mean in means])
