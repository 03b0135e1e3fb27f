"""Models by name and folder, started again without transformers; models and devices that cannot be used."""

from __future__ import annotations

import importlib.util
import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers as tf

from blendserve.config import ModelConfig
from blendserve.errors import ConfigError, ModelError, ModelUnsupported
from blendserve.models import fast_load, loader, sources
from blendserve.models.loader import LoadedModel, end_tokens, fingerprint, load_model
from blendserve.models.sources import BUNDLED, Bundled
from blendserve.models.tokenizer import Tokenizer, agree
from tests.support.blending import blend, distance, model_logits, some_prompt
from tests.support.files import own_cache
from tests.support.models import config, tiny_model
from tests.support.tokenizers import bundled_tokenizer, spaced_tokenizer

PROMPT = some_prompt([7, 9])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache(tmp_path / "cache", monkeypatch)


def saved(name: str, folder: Path) -> Path:
    tiny_model.__wrapped__(name).save_pretrained(folder)
    spaced_tokenizer("a b c").save_pretrained(folder)
    return folder


def load(folder: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(ModelConfig(name=str(folder), dtype=dtype, device="cpu"))


def imports_a_model(folder: Path, dtype: str = "float32") -> bool:
    """Whether a start loads transformers' model."""
    from_pretrained = tf.AutoModelForCausalLM.from_pretrained
    with patch.object(tf.AutoModelForCausalLM, "from_pretrained", side_effect=from_pretrained) as called:
        load(folder, dtype)
    return bool(called.called)


KINDS = [
    *("llama", "llama-yarn", "llama-llama3", "gemma3_text"),
    *("phi3-partial", "olmo2", "cohere-normed", "glm", "gemma4_text", "gemma4_text-shared"),
]


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in KINDS), ("llama", "bfloat16"), ("gemma2", "bfloat16")]
)
def test_the_second_start_of_a_folder_has_the_same_bits_without_transformers(
    name: str, dtype: str, tmp_path: Path
) -> None:
    folder = saved(name, tmp_path / "model")
    first = load(folder, dtype)
    assert not imports_a_model(folder, dtype)
    second = load(folder, dtype)
    assert second.name == str(folder)
    assert (second.fingerprint, second.end_tokens) == (first.fingerprint, first.end_tokens)
    done = [blend(model.decoder, PROMPT, ratio=0.5) for model in (first, second)]
    assert torch.equal(done[0].logits, done[1].logits)
    assert distance(done[0].cache.keys, done[1].cache.keys) == 0
    assert torch.equal(model_logits(second.decoder, PROMPT), model_logits(first.decoder, PROMPT))
    assert not second.decoder.reference.training
    assert imports_a_model(folder, {"float32": "bfloat16", "bfloat16": "float32"}[dtype])


def test_tokenizer_and_configuration_are_read_without_weights(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    settings = ModelConfig(name=str(folder), dtype="bfloat16", device="cpu")
    tokenizer = load_model(settings).tokenizer
    (folder / "model.safetensors").unlink()
    assert loader.load_tokenizer(settings)("a c b") == tokenizer("a c b")
    configuration, dtype = loader.read_configuration(settings)
    assert (configuration.num_hidden_layers, dtype) == (4, torch.bfloat16)


def test_changed_files_damaged_records_and_modules_of_transformers_are_loaded_again(tmp_path: Path) -> None:
    experts = saved("mixtral", tmp_path / "experts")
    assert [imports_a_model(experts) for _ in range(2)] == [True, True]
    folder = saved("llama", tmp_path / "model")
    before = load(folder).fingerprint
    fast_load.record_file(folder, torch.float32).write_text("{")
    assert [imports_a_model(folder) for _ in range(2)] == [True, False]
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 1e-3}))
    assert [imports_a_model(folder) for _ in range(2)] == [True, False]
    (folder / "config.json").write_text(json.dumps(settings))
    file = folder / "model.safetensors"  # other weights of the same size and time
    stat, raw = file.stat(), bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert imports_a_model(folder)
    assert load(folder).fingerprint != before


def test_random_weights_in_the_shape_of_a_folder_are_the_same_each_time(tmp_path: Path) -> None:
    config("llama", vocab_size=300).save_pretrained(tmp_path)
    settings = ModelConfig(name=f"random:{tmp_path}", dtype="float32", device="cpu")
    first, again = load_model(settings), load_model(settings)
    assert first.fingerprint == again.fingerprint
    assert torch.equal(model_logits(first.decoder, PROMPT), model_logits(again.decoder, PROMPT))
    ids = first.tokenizer("A text of the bundled tokenizer")["input_ids"]
    assert ids == [i % 300 for i in bundled_tokenizer()("A text of the bundled tokenizer")["input_ids"]]
    assert max(first.end_tokens) < loader.read_configuration(settings)[0].vocab_size == 300
    assert loader.load_tokenizer(settings)("A text of the bundled tokenizer")["input_ids"] == ids


def test_the_fingerprint_is_of_weights_and_configuration_alone() -> None:
    base = fingerprint(tiny_model("llama"))
    assert fingerprint(tiny_model.__wrapped__("llama")) == base
    other = tiny_model.__wrapped__("llama")
    other.model.layers[3].mlp.up_proj.weight.data[5, 5] += 1e-6
    for model in (other, tiny_model("llama-linear"), tiny_model("llama", torch.bfloat16)):
        assert fingerprint(model) != base


@pytest.mark.skipif(tf.__version__ != "5.23.0", reason="the defaults of a configuration are part of it")
def test_the_fingerprint_of_a_model_stays() -> None:
    """It is part of every chunk's key: another value makes all stored KV useless."""
    sizes: dict[str, Any] = {
        "vocab_size": 8,
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
    }
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes))
    for weights in model.parameters():
        torch.nn.init.constant_(weights, 0.5)
    assert fingerprint(model) == "318363ea3161c9c7bc3f463552c76397"


def test_a_tokenizer_that_does_more_than_its_backend_stays_transformers_own() -> None:
    own = deepcopy(bundled_tokenizer())
    assert agree(Tokenizer.of(own), own)
    own.chat_template = "{{ messages | length }}"
    assert agree(Tokenizer.of(own), own)

    ours, call = Tokenizer.of(own), type(own).__call__
    with patch.object(type(own), "__call__", lambda self, text, **more: call(self, text.upper(), **more)):
        assert not agree(ours, own)


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
        "no/such-model": "model.name",
        str(tmp_path / "empty"): "model.name",
        "smollm2-135m": "model.name",
        str(tmp_path / "gpt2"): "model_type",
    }.items():
        with pytest.raises(ModelError) as error:
            load_model(ModelConfig(name=model, device="cpu"))
        assert error.value.setting == setting
        assert isinstance(error.value, ModelUnsupported) == (setting == "model_type")


@pytest.mark.parametrize("device", ["cuda", "xpu", "nonsense", "cuda:99"])
def test_devices_that_are_missing_are_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError) as error:
        load_model(ModelConfig(device=device))
    assert error.value.setting == "model.device"


def test_a_failed_conversion_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = BUNDLED["smollm2-135m"]

    def fails(file: Path, into: Path) -> None:
        (into / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(sources, "write_folder", fails)
    monkeypatch.setitem(BUNDLED, "damaged", Bundled(whole.packages, whole.install, whole.file, "0" * 64))
    for name, error in (("damaged", ModelError), ("smollm2-135m", KeyboardInterrupt)):
        with pytest.raises(error):
            load_model(ModelConfig(name=name, device="cpu"))
    assert list((tmp_path / "cache" / "blendserve" / "readers").iterdir()) == []
