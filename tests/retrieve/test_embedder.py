"""Vectors are of unit length, windows fit and lose nothing, and a question costs no more than a few windows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.core import Passage
from blendserve.errors import ModelError
from blendserve.retrieve import Embedder
from blendserve.retrieve.embedder import BUNDLED, QUESTION_WINDOWS, fingerprint_of
from tests.support.files import copied_model

WORDS = [
    "word ",
    "antidisestablishmentarianism ",
    "naïve,",
    "漢字",
    "🙂",
    "\n\n",
    "x" * 120,
    "1.5e-3 ",
    "[SEP]",
]
long_texts = st.lists(st.sampled_from(WORDS) | st.text(max_size=5), min_size=60, max_size=250).map("".join)


def ids_of(embedder: Embedder, text: str) -> list[int]:
    """What the model itself reads, special tokens included, without a limit."""
    return list(embedder.encoder.tokenizer.encode(text).ids)


@given(long_texts, st.sampled_from(["", "A title", "long title " * 100]))
def test_every_word_piece_is_in_a_window_that_fits(embedder: Embedder, text: str, title: str) -> None:
    windows = embedder.windows(text, title)
    ids = [ids_of(embedder, window) for window in windows]
    assert all(len(window) <= embedder.max_tokens for window in ids)
    assert set(ids_of(embedder, text)) <= {i for window in ids for i in window}
    assert len(title) > 20 or all(window.startswith(title) for window in windows)


def test_windows_overlap_and_follow_each_other(embedder: Embedder) -> None:
    text = " ".join(f"number{n}" for n in range(400))
    spans = []
    for window in embedder.windows(text, "Numbers"):
        at = [int(word.removeprefix("number")) for word in window.removeprefix("Numbers\n").split()]
        assert at == list(range(at[0], at[-1] + 1))  # whole words, none left out
        spans.append((at[0], at[-1]))
    assert (spans[0][0], spans[-1][1]) == (0, 399)
    assert all(before[1] > after[0] > before[0] for before, after in pairwise(spans))
    assert embedder.windows("Short. ", "T") == ["T\nShort. "]


def test_vectors_are_unit_ones_in_the_order_of_the_texts(embedder: Embedder) -> None:
    texts = ["The cat sat.", "", "A dog ran in the park.", "The cat sat.", "word " * 600]
    seen: list[tuple[int, int]] = []
    vectors = embedder.embed(texts, lambda done, total: seen.append((done, total)))
    assert vectors.shape == (5, embedder.dimension)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    alone = np.concatenate([embedder.embed([text]) for text in texts])
    np.testing.assert_allclose(vectors, alone, atol=1e-6)
    windows = [embedder.windows(text) for text in texts]
    assert seen[-1] == (sum(map(len, windows)),) * 2
    assert embedder.embed([]).shape == (0, embedder.dimension)
    vectors, counts = embedder.embed_passages([Passage(text) for text in texts])
    assert counts == [len(group) for group in windows] == [1, 1, 1, 1, 3]
    np.testing.assert_allclose(vectors, embedder.embed([w for g in windows for w in g]), atol=1e-6)


class Counting:
    """An encoder and its tokenizer that count what they are given."""

    def __init__(self, encoder: Any) -> None:
        self.encoder, self.tokens, self.characters, self.tokenizer = encoder, 0, 0, self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)

    def encode(self, given: Any, of_question: bool = False, **options: Any) -> Any:
        if isinstance(given, str):
            self.characters += len(given)
            return self.encoder.tokenizer.encode(given, **options)
        self.tokens += sum(len(window.ids) + self.encoder.overhead for window in given)
        return self.encoder.encode(given, of_question)


@pytest.mark.parametrize("unit", ["What did the author say about it? ", "漢", " ", "a\n", "x"])
def test_no_question_costs_more_than_a_few_windows(embedder: Embedder, unit: str) -> None:
    counting: Any = Counting(embedder.encoder)
    vector = Embedder(counting, "counting", "").embed_question(unit * (300_000 // len(unit)) + "x")
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    assert counting.tokens <= QUESTION_WINDOWS * embedder.max_tokens
    assert counting.characters <= 10 * QUESTION_WINDOWS * embedder.max_tokens * 8


def test_a_long_question_counts_by_its_beginning_and_its_end(embedder: Embedder) -> None:
    """Up to QUESTION_WINDOWS by all of it; of a longer one, what is between the ends does not count."""
    middle = "The weather was fine that day. " * 900
    asked, pasted = "Who painted the ceiling of the chapel?", "Wheat is grown on the plains. " * 900
    vector = embedder.embed_question(middle + asked)
    other = embedder.embed_question(middle[: len(middle) // 3] + pasted + middle[-len(middle) // 3 :] + asked)
    np.testing.assert_allclose(vector, other, atol=1e-6)
    target = embedder.embed(["Michelangelo painted the ceiling of the chapel."])[0]
    assert vector @ target > embedder.embed_question(middle) @ target + 0.03
    some = " ".join(f"number{n}" for n in range(280))
    assert 1 < len(embedder.windows(some)) <= QUESTION_WINDOWS
    mean = embedder.embed(embedder.windows(some)).sum(0)
    np.testing.assert_allclose(embedder.embed_question(some), mean / np.linalg.norm(mean), atol=1e-6)


def test_the_fingerprint_follows_the_files_not_the_folder(folder: Path, tmp_path: Path) -> None:
    copy = copied_model(folder, tmp_path / "copy")
    assert fingerprint_of(copy) == fingerprint_of(folder)
    config = copy / "sentence_bert_config.json"
    config.write_text(config.read_text().replace("256", "128"))
    changed = Embedder.load(str(copy))
    assert changed.fingerprint == fingerprint_of(copy) != fingerprint_of(folder)
    assert changed.max_tokens == 128


def test_models_that_cannot_be_loaded_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = copied_model(folder, tmp_path / "damaged")
    (damaged / "model.safetensors").unlink()
    (damaged / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    monkeypatch.setitem(BUNDLED, "other", "gt_not_installed")
    for name in ("no-such-model", "some/model", str(tmp_path), str(damaged), "other"):
        with pytest.raises(ModelError):
            Embedder.load(name)
