"""GGUF files: the bundled one converted as by transformers, a user's by transformers itself, or refused."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from blendserve.config import ModelConfig
from blendserve.errors import ModelError, ModelUnsupported
from blendserve.models import gguf as converter
from blendserve.models.loader import LoadedModel, fingerprint, load_model
from blendserve.models.sources import BUNDLED
from tests.support.files import own_cache

gguf = pytest.importorskip("gguf", reason="the reference is the package gguf")
pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF files")

TEXTS = (
    " The cat sat on 12 mats.\n\nna\u00efve \u6f22\u5b57 \U0001f642\t x",
    "a<|im_start|>user\nb<|im_end|><|endoftext|> <file_sep>c",
    "  def f(x):\n\treturn x**2  # \u00b2\r\n",
)
HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS = 64, 96, 4, 2, 16, 2
SETTINGS = {  # of a llama of two layers
    "block_count": LAYERS,
    "context_length": 256,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "rope.dimension_count": DIM,
}
SHAPES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("attn_norm", "ffn_norm"), (HIDDEN,)),
    **dict.fromkeys(("attn_q", "attn_output"), (HEADS * DIM, HIDDEN)),
    **dict.fromkeys(("attn_k", "attn_v"), (KV_HEADS * DIM, HIDDEN)),
    **dict.fromkeys(("ffn_gate", "ffn_up"), (INNER, HIDDEN)),
    "ffn_down": (HIDDEN, INNER),
}
BIASES = {f"attn_{part}.bias": (n * DIM,) for part, n in {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}.items()}
MERGES = ["t h", "th e", "\u0120 a"]
LETTERS = ["\u0120", "\u010a", *"abcdefghijklmnopqrstuvwxyz"]
TOKENS = ["<|endoftext|>", "<s>", "</s>", *LETTERS, *(merge.replace(" ", "") for merge in MERGES)]


def theirs(file: Path, folder: Path) -> Path:
    """transformers' conversion."""
    quantization = GgufConfig(gguf_file=file.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=quantization, dtype=torch.bfloat16
    )
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def ours(file: Path, folder: Path) -> Path:
    folder.mkdir()
    converter.write_folder(file, folder)
    return folder


def check_equal(*folders: Path) -> None:
    """Whether two folders hold the same model, by its fingerprint, and tokenizer."""
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16) for folder in folders]
    assert fingerprint(models[0]) == fingerprint(models[1])
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert len({getattr(model.generation_config, name) for model in models}) == 1
    files = [json.loads((folder / "tokenizer.json").read_text("utf-8")) for folder in folders]
    assert files[0] == files[1]
    mine, expected = (AutoTokenizer.from_pretrained(folder) for folder in folders)
    assert mine.special_tokens_map == expected.special_tokens_map
    assert len(mine) == len(expected)
    for text in TEXTS:
        for options in ({}, {"add_special_tokens": False}, {"split_special_tokens": True}):
            assert mine(text, **options)["input_ids"] == expected(text, **options)["input_ids"]
    assert mine.chat_template == expected.chat_template


def write_tiny(file: Path, kind: str = "F32", **changed: Any) -> Path:
    """A small model with random weights, by the gguf package. changed: settings that differ."""
    family = changed.get("architecture", "llama")
    writer = gguf.GGUFWriter(file, family)
    writer.add_name("tiny")
    for name, value in SETTINGS.items():
        writer.add_uint32(f"{family}.{name}", value)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if "scaling" in changed:
        writer.add_rope_scaling_type(gguf.RopeScalingType(changed["scaling"]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(changed.get("eos", 2))
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    shapes |= {"output": (len(TOKENS), HIDDEN)} if changed.get("untied") else {}
    inside = {**SHAPES, **changed.get("layer", {})}
    shapes |= {f"blk.{l}.{part}": shape for l in range(LAYERS) for part, shape in inside.items()}
    rng, quantised = np.random.default_rng(0), gguf.GGMLQuantizationType[kind]
    for name, shape in {**shapes, **changed.get("shapes", {})}.items():
        if shape:  # else it is missing
            values, is_vector = rng.standard_normal(shape).astype(np.float32), len(shape) == 1
            data = values if is_vector else gguf.quantize(values, quantised)
            full = name if name.endswith(".bias") else f"{name}.weight"
            writer.add_tensor(full, data, raw_dtype=None if is_vector or kind == "F32" else quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def bundled() -> Path:
    spec = find_spec(BUNDLED["smollm2-135m"].packages[0])
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / BUNDLED["smollm2-135m"].file


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache(tmp_path / "cache", monkeypatch)


def load(model: Path | str, dtype: str = "float32") -> LoadedModel:
    return load_model(ModelConfig(name=str(model), dtype=dtype, device="cpu"))


@pytest.mark.nightly  # twenty seconds; each part of a conversion is compared below
def test_the_bundled_model_is_converted_as_transformers_converts_it(bundled: Path, tmp_path: Path) -> None:
    check_equal(ours(bundled, tmp_path / "ours"), theirs(bundled, tmp_path / "theirs"))


SLOW_IMPORTS = {"transformers", "torch._dynamo", "gguf", "accelerate", "scipy", "sympy"}


def test_the_first_start_imports_no_slow_package() -> None:
    code = (
        "import sys; from blendserve.config import ModelConfig; from blendserve.models.loader import load_model; "
        "from blendserve.engine import engine; from blendserve.retrieve import Embedder; Embedder.load(); "
        f"load_model(ModelConfig(device='cpu')); print(sorted({SLOW_IMPORTS} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q8_0"])
def test_a_small_llama_is_converted_as_transformers_converts_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converter, "CHUNK", 7)  # tensors are dequantised in pieces
    file = write_tiny(tmp_path / "tiny.gguf", kind, untied=kind == "Q8_0")
    check_equal(ours(file, tmp_path / "ours"), theirs(file, tmp_path / "theirs"))


def test_a_user_s_file_is_converted_once_and_known_by_its_content(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "blendserve.models.sources")
    file = write_tiny(tmp_path / "mine.gguf")
    first = load(file)
    assert first.name == str(file)
    assert len(caplog.records) == 1
    file.rename(tmp_path / "moved.GGUF")
    assert load(tmp_path / "moved.GGUF").fingerprint == first.fingerprint
    assert len(caplog.records) == 1
    write_tiny(file, untied=True)
    assert load(file).fingerprint != first.fingerprint
    assert len(caplog.records) == 2


def test_another_architecture_is_converted_by_transformers(tmp_path: Path) -> None:
    file = write_tiny(tmp_path / "qwen.gguf", architecture="qwen2", layer=BIASES)
    model: Any = load(file).adapter.reference
    assert model.config.model_type == "qwen2"


@pytest.mark.parametrize(
    "changed",
    [
        {"architecture": "gpt2"},
        {"architecture": "deepseek2"},
        {"shapes": {"rope_freqs": (DIM // 2,)}},  # scales its RoPE
        {"architecture": "qwen2", "scaling": "yarn"},
        {"shapes": {"blk.1.ffn_up": ()}},
        {"shapes": {"token_embd": ()}},
        {"shapes": {"blk.0.attn_k": (HIDDEN, HIDDEN)}},
        {"eos": 999},
    ],
)
def test_files_that_cannot_be_used_are_refused_by_name(changed: dict[str, Any], tmp_path: Path) -> None:
    file = write_tiny(tmp_path / "tiny.gguf", **changed)
    with pytest.raises(ModelError) as error:
        load(file)
    assert error.value.path == str(file) or isinstance(error.value, ModelUnsupported)


@pytest.mark.parametrize("raw", [None, b"", b"not at all", b"GGUF\x01\0\0\0" + bytes(16), "short"])
def test_files_that_are_missing_or_damaged_are_refused(raw: bytes | str | None, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    if raw == "short":
        whole = write_tiny(tmp_path / "whole.gguf").read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
    elif isinstance(raw, bytes):
        file.write_bytes(raw)
    with pytest.raises(ModelError) as error:
        load(file)
    assert error.value.path == str(file)
