"""The embedder: windows that fit and lose nothing, unit vectors, and our own BERT beside sentence-transformers'."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.core import Passage, run
from blendserve.errors import ModelError
from blendserve.retrieve import Embedder, bert
from blendserve.retrieve.bert import BertFolder
from blendserve.retrieve.embedder import BUNDLED, MAX_QUESTION_WINDOWS, fingerprint_of
from blendserve.retrieve.encoder import Window
from tests.retrieve.conftest import embed, exact_embedder, windows_of
from tests.support.files import copied_model

WORDS = ["antidisestablishmentarianism ", "naïve,", "漢字", "🙂", "\n\n", "x" * 120, "1.5e-3 ", "[SEP]"]
long_texts = st.lists(st.sampled_from(WORDS) | st.text(max_size=5), min_size=60, max_size=250).map("".join)


@given(long_texts, st.sampled_from(["", "A title", "long title " * 100]))
def test_every_word_piece_is_in_a_window_that_fits(embedder: Embedder, text: str, title: str) -> None:
    tokenizer, windows = embedder.encoder.tokenizer, windows_of(embedder, text, title)
    ids = [tokenizer.encode(window).ids for window in windows]  # with special tokens
    assert all(len(window) <= embedder.max_tokens for window in ids)
    assert set(tokenizer.encode(text).ids) <= {i for window in ids for i in window}
    assert len(title) > 20 or all(window.startswith(title) for window in windows)


def test_windows_overlap_and_follow_each_other(embedder: Embedder) -> None:
    text = " ".join(f"number{n}" for n in range(400))
    spans = []
    for window in windows_of(embedder, text, "Numbers"):
        at = [int(word.removeprefix("number")) for word in window.removeprefix("Numbers\n").split()]
        assert at == list(range(at[0], at[-1] + 1))  # whole words, none left out
        spans.append((at[0], at[-1]))
    assert (spans[0][0], spans[-1][1]) == (0, 399)
    assert all(before[1] > after[0] > before[0] for before, after in pairwise(spans))
    assert windows_of(embedder, "Short. ", "T") == ["T\nShort. "]


@pytest.mark.parametrize("unit", ["What did the author say about it? ", "漢", " ", "a\n", "x"])
def test_no_question_costs_more_than_a_few_windows(
    embedder: Embedder, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Mock(wraps=embedder.encoder.encode)
    monkeypatch.setattr(embedder.encoder, "encode", encode)
    vector = embedder.embed_question(unit * (300_000 // len(unit)) + "x")
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    windows = [window for call in encode.call_args_list for window in call.args[0]]
    assert sum(len(window.ids) + 2 for window in windows) <= MAX_QUESTION_WINDOWS * embedder.max_tokens


def test_a_long_question_counts_by_its_beginning_and_its_end(embedder: Embedder) -> None:
    """Up to MAX_QUESTION_WINDOWS by all of it; of a longer one, what is between the ends does not count."""
    middle = "The weather was fine that day. " * 900
    asked, pasted = "Who painted the ceiling of the chapel?", "Wheat is grown on the plains. " * 900
    vector = embedder.embed_question(middle + asked)
    other = embedder.embed_question(middle[: len(middle) // 3] + pasted + middle[-len(middle) // 3 :] + asked)
    np.testing.assert_allclose(vector, other, atol=1e-6)
    target = embed(embedder, ["Michelangelo painted the ceiling of the chapel."])[0]
    assert vector @ target > embedder.embed_question(middle) @ target + 0.03
    some = " ".join(f"number{n}" for n in range(280))
    assert 1 < len(windows_of(embedder, some)) <= MAX_QUESTION_WINDOWS
    mean = embed(embedder, windows_of(embedder, some)).sum(0)
    np.testing.assert_allclose(embedder.embed_question(some), mean / np.linalg.norm(mean), atol=1e-6)


TEXTS = [
    "The cat sat.", "", "Who?", "naïve façade, 漢字 and 🙂; [SEP] taken as it is", "A dog ran in the park.", "A cat ran.",
    "x" * 300, "  spaces \t and\n\nlines  ", *(" ".join(f"number{n}" for n in range(m)) for m in range(3, 90, 7)),
]  # fmt: skip


@pytest.fixture(scope="session")
def library(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return copied_model(folder, tmp_path / "copy")


def edit(file: Path, change: Any) -> None:
    """Merge a dictionary into a file of JSON, or add to its list."""
    value = json.loads(file.read_text())
    file.write_text(json.dumps({**value, **change} if isinstance(value, dict) else value + change))


def test_the_fingerprint_follows_the_files_not_the_folder(folder: Path, copy: Path) -> None:
    assert fingerprint_of(copy) == fingerprint_of(folder)
    edit(copy / "sentence_bert_config.json", {"max_seq_length": 128})
    changed = Embedder.load(str(copy))
    assert changed.fingerprint == fingerprint_of(copy) != fingerprint_of(folder)
    assert changed.max_tokens == 128


def test_models_that_cannot_be_loaded_are_refused(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors").write_bytes(weights[:1000])
    monkeypatch.setitem(BUNDLED, "other", "gt_not_installed")
    for name in ("some/model", str(tmp_path), str(copy), "other"):
        with pytest.raises(ModelError):
            Embedder.load(name)


def one_window_each(embedder: Embedder) -> list[Window]:
    return [window for (window,) in run(embedder.cut([Passage(text) for text in TEXTS]))]


@pytest.mark.parametrize("packed", [True, False])
def test_vectors_are_the_library_s(
    folder: Path, library: Any, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unit vectors in the order of the texts, several batches of them; also with a torch without packed layers."""
    if not packed:
        monkeypatch.setattr(bert, "packed_linear", Mock(side_effect=NotImplementedError))
        assert Embedder.load().dimension == exact_embedder(folder).dimension
    monkeypatch.setattr(bert, "BATCH_TOKENS_PER_THREAD", 300)
    embedder, seen = exact_embedder(folder), list[tuple[int, int]]()
    vectors = run(embedder.encode(one_window_each(embedder), lambda done, total: seen.append((done, total))))
    expected = library.encode(TEXTS, normalize_embeddings=True, show_progress_bar=False)
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert seen == sorted(seen)
    assert seen[-1] == (len(TEXTS),) * 2
    assert len(seen) > 3
    assert run(embedder.encode([])).shape == (0, embedder.dimension)
    assert embedder.max_tokens == library.max_seq_length


def test_cls_pooling_and_a_folder_as_the_library_saves_it_today(copy: Path, library: Any) -> None:
    from sentence_transformers import SentenceTransformer

    edit(copy / "1_Pooling/config.json", {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True})
    theirs = SentenceTransformer(str(copy), device="cpu", local_files_only=True)
    theirs.save(str(copy / "saved"))
    expected = theirs.encode(TEXTS, normalize_embeddings=True, show_progress_bar=False)
    for folder in (copy, copy / "saved"):
        np.testing.assert_allclose(embed(exact_embedder(folder), TEXTS), expected, atol=1e-5)


def test_half_precision_is_alike_and_does_not_depend_on_the_batch(embedder: Embedder) -> None:
    """As a user gets it: in bf16 where this CPU is faster with it."""
    fast_embedder = Embedder.load()
    fast = run(fast_embedder.encode(one_window_each(embedder)))
    assert (fast * embed(embedder, TEXTS)).sum(1).min() > 0.999
    assert (fast * embed(fast_embedder, TEXTS)).sum(1).min() > 0.9999  # each alone


CHANGES: list[tuple[str, Any]] = [  # a file and what is merged into it; None: it is missing
    ("config.json", {"model_type": "distilbert"}),
    ("config.json", {"hidden_act": "relu"}),
    ("config.json", {"position_embedding_type": "relative_key"}),
    ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}),
    ("config_sentence_transformers.json", {"prompts": {"query": "query: "}}),
    ("tokenizer_config.json", {"do_lower_case": False}),
    ("sentence_bert_config.json", {"do_lower_case": True}),
    ("modules.json", [{"idx": 3, "path": "3", "type": "x.Dense"}]),
    *((name, None) for name in ("model.safetensors", "tokenizer.json")),
]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_what_is_not_known_is_the_library_s(copy: Path, name: str, change: Any) -> None:
    assert BertFolder.read(copy)
    edit(copy / name, change) if change else (copy / name).unlink()
    assert BertFolder.read(copy) is None


def test_the_library_serves_what_we_do_not(
    copy: Path, library: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """A prompt, which counts against the limit; loading prints nothing."""
    edit(copy / "config_sentence_transformers.json", {"prompts": {"query": "query: ", "document": ""}})
    embedder = Embedder.load(str(copy))
    assert capfd.readouterr() == ("", "")
    expected = library.encode(["query: Who?"], normalize_embeddings=True, show_progress_bar=False)[0]
    np.testing.assert_allclose(embedder.embed_question("Who?"), expected, atol=1e-5)
    for window in windows_of(embedder, "word " * 600):
        assert len(library.tokenizer("query: " + window, truncation=False, verbose=False).input_ids) <= 256
