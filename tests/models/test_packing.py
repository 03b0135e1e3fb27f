"""Models whose weights stay quantised, against the same files dequantised."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from blendserve.config import ModelConfig
from blendserve.kernels.packed import PackedMatrix
from blendserve.kernels.selfcheck import widest
from blendserve.kv import stacked
from blendserve.models import forward
from blendserve.models.forward import Row, run_rows
from blendserve.models.kv_cache import KVCache
from blendserve.models.loader import LoadedModel, load_model
from blendserve.models.model import DecoderModel
from blendserve.models.native import native_layers
from blendserve.models.packing import pack_weights
from blendserve.models.reference import model_forward
from blendserve.models.runner import append_each, decode_each, decode_in_int8, native_decoder
from tests.support.kernel_switches import loop_over_kernels_of_steps, plain_torch
from tests.support.models import wide_model

pytest.importorskip("gguf", reason="it writes the files")
DTYPES = [d for d in (torch.bfloat16, torch.float32) if widest("pack", d)]
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
DOWN = "model.layers.0.mlp.down_proj.weight"
IDS = tuple(3 + 7 * i % 90 for i in range(24))


def write(folder: Path, name: str, kind: str) -> str:
    from tests.support.gguf_files import MODELS, tiny, write_model

    return str(write_model(folder / f"{name}.gguf", tiny(name), MODELS[name][0], kind))


def load(name: str, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> LoadedModel:
    word: Any = str(dtype).removeprefix("torch.")
    return load_model(ModelConfig(name=name, dtype=word, **settings))


def run(model: LoadedModel) -> list[torch.Tensor]:
    """Logits and KV of a prompt, then of one more token."""
    cache, rows = KVCache(model.decoder, len(IDS) + 1), list(enumerate(IDS))
    with torch.inference_mode():
        logits = run_rows(model.decoder, [Row(cache, at, token) for at, token in rows])
        last = append_each(model.decoder, [Row(cache, len(IDS), 5)])
    return [logits, *(x[:, :, : len(IDS)] for x in map(stacked, (cache.keys, cache.values))), last]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def test_an_odd_vocabulary_is_dequantised_without_the_package_gguf(tmp_path: Path) -> None:
    """Kernels write two outputs at once."""
    from tests.support.gguf_files import MODELS, tiny, write_model

    model = tiny("llama-untied", vocab_size=97)
    file = str(write_model(tmp_path / "odd.gguf", model, MODELS["llama-untied"][0], "Q8_0"))
    dense = load(file, torch.float32, weights="bf16")
    with patch.dict(sys.modules, gguf=None):
        packed = load(file, torch.float32)
    assert isinstance(packed.decoder.tensors[DOWN], PackedMatrix)
    head = packed.decoder.tensors["lm_head.weight"]
    assert isinstance(head, torch.Tensor)
    assert torch.equal(head.bfloat16().float(), dense.decoder.tensors["lm_head.weight"])
    assert distance(run(packed)[0], run(dense)[0]) < 0.05


@EACH_DTYPE
@pytest.mark.parametrize(
    ("name", "kind"), [("llama-untied", "Q8_0"), ("qwen3", "Q4_0"), ("gemma3_text", "Q5_1")]
)
def test_a_file_as_it_is_gives_what_its_numbers_give(
    name: str, kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    file = write(tmp_path, name, kind)
    packed, dense = load(file, dtype), load(file, dtype, weights="bf16")
    assert isinstance(packed.decoder.tensors[DOWN], PackedMatrix)
    assert packed.tokenizer("ab")["input_ids"] == dense.tokenizer("ab")["input_ids"]
    *prefill, last = run(packed)
    *expected, other = run(dense)
    if dtype == torch.bfloat16:
        assert all(map(torch.equal, prefill[1:], expected[1:])), "stored KV would not be that of the model"
        assert (packed.fingerprint == dense.fingerprint) == name.startswith("llama")
    assert distance(prefill[0], expected[0]) < 0.05
    assert distance(last, other) < 0.05
    own = model_forward(packed.decoder, IDS)
    assert distance(own.logits[1], prefill[0][-1]) < 0.05
    assert distance(own.logits, model_forward(dense.decoder, IDS).logits) < 0.05


@EACH_DTYPE
@pytest.mark.parametrize("name", ["llama-biased", "qwen3-window", "phi3-window", "gemma3_text"])
@torch.inference_mode()
def test_steps_and_halves_of_layers_equal_the_layer_loop(name: str, dtype: torch.dtype) -> None:
    reference = wide_model(name, dtype)
    tensors = pack_weights(reference.state_dict(), dtype, in_q8_0=True)
    model = DecoderModel(reference.config, tensors, lambda: reference)
    assert native_decoder(model)[0] is not None, native_decoder(model)[1]
    assert all(native_layers(model, n) for n in (8, 20))

    def outcome(step: Any, n: int) -> list[torch.Tensor]:
        cache = KVCache(model, 40)
        return [
            step(model, [Row(cache, at, 1 + at) for at in range(n)]),
            *(x[:, :, :n] for x in map(stacked, (cache.keys, cache.values))),
        ]

    for n in (1, 2, 7, 8):
        found = outcome(append_each, n)
        with loop_over_kernels_of_steps(model), patch.object(forward, "native_layers", lambda *_: None):
            assert all(map(torch.equal, found, outcome(run_rows, n)))
    found = outcome(run_rows, 20)
    with patch.object(forward, "native_layers", lambda *_: None):
        assert all(map(torch.equal, found, outcome(run_rows, 20)))


@EACH_DTYPE
@torch.inference_mode()
def test_int8_inputs_are_for_answers_alone(dtype: torch.dtype) -> None:
    reference = wide_model("qwen3-window", dtype)
    model = DecoderModel(
        reference.config, pack_weights(reference.state_dict(), dtype, in_q8_0=True), lambda: reference
    )
    decode_in_int8(model)

    def logits(step: Any) -> torch.Tensor:
        cache = KVCache(model, 40)
        return torch.as_tensor(step(model, [Row(cache, at, 1 + at) for at in range(5)]))

    exact, approximate = logits(append_each), logits(decode_each)
    assert 0 < distance(approximate, exact) < 0.1


def test_any_model_is_quantised_to_q8_0_when_it_is_loaded(tmp_path: Path) -> None:
    file = write(tmp_path, "qwen3", "F32")
    packed, dense = load(file, DTYPES[0], weights="q8_0"), load(file, DTYPES[0])
    assert isinstance(packed.decoder.tensors[DOWN], PackedMatrix)
    assert packed.fingerprint != dense.fingerprint
    for got, want in zip(run(packed), run(dense), strict=True):
        assert 0 < distance(got, want) < 0.05


def test_packed_weights_lie_in_private_memory() -> None:
    """Linux gives shared memory no large pages, unless it is told to."""
    strips = pack_weights({"a": torch.ones(32, 64)}, DTYPES[0], in_q8_0=True)["a"]
    assert isinstance(strips, PackedMatrix)
    at = strips.strips.data_ptr()
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ends = {tuple(int(end, 16) for end in span.split("-")): mode for span, mode, *_ in maps}
    assert [mode for (begin, end), mode in ends.items() if begin <= at < end] == ["rw-p"]


def test_without_kernels_a_file_is_dequantised(tmp_path: Path) -> None:
    file = write(tmp_path, "llama", "Q8_0")
    with plain_torch():
        assert not isinstance(load(file, torch.float32).decoder.tensors[DOWN], PackedMatrix)
