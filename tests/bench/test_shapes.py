"""Readers of random weights: the numbers of their shape, the same weights for the same seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from blendserve.config import ReaderConfig
from blendserve.errors import ModelError, ModelUnsupported
from blendserve.models.loader import Reader, load_reader
from blendserve.models.random_model import TILE, Folded, random_model
from blendserve.models.shapes import SHAPES, shape_config
from tests.bench.conftest import write_shape
from tests.support.tokenizers import bundled_tokenizer

# Parameters in millions as the model cards have them, embeddings once where they are tied.
QWEN = {"Qwen2.5-0.5B": 494, "Qwen2.5-7B": 7616}
MILLIONS = QWEN | {"Llama-3.2-1B": 1236, "Llama-3.1-8B": 8030, "Mistral-7B": 7248}


@pytest.mark.parametrize("name", SHAPES)
def test_a_named_shape_has_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(shape_config(name.lower()))
    model.tie_weights()
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == MILLIONS[name]


def test_weights_are_noise_that_follows_from_the_seed_alone(
    tiny: str, reader: Reader, tmp_path: Path
) -> None:
    other_shape = load_reader(ReaderConfig(model=write_shape(tmp_path, num_hidden_layers=2), dtype="float32"))
    assert other_shape.fingerprint != reader.fingerprint
    config = shape_config(tiny.removeprefix("random:"))
    first, again, other = (random_model(config, torch.float32, seed).state_dict() for seed in (0, 0, 1))
    own = reader.adapter.model.state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert all(torch.equal(first[name], own[name]) for name in own)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    layers = [first[f"model.layers.{l}.mlp.up_proj.weight"] for l in range(3)]
    assert not torch.equal(layers[0], layers[1])
    for name, weights in random_model(config, torch.bfloat16).named_parameters():
        assert weights.dtype == torch.bfloat16
        if "norm" in name:
            assert weights.eq(1).all()
        else:
            assert 0.018 < float(weights.detach().float().std()) < 0.022, name


def test_a_matrix_larger_than_the_tile_has_no_equal_rows() -> None:
    sizes: Any = {"hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LlamaConfig(vocab_size=TILE // 64 + 100, **sizes)
    weights = random_model(config, torch.float32).model.embed_tokens.weight
    assert len(weights[-2000:].unique(dim=0)) == 2000
    assert not torch.equal(weights[:100], weights[-100:])


def test_a_folded_tokenizer_stays_within_the_vocabulary(reader: Reader) -> None:
    text = "Folding changes which tokens there are, not how many."
    ids, own = reader.tokenizer(text)["input_ids"], bundled_tokenizer()(text)["input_ids"]
    assert isinstance(reader.tokenizer, Folded)
    assert ids == [i % 500 for i in own]
    assert max(reader.end_tokens) < 500


@pytest.mark.parametrize(
    "changes",
    [{"num_hidden_layers": 0}, {"hidden_size": -64}, {"hidden_size": "wide"}, {"model_type": "nonsense"}],
)
def test_a_shape_that_fits_no_model_is_refused(changes: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        load_reader(ReaderConfig(model=write_shape(tmp_path, **changes)))
    with pytest.raises(ModelUnsupported):
        load_reader(ReaderConfig(model=write_shape(tmp_path, model_type="gpt2")))
