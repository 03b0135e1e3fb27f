"""Readers by name and folder, with a quick start where it is proven; models and devices that cannot be used."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from blendserve.config import ReaderConfig
from blendserve.errors import ConfigError, ModelError, ModelUnsupported
from blendserve.kernels.cpu import isa
from blendserve.models import loader, quick_start
from blendserve.models.loader import Reader, end_tokens, fingerprint, load_reader
from blendserve.models.plain_llama import PlainConfig
from blendserve.models.plain_tokenizer import PlainTokenizer
from tests.support.blending import assert_near, blend, model_logits, some_prompt
from tests.support.files import own_cache
from tests.support.models import tiny_adapter, tiny_model
from tests.support.tokenizers import bundled_tokenizer, spaced_tokenizer

PROMPT = some_prompt([7, 9])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache(tmp_path / "cache", monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny reader on disk."""
    return saved("llama", tmp_path / "reader")


def saved(name: str, folder: Path) -> Path:
    tiny_model.__wrapped__(name).save_pretrained(folder)
    spaced_tokenizer("a b c").save_pretrained(folder)
    return folder


def load(folder: Path, dtype: str = "float32") -> Reader:
    return load_reader(ReaderConfig(model=str(folder), dtype=dtype, device="cpu"))


def is_quick(reader: Reader) -> bool:
    return isinstance(reader.tokenizer, PlainTokenizer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_starts_quickly_the_second_time_with_the_same_bits(folder: Path, dtype: str) -> None:
    first, second = load(folder, dtype), load(folder, dtype)
    assert [is_quick(first), is_quick(second)] == [False, True]
    assert first.name == str(folder)
    assert (second.fingerprint, second.end_tokens) == (first.fingerprint, first.end_tokens)
    done = [blend(reader.adapter, PROMPT, ratio=0.5) for reader in (first, second)]
    assert torch.equal(done[0].logits, done[1].logits)
    assert torch.equal(done[0].cache.keys, done[1].cache.keys)
    assert not is_quick(load(folder, {"float32": "bfloat16", "bfloat16": "float32"}[dtype]))
    own = model_logits(first.adapter, PROMPT)
    assert torch.equal(model_logits(second.adapter, PROMPT), own)  # of the borrowed model, loaded now
    if dtype == "float32":
        assert_near(own, model_logits(tiny_adapter("llama"), PROMPT), 1e-5)
    model: Any = second.adapter.model
    assert type(model) is type(first.adapter.model)
    assert model is second.adapter.model
    assert not model.training


@pytest.mark.parametrize(
    "difference",
    [{"rms_norm_eps": 2e-5}, {"rope_parameters": {"rope_theta": 1e4 + 1, "rope_type": "default"}}, None],
)
def test_a_model_or_tokenizer_that_differs_never_starts_quickly(
    difference: dict[str, Any] | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if difference:
        monkeypatch.setattr(
            quick_start, "PlainConfig", lambda **config: PlainConfig(**{**config, **difference})
        )
    else:
        monkeypatch.setattr(PlainTokenizer, "decode", lambda *args, **options: "")
    load(folder)
    assert not is_quick(load(folder))


def test_changed_files_and_damaged_records_are_read_again(folder: Path, tmp_path: Path) -> None:
    before = load(folder).fingerprint
    for file in (tmp_path / "cache").rglob(quick_start.ABOUT):
        file.write_text("{")
    assert [is_quick(load(folder)) for _ in range(2)] == [False, True]
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 1e-3}))
    assert [is_quick(load(folder)) for _ in range(2)] == [False, True]
    (folder / "config.json").write_text(json.dumps(settings))
    file = folder / "model.safetensors"  # other weights of the same size and time
    stat, raw = file.stat(), bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = load(folder)
    assert not is_quick(after)
    assert after.fingerprint != before


def test_the_fingerprint_is_of_weights_and_configuration_alone() -> None:
    base = fingerprint(tiny_model("llama"))
    assert fingerprint(tiny_model.__wrapped__("llama")) == base
    other = tiny_model.__wrapped__("llama")
    with torch.no_grad():
        other.model.layers[3].mlp.up_proj.weight[5, 5] += 1e-6
    same_shapes = other, tiny_model("llama", seed=1)
    for model in (*same_shapes, tiny_model("llama-linear"), tiny_model("llama", torch.bfloat16)):
        assert fingerprint(model) != base


def test_end_tokens_are_the_models_and_the_tokenizers() -> None:
    model, tokenizer = tiny_model.__wrapped__("llama"), bundled_tokenizer()
    model.generation_config.eos_token_id = [5, 7]
    assert end_tokens(model, tokenizer) == {5, 7, tokenizer.eos_token_id}
    model.generation_config.eos_token_id = None
    assert end_tokens(model, tokenizer) == {tokenizer.eos_token_id}


def test_models_that_are_not_there_or_not_supported_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    tf.GPT2Config().save_pretrained(tmp_path / "gpt2")  # no weights: it is refused before these are read
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # that of the bundled model
    for model, setting in {
        "no/such-model": "reader.model",
        str(tmp_path / "empty"): "reader.model",
        "smollm2-135m": "reader.model",
        str(tmp_path / "gpt2"): "model_type",
    }.items():
        with pytest.raises(ModelError) as error:
            load_reader(ReaderConfig(model=model, device="cpu"))
        assert error.value.setting == setting
        assert isinstance(error.value, ModelUnsupported) == (setting == "model_type")


@pytest.mark.parametrize("device", ["cuda", "xpu", "nonsense", "cuda:99"])
def test_devices_that_are_missing_are_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError) as error:
        load_reader(ReaderConfig(device=device))
    assert error.value.setting == "reader.device"


def test_a_failed_conversion_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(gguf: Any, into: Path) -> None:
        (into / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(loader, "write_folder", fails)
    with pytest.raises(KeyboardInterrupt):
        load_reader(ReaderConfig(device="cpu"))
    assert list((tmp_path / "cache" / "blendserve" / "readers").iterdir()) == []


def test_auto_dtype_is_bf16_only_where_the_cpu_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    for sets, dtype in ((("avx2", "avx512", "avx512_bf16"), torch.bfloat16), (("avx2",), torch.float32)):
        monkeypatch.setattr(isa, "allowed", lambda sets=sets: sets)
        assert load(folder, "auto").adapter.dtype == dtype
