"""Tiny random models, built from config: every code path of every family in milliseconds."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Cache

from blendserve.models.families import FAMILIES
from blendserve.models.model import DecoderModel
from blendserve.models.reference import TextTower
from blendserve.models.refusals import TOWERS

CONTEXT, WINDOW = 256, 24
# fmt: off
BASE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,  # larger than usual: attention must not be flat, or nothing would depend on position
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}
# fmt: on
TYPES = ["sliding_attention", "full_attention"] * 2
WINDOWED: dict[str, Any] = {"sliding_window": WINDOW}
SLIDES: dict[str, Any] = {**WINDOWED, "layer_types": TYPES}
SLIDES_IF_USED = {**SLIDES, "use_sliding_window": True}


def rope(kind: str = "default", **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **parameters}}


# fmt: off
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
UNTRUNCATED = rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False)
SCALED = rope("yarn", factor=16.0, original_max_position_embeddings=CONTEXT // 16, llama_4_scaling_beta=0.5)
PARTIAL, MROPE = rope(partial_rotary_factor=0.5), rope(mrope_section=[4, 2, 2])
TYPED_ROPE = {"rope_parameters": {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
}}
PARTIALLY_TYPED = {"rope_parameters": {
    **TYPED_ROPE["rope_parameters"],
    "full_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
GROUPED = {
    **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}
GATED = {**EXPERTS, **SLIDES, "shared_expert_intermediate_size": 40}
HYBRID_TYPES = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
DELTA_NET = {
    "layer_types": HYBRID_TYPES, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
}
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 12, "mamba_n_groups": 2, "mamba_chunk_size": 16,
}
GRANITE_4 = {
    **MAMBA, "layer_types": ["full_attention", "linear_attention"] * 2, "num_local_experts": 0,
    "shared_intermediate_size": 40,
}
FALCON_H1 = {
    **MAMBA, "mamba_d_ssm": 128, "attention_in_multiplier": 0.7, "key_multiplier": 0.5, "attention_out_multiplier": 1.5,
    "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "mlp_multipliers": [1.3, 0.8], "embedding_multiplier": 3.0, "lm_head_multiplier": 2.0,
}
NEMOTRON_H = {
    "time_step_min": 1e-9,  # transformers clamps time steps to it where several tokens run, not where one does
    **GROUPED, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 12, "n_groups": 2, "chunk_size": 16,
    "moe_shared_expert_intermediate_size": 40, "rescale_prenorm_residual": False,
}
CONV = {
    "layer_types": ["conv", "full_attention"] * 2, "norm_eps": 1e-5, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False,
}
GEMMA = {**SLIDES, "query_pre_attn_scalar": 8}
GEMMA_4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
GEMMA_4 = {
    **SLIDES, "global_head_dim": 32, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 0,
    "rope_parameters": GEMMA_4_ROPE,
}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "head_dim": 8, "rms_norm_eps": 1e-3,  # latents have another
}
KIMI = {
    **LATENT, **GROUPED, "q_lora_rank": None, "layer_types": HYBRID_TYPES, "linear_head_dim": 16, "linear_num_heads": 4,
}
GRANITE = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0,
}
BIASED = {"attention_bias": True, "mlp_bias": True}
SWASH = {**GRANITE, **SLIDES, **BIASED, "layer_rope_theta": [1e4, 0, 1e4, 100.0]}
SHARED = {"shared_intermediate_size": 40}

# name -> settings beside those of BASE; what stands in front of the first "-" is the family's model_type
TINY: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-linear": rope("linear", factor=2.0),
    "llama-llama3": LLAMA3,
    "llama-yarn": YARN,
    "llama-biased": BIASED,
    "mistral": {"sliding_window": None},
    "mistral-window": WINDOWED,
    "ministral-window": SLIDES,
    "mixtral": {**EXPERTS, "sliding_window": None},
    "mixtral-window": {**EXPERTS, **WINDOWED},
    "qwen2": {},
    "qwen2-window": SLIDES_IF_USED,
    "qwen2_moe-window": {**EXPERTS, **SLIDES_IF_USED, "shared_expert_intermediate_size": 40},
    "qwen3": {},
    "qwen3-window": SLIDES_IF_USED,
    "qwen3_moe": {**EXPERTS, "mlp_only_layers": [1]},
    "qwen3_moe-window": {**EXPERTS, **WINDOWED, "use_sliding_window": True},
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_text-tower": DELTA_NET,
    "qwen3_5_moe_text-tower": {**EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 40},
    "qwen3_5_moe_text": {**EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 40},
    "qwen3_next": {**EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 40},
    "granitemoehybrid": {**GRANITE, **GRANITE_4},
    "granitemoehybrid-rope": {**GRANITE, **GRANITE_4, "position_embedding_type": "rope", "num_local_experts": 4},
    "kimi_linear": {**KIMI, "q_lora_rank": 24, "attention_bias": True},
    "kimi_linear-dense": {**KIMI, "mlp_layer_types": ["dense"] * 4},
    "axk1": {**LATENT, **GROUPED},
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**FALCON_H1, "num_hidden_layers": 2},
    "falcon_h1-biased": {**FALCON_H1, **BIASED, "mamba_rms_norm": True, "num_hidden_layers": 2},
    "nemotron_h": {**NEMOTRON_H, "layer_types": ["linear_attention", "moe", "full_attention", "mlp"], "mlp_bias": True},
    "nemotron_h-dense": {
        **NEMOTRON_H, "layer_types": ["mlp", "linear_attention", "full_attention", "mlp", "full_attention"],
    },
    "olmo_hybrid": {**DELTA_NET, **rope()},
    "olmo_hybrid-nope": {**DELTA_NET, **rope(rope_theta=None)},
    "lfm2": CONV,
    "lfm2_moe": {**EXPERTS, **CONV, "num_dense_layers": 1},
    "lfm3": {
        **CONV, **WINDOWED, "layer_types": ["conv", "full_attention", "sliding_attention", "conv"], "conv_L_cache": 7,
        "rope_parameters": GEMMA_4_ROPE,
    },
    "gemma": {},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "gemma2-uncapped": {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3_text": {**GEMMA, **TYPED_ROPE},
    "gemma3_text-capped": {**GEMMA, "final_logit_softcapping": 5.0},
    "gemma4_text": {**GEMMA_4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4_text-shared": {
        **GEMMA_4, "num_hidden_layers": 6, "layer_types": TYPES + TYPES[:2], "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 12, "use_double_wide_mlp": True,
    },
    "gemma4_text-experts": {
        **GEMMA_4, **EXPERTS, "enable_moe_block": True, "top_k_experts": 2, "final_logit_softcapping": 5.0,
    },
    "gemma4_unified_text": {**GEMMA_4, "num_global_key_value_heads": 1, "final_logit_softcapping": 5.0},
    "gemma4_unified_text-tower": GEMMA_4,
    "phi3": {},
    "phi3-partial": PARTIAL,
    "phi3-window": WINDOWED,
    "olmo2": {},
    "olmo3": SLIDES,
    "granite": GRANITE,
    "granitemoe": {**GRANITE, **EXPERTS},
    "afmoe": {**GATED, "num_dense_layers": 1, "num_shared_experts": 1, "mup_enabled": True},
    "afmoe-unscaled": {**GATED, "num_dense_layers": 3, "attention_bias": True},
    "kolibri1": {**EXPERTS, **SLIDES, "shared_expert_intermediate_size": 40},
    "laguna": {**GATED, **PARTIALLY_TYPED, "gating": "per-element"},
    "laguna-layers": {**GATED, **TYPED_ROPE, "num_attention_heads_per_layer": [4, 2, 6, 4]},
    "laguna-heads": {**GATED, **TYPED_ROPE, "gating": "per-head", "attention_bias": True},
    "glm4_moe_lite": {**LATENT, **GROUPED},
    "granite_swa": SWASH,
    "granitemoe_swa": {**SWASH, **EXPERTS, **SHARED},
    "granitemoe_swa-unshared": {**SWASH, **EXPERTS, **rope("linear", factor=2.0)},
    "granitemoeshared": {**GRANITE, **EXPERTS, **SHARED},
    "flint": {**EXPERTS, **SLIDES, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]},
    "gpt_oss": {**EXPERTS, **SLIDES, **UNTRUNCATED},
    "smollm3": {"no_rope_layers": [1, 1, 0, 1]},
    "smollm3-window": SLIDES_IF_USED,
    "cohere": {"logit_scale": 0.3},
    "cohere-normed": {"use_qk_norm": True},
    "cohere2": SLIDES,
    "exaone4": SLIDES,
    "starcoder2": WINDOWED,
    "seed_oss": {},
    "arcee": {},
    "helium": {},
    "glm": {},
    "glm4": {},
    "apertus": {},
    "aria_text": {**BIASED, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "cohere2_moe": {**EXPERTS, **SLIDES, **BIASED, "logit_scale": 0.3, "num_shared_experts": 1},
    "cohere2_moe-dense": {  # a dense layer without a window has RoPE
        **EXPERTS, **SLIDES, "rms_norm_eps": 1e-5, "expert_selection_fn": "sigmoid",
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "prefix_dense_intermediate_size": 40,
    },
    "cwm": {**SLIDES, **LLAMA3},
    "deepseek_v2": {**LATENT, **GROUPED, "topk_method": "greedy"},
    "deepseek_v3": {**LATENT, **GROUPED, "q_lora_rank": None, "rope_interleave": False, **BIASED},
    "deepseek_v3-yarn": {
        **LATENT, **GROUPED,
        **rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0),
    },
    "deepseek_v3-tower": {**LATENT, **GROUPED},
    "dots1": {**GROUPED, **SLIDES, **BIASED},
    "ernie4_5": {"use_bias": True},
    "ernie4_5_moe": {
        "use_bias": True, "moe_intermediate_size": 48, "moe_k": 2, "moe_num_experts": 4,
        "moe_num_shared_experts": 1, "moe_layer_end_index": 2,
    },
    "exaone_moe": {**EXPERTS, **SLIDES, "num_shared_experts": 1},
    "flex_olmo": {**EXPERTS, **BIASED, "norm_topk_prob": True},
    "glm4_moe": {**GROUPED, **BIASED, **PARTIAL, "use_qk_norm": True},
    "glm4_moe-unnormed": {**GROUPED, "use_qk_norm": False},
    "hyperclovax": {**GRANITE, **BIASED},
    "hy_v3": {**EXPERTS, **BIASED, "mlp_layer_types": ["dense", "sparse", "sparse", "dense"]},
    "internlm3": BIASED,
    "iquestcoder": BIASED,
    "jais2": {},
    "mellum": {**EXPERTS, **SLIDES, **TYPED_ROPE, **BIASED},
    "mimo_v2_flash": {
        **GROUPED, **SLIDES, **PARTIALLY_TYPED, "num_attention_heads": 8, "v_head_dim": 12, "attention_value_scale": 0.7,
        "mlp_layer_types": ["dense", "sparse"] * 2,
    },
    "minicpm3": {**LATENT, "scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 32},
    "minimax_m2": {**EXPERTS, **PARTIAL},
    "ministral3": {**SCALED, **WINDOWED},
    "mistral4": {
        **LATENT, **GROUPED, "head_dim": 24, **rope("yarn", factor=16.0, original_max_position_embeddings=CONTEXT // 16,
                                                    llama_4_scaling_beta=0.5, mscale=1.0, mscale_all_dim=1.0),
    },
    "mistral4-plain": {**LATENT, **GROUPED, "head_dim": 24},
    "muse_glimmer_text": {
        **SLIDES, "post_norm_eps": 1e-2, "qk_scale_factor": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 5.0,
        "layer_rope_theta": [1e4, 0, 1e4, 100.0],
    },
    "nanochat": {"final_logit_softcapping": 5.0},
    "nemotron": {**BIASED, **PARTIAL},
    "olmo": BIASED,
    "olmoe": {**EXPERTS, **BIASED, "norm_topk_prob": True},
    "phi": PARTIAL,
    "phimoe": {**EXPERTS, **BIASED, **WINDOWED, "lm_head_bias": True},
    "qwen2_5_vl_text": {**MROPE, **SLIDES_IF_USED, "max_window_layers": 0},
    "qwen3_vl_text": {**MROPE, **BIASED},
    "qwen3_vl_moe_text": {**MROPE, **EXPERTS, **BIASED},
    "gemma3_text-tower": {**GEMMA, **TYPED_ROPE},
    "gemma4_text-tower": {**GEMMA_4, "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 12},
    "mistral-tower": WINDOWED,
    "ministral3-tower": {**SCALED, "sliding_window": None},
    "solar_open": {**GROUPED, **BIASED},
    "vaultgemma": {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "youtu": LATENT,
    "stablelm": {**PARTIAL, "use_qkv_bias": True, "qk_layernorm": False, "use_parallel_residual": False},
}
# fmt: on
EYES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
SIGLIP = {**EYES, "image_size": 16, "patch_size": 8}
GEMMA_4_EYES = {
    "model_type": "gemma4_vision",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
}
KIMI_EYES = {
    "model_type": "kimi_k25_vision",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
}
MUSE_EYES = {**EYES, "patch_size": 4}
PIXTRAL = {**SIGLIP, "model_type": "pixtral", "head_dim": 8}
QWEN_EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
QWEN3_EYES = {**QWEN_EYES, "deepstack_visual_indexes": [0]}
# Those that are the text model of a checkpoint that reads pictures too -> its type and its vision settings.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_5_vl_text": ("qwen2_5_vl", QWEN_EYES),
    "qwen3_vl_text": ("qwen3_vl", QWEN3_EYES),
    "qwen3_vl_moe_text": ("qwen3_vl_moe", QWEN3_EYES),
    "qwen3_5_text-tower": ("qwen3_5", QWEN_EYES),
    "qwen3_5_moe_text-tower": ("qwen3_5_moe", QWEN_EYES),
    "gemma3_text-tower": ("gemma3", SIGLIP),
    "gemma4_text-tower": ("gemma4", GEMMA_4_EYES),
    "gemma4_unified_text-tower": ("gemma4_unified", {"model_type": "gemma4_unified_vision"}),
    "muse_glimmer_text": ("muse_glimmer", MUSE_EYES),
    "deepseek_v3-tower": ("kimi_k25", KIMI_EYES),
    "mistral-tower": ("mistral3", PIXTRAL),
    "mistral4": ("mistral3", PIXTRAL),
    "mistral4-plain": ("mistral3", PIXTRAL),
    "ministral3-tower": ("mistral3", PIXTRAL),
}
# Python 3.10 has no transformers that recurrent layers can run on (models/recurrent.py).
HAS_RECURRENT = hasattr(Cache, "get_conv_state")
LEFT_OUT = {kind for kind, family in FAMILIES.items() if family.recurrent and not HAS_RECURRENT}
FAMILIES_HERE = set(FAMILIES) - LEFT_OUT
TINY = {name: settings for name, settings in TINY.items() if name.partition("-")[0] not in LEFT_OUT}
CHECKPOINTS = {name: made for name, made in CHECKPOINTS.items() if name.partition("-")[0] not in LEFT_OUT}
# One of each kind of difference, for properties that take many examples.
KINDS = [
    *("llama-yarn", "mistral-window", "gemma2", "gemma3_text"),
    *("phi3-partial", "olmo2", "smollm3", "cohere", "granite_swa"),
]
# With recurrent layers.
HYBRIDS = [
    *("qwen3_5_text", "qwen3_next", "granitemoehybrid-rope", "bamba", "olmo_hybrid"),
    *("falcon_h1", "nemotron_h", "nemotron_h-dense", "kimi_linear-dense", "lfm2", "lfm3"),
]
HYBRIDS = [name for name in HYBRIDS if name in TINY]
needs_recurrent = pytest.mark.skipif(not HAS_RECURRENT, reason="this transformers runs no recurrent layers")
# Also experts, multipliers, layers without RoPE next to windows, interleaved halves, sinks, layers that keep KV of other
# shapes than others, or none, latents, and RoPE by negative angles.
BLEND_KINDS = [
    *KINDS,
    *("qwen3_moe-window", "granite", "cohere2", "glm4", "gpt_oss"),
    *("gemma4_text", "gemma4_text-shared", "glm4_moe_lite", "mimo_v2_flash", "nanochat"),
]


def config(kind: str, **settings: Any) -> Any:
    """The configuration of a tiny model of this type."""
    return AutoConfig.for_model(kind, **{**BASE, **settings})


def tower(checkpoint: str, eyes: dict[str, Any], kind: str, **settings: Any) -> Any:
    """That of a checkpoint with a text model of this type, which reads pictures too."""
    text = {**BASE, **settings, "model_type": kind}
    return AutoConfig.for_model(checkpoint, text_config=text, vision_config=dict(eyes))


def tiny_config(name: str) -> Any:
    kind, settings = name.partition("-")[0], TINY[name]
    return tower(*CHECKPOINTS[name], kind, **settings) if name in CHECKPOINTS else config(kind, **settings)


def from_config(made: Any) -> Any:
    """A model with the weights of seed 0, with transformers' plain attention."""
    torch.manual_seed(0)
    auto: Any = AutoModelForImageTextToText if made.model_type in TOWERS else AutoModelForCausalLM
    return auto.from_config(made, attn_implementation="eager").eval()


@cache
def tiny_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A random model; the same object every time, so tests must not change it."""
    model = _unlike_new(from_config(tiny_config(name)), dtype)
    return TextTower(model).eval() if name in CHECKPOINTS else model


@torch.no_grad()
def _unlike_new(model: Any, dtype: torch.dtype) -> Any:
    """Its norms and biases at random: among ones and zeros many mistakes would not show."""
    for name_of, parameter in model.named_parameters():
        if name_of.endswith("A_log"):  # states last, as in trained models
            parameter.uniform_(-6, -3)
        elif parameter.dim() == 1:
            parameter += 0.3 * torch.rand_like(parameter)
    for name_of, buffer in model.named_buffers():
        if name_of.endswith("layer_scalar"):  # Gemma 4's
            buffer += 0.3 * torch.rand_like(buffer)
    for parameter in model.parameters():  # not buffers: transformers keeps RoPE's frequencies in fp32
        parameter.data = parameter.data.to(dtype)
    return model


@cache
def wide_model(name: str, dtype: torch.dtype) -> Any:
    """The same with heads of 64 dimensions and even sizes, which native kernels take. NAME/8: with 8 kv heads."""
    name, _, n_kv_heads = name.partition("/")
    made = tiny_config(name)
    made.hidden_size, made.head_dim, made.vocab_size = 256, 64, 98
    if n_kv_heads:
        made.num_key_value_heads, made.num_attention_heads = int(n_kv_heads), 2 * int(n_kv_heads)
    return _unlike_new(from_config(made), dtype)


@cache
def tiny_decoder(name: str, dtype: torch.dtype = torch.float32) -> DecoderModel:
    return DecoderModel.of(tiny_model(name, dtype))


def fresh_model(name: str) -> DecoderModel:
    """A decoder over a model of its own, for tests that look at what is left of it."""
    return DecoderModel.of(tiny_model.__wrapped__(name))
