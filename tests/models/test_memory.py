"""What a model takes is known before it is taken, and refused where it does not fit."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file

from blendserve.config import ModelConfig, ServeConfig, StoreConfig
from blendserve.engine.batch_engine import BatchEngine, plan_memory
from blendserve.engine.request import Observer
from blendserve.errors import ModelError
from blendserve.models.loader import load_model
from blendserve.models.memory import check_fits, weight_bytes
from tests.support.engines import toy_engine
from tests.support.models import config, from_config
from tests.support.tokenizers import bundled_tokenizer


def test_the_heads_of_files_tell_what_weights_take(tmp_path: Path) -> None:
    save_file(
        {"a": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(7)}, tmp_path / "one.safetensors"
    )
    save_file({"c": torch.zeros(11, dtype=torch.int32)}, tmp_path / "two.safetensors")
    assert weight_bytes(tmp_path, torch.bfloat16) == 2 * (15 + 7) + 44
    assert weight_bytes(tmp_path, torch.float32) == 4 * (15 + 7) + 44
    assert weight_bytes(tmp_path, torch.float32, has_int8_copy=True) == 4 * (15 + 7) + 44 + 15 + 7 + 11
    assert weight_bytes(tmp_path / "nothing", torch.float32) == 0


def test_what_does_not_fit_is_refused() -> None:
    check_fits("mine", 100, 100)
    with pytest.raises(ModelError) as error:
        check_fits("mine", 101, 100)
    assert error.value.setting == "model.name"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = from_config(config("llama", tie_word_embeddings=False, vocab_size=len(bundled_tokenizer())))
    model.save_pretrained(tmp_path)
    bundled_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_model_is_refused_before_it_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(ModelConfig(name=str(folder), dtype="float32", device="cpu"))
    assert loaded.weight_bytes == sum(x.nbytes for x in loaded.decoder.reference.state_dict().values())
    monkeypatch.setattr("blendserve.machine.available_memory", lambda: loaded.weight_bytes - 1)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])  # not read
    with pytest.raises(ModelError) as error:
        load_model(ModelConfig(name=str(folder), dtype="float32", device="cpu"))
    assert error.value.setting == "model.name"
    assert error.value.path is None  # it is not the file that is wrong


def test_a_plan_is_what_a_server_takes() -> None:
    engine, settings = toy_engine(), ServeConfig(slots=3, slot_tokens=64)
    plan = plan_memory(engine.model, settings, StoreConfig())
    batch = BatchEngine(engine, Mock(Observer), settings)
    assert plan.kv == sum(x.nbytes for kv in (batch.pool.keys, batch.pool.values) for x in kv)
    assert (plan.slots, plan.slot_tokens) == (batch.pool.n, batch.pool.n_tokens)
    assert plan.shared == batch.fetcher.copies.shared.cap_bytes
    assert plan.conversations == engine.blender.prefixes.cap_bytes
