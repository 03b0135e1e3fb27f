"""GGUF files of tiny models, as llama.cpp's converter writes them: derived a second time, over the package gguf."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from blendserve.models.refusals import check_supported
from tests.support.models import PARTIAL, SCALED, WINDOWED, config, from_config, rope

LLAMA_3 = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
GEMMA_2 = {
    **WINDOWED,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 5.0,
}
GEMMA_3: dict[str, Any] = {
    **{**WINDOWED, "query_pre_attn_scalar": 16, "num_hidden_layers": 6, "layer_types": None},
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    },
}
OLMO_3: dict[str, Any] = {
    **WINDOWED,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "attention_factor": 1.2},
            **{"original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0},
        },
    },
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
BIASED = {"attention_bias": True, "mlp_bias": True}
MINISTRAL: dict[str, Any] = {
    "rope_parameters": {**SCALED["rope_parameters"], "mscale": 1.0, "mscale_all_dim": 1.0},
    "sliding_window": None,
}
# name -> architecture of llama.cpp, settings beside those of BASE; before the first "-" is transformers' model type
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-untied": ("llama", {"tie_word_embeddings": False, **BIASED}),
    "llama-linear": ("llama", rope("linear", factor=2.0)),
    "llama-yarn": ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=16.0)),
    "llama-llama3": ("llama", LLAMA_3),
    "mistral": ("llama", {"sliding_window": None}),
    "ministral3": ("mistral3", MINISTRAL),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
    "arcee": ("arcee", {}),
    "granite": ("granite", GRANITE),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo2", OLMO_3),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "seed_oss": ("seed_oss", {}),
    "ernie4_5": ("ernie4_5", {}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4, **LLAMA_3}),
    "exaone4-window": ("exaone4", WINDOWED),
    "glm4": ("glm4", {"attention_bias": True}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3-window": ("phi3", {**WINDOWED, **PARTIAL}),
    "phi": ("phi2", PARTIAL),
    "stablelm": (
        "stablelm",
        {**PARTIAL, "use_qkv_bias": True, "qk_layernorm": False, "use_parallel_residual": False},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "nemotron": ("nemotron", PARTIAL),
    "jais2": ("jais2", {}),
    "cohere": ("command-r", {"logit_scale": 0.3}),
    "cohere-normed": ("command-r", {"logit_scale": 0.3, "use_qk_norm": True}),
    "cohere2": ("cohere2", {**WINDOWED, "logit_scale": 0.3}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", GEMMA_2),
    "gemma3_text": ("gemma3", GEMMA_3),
}
TURNED = {"llama", "mistral3", "smollm3", "arcee", "granite", "olmo"}  # queries and keys
ONE_MORE = {"gemma", "gemma2", "gemma3", "nemotron"}  # in the weights of norms
LISTED_WINDOWS = {"olmo2", "exaone4"}
NO_WINDOW = {"starcoder2", "qwen2", "qwen3", "smollm3"}  # in the file


def tiny(name: str, **changed: Any) -> Any:
    """transformers' model, with norms and biases at random. changed: settings."""
    kind, (_, settings) = name.partition("-")[0], MODELS[name]
    model = from_config(config(kind, **{**settings, **changed}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.rand_like(parameter)
    return model


def as_stored(model: Any, kind: str = "F32") -> dict[str, Tensor]:
    """What is left of a model's weights when they are stored in this form, in fp32. Tied ones are there once."""
    weights = {name: x for name, x in model.state_dict().items() if not _is_tied(model, name)}
    return {name: torch.from_numpy(_dequantised(x, kind)) for name, x in weights.items()}


Tokens = tuple[list[str], list[int]]  # texts and types
TOKENS: Tokens = ([*("<0>", "<1>", "<2>"), *map(chr, range(0x21, 0x7E)), "ab"], [3] * 3 + [1] * 94)


def write_model(
    file: Path,
    model: Any,
    arch: str,
    kind: str = "F32",
    tokens: Tokens = TOKENS,
    more: Mapping[str, Any] = MappingProxyType({}),
    changed: Mapping[str, Tensor | None] = MappingProxyType({}),
) -> Path:
    """Write the model's configuration and weights, matrices in this form, and a vocabulary.

    more: metadata in place of those of a byte-level tokenizer with one merge; changed: tensors; None = there is none.
    """
    writer = gguf.GGUFWriter(file, arch)
    _write_settings(writer, arch, model.config)
    _write_tokens(writer, model.config, tokens, more)
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    tensors = dict[str, Tensor | None]()
    for name, x in model.state_dict().items():
        base, _, part = name.rpartition(".")
        if not _is_tied(model, name):
            tensors[f"{names.get_name(base)}.{part}"] = _as_in_file(x.float(), base, part, arch, model.config)
    rope = model.config.rope_parameters
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = torch.tensor(_llama_3(rope, model.config.head_dim))
    for name, x in {**tensors, **changed}.items():
        if x is not None:
            form = gguf.GGMLQuantizationType[kind if x.dim() > 1 else "F32"]
            writer.add_tensor(name, gguf.quantize(x.numpy(), form), raw_dtype=form)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return file


def _is_tied(model: Any, name: str) -> bool:
    return name == "lm_head.weight" and bool(model.config.tie_word_embeddings)


def _dequantised(x: Tensor, kind: str) -> Any:
    values = x.float().numpy()
    if x.dim() == 1 or kind == "F32":
        return values
    form = gguf.GGMLQuantizationType[kind]
    return np.ascontiguousarray(gguf.dequantize(gguf.quantize(values, form), form)).astype(np.float32)


def _as_in_file(x: Tensor, base: str, part: str, arch: str, config: Any) -> Tensor:
    if arch in ONE_MORE and f"{base}.{part}".endswith("norm.weight"):
        return x + 1
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
        base.rpartition(".")[2]
    )
    if arch in TURNED and heads:
        return torch.cat([torch.stack(head.chunk(2), 1).flatten(0, 1) for head in x.chunk(heads)])
    return x


def _llama_3(rope: dict[str, Any], dim: int) -> list[float]:
    """By what factor each frequency is slower: between two wavelengths the speed goes linearly in frequency."""
    factors = []
    for i in range(0, dim, 2):
        turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** (-i / dim) / (2 * math.pi)
        share = min(
            1.0,
            max(
                0.0, (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            ),
        )
        factors.append(1 / (share + (1 - share) / rope["factor"]))
    return factors


def _write_settings(writer: Any, arch: str, made: Any) -> None:
    """What the converter's base class and the class of the architecture write."""
    full = made.rope_parameters.get("full_attention", made.rope_parameters)
    dim = getattr(made, "head_dim", None) or made.hidden_size // made.num_attention_heads
    writer.add_context_length(made.max_position_embeddings)
    writer.add_embedding_length(made.hidden_size)
    writer.add_block_count(made.num_hidden_layers)
    writer.add_feed_forward_length(made.intermediate_size)
    writer.add_head_count(made.num_attention_heads)
    writer.add_head_count_kv(made.num_key_value_heads)
    if arch not in ("phi2", "phi3", "granite", "olmo"):
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    if (eps := getattr(made, "rms_norm_eps", None)) is not None:
        writer.add_layer_norm_rms_eps(eps)
    else:
        named = (getattr(made, n, None) for n in ("layer_norm_eps", "norm_eps", "norm_epsilon"))
        writer.add_layer_norm_eps(next((value for value in named if value), 1e-5))
    if arch not in ("gemma", "gemma2"):
        writer.add_rope_freq_base(full["rope_theta"])
    share = full.get("partial_rotary_factor", getattr(check_supported(made), "rope_share", 1.0))
    if arch in TURNED or arch in ("phi2", "phi3", "stablelm", "nemotron", "glm4", "cohere2", "jais2"):
        writer.add_rope_dimension_count(int(share * dim))
    _write_scaling(writer, full)
    window = getattr(made, "sliding_window", None)
    if window and arch not in NO_WINDOW:
        writer.add_sliding_window(window)
        if arch in LISTED_WINDOWS:
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in made.layer_types])
    elif arch == "phi3":
        writer.add_sliding_window(0)
    scales = {
        "logit_scale": writer.add_logit_scale,
        "logits_scaling": writer.add_logit_scale,
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
    }
    for name, add in scales.items():
        if value := getattr(made, name, None):
            add(value)


def _write_scaling(writer: Any, rope: dict[str, Any]) -> None:
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] != "yarn":
        return
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for name, key in (
        ("beta_fast", "yarn_beta_fast"),
        ("beta_slow", "yarn_beta_slow"),
        ("attention_factor", "yarn_attn_factor"),
    ):
        if rope.get(name) is not None:
            writer.add_float32(f"{writer.arch}.rope.scaling.{key}", rope[name])
    if "llama_4_scaling_beta" in rope:
        writer.add_float32(f"{writer.arch}.rope.scaling.yarn_log_multiplier", rope["mscale_all_dim"])
        writer.add_float32(f"{writer.arch}.attention.temperature_scale", rope["llama_4_scaling_beta"])


def _write_tokens(writer: Any, made: Any, tokens: Tokens, more: Mapping[str, Any]) -> None:
    texts, types = tokens
    assert len(texts) == len(types) == made.vocab_size
    writer.add_token_list(texts)
    writer.add_token_types(types)
    if "tokenizer.ggml.model" not in more:
        writer.add_tokenizer_model("gpt2")
        if pre := more.get("tokenizer.ggml.pre", "gpt-2"):
            writer.add_tokenizer_pre(pre)
        writer.add_token_merges(["a b"])
    writer.add_bos_token_id(made.bos_token_id)
    writer.add_eos_token_id(made.eos_token_id)
    kinds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    for key, value in {"tokenizer.ggml.add_bos_token": False, **more}.items():
        if value is not None and key != "tokenizer.ggml.pre":
            kinds[type(value)](key, value)
