"""Writes a GGUF file's model as a Hugging Face folder in bf16, without transformers, whose import takes seconds.

tests/models/test_gguf.py compares its weights with those that the package gguf dequantises.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor

from blendserve.models.fast_load import Start
from blendserve.models.gguf import reading
from blendserve.models.gguf_model import read_gguf
from blendserve.models.memory import available_on, check_fits
from blendserve.models.weights import QuantisedMatrix, Weights

Bytes = npt.NDArray[np.uint8]  # [N, bytes of a block]
Floats = npt.NDArray[np.float32]  # [N, weights of a block]
CHUNK = 1 << 20  # weights that are dequantised at once: less memory, which is sooner cleared
# What a LlamaConfig adds to what the file says. It is part of the fingerprint.
LLAMA_DEFAULTS = {
    "architectures": ["LlamaForCausalLM"],
    "attention_dropout": 0.0,
    "chunk_size_feed_forward": 0,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "initializer_range": 0.02,
    "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "output_attentions": False,
    "output_hidden_states": False,
    "pretraining_tp": 1,
    "problem_type": None,
    "return_dict": True,
    "use_cache": True,
}


def _half(blocks: Bytes, at: int) -> Floats:
    """The fp16 at a byte of each block -> fp32 [N, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _q4_1(b: Bytes) -> Floats:
    nibbles = np.concatenate([b[:, 4:] & np.uint8(15), b[:, 4:] >> np.uint8(4)], axis=1)
    return _half(b, 0) * nibbles.astype(np.float32) + _half(b, 2)


# The bundled file's, which need no package: bytes of a block, and its weights, as in ggml-quants.c.
FORMATS: dict[str, tuple[int, Callable[[Bytes], Floats]]] = {
    "Q4_1": (20, _q4_1),
    "Q8_0": (34, lambda b: b[:, 2:].view(np.int8).astype(np.float32) * _half(b, 0)),
}


def write_folder(file: Path, into: Path) -> Start:
    """Write config.json, model.safetensors in bf16 and the tokenizer.

    Raises ModelError; ModelUnsupported for what gguf_model.py does not read.
    """
    start, weights = read_as_config(file)
    check_fits(
        str(file), 2 * sum(math.prod(x.shape) for x in weights.values()), available_on(torch.device("cpu"))
    )
    config = start.config
    tokenizer = start.tokenizer
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    for name, values in (("config", config), ("tokenizer_config", settings)):
        (into / f"{name}.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", "utf-8")
    tokenizer.backend_tokenizer.save(str(into / "tokenizer.json"))
    if isinstance(tokenizer.chat_template, str):
        (into / "chat_template.jinja").write_text(tokenizer.chat_template, "utf-8")
    with reading(file):
        tensors = {name: _in_bf16(x) for name, x in weights.items()}
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    return start._replace(config=config)


def read_as_config(file: Path) -> tuple[Start, Mapping[str, Weights]]:
    """`read_gguf`, with the configuration as transformers has it; of other families than llama it lacks defaults."""
    start, weights = read_gguf(file)
    config = {"dtype": "bfloat16", **start.config}
    if config["model_type"] == "llama":
        config |= LLAMA_DEFAULTS
    if len(start.end_tokens) > 1:
        config["eos_token_id"] = sorted(start.end_tokens)
    return start._replace(config=config), weights


def _in_bf16(x: Weights) -> Tensor:
    """Dequantised in fp32 and rounded once."""
    if isinstance(x, Tensor):
        return x.to(torch.bfloat16)
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    n_rows = max(1, CHUNK // x.shape[1])
    for at in range(0, len(out), n_rows):
        rows = x.blocks[at : at + n_rows]
        part = QuantisedMatrix(x.kind, (len(rows), x.shape[1]), rows)
        out[at : at + n_rows] = _dequantised(part)
    return out


def _dequantised(x: QuantisedMatrix) -> Tensor:
    if x.kind not in FORMATS:
        return x.dequantise()
    n_bytes, values = FORMATS[x.kind]
    return torch.from_numpy(values(x.blocks.reshape(-1, n_bytes))).view(x.shape)
