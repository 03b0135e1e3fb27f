"""A model from a GGUF file, without transformers: configuration, tokenizer, and weights as the file holds them.

ROWS has the architectures, by llama.cpp's names: what the file leaves out because llama.cpp has it in code, and what its
converter changed in the weights. Names of weights follow from the family's row in families.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blendserve.errors import ModelUnsupported
from blendserve.models.checkpoint import MAX_LAYERS
from blendserve.models.families import FAMILIES, Family
from blendserve.models.fast_load import Configuration, Start
from blendserve.models.gguf import Gguf, reading
from blendserve.models.gguf_tokenizer import NAMES, read_tokenizer, token_ids
from blendserve.models.refusals import check_supported
from blendserve.models.weights import QuantisedMatrix, Weights

# the file's module -> ours, and the shapes its weights may have
Roles = dict[str, tuple[str, set[tuple[int, ...]]]]
# Read(name of a setting below the architecture's, default) -> its number or text. Without a default it must be there.
Read = Callable[..., Any]

LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LOCAL_BASE = 10_000.0  # of RoPE, where a file names none, and in Gemma 3's layers with a window
YARN = {  # rope_parameters -> the file's
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attn_factor",
    "mscale_all_dim": "yarn_log_multiplier",
}
FLAGS = {  # settings -> the weights of layer 0 by which a file shows them
    **dict.fromkeys(("attention_bias", "use_qkv_bias", "use_bias"), "attn_q.bias"),
    "attention_out_bias": "attn_output.bias",
    "mlp_bias": "ffn_down.bias",
    **dict.fromkeys(("use_qk_norm", "qk_layernorm"), "attn_q_norm.weight"),
}
BIASES = "attention_bias", "mlp_bias"


@dataclass(frozen=True)
class Dense:
    """One architecture."""

    model_type: str  # transformers'
    turns_pairs: bool = False  # rows of queries and keys are in llama.cpp's order of RoPE
    adds_one: bool = False  # to the weights of norms
    eps: str = "rms_norm_eps"  # setting
    activation: tuple[str, str] = ("hidden_act", "silu")  # setting and value
    full_every: int = 0  # of so many layers the last has no window; 0 = the family has no layer types
    flags: tuple[str, ...] = ()  # of FLAGS
    settings: Mapping[str, str] = field(default_factory=dict)  # -> the file's, None where it has none
    more: Callable[[Read, dict[str, Any]], dict[str, Any]] | None = None  # settings that are computed
    # the file's modules -> what other files call them
    called: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()  # modules that a file may lack


def _smollm3(read: Read, config: dict[str, Any]) -> dict[str, Any]:
    n = config["num_hidden_layers"]
    return {"no_rope_layers": [int((l + 1) % 4 != 0) for l in range(n)]}


def _gemma_scale(of_largest: int, read: Read, config: dict[str, Any]) -> dict[str, Any]:
    """The largest model, known by its number of layers, scales attention otherwise."""
    is_largest = config["num_hidden_layers"] == of_largest
    wide = config["hidden_size"] // config["num_attention_heads"]
    return {"query_pre_attn_scalar": wide if is_largest else config["head_dim"]}


def _olmo2(read: Read, config: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "olmo2" if config["sliding_window"] is None else "olmo3"}


def _glm4(read: Read, config: dict[str, Any]) -> dict[str, Any]:
    if read("nextn_predict_layers", 0) or read("rope.dimension_sections", None):
        raise ModelUnsupported("it is a vision model's text part, or predicts several tokens")
    return {}


RELU_2, GELU, GELU_NEW = (("hidden_act", name) for name in ("relu2", "gelu_pytorch_tanh", "gelu_new"))
CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
LAYER_NORM: dict[str, Any] = {"eps": "layer_norm_eps"}
COHERE: dict[str, Any] = {**LAYER_NORM, "settings": {"logit_scale": "logit_scale"}}
GEMMA: dict[str, Any] = {
    "adds_one": True,
    "activation": ("hidden_activation", "gelu_pytorch_tanh"),
    "flags": ("attention_bias",),
}
GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
# fmt: off
ROWS = {
    "llama": Dense("llama", turns_pairs=True, flags=BIASES),
    "mistral3": Dense("ministral3", turns_pairs=True),
    "smollm3": Dense("smollm3", turns_pairs=True, flags=BIASES, full_every=1, more=_smollm3),
    "arcee": Dense("arcee", turns_pairs=True, flags=BIASES, activation=RELU_2),
    "granite": Dense("granite", turns_pairs=True, flags=BIASES, settings=GRANITE),
    "olmo": Dense("olmo", **LAYER_NORM, turns_pairs=True, flags=("attention_bias",),
                settings={"clip_qkv": "attention.clamp_kqv"}, optional=("attn_norm", "ffn_norm", "output_norm")),
    "olmo2": Dense("olmo2", flags=("attention_bias",), full_every=4, more=_olmo2),
    "qwen2": Dense("qwen2", full_every=1),
    "qwen3": Dense("qwen3", flags=("attention_bias",), full_every=1),
    "seed_oss": Dense("seed_oss", flags=(*BIASES, "attention_out_bias"), called={"post_attention_norm": "ffn_norm"}),
    "ernie4_5": Dense("ernie4_5", flags=("use_bias",)),
    "exaone4": Dense("exaone4", full_every=4),
    "glm4": Dense("glm4", flags=("attention_bias",), more=_glm4),
    "phi3": Dense("phi3"),
    "phi2": Dense("phi", **LAYER_NORM, activation=GELU_NEW),
    "stablelm": Dense("stablelm", **LAYER_NORM, flags=("use_qkv_bias", "qk_layernorm")),
    "starcoder2": Dense("starcoder2", eps="norm_epsilon", activation=GELU, flags=("use_bias",)),
    "nemotron": Dense("nemotron", adds_one=True, eps="norm_eps", activation=RELU_2, flags=BIASES),
    "jais2": Dense("jais2", **LAYER_NORM, activation=RELU_2, flags=BIASES),
    "command-r": Dense("cohere", **COHERE, flags=("attention_bias", "use_qk_norm"),
                     optional=("attn_q_norm", "attn_k_norm")),
    "cohere2": Dense("cohere2", **COHERE, full_every=4),
    "gemma": Dense("gemma", **GEMMA),
    "gemma2": Dense("gemma2", **GEMMA, full_every=2, settings=CAPS, more=partial(_gemma_scale, 46)),
    "gemma3": Dense("gemma3_text", **GEMMA, full_every=6, settings=CAPS, more=partial(_gemma_scale, 62)),
}
# fmt: on


def read_gguf(file: Path) -> tuple[Start, Mapping[str, Weights]]:
    """A GGUF file's model: what a start must know, and its weights by the names of transformers' state_dict.

    Each look-up makes a view of the mapped file, or a copy of its rows in another order. Plain weights have the file's
    dtype. Tied embeddings are not there a second time.

    Raises ModelUnsupported for what the tables here lack and transformers may have; ModelError for a damaged file.
    """
    gguf = Gguf(file)
    with reading(file):
        architecture = str(gguf.metadata["general.architecture"])
        row = ROWS.get(architecture)
        if row is None:
            raise ModelUnsupported(f"{file} has architecture {architecture!r}, which has no row", path=file)
        config = _config(gguf, architecture, row)
        config["_model_name_or_path"] = gguf.metadata.get("general.name")
        check_supported(Configuration(**config))
        tensors = GgufTensors(gguf, row, config)
        tokenizer = read_tokenizer(gguf, architecture)
        start = Start(config, tokenizer, token_ids(gguf.metadata, "eos", "eot", "eom"), None)
        gguf.metadata.clear()  # or lists of all tokens take memory while weights are packed
        return start, tensors


def _setting(gguf: Gguf, architecture: str, name: str, *default: Any) -> Any:
    """A number, flag, text or list below the architecture's name."""
    key = f"{architecture}.{name}"
    if key not in gguf.metadata and default:
        return default[0]
    value = gguf.metadata[key]
    if isinstance(value, list) and name != "attention.sliding_window_pattern":
        raise ModelUnsupported(f"{gguf.path} has {key} by layer, which is not read", path=gguf.path)
    return value


def _config(gguf: Gguf, architecture: str, row: Dense) -> dict[str, Any]:
    """The fields of config.json that a decoder reads, and those by which transformers makes the same model."""
    read = partial(_setting, gguf, architecture)
    heads = read("attention.head_count")
    layers = read("block_count")
    if not (heads > 0 and 0 < layers <= MAX_LAYERS):
        raise ValueError(f"it has {heads} heads and {layers} layers")
    kv_heads = read("attention.head_count_kv", heads)
    if read("expert_count", 0):
        raise ModelUnsupported(f"{gguf.path} has a mixture of experts, which is not read", path=gguf.path)
    fused = gguf.tensors.get("blk.0.attn_qkv.weight")
    rows, parts = (
        (fused.shape[0], heads + 2 * kv_heads)
        if fused
        else (gguf.tensors["blk.0.attn_q.weight"].shape[0], heads)
    )
    config: dict[str, Any] = {
        "model_type": row.model_type,
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "hidden_size": read("embedding_length"),
        "intermediate_size": read("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": rows // parts,
        "max_position_embeddings": read("context_length"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        row.eps: read(f"attention.layer_norm_{'rms_' if row.eps == 'rms_norm_eps' else ''}epsilon"),
        row.activation[0]: row.activation[1],
        "pad_token_id": None,  # or transformers assumes one
        **{f"{name}_token_id": i for name in NAMES for i in token_ids(gguf.metadata, name)},
        **{name: f"blk.0.{FLAGS[name]}" in gguf.tensors for name in row.flags},
        **{name: read(key, None) for name, key in row.settings.items()},
    }
    if FAMILIES[row.model_type].windows != "no" or row.full_every:
        config["sliding_window"] = read("attention.sliding_window", 0) or None
    if row.full_every:
        config["layer_types"] = _layer_types(read, layers, row.full_every, config["sliding_window"])
    config |= row.more(read, config) if row.more else {}
    config["rope_parameters"] = _rope(gguf, read, config)
    return config


def _layer_types(read: Read, layers: int, full_every: int, window: int | None) -> list[str]:
    """Which layers slide: by the file's list or period, or by the family's."""
    pattern = read("attention.sliding_window_pattern", full_every)
    if not isinstance(pattern, list):
        pattern = [(l + 1) % pattern != 0 for l in range(layers)]
    slides = [window is not None and bool(flag) for flag in pattern]
    return ["sliding_attention" if flag else "full_attention" for flag in slides]


def _rope(gguf: Gguf, read: Read, config: dict[str, Any]) -> dict[str, Any]:
    """rope_parameters of config.json."""
    base = read("rope.freq_base", LOCAL_BASE)
    head_dim = config["head_dim"]
    kind = read("rope.scaling.type", "none")
    made: dict[str, Any] = {"rope_type": kind, "rope_theta": base}
    if kind == "none":
        made["rope_type"] = "default"
    elif kind in ("linear", "yarn"):
        made["factor"] = read("rope.scaling.factor")
    else:
        raise ModelUnsupported(f"{gguf.path} scales RoPE by {kind!r}, which is not read", path=gguf.path)
    if kind == "yarn":
        found = {name: read(f"rope.scaling.{key}", None) for name, key in YARN.items()}
        made |= {name: value for name, value in found.items() if value is not None}
        made |= {"mscale": 1.0} if made.get("mscale_all_dim") else {}
        made["original_max_position_embeddings"] = read("rope.scaling.original_context_length")
    if beta := read("attention.temperature_scale", None):
        made["llama_4_scaling_beta"] = beta
    if (turned := read("rope.dimension_count", head_dim)) != head_dim:
        made["partial_rotary_factor"] = turned / head_dim
    if {"rope_factors_long.weight", "rope_factors_short.weight"} & gguf.tensors.keys():
        raise ModelUnsupported(f"{gguf.path} scales RoPE by the length of a text", path=gguf.path)
    if "rope_freqs.weight" in gguf.tensors:
        made |= _llama_3(gguf, made)
    if not FAMILIES[config["model_type"]].typed_rope:
        return made
    local = read("rope.freq_base_swa", LOCAL_BASE if config["model_type"] == "gemma3_text" else base)
    return {"sliding_attention": {"rope_type": "default", "rope_theta": local}, "full_attention": made}


def _llama_3(gguf: Gguf, rope: dict[str, Any]) -> dict[str, Any]:
    """The parameters of which `rope_freqs` is made. Raises ModelUnsupported for others than Llama 3's."""
    found = gguf.tensor("rope_freqs.weight")
    assert isinstance(found, Tensor)
    factor = float(found.max())
    low, high, length = LLAMA_3.values()
    waves = 2 * torch.pi * rope["rope_theta"] ** (torch.arange(len(found), dtype=torch.float64) / len(found))
    share = ((length / waves - low) / (high - low)).clamp(0, 1)
    if rope["rope_type"] != "default" or not torch.allclose(
        1 / ((1 - share) / factor + share), found.double(), 1e-3
    ):
        raise ModelUnsupported(f"{gguf.path} scales RoPE by factors of its own", path=gguf.path)
    return {"rope_type": "llama3", "factor": factor, **LLAMA_3}


def _roles(family: Family, config: Mapping[str, Any]) -> Roles:
    """The modules of a layer."""
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    dim = config["head_dim"]
    q, k = (config[f"num_{name}_heads"] * dim for name in ("attention", "key_value"))
    own = ["gate_proj", "up_proj"] if "gate_proj" in family.mlp_layers else family.mlp_layers[:1]
    is_fused = own[-1] == "gate_up_proj"
    norms = {
        "attn_norm": family.before_attention,
        "post_attention_norm": family.after_attention,
        "ffn_norm": None if family.parallel else family.before_mlp,
        "post_ffw_norm": family.after_mlp,
    }
    projections = {"qkv": q + 2 * k} if family.fused_qkv else {"q": q, "k": k, "v": k}
    heads = {"q": (q, config["num_attention_heads"]), "k": (k, config["num_key_value_heads"])}
    return {
        **{role: (name, {(hidden,)}) for role, name in norms.items() if name},
        **{f"attn_{x}": (f"self_attn.{x}_proj", {(rows, hidden)}) for x, rows in projections.items()},
        "attn_output": (f"self_attn.{family.called('o_proj')}", {(hidden, q)}),
        **{
            f"attn_{x}_norm": (f"self_attn.{family.called(f'{x}_norm')}", {(dim,), (rows,), (n, dim)})
            for x, (rows, n) in heads.items()
            if family.qk_norm != "no"
        },
        **({"ffn_gate": (f"mlp.{own[0]}", {(inner, hidden)})} if len(own) > 1 else {}),
        "ffn_up": (f"mlp.{own[-1]}", {(inner * (1 + is_fused), hidden)}),
        "ffn_down": (f"mlp.{family.mlp_layers[-1]}", {(hidden, inner)}),
    }


class GgufTensors(Mapping[str, Weights]):
    """A file's weights by transformers' names."""

    def __init__(self, gguf: Gguf, row: Dense, config: Mapping[str, Any]) -> None:
        """Raises ValueError for weights that are missing or of another shape than config says; ModelUnsupported."""
        self._gguf = gguf
        self._row = row
        family = FAMILIES[config["model_type"]]
        ends: Roles = {
            "token_embd": ("model.embed_tokens", {(config["vocab_size"], config["hidden_size"])}),
            "output_norm": (f"model.{family.called('norm')}", {(config["hidden_size"],)}),
        }
        if not config["tie_word_embeddings"]:
            ends["output"] = "lm_head", {(config["vocab_size"], config["hidden_size"])}
        self._heads = {x: config[f"num_{name}_heads"] for x, name in (("q", "attention"), ("k", "key_value"))}
        roles = _roles(family, config)
        self._missing: list[str] = []
        called = {own: name for name, own in row.called.items()}
        self._names: dict[str, str] = {}
        self._add(ends, "", "")
        for l in range(config["num_hidden_layers"]):
            self._add(
                {called.get(x, x): about for x, about in roles.items()}, f"blk.{l}.", f"model.layers.{l}."
            )
        left = gguf.tensors.keys() - {*self._names.values(), "rope_freqs.weight"}
        if left:  # experts, or parts that are fused
            raise ModelUnsupported(
                f"{gguf.path} has weights {min(left)!r}, which are not read", path=gguf.path
            )
        if self._missing:
            raise ValueError(f"it has no weights {self._missing[0]}")

    def _add(self, roles: Roles, of_file: str, ours: str) -> None:
        for role, (name, shapes) in roles.items():
            found = self._gguf.tensors.get(f"{of_file}{role}.weight")
            if found is None and role in self._row.optional:
                continue
            if found is None:
                self._missing.append(f"{of_file}{role}.weight")
                continue
            if found.shape not in shapes:
                raise ValueError(f"weights {of_file}{role}.weight have shape {found.shape}")
            self._names[f"{ours}{name}.weight"] = f"{of_file}{role}.weight"
            bias = self._gguf.tensors.get(f"{of_file}{role}.bias")
            if bias is not None and bias.shape != found.shape[:1]:
                raise ValueError(f"weights {of_file}{role}.bias have shape {bias.shape}")
            if bias is not None:
                self._names[f"{ours}{name}.bias"] = f"{of_file}{role}.bias"

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> Weights:
        made = self._gguf.tensor(self._names[name])
        if self._row.turns_pairs and (turned := re.search(r"\.([qk])_proj\.", name)):
            return _halves(made, self._heads[turned[1]])
        if self._row.adds_one and name.endswith("norm.weight"):
            assert isinstance(made, Tensor)
            return made - 1
        return made


def _halves(x: Weights, heads: int) -> Weights:
    """Rows in the order of Hugging Face's RoPE, first halves then second, instead of llama.cpp's pairs."""
    if isinstance(x, Tensor):
        return x.view(heads, -1, 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)
    blocks = x.blocks.reshape(heads, -1, 2, x.blocks.shape[1]).swapaxes(1, 2).reshape(x.blocks.shape)
    return QuantisedMatrix(x.kind, x.shape, blocks)
