"""Tiny random models, built from config: every code path of every family in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers as tf

from blendserve.models.adapter import Adapter

CONTEXT, WINDOW = 256, 24
BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,  # larger than usual: attention must not be flat, or nothing would depend on position
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
TYPES = ["sliding_attention", "full_attention"] * 2
SLIDES: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": TYPES}


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


YARN = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
LLAMA3 = rope(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
TYPED_ROPE = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    }
}
GEMMA = {**SLIDES, "query_pre_attn_scalar": 8}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}


def config(cls: Any, *parts: dict[str, Any], **changes: Any) -> Any:
    values = dict(BASE)
    for part in (*parts, changes):
        values.update(part)
    return cls(**values)


# name -> its config; what stands in front of the first "-" is the family's model_type
TINY: dict[str, Callable[[], Any]] = {
    "llama": lambda: config(tf.LlamaConfig),
    "llama-linear": lambda: config(tf.LlamaConfig, rope(rope_type="linear", factor=2.0)),
    "llama-llama3": lambda: config(tf.LlamaConfig, LLAMA3),
    "llama-yarn": lambda: config(tf.LlamaConfig, YARN),
    "llama-biased": lambda: config(tf.LlamaConfig, attention_bias=True, mlp_bias=True),
    "mistral": lambda: config(tf.MistralConfig, sliding_window=None),
    "mistral-window": lambda: config(tf.MistralConfig, sliding_window=WINDOW),
    "ministral-window": lambda: config(tf.MinistralConfig, SLIDES),
    "mixtral": lambda: config(tf.MixtralConfig, EXPERTS, sliding_window=None),
    "mixtral-window": lambda: config(tf.MixtralConfig, EXPERTS, sliding_window=WINDOW),
    "qwen2": lambda: config(tf.Qwen2Config),
    "qwen2-window": lambda: config(tf.Qwen2Config, SLIDES, use_sliding_window=True),
    "qwen2-yarn": lambda: config(tf.Qwen2Config, YARN),
    "qwen2_moe": lambda: config(tf.Qwen2MoeConfig, EXPERTS, shared_expert_intermediate_size=40),
    "qwen2_moe-window": lambda: config(
        tf.Qwen2MoeConfig, EXPERTS, shared_expert_intermediate_size=40, **SLIDES, use_sliding_window=True
    ),
    "qwen3": lambda: config(tf.Qwen3Config),
    "qwen3-window": lambda: config(tf.Qwen3Config, SLIDES, use_sliding_window=True),
    "qwen3_moe": lambda: config(tf.Qwen3MoeConfig, EXPERTS, mlp_only_layers=[1]),
    "qwen3_moe-window": lambda: config(
        tf.Qwen3MoeConfig, EXPERTS, use_sliding_window=True, sliding_window=WINDOW
    ),
    "gemma": lambda: config(tf.GemmaConfig),
    "gemma2": lambda: config(tf.Gemma2Config, GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=5.0),
    "gemma2-uncapped": lambda: config(
        tf.Gemma2Config, GEMMA, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "gemma3_text": lambda: config(tf.Gemma3TextConfig, GEMMA, TYPED_ROPE),
    "gemma3_text-capped": lambda: config(tf.Gemma3TextConfig, GEMMA, final_logit_softcapping=5.0),
    "phi3": lambda: config(tf.Phi3Config),
    "phi3-partial": lambda: config(tf.Phi3Config, rope(rope_type="default", partial_rotary_factor=0.5)),
    "phi3-window": lambda: config(tf.Phi3Config, sliding_window=WINDOW),
    "olmo2": lambda: config(tf.Olmo2Config),
    "olmo3": lambda: config(tf.Olmo3Config, SLIDES),
    "granite": lambda: config(tf.GraniteConfig, GRANITE),
    "granitemoe": lambda: config(tf.GraniteMoeConfig, GRANITE, EXPERTS),
    "smollm3": lambda: config(tf.SmolLM3Config, no_rope_layers=[1, 1, 0, 1]),
    "smollm3-window": lambda: config(tf.SmolLM3Config, SLIDES, use_sliding_window=True),
    "cohere": lambda: config(tf.CohereConfig, logit_scale=0.3),
    "cohere-normed": lambda: config(tf.CohereConfig, use_qk_norm=True),
    "cohere2": lambda: config(tf.Cohere2Config, SLIDES),
    "exaone4": lambda: config(tf.Exaone4Config, SLIDES),
    "starcoder2": lambda: config(tf.Starcoder2Config, sliding_window=WINDOW),
    "seed_oss": lambda: config(tf.SeedOssConfig),
    "arcee": lambda: config(tf.ArceeConfig),
    "helium": lambda: config(tf.HeliumConfig),
    "glm": lambda: config(tf.GlmConfig),
    "glm4": lambda: config(tf.Glm4Config),
    "apertus": lambda: config(tf.ApertusConfig),
}
# One of each kind of difference, for properties that take many examples.
KINDS = [
    "llama-yarn",
    "mistral-window",
    "gemma2",
    "gemma3_text",
    "phi3-partial",
    "olmo2",
    "smollm3",
    "cohere",
]
# With experts, multipliers, layers without RoPE next to windows, and interleaved halves.
BLEND_KINDS = [*KINDS, "qwen3_moe-window", "granite", "cohere2", "glm4"]


@cache
def tiny_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A random model; the same object every time, so tests must not change it."""
    torch.manual_seed(seed)
    model: Any = tf.AutoModelForCausalLM.from_config(TINY[name](), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                parameter.dim() == 1
            ):  # norms and biases start as ones and zeros, where many mistakes would not show
                parameter += 0.3 * torch.rand_like(parameter)
    return model.to(dtype).eval()


@cache
def tiny_adapter(name: str, dtype: torch.dtype = torch.float32) -> Adapter:
    return Adapter(tiny_model(name, dtype))


def fresh_model(name: str) -> Adapter:
    """An adapter over a model of its own, for tests that look at what is left of it."""
    return Adapter(tiny_model.__wrapped__(name))
