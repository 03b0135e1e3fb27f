"""Which models are supported: the family of a configuration, or the reason why it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blendserve.errors import ModelUnsupported
from blendserve.models.families import FAMILIES, LAYER_TYPES, RECURRENT_TYPES, Family

# Vision-language checkpoints: their text model is used, whose own type must be in FAMILIES.
TOWERS = {
    *("gemma3", "gemma4", "gemma4_unified", "kimi_k25", "mistral3", "muse_glimmer"),
    *("qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
}

MLA = "its form of multi-head latent attention is not built in"
ENCODER = "it is not a decoder alone: its input is not causal"
REFUSALS = {
    "each of its layers has two attentions, which is not built in": "longcat_flash",
    "it selects keys by an indexer, which is not built in": (
        "axk2 deepseek_v32 dots3_note_text glm_moe_dsa glm5_next hy_v4 minimax_m3_vl_text mistral_large4_text "
        "qwen4_exp_text"
    ),
    "it pools keys over windows at fixed positions, so that a moved chunk is right at few offsets only": "deepseek_v4",
    "it has no attention, so there is no KV to reuse": "mamba mamba2 falcon_mamba rwkv xlstm",
    "its recurrent layers are not built in": "recurrent_gemma jamba minimax",
    "its attention also reads the embeddings, which is not supported": "zamba zamba2",
    "its positions are added to the input, so that a key cannot be moved": (
        "gpt2 gpt_neo gpt_bigcode opt xglm biogpt openai-gpt"
    ),
    "its positions are a bias on attention scores (ALiBi), which is not built in": "bloom mpt",
    "its layers mix several streams of hidden states, which is not built in": "gemma3n gemma3n_text",
    "it attends within blocks of a fixed length, which is not built in": "llama4 llama4_text",
    "its text model is not proven: use a text-only checkpoint of the family": "qwen2_vl mllama llava",
    ENCODER: "bert roberta t5 bart whisper",
    "it norms keys after RoPE, so that moving one is more than a rotation": "hunyuan_v1_dense hunyuan_v1_moe",
    "it subtracts one attention from another, which is not built in": "diffllama",
    "it masks keys by their values": "doge",
}
REFUSED = {kind: reason for reason, kinds in REFUSALS.items() for kind in kinds.split()}

# Settings that some checkpoints of a supported type have, and why these are refused.
REFUSED_SETTINGS = {
    "use_bidirectional_attention": "its attention is not causal",
    "clip_qkv": "it clips queries, keys and values, which is not built in",
    "qk_layernorm": "its norms of queries and keys are not built in",
    "use_parallel_residual": "its attention and MLP read the same input, which is not built in for this type",
}

REQUIRED_SETTINGS = {
    "use_post_norm": "it has no norms of what its layers add",
    "use_sandwich_norm": "it has no norms of what its layers add",
    "use_attention_gate": "its attention has no gate",
}

ALLOWED = None, False, "vision"  # values of these; "vision": for the tokens of a picture alone

# RoPE types whose angles depend on the position alone, so that a key can be moved. Dynamic NTK and longrope change their
# frequencies with the sequence length: a stored key would be right for one length only.
MOVABLE_ROPE = {"default", "linear", "llama3", "yarn", "proportional"}


def check_supported(config: Any) -> Family:
    """The family of a model's configuration. Raises ModelUnsupported with the reason."""
    kind = str(getattr(config, "model_type", "?"))
    if kind in TOWERS:
        return check_supported(config.get_text_config())
    setting, reason = _refused_setting(config) if kind in FAMILIES else ("model_type", _refused_type(config))
    if reason:
        raise ModelUnsupported(
            f"model type {kind!r} cannot be blended: {reason}. Supported are {', '.join(sorted(FAMILIES))}; "
            "docs/how-to/extend.md tells how to add a family",
            setting=setting,
        )
    return FAMILIES[kind]


def _refused_setting(config: Any) -> tuple[str, str]:
    """The first setting that the family's row does not cover, and why; ("", "") if there is none."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, Mapping)]  # one set for each layer type
    for rope in {str(p.get("rope_type", "default")) for p in nested or [parameters]} - MOVABLE_ROPE:
        return "rope_parameters", (
            f"its RoPE of type {rope!r} changes with the sequence length, so that a stored key cannot be moved "
            f"(types {', '.join(sorted(MOVABLE_ROPE))} can)"
        )
    family = FAMILIES[config.model_type]
    known = LAYER_TYPES | (RECURRENT_TYPES if family.recurrent else set())
    known |= {"hybrid"} if family.side_by_side else set()
    if others := set(getattr(config, "layer_types", None) or ()) - known:
        return "layer_types", f"it has layers of type {', '.join(sorted(others))}"
    found = [row for row in REFUSED_SETTINGS.items() if getattr(config, row[0], None) not in ALLOWED]
    found += [row for row in REQUIRED_SETTINGS.items() if not getattr(config, row[0], True)]
    return next(iter(found), ("", ""))


def _refused_type(config: Any) -> str:
    """Why a model of a type without a row is refused."""
    if reason := REFUSED.get(config.model_type):
        return reason
    if getattr(config, "is_encoder_decoder", False):
        return ENCODER
    if getattr(config, "kv_lora_rank", None):
        return MLA
    return "blending is not proven right on it"
