"""Our own BERT gives sentence-transformers' vectors, serves only what it knows, and is chosen in its fastest form."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blendserve.kernels.cpu.isa import Level
from blendserve.kernels.verify import Status
from blendserve.retrieve import Embedder, precision
from blendserve.retrieve.bert import Bert
from blendserve.retrieve.bert_folder import BertFolder, is_plain_bert
from blendserve.retrieve.encoder import Window
from tests.support.files import copied_model

TEXTS = [
    "The cat sat.", "", "Who?", "naïve façade, 漢字 and 🙂; [SEP] taken as it is", "A dog ran in the park.", "A cat ran.",
    "x" * 300, "  spaces \t and\n\nlines  ", *(" ".join(f"number{n}" for n in range(m)) for m in range(3, 90, 7)),
]  # fmt: skip


@pytest.fixture(scope="session")
def library(model_folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(model_folder), device="cpu", local_files_only=True)


@pytest.fixture
def copy(model_folder: Path, tmp_path: Path) -> Path:
    return copied_model(model_folder, tmp_path / "copy")


def edit(file: Path, **values: Any) -> None:
    settings = json.loads(file.read_text())
    settings.update(values)
    file.write_text(json.dumps(settings))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("by_kernels", [False, True])
def test_vectors_are_the_library_s(model_folder: Path, library: Any, by_kernels: bool, packed: bool) -> None:
    encoder = Bert(BertFolder(model_folder), torch.float32, by_kernels, packed)
    expected = library.encode(TEXTS, normalize_embeddings=True, show_progress_bar=False)
    np.testing.assert_allclose(Embedder(encoder, "", "").embed(TEXTS), expected, atol=1e-5)
    assert encoder.max_tokens == library.max_seq_length


@pytest.fixture(scope="module")
def encoder(model_folder: Path) -> Bert:
    return Bert(BertFolder(model_folder), torch.float32, by_kernels=False)


@settings(max_examples=200)
@given(st.text(max_size=60))
def test_tokens_are_the_library_s(encoder: Bert, library: Any, text: str) -> None:
    own = encoder.tokenizer.encode(text).ids
    assert own == library.tokenizer(text, truncation=False, verbose=False).input_ids
    assert [encoder._first, encoder._last] == [own[0], own[-1]]


def test_cls_pooling_and_a_folder_as_the_library_saves_it_today(copy: Path, library: Any) -> None:
    from sentence_transformers import SentenceTransformer

    edit(copy / "1_Pooling/config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True)
    saved = copy / "saved"
    theirs = SentenceTransformer(str(copy), device="cpu", local_files_only=True)
    theirs.save(str(saved))
    expected = theirs.encode(TEXTS, normalize_embeddings=True, show_progress_bar=False)
    for folder in (copy, saved):
        assert is_plain_bert(folder)
        encoder = Bert(BertFolder(folder), torch.float32, False)
        np.testing.assert_allclose(Embedder(encoder, "", "").embed(TEXTS), expected, atol=1e-5)
    assert encoder.max_tokens == theirs.max_seq_length


def test_half_precision_is_alike_and_does_not_depend_on_the_batch(
    embedder: Embedder, fast_embedder: Embedder
) -> None:
    fast = fast_embedder.embed(TEXTS)
    cosines = (fast * embedder.embed(TEXTS)).sum(1)
    assert cosines.min() > 0.999
    alone = np.concatenate([fast_embedder.embed([text]) for text in TEXTS])
    assert (fast * alone).sum(1).min() > 0.9999


def more_modules(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*modules, {"idx": 3, "path": "3", "type": "x.Dense"}]))


def no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


REFUSED: dict[str, Callable[[Path], None]] = {
    "another model": lambda f: edit(f / "config.json", model_type="distilbert"),
    "another activation": lambda f: edit(f / "config.json", hidden_act="relu"),
    "relative positions": lambda f: edit(f / "config.json", position_embedding_type="relative_key"),
    "another pooling": lambda f: edit(f / "1_Pooling/config.json", pooling_mode_max_tokens=True),
    "a prompt": lambda f: edit(f / "config_sentence_transformers.json", prompts={"query": "query: "}),
    "another tokenizer": lambda f: edit(f / "tokenizer_config.json", do_lower_case=False),
    "lower-casing of its own": lambda f: edit(f / "sentence_bert_config.json", do_lower_case=True),
    "one module more": more_modules,
    "weights in another file": lambda f: (f / "model.safetensors").unlink(),
    "no JSON": no_json,
    "no such file": lambda f: (f / "tokenizer.json").unlink(),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_what_is_not_known_is_the_library_s(copy: Path, change: Callable[[Path], None]) -> None:
    assert is_plain_bert(copy)
    change(copy)
    assert not is_plain_bert(copy)


def test_the_library_serves_what_we_do_not(copy: Path, library: Any) -> None:
    """A prompt, which counts against the limit."""
    prompts = {"query": "query: ", "document": ""}
    edit(copy / "config_sentence_transformers.json", prompts=prompts)
    embedder = Embedder.load(str(copy))
    expected = library.encode(["query: Who?"], normalize_embeddings=True, show_progress_bar=False)[0]
    np.testing.assert_allclose(embedder.embed_question("Who?"), expected, atol=1e-5)
    for window in embedder.windows("word " * 600):
        assert len(library.tokenizer("query: " + window, truncation=False, verbose=False).input_ids) <= 256


def test_the_form_is_measured_once_and_kept(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, asked = BertFolder(model_folder), list[int]()
    seconds, bad = dict[str, float](), set[str]()

    def compare(encoders: Mapping[str, Bert]) -> tuple[dict[str, float], dict[str, float]]:
        asked.append(len(encoders))
        return seconds, {name: float("nan") if name in bad else 1.0 for name in encoders}

    monkeypatch.setattr(precision, "compare", compare)
    monkeypatch.setattr(precision, "fast_dtype", lambda: torch.float32)
    assert precision.fastest(folder, "x").dtype == "float32"
    assert not asked  # nothing to choose from
    monkeypatch.setattr(precision, "fast_dtype", lambda: torch.bfloat16)
    halves = set(precision.FORMS) - {"fp32"}
    for quick, wrong, dtype in (
        ("bf16", set(), "bfloat16"),
        ("bf16", halves, "float32"),
        ("fp32", set(), "float32"),
    ):
        seconds, bad = dict.fromkeys(precision.FORMS, 0.2) | {quick: 0.1}, wrong
        for _ in range(2):
            assert precision.fastest(folder, f"{quick} {wrong}").dtype == dtype
    assert len(asked) == 3
    for file in tmp_path.rglob("*.json"):
        file.write_text("[1")  # a damaged one is none
    precision.fastest(folder, "fp32 set()")
    assert len(asked) == 4


def test_choosing_a_form_compiles_no_kernels_that_no_form_uses(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = set[str]()

    def status(level: Level) -> Status:
        asked.add(level.dtype)
        return Status(False, "not compiled here")

    monkeypatch.setattr(precision, "cpu_status", status)
    monkeypatch.setattr(precision, "measure", lambda runs, ours: None)
    monkeypatch.setattr(precision, "fast_dtype", lambda: torch.bfloat16)
    precision.fastest(BertFolder(model_folder), "x")
    assert asked == {"bfloat16"}


def test_on_a_machine_too_busy_to_measure_the_order_decides_and_nothing_is_kept(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(precision, "fast_dtype", lambda: torch.bfloat16)
    monkeypatch.setattr(precision, "measure", lambda runs, ours: None)
    assert precision.fastest(BertFolder(model_folder), "x").dtype == "bfloat16"
    assert not list((tmp_path / "blendserve" / "embedder").glob("*"))


def test_without_packing_the_other_forms_are_compared(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no oneDNN")

    monkeypatch.setattr("blendserve.retrieve.bert._packed", refuse)
    assert list(precision._made(BertFolder(model_folder))) == ["bf16, kernels", "bf16", "fp32"]


def test_measuring_looks_at_vectors(model_folder: Path) -> None:
    folder = BertFolder(model_folder)
    right, wrong = Bert(folder, torch.float32, False), Bert(folder, torch.float32, False)
    wrong._stack = wrong._stack[:3]
    forms = {"fp32": right, "kernels": Bert(folder, torch.float32, True), "wrong": wrong}
    seconds, alike = precision.compare(forms)
    assert alike["fp32"] == pytest.approx(1, abs=1e-5)
    assert alike["kernels"] == pytest.approx(1, abs=1e-5)
    assert alike["wrong"] < precision.ALIKE
    assert not seconds or min(seconds.values()) > 0


def test_batches_of_any_mixture(encoder: Bert) -> None:
    """Windows need not come sorted: equal lengths that do not stand side by side are groups of their own."""
    rng = np.random.default_rng(0)
    windows = [Window("", rng.integers(1000, 20000, n, np.int32)) for n in (5, 9, 5, 5, 1, 9, 200)]
    together = encoder.encode(windows, of_question=False)
    alone = np.concatenate([encoder.encode([window], of_question=False) for window in windows])
    np.testing.assert_allclose(together, alone, atol=1e-5)
