"""Tiny random models, built from config: every code path of every family in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers as tf

from blendserve.models.families import TOWERS
from blendserve.models.model import DecoderModel
from blendserve.models.reference import TextTower

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
BIASED = {"attention_bias": True, "mlp_bias": True}
PARTIAL = rope(rope_type="default", partial_rotary_factor=0.5)
GROUPED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
SCALED = rope(
    rope_type="yarn", factor=2.0, original_max_position_embeddings=CONTEXT // 2, llama_4_scaling_beta=0.5
)
MROPE = rope(rope_type="default", mrope_section=[4, 2, 2])
EYES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
SIGLIP = {**EYES, "image_size": 16, "patch_size": 8}
PIXTRAL = {**SIGLIP, "model_type": "pixtral", "head_dim": 8}
QWEN_EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
QWEN3_EYES = {**QWEN_EYES, "deepstack_visual_indexes": [0]}


def config(cls: Any, *parts: dict[str, Any], **changes: Any) -> Any:
    values = dict(BASE)
    for part in (*parts, changes):
        values.update(part)
    return cls(**values)


def tower(cls: Any, eyes: dict[str, Any], *parts: dict[str, Any], **changes: Any) -> Any:
    """The configuration of a checkpoint that reads pictures too."""
    return cls(text_config=config(dict, *parts, **changes), vision_config=dict(eyes))


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
    "aria_text": lambda: config(
        tf.AriaTextConfig, BIASED, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1
    ),
    "cohere2_moe": lambda: config(
        tf.Cohere2MoeConfig, EXPERTS, SLIDES, BIASED, logit_scale=0.3, num_shared_experts=1
    ),
    "cohere2_moe-dense": lambda: config(
        tf.Cohere2MoeConfig,
        EXPERTS,
        SLIDES,
        rms_norm_eps=1e-5,
        expert_selection_fn="sigmoid",
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],  # a dense layer without a window has RoPE
        prefix_dense_intermediate_size=40,
    ),
    "cwm": lambda: config(tf.CwmConfig, SLIDES, LLAMA3),
    "dots1": lambda: config(tf.Dots1Config, EXPERTS, GROUPED, SLIDES, BIASED),
    "ernie4_5": lambda: config(tf.Ernie4_5Config, use_bias=True),
    "ernie4_5_moe": lambda: config(
        tf.Ernie4_5_MoeConfig,
        use_bias=True,
        moe_intermediate_size=48,
        moe_k=2,
        moe_num_experts=4,
        moe_num_shared_experts=1,
        moe_layer_end_index=2,
    ),
    "exaone_moe": lambda: config(tf.ExaoneMoeConfig, EXPERTS, SLIDES, num_shared_experts=1),
    "flex_olmo": lambda: config(tf.FlexOlmoConfig, EXPERTS, BIASED, norm_topk_prob=True),
    "glm4_moe": lambda: config(tf.Glm4MoeConfig, EXPERTS, GROUPED, BIASED, PARTIAL, use_qk_norm=True),
    "glm4_moe-unnormed": lambda: config(tf.Glm4MoeConfig, EXPERTS, GROUPED, use_qk_norm=False),
    "hy_v3": lambda: config(
        tf.HYV3Config, EXPERTS, BIASED, mlp_layer_types=["dense", "sparse", "sparse", "dense"]
    ),
    "internlm3": lambda: config(tf.InternLM3Config, BIASED),
    "iquestcoder": lambda: config(tf.IQuestCoderConfig, BIASED),
    "jais2": lambda: config(tf.Jais2Config),
    "mellum": lambda: config(tf.MellumConfig, EXPERTS, SLIDES, TYPED_ROPE, BIASED),
    "minimax_m2": lambda: config(tf.MiniMaxM2Config, EXPERTS, PARTIAL),
    "ministral3": lambda: config(tf.Ministral3Config, SCALED, sliding_window=WINDOW),
    "nemotron": lambda: config(tf.NemotronConfig, BIASED, PARTIAL),
    "olmo": lambda: config(tf.OlmoConfig, BIASED),
    "olmoe": lambda: config(tf.OlmoeConfig, EXPERTS, BIASED, norm_topk_prob=True),
    "phimoe": lambda: config(tf.PhimoeConfig, EXPERTS, BIASED, lm_head_bias=True, sliding_window=WINDOW),
    "qwen2_5_vl_text": lambda: tower(
        tf.Qwen2_5_VLConfig, QWEN_EYES, MROPE, SLIDES, use_sliding_window=True, max_window_layers=0
    ),
    "qwen3_vl_text": lambda: tower(tf.Qwen3VLConfig, QWEN3_EYES, MROPE, BIASED),
    "qwen3_vl_moe_text": lambda: tower(tf.Qwen3VLMoeConfig, QWEN3_EYES, MROPE, EXPERTS, BIASED),
    "gemma3_text-tower": lambda: tower(tf.Gemma3Config, SIGLIP, GEMMA, TYPED_ROPE),
    "mistral-tower": lambda: tower(
        tf.Mistral3Config, PIXTRAL, {"model_type": "mistral"}, sliding_window=WINDOW
    ),
    "ministral3-tower": lambda: tower(
        tf.Mistral3Config, PIXTRAL, {"model_type": "ministral3"}, SCALED, sliding_window=None
    ),
    "solar_open": lambda: config(tf.SolarOpenConfig, EXPERTS, GROUPED, BIASED),
    "stablelm": lambda: config(
        tf.StableLmConfig, PARTIAL, use_qkv_bias=True, qk_layernorm=False, use_parallel_residual=False
    ),
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
    made = TINY[name]()
    auto: Any = tf.AutoModelForImageTextToText if made.model_type in TOWERS else tf.AutoModelForCausalLM
    model = auto.from_config(made, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                parameter.dim() == 1
            ):  # norms and biases are ones and zeros, where many mistakes would not show
                parameter += 0.3 * torch.rand_like(parameter)
    for parameter in model.parameters():  # not buffers: transformers keeps RoPE's frequencies in fp32
        parameter.data = parameter.data.to(dtype)
    model.eval()
    return TextTower(model).eval() if made.model_type in TOWERS else model


@cache
def wide_model(name: str, dtype: torch.dtype) -> Any:
    """The same with heads of 64 dimensions and even sizes, which native kernels take."""
    torch.manual_seed(0)
    made = TINY[name]()
    made.hidden_size, made.head_dim, made.vocab_size = 256, 64, 98
    model: Any = tf.AutoModelForCausalLM.from_config(made, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.eval()


@cache
def tiny_adapter(name: str, dtype: torch.dtype = torch.float32) -> DecoderModel:
    return DecoderModel.of(tiny_model(name, dtype))


def fresh_model(name: str) -> DecoderModel:
    """An adapter over a model of its own, for tests that look at what is left of it."""
    return DecoderModel.of(tiny_model.__wrapped__(name))
