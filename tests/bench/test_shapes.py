"""Readers of random weights: the numbers of their shape, the same every time, and made without torch's initialisers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blendserve.config import ReaderConfig
from blendserve.errors import ModelError, ModelUnsupported
from blendserve.models.loader import Reader, load_reader, read_configuration
from blendserve.models.random_model import TILE, Folded, random_model
from blendserve.models.shapes import SHAPES, shape_config
from tests.bench.conftest import write_shape
from tests.support.tokenizers import bundled_tokenizer

# Parameters in millions as the model cards have them, embeddings once where they are tied.
MILLIONS = {
    "Qwen2.5-0.5B": 494,
    "Qwen2.5-7B": 7616,
    "Llama-3.2-1B": 1236,
    "Llama-3.1-8B": 8030,
    "Mistral-7B": 7248,
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_named_shape_has_the_published_number_of_parameters(name: str) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config(name.lower()))
    model.tie_weights()
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == MILLIONS[name]


def test_weights_follow_from_the_seed_alone(tiny: str, reader: Reader) -> None:
    config = shape_config(tiny.removeprefix("random:"))
    first, again, other = (random_model(config, torch.float32, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    layers = [first[f"model.layers.{l}.mlp.up_proj.weight"] for l in range(3)]
    assert not torch.equal(layers[0], layers[1])
    assert all(
        torch.equal(first[name], weights) for name, weights in reader.adapter.model.state_dict().items()
    )


def test_weights_are_noise_and_norms_are_one(tiny: str) -> None:
    model = random_model(shape_config(tiny.removeprefix("random:")), torch.bfloat16)
    for name, weights in model.named_parameters():
        assert weights.dtype == torch.bfloat16
        if "norm" in name:
            assert weights.eq(1).all()
        else:
            assert 0.018 < float(weights.detach().float().std()) < 0.022, name


def test_a_matrix_larger_than_the_tile_is_filled_and_its_rows_differ() -> None:
    from transformers import LlamaConfig

    rows = TILE // 64 + 100
    config = LlamaConfig(
        vocab_size=rows, hidden_size=64, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    weights = random_model(config, torch.float32).model.embed_tokens.weight
    assert len(weights[-2000:].unique(dim=0)) == 2000
    assert not torch.equal(weights[:100], weights[-100:])


def test_the_fingerprint_tells_shapes_apart_and_is_the_same_again(
    tiny: str, reader: Reader, tmp_path: Path
) -> None:
    other = write_shape(tmp_path, num_hidden_layers=2)
    prints = [load_reader(ReaderConfig(model=m, dtype="float32")).fingerprint for m in (tiny, other)]
    assert prints[0] == reader.fingerprint != prints[1]


def test_a_folded_tokenizer_stays_within_the_vocabulary_and_does_as_much_work(reader: Reader) -> None:
    text = "Folding changes which tokens there are, not how many."
    ids, own = reader.tokenizer(text)["input_ids"], bundled_tokenizer()(text)["input_ids"]
    assert isinstance(reader.tokenizer, Folded)
    assert ids == [i % 500 for i in own]
    assert max(reader.end_tokens) < 500


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("lama-1b", "no shape 'lama-1b'.*Qwen2.5-0.5B, Qwen2.5-7B, Llama-3.2-1B"),
        ("", "no shape ''.*Mistral-7B"),
        ("nowhere/at/all", "config.json"),
    ],
)
def test_an_unknown_shape_is_told_the_known_ones(shape: str, message: str) -> None:
    for load in (load_reader, read_configuration):
        with pytest.raises(ModelError, match=message):
            load(ReaderConfig(model=f"random:{shape}"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "4 query heads, which 3 kv heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0"),
        ({"hidden_size": -64}, "cannot be|must be at least 1"),
        ({"hidden_size": "wide"}, "cannot be used"),
        ({"model_type": "nonsense"}, "cannot be used"),
    ],
)
def test_numbers_that_fit_no_model(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        load_reader(ReaderConfig(model=write_shape(tmp_path, **changes)))


def test_a_shape_of_a_family_that_cannot_be_blended(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="gpt2"):
        load_reader(ReaderConfig(model=write_shape(tmp_path, model_type="gpt2")))
