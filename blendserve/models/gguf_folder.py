"""Writes a GGUF file as a Hugging Face model folder, as transformers' own conversion does, without importing it.

Weights, configuration and tokenizer are equal to transformers' conversion; tests/models/test_gguf.py compares them. An
architecture or tokenizer that is not listed here raises UnsupportedGguf.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from torch import Tensor

from blendserve.models.gguf import Gguf, UnsupportedGguf
from blendserve.models.tokenizer import Tokenizer

CONTROL = 3  # llama.cpp's token type of special tokens
TOKEN_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
BODY = {"token_embd": "embed_tokens", "output_norm": "norm"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# What a LlamaConfig adds to its config.json when it is read. It is part of the fingerprint.
LLAMA_DEFAULTS = {
    "chunk_size_feed_forward": 0,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "output_attentions": False,
    "output_hidden_states": False,
    "problem_type": None,
    "return_dict": True,
}


class Converted(NamedTuple):
    """What transformers would know of the folder."""

    config: dict[str, Any]  # with defaults
    tokenizer: Tokenizer
    end_tokens: frozenset[int]


def write_folder(gguf: Gguf, into: Path) -> Converted:
    """Write config.json, model.safetensors in bf16 and the tokenizer. Raises ModelError, UnsupportedGguf."""
    config = _config(gguf)
    names = _names(gguf, config)
    tokenizer = _tokenizer(gguf)
    backend, about = tokenizer.backend_tokenizer, tokenizer.about
    names_of_ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids: dict[str, Any] = {name: config[name] for name in names_of_ids if name in config}
    _write(into / "config.json", config)
    _write(into / "generation_config.json", {"_from_model_config": True, **ids})
    backend.save(str(into / "tokenizer.json"))
    special = about["special_tokens"]
    _write(into / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})
    if about["chat_template"]:
        (into / "chat_template.jinja").write_text(about["chat_template"], "utf-8")
    _write_weights(gguf, names, config, into / "model.safetensors")
    ends = frozenset({about["eos_token_id"]} - {None})
    return Converted({**LLAMA_DEFAULTS, **config}, tokenizer, ends)


def _config(gguf: Gguf) -> dict[str, Any]:
    """config.json of a llama model."""
    found = gguf.metadata
    architecture, name = found.get("general.architecture"), str(found.get("general.name"))
    if architecture != "llama" or "mistral" in name.lower() or "llama.expert_count" in found:
        raise UnsupportedGguf(f"{gguf.path} has architecture {architecture!r}; only plain llama is read here")
    heads = gguf.number("llama.attention.head_count")
    ids = {
        f"{ours}_token_id": found[key]
        for ours, theirs in TOKEN_IDS.items()
        if (key := f"tokenizer.ggml.{theirs}_token_id") in found
    }
    return {
        **({"_model_name_or_path": name} if "general.name" in found else {}),
        **ids,
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "head_dim": gguf.number("llama.rope.dimension_count"),
        "hidden_act": "silu",
        "hidden_size": gguf.number("llama.embedding_length"),
        "initializer_range": 0.02,
        "intermediate_size": gguf.number("llama.feed_forward_length"),
        "max_position_embeddings": gguf.number("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": gguf.number("llama.block_count"),
        "num_key_value_heads": gguf.number("llama.attention.head_count_kv", heads),
        "pretraining_tp": 1,
        "rms_norm_eps": gguf.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_theta": gguf.number("llama.rope.freq_base"), "rope_type": "default"},
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "use_cache": True,
        "vocab_size": len(found.get("tokenizer.ggml.tokens", ())),
    }


def _names(gguf: Gguf, config: dict[str, Any]) -> dict[str, str]:
    """Every tensor's Hugging Face name -> its name in the file. Shapes are checked against the configuration."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    rows, kv_rows = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {
        **dict.fromkeys(("attn_norm", "ffn_norm", "output_norm"), (hidden,)),
        **dict.fromkeys(("token_embd", "output"), (config["vocab_size"], hidden)),
        "attn_q": (rows, hidden),
        **dict.fromkeys(("attn_k", "attn_v"), (kv_rows, hidden)),
        "attn_output": (hidden, rows),
        **dict.fromkeys(("ffn_gate", "ffn_up"), (inner, hidden)),
        "ffn_down": (hidden, inner),
    }
    names = {f"model.{to}.weight": f"{name}.weight" for name, to in BODY.items()}
    if not config["tie_word_embeddings"]:
        names["lm_head.weight"] = "output.weight"
    for l in range(config["num_hidden_layers"]):
        names |= {f"model.layers.{l}.{to}.weight": f"blk.{l}.{name}.weight" for name, to in LAYER.items()}
        if f"blk.{l}.attn_norm.weight" not in gguf.tensors:
            break  # named below
    for name in names.values():
        stored = gguf.tensors.get(name)
        wanted = shapes[name.split(".")[-2]]
        if stored is None or stored.shape != wanted:
            has = "missing" if stored is None else f"of shape {list(stored.shape)}"
            raise gguf.damaged(f"tensor {name!r} is {has}, its metadata says {list(wanted)}")
    if dim % 2 or (more := gguf.tensors.keys() - names.values()):
        what = "a head dimension that is odd" if dim % 2 else f"tensor {min(more)!r}"
        raise UnsupportedGguf(f"{gguf.path} has {what}, which no plain llama has")
    return names


def _write_weights(gguf: Gguf, names: dict[str, str], config: dict[str, Any], path: Path) -> None:
    """Every tensor in bf16, one at a time: memory holds one."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for to, name in names.items():
        shape = gguf.tensors[name].shape
        start, end = end, end + 2 * torch.Size(shape).numel()
        header[to] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names.values():
            tensor = gguf.tensor(name, torch.bfloat16)
            if n := heads.get(name.split(".")[-2]):
                tensor = _in_halves(tensor, n)
            file.write(tensor.contiguous().view(torch.uint8).numpy().data)


def _in_halves(weight: Tensor, n_heads: int) -> Tensor:
    """Rows in the order of Hugging Face's RoPE, first halves then second, instead of llama.cpp's pairs."""
    return weight.view(n_heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _tokenizer(gguf: Gguf) -> Tokenizer:
    """A byte-level BPE tokenizer."""
    found = gguf.metadata
    kind, split = found.get("tokenizer.ggml.model"), found.get("tokenizer.ggml.pre", "default")
    if (
        kind != "gpt2"
        or split not in {"default", "gpt-2", "smollm"}
        or found.get("tokenizer.ggml.add_eos_token")
    ):
        raise UnsupportedGguf(f"{gguf.path} has a tokenizer of kind {kind!r}, {split!r}")
    tokens: Any = found.get("tokenizer.ggml.tokens")
    merges: Any = found.get("tokenizer.ggml.merges")
    types = found.get("tokenizer.ggml.token_type", [1] * len(tokens or ()))
    ids = {
        f"{ours}_token": found.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in TOKEN_IDS.items()
    }
    if not _are_texts(tokens) or not _are_texts(merges) or len(set(tokens)) != len(tokens):
        raise gguf.damaged("its tokens or merges are missing, or a token is listed twice")
    if len(types) != len(tokens) or any(i is not None and not 0 <= i < len(tokens) for i in ids.values()):
        raise gguf.damaged("its token types or special tokens do not fit its tokens")
    if not set(types) <= {1, CONTROL}:
        raise UnsupportedGguf(
            f"{gguf.path} has tokens of types {sorted(set(types))}; only 1 and 3 are read here"
        )
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
        model = models.BPE(
            vocab=vocabulary,
            merges=pairs,
            continuing_subword_prefix="",
            end_of_word_suffix="",
            fuse_unk=False,
        )
    except Exception as error:  # tokenizers raises nothing narrower
        raise gguf.damaged(f"its tokenizer cannot be built ({error})") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {name: tokens[i] for name, i in ids.items() if i is not None}
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    backend.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token in dict.fromkeys([*special.values(), *control])
        ]
    )
    bos = special.get("bos_token") if found.get("tokenizer.ggml.add_bos_token") else None
    one, other = (f"{bos}:0 $A:0", f" {bos}:1 $B:1") if bos else ("$A:0", " $B:1")
    backend.post_processor = processors.TemplateProcessing(
        single=one, pair=one + other, special_tokens=[(bos, ids["bos_token"])] if bos else []
    )
    about = {
        "special_tokens": special,
        "eos_token_id": ids["eos_token"],
        "chat_template": found.get("tokenizer.chat_template"),
    }
    return Tokenizer(backend, about)


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(isinstance(value, str) for value in values)


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", "utf-8")
