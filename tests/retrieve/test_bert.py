"""Our own BERT gives sentence-transformers' vectors, serves only what it knows, and is chosen in its fastest form."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.kernels.cpu.isa import Level
from blendserve.kernels.verify import Status
from blendserve.retrieve import Embedder, precision
from blendserve.retrieve.bert import Bert
from blendserve.retrieve.bert_folder import BertFolder, is_plain_bert
from tests.support.files import copied_model

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


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(("by_kernels", "packed"), [(False, False), (True, False), (False, True)])
def test_vectors_are_the_library_s(folder: Path, library: Any, by_kernels: bool, packed: bool) -> None:
    encoder = Bert(BertFolder(folder), torch.float32, by_kernels, packed)
    expected = library.encode(TEXTS, normalize_embeddings=True, show_progress_bar=False)
    np.testing.assert_allclose(Embedder(encoder, "", "").embed(TEXTS), expected, atol=1e-5)
    assert encoder.max_tokens == library.max_seq_length


@given(st.text(max_size=60))
def test_tokens_are_the_library_s(embedder: Embedder, library: Any, text: str) -> None:
    ids = embedder.encoder.tokenizer.encode(text).ids
    assert ids == library.tokenizer(text, truncation=False, verbose=False).input_ids


def test_cls_pooling_and_a_folder_as_the_library_saves_it_today(copy: Path, library: Any) -> None:
    from sentence_transformers import SentenceTransformer

    edit(copy / "1_Pooling/config.json", pooling_mode_mean_tokens=False, pooling_mode_cls_token=True)
    theirs = SentenceTransformer(str(copy), device="cpu", local_files_only=True)
    theirs.save(str(copy / "saved"))
    expected = theirs.encode(TEXTS, normalize_embeddings=True, show_progress_bar=False)
    for folder in (copy, copy / "saved"):
        assert is_plain_bert(folder)
        encoder = Bert(BertFolder(folder), torch.float32, False)
        np.testing.assert_allclose(Embedder(encoder, "", "").embed(TEXTS), expected, atol=1e-5)


def test_half_precision_is_alike_and_does_not_depend_on_the_batch(embedder: Embedder) -> None:
    """As a user gets it: in bf16 where this CPU is faster with it."""
    fast_embedder = Embedder.load()
    fast = fast_embedder.embed(TEXTS)
    assert (fast * embedder.embed(TEXTS)).sum(1).min() > 0.999
    alone = np.concatenate([fast_embedder.embed([text]) for text in TEXTS])
    assert (fast * alone).sum(1).min() > 0.9999


def add_module(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*modules, {"idx": 3, "path": "3", "type": "x.Dense"}]))


UNKNOWN: dict[str, Callable[[Path], object]] = {
    "another model": lambda f: edit(f / "config.json", model_type="distilbert"),
    "another activation": lambda f: edit(f / "config.json", hidden_act="relu"),
    "relative positions": lambda f: edit(f / "config.json", position_embedding_type="relative_key"),
    "another pooling": lambda f: edit(f / "1_Pooling/config.json", pooling_mode_max_tokens=True),
    "a prompt": lambda f: edit(f / "config_sentence_transformers.json", prompts={"query": "query: "}),
    "another tokenizer": lambda f: edit(f / "tokenizer_config.json", do_lower_case=False),
    "its own lower-casing": lambda f: edit(f / "sentence_bert_config.json", do_lower_case=True),
    "one module more": add_module,
    "weights in another file": lambda f: (f / "model.safetensors").unlink(),
    "no JSON": lambda f: (f / "config.json").write_text("{"),
    "no such file": lambda f: (f / "tokenizer.json").unlink(),
}


@pytest.mark.parametrize("change", UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_known_is_the_library_s(copy: Path, change: Callable[[Path], object]) -> None:
    assert is_plain_bert(copy)
    change(copy)
    assert not is_plain_bert(copy)


def test_the_library_serves_what_we_do_not(
    copy: Path, library: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """A prompt, which counts against the limit; loading prints nothing."""
    edit(copy / "config_sentence_transformers.json", prompts={"query": "query: ", "document": ""})
    embedder = Embedder.load(str(copy))
    assert capfd.readouterr() == ("", "")
    expected = library.encode(["query: Who?"], normalize_embeddings=True, show_progress_bar=False)[0]
    np.testing.assert_allclose(embedder.embed_question("Who?"), expected, atol=1e-5)
    for window in embedder.windows("word " * 600):
        assert len(library.tokenizer("query: " + window, truncation=False, verbose=False).input_ids) <= 256


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, on a CPU that multiplies bf16."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(precision, "fast_dtype", lambda: torch.bfloat16)
    return tmp_path / "cache"


def test_the_form_is_measured_once_and_kept(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, (seconds, bad) = list[int](), (dict[str, float](), set[str]())

    def compare(encoders: Mapping[str, Bert]) -> tuple[dict[str, float], dict[str, float]]:
        asked.append(len(encoders))
        return seconds, {name: float("nan") if name in bad else 1.0 for name in encoders}

    monkeypatch.setattr(precision, "compare", compare)
    halves = set(precision.FORMS) - {"fp32"}
    for quick, wrong, dtype in (
        ("bf16", set(), "bfloat16"),
        ("bf16", halves, "float32"),
        ("fp32", set(), "float32"),
    ):
        seconds, bad = dict.fromkeys(precision.FORMS, 0.2) | {quick: 0.1}, wrong
        for _ in range(2):
            assert precision.fastest(BertFolder(folder), f"{quick} {wrong}").dtype == dtype
    assert len(asked) == 3
    for file in cache.rglob("*.json"):
        file.write_text("[1")  # a damaged one is none
    precision.fastest(BertFolder(folder), "fp32 set()")
    assert len(asked) == 4
    monkeypatch.setattr(precision, "fast_dtype", lambda: torch.float32)
    assert precision.fastest(BertFolder(folder), "x").dtype == "float32"
    assert len(asked) == 4  # nothing to choose from


def test_on_a_machine_too_busy_to_measure_the_order_decides_and_nothing_is_kept(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are kernels compiled that no form uses."""
    levels = set[str]()

    def status(level: Level) -> Status:
        levels.add(level.dtype)
        return Status(False, "not compiled here")

    monkeypatch.setattr(precision, "cpu_status", status)
    monkeypatch.setattr(precision, "measure", lambda runs, ours: None)
    assert precision.fastest(BertFolder(folder), "x").dtype == "bfloat16"
    assert levels == {"bfloat16"}
    assert not list(cache.rglob("*.json"))


def test_without_packing_the_other_forms_are_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no oneDNN")

    monkeypatch.setattr("blendserve.retrieve.bert.packed_linear", refuse)
    assert list(precision.available_forms(BertFolder(folder))) == ["bf16, kernels", "bf16", "fp32"]


def test_a_form_is_compared_by_its_vectors_and_its_least_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reversed(Bert):
        def encode(self, windows: Any, of_question: bool) -> np.ndarray:
            return np.flip(super().encode(windows, of_question), 0)

    monkeypatch.setattr(precision, "measure", lambda runs, ours: {n: [3.0, 1.0 + len(n)] for n in runs})
    made = BertFolder(folder)
    forms = {name: kind(made, torch.float32, False) for name, kind in (("fp32", Bert), ("x", Reversed))}
    seconds, alike = precision.compare(forms)
    assert seconds == {"fp32": 3.0, "x": 2.0}
    assert alike["x"] < precision.ALIKE < alike["fp32"] == pytest.approx(1, abs=1e-5)
