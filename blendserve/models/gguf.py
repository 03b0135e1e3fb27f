"""Converts the bundled llama from GGUF to a Hugging Face folder without transformers, whose import takes seconds.

Its SHA-256 is known, so nothing here guards against damage; a user's own file is converted by transformers (sources.py).
The folder equals transformers' own conversion: tests/models/test_gguf.py compares them.

A GGUF file is: magic, version, counts, metadata, table of tensors, padding, data. Blocks as in ggml-quants.c.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, processors
from torch import Tensor

from blendserve.models.fast_load import Start
from blendserve.models.pre_tokenizers import set_pre_tokenizer
from blendserve.models.tokenizer import Tokenizer

Bytes = npt.NDArray[np.uint8]  # [N, bytes of a block]
Floats = npt.NDArray[np.float32]  # [N, elements of a block]

# struct codes by value type, and the two types that have a length
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
STRING, ARRAY = 8, 9
CHUNK = 1 << 16  # blocks that are dequantised at once: less memory, which is sooner cleared
CONTROL = 3  # token type of special tokens
TOKEN_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # ours -> the file's
SETTINGS = {  # of a LlamaConfig -> the file's
    "_model_name_or_path": "general.name",
    "head_dim": "llama.rope.dimension_count",
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "max_position_embeddings": "llama.context_length",
    "num_attention_heads": "llama.attention.head_count",
    "num_hidden_layers": "llama.block_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
}
CONSTANTS = {  # of config.json
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
    "use_cache": True,
}
# What a LlamaConfig adds to its config.json when it is read. It is part of the fingerprint.
DEFAULTS = {
    "chunk_size_feed_forward": 0,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "output_attentions": False,
    "output_hidden_states": False,
    "problem_type": None,
    "return_dict": True,
}
BODY = {"embed_tokens": "token_embd", "norm": "output_norm"}  # Hugging Face's names -> the file's
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _half(blocks: Bytes, at: int) -> Floats:
    """The fp16 at a byte of each block -> fp32 [N, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _q4_1(b: Bytes) -> Floats:
    nibbles = np.concatenate([b[:, 4:] & np.uint8(15), b[:, 4:] >> np.uint8(4)], axis=1)
    return _half(b, 0) * nibbles.astype(np.float32) + _half(b, 2)


class BlockFormat(NamedTuple):
    """How a block of elements is stored."""

    elements: int
    n_bytes: int
    values: Callable[[Bytes], Floats]


# The bundled file's, by the numbers of `enum ggml_type` in ggml.h.
FORMATS = {
    0: BlockFormat(1, 4, lambda b: b.view(np.float32)),  # F32
    3: BlockFormat(32, 20, _q4_1),
    8: BlockFormat(32, 34, lambda b: b[:, 2:].view(np.int8).astype(np.float32) * _half(b, 0)),  # Q8_0
}


class Gguf:
    """An open file: its metadata, and tensors that are dequantised when asked for."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        _, _, n_tensors, n_values = self._numbers("4sIQQ")
        self.metadata = {self._text(): self._value(*self._numbers("I")) for _ in range(n_values)}
        self.tensors = dict(self._entry() for _ in range(n_tensors))
        alignment = self.metadata.get("general.alignment", 32)
        self._start = -(-self._at // alignment) * alignment

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor, dequantised in fp32 and rounded to `dtype` once. Raises KeyError."""
        shape, kind, offset = self.tensors[name]
        form, start = FORMATS[kind], self._start + offset
        out = torch.empty(shape, dtype=dtype)
        n_blocks = out.numel() // form.elements
        blocks = np.frombuffer(self._data, np.uint8, n_blocks * form.n_bytes, start).reshape(n_blocks, -1)
        values = out.view(n_blocks, -1)
        for at in range(0, n_blocks, CHUNK):
            some = blocks[at : at + CHUNK].copy()  # a copy, as torch wants to write
            values[at : at + CHUNK] = torch.from_numpy(form.values(some))
        return out

    def _numbers(self, code: str) -> tuple[Any, ...]:
        """The next values, by their struct codes."""
        size = struct.calcsize(f"<{code}")
        self._at += size
        return struct.unpack(f"<{code}", self._data[self._at - size : self._at])

    def _text(self) -> str:
        (length,) = self._numbers("Q")
        return str(self._numbers(f"{length}s")[0].decode("utf-8"))

    def _value(self, kind: int) -> Any:
        """One value of the metadata."""
        if kind == STRING:
            return self._text()
        if kind != ARRAY:
            return self._numbers(SCALARS[kind])[0]
        element, count = self._numbers("IQ")
        if element == STRING:
            return [self._text() for _ in range(count)]
        return list(self._numbers(f"{count}{SCALARS[element]}"))

    def _entry(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        """A tensor's name; its shape in torch's order, format, and offset in the data."""
        name, (n_dims,) = self._text(), self._numbers("I")
        dims = self._numbers(f"{n_dims}Q")
        return name, (dims[::-1], *self._numbers("IQ"))


def write_folder(file: Path, into: Path) -> Start:
    """Write config.json, model.safetensors in bf16 and the tokenizer of a llama with byte-level BPE."""
    gguf = Gguf(file)
    config, tokenizer = _config(gguf), _tokenizer(gguf.metadata)
    set_pre_tokenizer(tokenizer.backend_tokenizer, gguf.metadata.get("tokenizer.ggml.pre"), file)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    for name, values in (("config", config), ("tokenizer_config", settings)):
        (into / f"{name}.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", "utf-8")
    tokenizer.backend_tokenizer.save(str(into / "tokenizer.json"))
    if isinstance(tokenizer.chat_template, str):
        (into / "chat_template.jinja").write_text(tokenizer.chat_template, "utf-8")
    save_file(_weights(gguf, config), into / "model.safetensors", {"format": "pt"})
    return Start({**DEFAULTS, **config}, tokenizer, frozenset({config["eos_token_id"]}), fingerprint=None)


def _config(gguf: Gguf) -> dict[str, Any]:
    """config.json of a llama model."""
    metadata = gguf.metadata
    ids = {ours: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in TOKEN_IDS.items()}
    return {
        **CONSTANTS,
        **{name: metadata[key] for name, key in SETTINGS.items()},
        **{f"{name}_token_id": i for name, i in ids.items() if i is not None},
        "rope_parameters": {"rope_theta": metadata["llama.rope.freq_base"], "rope_type": "default"},
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    }


def _weights(gguf: Gguf, config: dict[str, Any]) -> dict[str, Tensor]:
    """Every tensor in bf16, by its Hugging Face name."""
    names = {f"model.{to}": name for to, name in BODY.items()}
    if not config["tie_word_embeddings"]:
        names["lm_head"] = "output"
    for l in range(config["num_hidden_layers"]):
        names |= {f"model.layers.{l}.{to}": f"blk.{l}.{name}" for to, name in LAYER.items()}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    weights = {}
    for to, name in names.items():
        x = gguf.tensor(f"{name}.weight", torch.bfloat16)
        if n := heads.get(to.rpartition(".")[2]):
            # Rows in the order of Hugging Face's RoPE, first halves then second, instead of llama.cpp's pairs.
            x = x.view(n, -1, 2, x.shape[1]).transpose(1, 2).reshape(x.shape)
        weights[f"{to}.weight"] = x
    return weights


def _tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """A byte-level BPE tokenizer."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {name: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for name, theirs in TOKEN_IDS.items()}
    special = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
    types = zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
    control = [token for token, kind in types if kind == CONTROL]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
            continuing_subword_prefix="",
            end_of_word_suffix="",
            fuse_unk=False,
        )
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    named = dict.fromkeys([*special.values(), *control])
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in named])
    return Tokenizer(backend, special, ids["eos"], metadata.get("tokenizer.chat_template"))
