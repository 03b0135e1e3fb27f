"""The supported model families, as a table of how their layers differ from Llama's. What is refused is in refusals.py.

A layer is   x + attention(norm(x)),  then  x + mlp(norm(x)),   with norms, scales and windows that differ by family.
To support one more, add a line to FAMILIES and a tiny model of it to tests/support/models.py: the tests compare every
layer with the model's own, and the gate does it again on the real weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from blendserve.kernels.norm import GEMMA_RMS, LATE_RMS, RMS, NormForm
from blendserve.kernels.rotary import HALVES, INTERLEAVED, WIDE_INTERLEAVED, Rotary

Gate = Literal["gate_proj", "g_proj", "g_proj by softplus", "q_proj"]  # in layers.py
OtherNorm = Literal["layer", "layer, wide", "layer, plus one", "rms or layer", "rms by power"]  # in layers.py

Setting = str | Callable[[Any], float]  # a number of the configuration: its name, or how it is computed

LAYER_TYPES = {"full_attention", "sliding_attention"}
RECURRENT_TYPES = {"linear_attention", "conv", "mlp", "moe"}  # of families with a recurrent mixer


def _always(config: Any, l: int) -> bool:
    return True


def _never(config: Any, l: int) -> bool:
    return False


def _kv_heads(config: Any, l: int) -> int:
    return int(config.num_key_value_heads)


def _twice_if_it_slides(config: Any, l: int) -> int:
    return int(config.num_key_value_heads) * (1 + slides(config, l))


@dataclass(frozen=True, slots=True)
class Family:
    """One family's layers. Names are of modules and settings in transformers' model; None = there is none."""

    models: str  # for people
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None  # norms attention's output before it is added
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    norm: NormForm | OtherNorm = RMS  # of all its norms
    # in its place the norm of queries, keys and embeddings, without weights, and the last
    plain_norm: OtherNorm | None = None
    post_eps: str | None = None  # setting with the epsilon of the norms after attention and MLP
    # of modules that are called otherwise than Llama's
    names: Mapping[str, str] = field(default_factory=dict)
    mlp: str | None = "mlp"  # None: a layer is one part alone, attention, a mixer or an MLP
    mlp_layers: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    parallel: bool = False  # the MLP reads what attention reads, normed as for it
    experts: bool = False  # the MLP is a mixture of experts; each row is routed on its own
    experts_beside: bool = False  # a mixture of experts beside the MLP, if config.enable_moe_block
    experts_if: str | None = None  # setting, 0 of which leaves them out
    shared_mlp: str | None = None  # an MLP beside the experts, unless config.shared_intermediate_size is 0
    fused_qkv: bool = False  # one qkv_proj instead of three
    recurrent: str | None = None  # the mixer of its recurrent layers
    # a layer has a mixer beside attention; here it is two layers, the mixer's first
    side_by_side: bool = False
    matrix_state: bool = False  # a state changes by a matrix, not by a number of each head
    llama_norms: bool = False  # recurrent layers have norms where Llama has them, in place of those above
    latent: bool = False  # keys and values of all heads are made of one latent (multi-head latent attention)
    # of attention's output, by head or by dim; q_proj: each head's queries, then its gate
    gate: Gate | None = None
    qk_norm: Literal["no", "head", "width"] = "no"  # norms before RoPE: of each head, or over all
    v_norm: bool = False  # of each head, without weights
    kv_heads: Callable[[Any, int], int] = _kv_heads  # of a layer
    value_dim: str | None = None  # setting with the dims of a value; None: as of a key
    windows: Literal["no", "all", "typed"] = "no"  # layers that slide; typed: as config.layer_types says
    softcap: str | None = None  # of attention scores
    sinks: bool = False  # attention has one a head, in the layers that have weights for it
    attention_scale: Callable[[Any], float] | None = None  # by the configuration; None: 1 / sqrt(D)
    rotary: Rotary = HALVES
    turns_back: bool = False  # RoPE turns by negative angles
    wide_rope: bool = False  # cos and sin stay in fp32
    rotates: Callable[[Any, int], bool] = _always  # whether a layer has RoPE at all
    typed_rope: bool = False  # other angles for each layer type
    rope_share: float = 1.0  # of a head's dims, where rope_parameters does not say
    scaled_queries: bool = False  # by their position, if rope_parameters has llama_4_scaling_beta
    rope_bases: bool = False  # config.layer_rope_theta has one for each layer; 0 = no RoPE
    layer_inputs: bool = False  # each layer has embeddings of its own, if config.hidden_size_per_layer_input
    layer_scale: str | None = None  # a number in the weights, of what each layer gives
    # of what linear layers and the mixer give, by name; "attention_input": of what attention reads
    scales: Mapping[str, Setting] = field(default_factory=dict)
    embedding_scale: str | None = None  # setting, or "sqrt(hidden_size)", or the flag "mup_enabled" of that
    residual_scale: Setting | None = None
    logits_scale: str | None = None
    logits_divisor: Setting | None = None
    logits_softcap: str | None = None

    def called(self, name: str) -> str:
        """The family's name of a module that Llama has."""
        return self.names.get(name, name)


def slides(config: Any, l: int) -> bool:
    """Whether layer l has a sliding window, by config.layer_types."""
    return bool(config.layer_types[l] == "sliding_attention")


def _slides_or_has_no_window(config: Any, l: int) -> bool:
    return config.sliding_window is None or slides(config, l)


def _slides_or_is_dense(config: Any, l: int) -> bool:
    is_dense = config.mlp_layer_types[l] == "dense" and config.prefix_dense_sliding_window_pattern == 1
    return bool(is_dense) or slides(config, l)


def _qk_scale(config: Any) -> float:
    return float(config.head_dim**-0.5 * config.qk_scale_factor)


def _latent_scale(config: Any) -> float:
    """The scale of all dims of a query, and of YaRN's, which DeepSeek applies here instead of to cos and sin."""
    rope = getattr(config, "rope_parameters", None) or {}
    factor = rope.get("factor", 1.0)
    mscale = rope.get("mscale_all_dim", 0)
    stretch = 0.1 * mscale * math.log(factor) + 1.0 if mscale and factor > 1 else 1.0
    return float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5 * stretch**2)


# Columns that several families share.
POST_NORM: dict[str, Any] = {
    "before_attention": None,
    "after_attention": "post_attention_layernorm",
    "before_mlp": None,
    "after_mlp": "post_feedforward_layernorm",
}
SANDWICH: dict[str, Any] = {
    "after_attention": "post_attention_layernorm",
    "before_mlp": "pre_mlp_layernorm",
    "after_mlp": "post_mlp_layernorm",
}
GEMMA: dict[str, Any] = {"norm": GEMMA_RMS, "embedding_scale": "sqrt(hidden_size)"}
GEMMA_2: dict[str, Any] = {
    **GEMMA,
    "after_attention": "post_attention_layernorm",
    "before_mlp": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm",
    "attention_scale": lambda config: config.query_pre_attn_scalar**-0.5,
    "windows": "typed",
    "logits_softcap": "final_logit_softcapping",
}
MUSE: dict[str, Any] = {
    **GEMMA_2,
    "embedding_scale": None,
    "qk_norm": "head",
    "attention_scale": _qk_scale,
    "plain_norm": "rms by power",
    "names": {"q_norm": "qk_norm"},
}
GEMMA_4: dict[str, Any] = {
    **GEMMA_2,
    "norm": "rms by power",
    "qk_norm": "head",
    "v_norm": True,
    "attention_scale": lambda config: 1.0,
    "typed_rope": True,
    "layer_scale": "layer_scalar",
}
GRANITE: dict[str, Any] = {
    "attention_scale": lambda config: config.attention_multiplier,
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logits_divisor": "logits_scaling",
}
COHERE: dict[str, Any] = {"parallel": True, "rotary": WIDE_INTERLEAVED, "logits_scale": "logit_scale"}
OLMO: dict[str, Any] = {**POST_NORM, "norm": LATE_RMS, "qk_norm": "width", "wide_rope": True}
EXAONE: dict[str, Any] = {"windows": "typed", "qk_norm": "head", "rotates": _slides_or_has_no_window}
ERNIE: dict[str, Any] = {"rotary": INTERLEAVED, "wide_rope": True}
GLM: dict[str, Any] = {"rotary": INTERLEAVED, "mlp_layers": ("gate_up_proj", "down_proj")}
GRANITE_MOE: dict[str, Any] = {**GRANITE, "mlp": "block_sparse_moe", "experts": True}
SWASH: dict[str, Any] = {"windows": "typed", "sinks": True, "rope_bases": True}
UNGATED: dict[str, Any] = {"mlp_layers": ("up_proj", "down_proj")}
LFM: dict[str, Any] = {
    "before_attention": "operator_norm",
    "before_mlp": "ffn_norm",
    "mlp": "feed_forward",
    "qk_norm": "head",
    "recurrent": "conv",
    "names": {"norm": "embedding_norm"},
}
LFM_2: dict[str, Any] = {
    **LFM,
    "names": {**LFM["names"], "o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"},
}
FALCON: dict[str, Any] = {
    "recurrent": "mamba",
    "side_by_side": True,
    "before_mlp": "pre_ff_layernorm",
    "mlp": "feed_forward",
    "names": {"norm": "final_layernorm"},
    "scales": {
        "attention_input": "attention_in_multiplier",
        "k_proj": "key_multiplier",
        "o_proj": "attention_out_multiplier",
        "mamba": "ssm_out_multiplier",
        "gate_proj": lambda config: config.mlp_multipliers[0],
        "down_proj": lambda config: config.mlp_multipliers[1],
    },
    "embedding_scale": "embedding_multiplier",
    "logits_scale": "lm_head_multiplier",
}
LATENT: dict[str, Any] = {"latent": True, "attention_scale": _latent_scale}
DELTA_NET: dict[str, Any] = {
    "norm": GEMMA_RMS,
    "qk_norm": "head",
    "gate": "q_proj",
    "recurrent": "linear_attn",
    "matrix_state": True,
}
NORMED_EXPERTS: dict[str, Any] = {"qk_norm": "head", "experts": True}

# fmt: off
FAMILIES: dict[str, Family] = {
    "llama": Family("Llama 1-3, SmolLM 1-2, TinyLlama, Yi, DeepSeek-LLM"),
    "mistral": Family("Mistral 7B, Nemo, Small", windows="all"),
    "ministral": Family("Ministral 8B", windows="typed"),
    "mixtral": Family("Mixtral", windows="all", experts=True),
    "qwen2": Family("Qwen2, Qwen2.5", windows="typed"),
    "qwen2_moe": Family("Qwen1.5-MoE, Qwen2-MoE", windows="typed", experts=True),
    "qwen3": Family("Qwen3", windows="typed", qk_norm="head"),
    "qwen3_moe": Family("Qwen3-MoE", windows="all", qk_norm="head", experts=True),
    "gemma": Family("Gemma 1", **GEMMA),
    "gemma2": Family("Gemma 2", **GEMMA_2, softcap="attn_logit_softcapping"),
    "gemma3_text": Family("Gemma 3, text checkpoints", **GEMMA_2, qk_norm="head", typed_rope=True),
    "gemma4_text": Family("Gemma 4 E2B, E4B, 26B-A4B, 31B, text only", **GEMMA_4, experts_beside=True, layer_inputs=True),
    "gemma4_unified_text": Family("Gemma 4 12B, text only", **GEMMA_4),
    "phi3": Family("Phi-3, Phi-3.5, Phi-4 with default RoPE",
                   windows="all", fused_qkv=True, mlp_layers=("gate_up_proj", "down_proj")),
    "olmo2": Family("OLMo 2", **OLMO),
    "olmo3": Family("OLMo 3", **OLMO, windows="typed", typed_rope=True),
    "granite": Family("Granite 3", **GRANITE),
    "granitemoe": Family("Granite 3 MoE", **GRANITE_MOE),
    "gpt_oss": Family("gpt-oss 20B, 120B", norm=LATE_RMS, windows="typed", sinks=True, experts=True),
    "smollm3": Family("SmolLM3", windows="typed", rotates=lambda config, l: bool(config.no_rope_layers[l])),
    "cohere": Family("Command R", **COHERE, norm="layer, wide", qk_norm="head"),
    "cohere2": Family("Command R7B, Command A", **COHERE, norm="layer, wide", windows="typed", rotates=slides),
    "exaone4": Family("EXAONE 4", **POST_NORM, **EXAONE),
    "starcoder2": Family("StarCoder2", windows="all", norm="layer", mlp_layers=("c_fc", "c_proj")),
    "seed_oss": Family("Seed-OSS"),
    "arcee": Family("AFM", **UNGATED),
    "helium": Family("Helium", norm=LATE_RMS, rotary=INTERLEAVED),
    "glm": Family("GLM-4 9B", **GLM),
    "glm4": Family("GLM-4-0414", **GLM, after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    "apertus": Family("Apertus", **UNGATED,
                      before_attention="attention_layernorm", before_mlp="feedforward_layernorm", qk_norm="head"),
    "afmoe": Family("Trinity", **SANDWICH, norm=LATE_RMS, qk_norm="head", experts=True, windows="typed",
                    rotates=slides, gate="gate_proj", embedding_scale="mup_enabled"),
    "aria_text": Family("Aria, text checkpoints", experts=True),
    "cohere2_moe": Family("Command A MoE",
                          **COHERE, norm="rms or layer", windows="typed", experts=True, rotates=_slides_or_is_dense),
    "cwm": Family("Code World Model", windows="typed"),
    "deepseek_v2": Family("DeepSeek V2, V2-Lite", **LATENT, experts=True, rotary=WIDE_INTERLEAVED, wide_rope=True),
    "deepseek_v3": Family("DeepSeek V3, R1, Kimi K2", **LATENT, experts=True),
    "dots1": Family("dots.llm1", **NORMED_EXPERTS, windows="typed"),
    "ernie4_5": Family("ERNIE 4.5", **ERNIE),
    "ernie4_5_moe": Family("ERNIE 4.5 MoE", **ERNIE, experts=True),
    "exaone_moe": Family("K-EXAONE", **EXAONE, experts=True),
    "flex_olmo": Family("FlexOlmo", **OLMO, experts=True),
    "flint": Family("Flint", **NORMED_EXPERTS, norm=LATE_RMS, windows="typed", sinks=True, rotates=slides),
    "glm4_moe": Family("GLM-4.5, 4.6, GLM-4.5-Air", **NORMED_EXPERTS),
    "glm4_moe_lite": Family("GLM-4.7-Flash", **LATENT, experts=True),
    "granite_swa": Family("Granite Swash", **GRANITE, **SWASH),
    "granitemoe_swa": Family("Granite Swash MoE", **GRANITE_MOE, **SWASH, shared_mlp="shared_mlp"),
    "granitemoeshared": Family("Granite MoE with a shared expert", **GRANITE_MOE, shared_mlp="shared_mlp"),
    "hyperclovax": Family("HyperCLOVA X SEED Think", **{**GRANITE, "logits_divisor": None},
                          logits_scale="logits_scaling", after_attention="post_norm1", after_mlp="post_norm2"),
    "hy_v3": Family("Hunyuan 3", **NORMED_EXPERTS),
    "internlm3": Family("InternLM 3"),
    "iquestcoder": Family("IQuest-Coder"),
    "jais2": Family("Jais 2", norm="layer", **UNGATED),
    "kolibri1": Family("Kolibri 1", **EXAONE, experts=True, after_attention="post_self_attn_layernorm",
                       after_mlp="post_mlp_layernorm"),
    "laguna": Family("Laguna", **NORMED_EXPERTS, windows="typed", typed_rope=True,
                     gate="g_proj by softplus"),
    "kimi_linear": Family("Kimi Linear", **LATENT, experts=True, recurrent="self_attn", matrix_state=True,
                          rotates=_never),
    "lfm2": Family("LFM2, LFM2.5", **LFM_2, mlp_layers=("w1", "w3", "w2")),
    "lfm2_moe": Family("LFM2 MoE", **LFM_2, experts=True),
    "lfm3": Family("LFM3", **LFM, mlp_layers=("w1", "w3", "w2"), windows="typed", typed_rope=True, wide_rope=True,
                   after_attention="post_operator_norm", after_mlp="post_ffn_norm", gate="g_proj"),
    "mellum": Family("Mellum 2", **NORMED_EXPERTS, windows="typed", typed_rope=True),
    "mimo_v2_flash": Family("MiMo V2 Flash", experts=True, windows="typed", sinks=True, typed_rope=True,
                            kv_heads=_twice_if_it_slides, value_dim="v_head_dim",
                            scales={"v_proj": "attention_value_scale"}, rope_share=0.334),
    "minicpm3": Family("MiniCPM3 with default RoPE", **LATENT, embedding_scale="scale_emb",
                       residual_scale=lambda config: config.scale_depth / math.sqrt(config.num_hidden_layers),
                       logits_divisor=lambda config: config.hidden_size / config.dim_model_base),
    "minimax_m2": Family("MiniMax M2", qk_norm="width", experts=True),
    "ministral3": Family("Ministral 3", windows="all", scaled_queries=True),
    "mistral4": Family("Mistral Small 4", **LATENT, experts=True, scaled_queries=True),
    "muse_glimmer_text": Family("Muse Glimmer 30B, text only", **MUSE, post_eps="post_norm_eps", gate="gate_proj",
                                logits_scale="output_multiplier",
                                rotates=lambda config, l: bool(config.layer_rope_theta[l])),
    "nanochat": Family("nanochat", norm="rms by power", plain_norm="rms by power", qk_norm="head",
                       mlp_layers=("fc1", "fc2"), turns_back=True, logits_softcap="final_logit_softcapping"),
    "nemotron": Family("Nemotron, Minitron", norm="layer, plus one", **UNGATED),
    "olmo": Family("OLMo 1", norm="layer", wide_rope=True),
    "olmoe": Family("OLMoE", qk_norm="width", experts=True),
    "phi": Family("Phi-1, 1.5, 2", norm="layer", parallel=True, mlp_layers=("fc1", "fc2"),
                  names={"o_proj": "dense", "norm": "final_layernorm"}),
    "phimoe": Family("Phi-3.5-MoE with default RoPE", windows="all", norm="layer", experts=True),
    "granitemoehybrid": Family("Granite 4 with Mamba-2 layers", **GRANITE_MOE, recurrent="mamba",
                               rotates=lambda config, l: config.position_embedding_type == "rope",
                               experts_if="num_local_experts", shared_mlp="shared_mlp"),
    "axk1": Family("A.X K1", **LATENT, experts=True),
    "bamba": Family("Bamba", recurrent="mamba", before_mlp="pre_ff_layernorm", mlp="feed_forward",
                    names={"norm": "final_layernorm"}),
    "falcon_h1": Family("Falcon-H1", **FALCON),
    "nemotron_h": Family("Nemotron-H, Nemotron 3 Nano", norm=LATE_RMS, before_attention="norm", before_mlp=None, mlp=None,
                         recurrent="mixer", rotates=_never,
                         names={"self_attn": "mixer", "embed_tokens": "embeddings", "norm": "norm_f"}),
    "olmo_hybrid": Family("OLMo Hybrid", **OLMO, recurrent="linear_attn", matrix_state=True, llama_norms=True,
                          rotates=lambda config, l: config.rope_parameters["rope_theta"] is not None),
    "qwen3_5_text": Family("Qwen3.5, 3.6, text only", **DELTA_NET),
    "qwen3_5_moe_text": Family("Qwen3.5, 3.6 MoE, text only", **DELTA_NET, experts=True),
    "qwen3_next": Family("Qwen3-Next, Qwen3-Coder-Next", **DELTA_NET, experts=True),
    "qwen2_5_vl_text": Family("Qwen2.5-VL, text only", windows="typed"),
    "qwen3_vl_text": Family("Qwen3-VL, text only", qk_norm="head"),
    "qwen3_vl_moe_text": Family("Qwen3-VL-MoE, text only", **NORMED_EXPERTS),
    "solar_open": Family("Solar Open", experts=True),
    "vaultgemma": Family("VaultGemma", **{**GEMMA_2, "after_attention": None, "after_mlp": None},
                         softcap="attn_logit_softcapping"),
    "youtu": Family("Youtu-LLM", **LATENT),
    "stablelm": Family("StableLM 2 1.6B, Zephyr 3B", norm="layer"),
}
# fmt: on
