"""A BERT sentence encoder on a CPU over packed tokens: no padding, and no import of sentence-transformers.

All tokens of a batch pass the linear layers together; each window attends to itself only. Linear layers run on oneDNN's
packed weights, attention on the kernels, in bf16 where the CPU multiplies it in hardware, else in fp32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from blendserve.core import Steps
from blendserve.kernels import ops
from blendserve.kernels.rows import AttentionPlan, plan_rows
from blendserve.kernels.types import AttentionSpec
from blendserve.models.loader import fast_dtype
from blendserve.retrieve.encoder import Window

BATCH_TOKENS_PER_THREAD = 1024  # enough for a matmul, and activations stay in the caches
# Rows are padded to a multiple: oneDNN prepares each new size for milliseconds.
FEW_ROWS, FEW_ROWS_STEP, ROW_STEP = 64, 16, 64

WEIGHTS = "model.safetensors"
MODULES = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
POOLING = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}  # keys of older versions
CONFIG = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
}
NORMALIZER = {  # field of tokenizer.json -> field of tokenizer_config.json and its default
    "lowercase": ("do_lower_case", True),
    "strip_accents": ("strip_accents", None),
    "handle_chinese_chars": ("tokenize_chinese_chars", True),
}

Affine = tuple[Tensor, Tensor]  # weight and bias
Layer = Callable[[Tensor], Tensor]


class BertFolder(NamedTuple):
    """A sentence-transformers folder whose model `Bert` can run."""

    path: Path
    config: dict[str, Any]
    pooling: str  # mean or cls
    max_tokens: int  # special tokens included

    @classmethod
    def read(cls, path: Path) -> BertFolder | None:
        """None unless it is a BERT with a known pooling, without prompts, whose tokenizer.json agrees with its
        configuration: then `Bert` computes the vectors of sentence-transformers."""

        def content(name: str) -> Any:
            return json.loads((path / name).read_text(encoding="utf-8"))

        with suppress(OSError, ValueError, TypeError, AttributeError, LookupError):
            config, sentence, modules = map(
                content, ("config.json", "sentence_bert_config.json", "modules.json")
            )
            tokenizer = content("tokenizer_config.json")
            normalizer = content("tokenizer.json")["normalizer"]
            settings = content(modules[1]["path"] + "/config.json")
            older = [name for name, on in settings.items() if name.startswith("pooling_mode_") and on]
            pooling = settings.get("pooling_mode") or " ".join(POOLING.get(name, name) for name in older)
            limit = int(sentence.get("max_seq_length") or tokenizer["model_max_length"])
            max_tokens = min(limit, int(config["max_position_embeddings"]))
            prompts = content("config_sentence_transformers.json").get("prompts") or {}
            if (
                [module["type"].rpartition(".")[2] for module in modules] in MODULES
                and not any(prompts.values())
                and pooling in POOLING.values()
                and all(config.get(name, value) == value for name, value in CONFIG.items())
                and (path / WEIGHTS).is_file()
                and normalizer["type"] == "BertNormalizer"
                and not sentence.get("do_lower_case")
                and all(normalizer[name] == tokenizer.get(*field) for name, field in NORMALIZER.items())
                and max_tokens > 0
            ):
                return cls(path, config, str(pooling), max_tokens)
        return None


class _EncoderLayer(NamedTuple):
    qkv: Layer
    out: Layer
    out_norm: Affine
    up: Layer  # with GELU
    down: Layer
    down_norm: Affine


class Bert:
    """An Encoder on the CPU."""

    def __init__(self, folder: BertFolder, dtype: torch.dtype | None = None) -> None:
        """dtype: of linear layers and attention; the fastest of this CPU if None.

        Raises OSError, LookupError or safetensors' error for damaged files.
        """
        self._dtype = dtype or (fast_dtype() if can_pack(torch.bfloat16) else torch.float32)
        self._linear = packed_linear if can_pack(self._dtype) else plain_linear
        self.tokenizer = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self._cls, self._sep = (self.tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]"))
        self.dimension = int(folder.config["hidden_size"])
        self.max_tokens = folder.max_tokens
        self.overhead = 2
        self._heads = int(folder.config["num_attention_heads"])
        self._attention = AttentionSpec((self.dimension // self._heads) ** -0.5)
        self._eps = float(folder.config["layer_norm_eps"])
        self._pooling = folder.pooling
        tensors = load_file(folder.path / WEIGHTS)  # memory-mapped
        weights = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
        token_types = weights["embeddings.token_type_embeddings.weight"]
        self._words = weights["embeddings.word_embeddings.weight"]
        self._positions = weights["embeddings.position_embeddings.weight"] + token_types[0]
        self._first_norm = _affine(weights, "embeddings.LayerNorm", torch.float32)
        n_layers = int(folder.config["num_hidden_layers"])
        self._layers = [self._layer(weights, f"encoder.layer.{l}") for l in range(n_layers)]

    @property
    def batch_tokens(self) -> int:
        return BATCH_TOKENS_PER_THREAD * torch.get_num_threads()

    @torch.inference_mode()
    def encode(self, windows: Sequence[Window], is_question: bool) -> Steps[np.ndarray]:
        """See Encoder."""
        lengths = [len(window.ids) + self.overhead for window in windows]
        ids = [i for window in windows for i in (self._cls, *window.ids.tolist(), self._sep)]
        padding = -len(ids) % (FEW_ROWS_STEP if len(ids) <= FEW_ROWS else ROW_STEP)
        if padding:  # one more window, whose vector is dropped
            lengths.append(padding)
            ids += [0] * padding
        pooled = self._pool((yield from self._forward(torch.tensor(ids), lengths)), lengths)
        vectors: np.ndarray = pooled[: len(windows)].numpy()
        return vectors

    def _forward(self, ids: Tensor, lengths: Sequence[int]) -> Steps[Tensor]:
        """Token ids of all windows, packed [N] -> the last layer's states [N, E]."""
        x = self._words[ids] + self._positions[torch.cat([torch.arange(n) for n in lengths])]
        x = self._norm(x, self._first_norm).to(self._dtype)
        for layer in self._layers:
            yield
            x = self._norm(layer.out(self._attend(layer.qkv(x), lengths)).add_(x), layer.out_norm)
            x = self._norm(layer.down(layer.up(x)).add_(x), layer.down_norm)
        return x

    def _attend(self, qkv: Tensor, lengths: Sequence[int]) -> Tensor:
        """[N, 3 E] -> [N, E], window by window. Every row is placed at its window's end, so it attends to all of it."""
        qkv = qkv.view(len(qkv), 3, self._heads, -1).permute(1, 2, 0, 3)
        backends: dict[int, tuple[Callable[..., Tensor], AttentionPlan]] = {}  # by length
        out = []
        for end, n in zip(accumulate(lengths), lengths, strict=True):
            q, k, v = qkv[:, :, end - n : end]
            if n not in backends:
                plan = plan_rows(torch.full((n,), n - 1), 1)
                backends[n] = ops.attend.select(q, k, v, self._attention, plan).run, plan
            attend, plan = backends[n]
            out.append(attend(q, k, v, self._attention, plan))
        return torch.cat(out)

    def _pool(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """States of all windows, packed [N, E] -> one vector per window, [n, E] fp32."""
        n = torch.tensor(lengths)
        if self._pooling == "cls":
            return hidden[n.cumsum(0) - n].float()
        sums = torch.zeros(len(lengths), self.dimension)
        sums.index_add_(0, torch.repeat_interleave(n), hidden.float())
        return sums / n[:, None]

    def _norm(self, x: Tensor, weights: Affine) -> Tensor:
        return F.layer_norm(x, (self.dimension,), *weights, self._eps)

    def _layer(self, weights: dict[str, Tensor], name: str) -> _EncoderLayer:
        def affine(part: str) -> Affine:
            return _affine(weights, f"{name}.{part}", self._dtype)

        qkv = zip(*(affine(f"attention.self.{part}") for part in ("query", "key", "value")), strict=True)
        weight, bias = (torch.cat(parts) for parts in qkv)
        return _EncoderLayer(
            self._linear(weight, bias),
            self._linear(*affine("attention.output.dense")),
            affine("attention.output.LayerNorm"),
            self._linear(*affine("intermediate.dense"), gelu=True),
            self._linear(*affine("output.dense")),
            affine("output.LayerNorm"),
        )


def _affine(weights: dict[str, Tensor], name: str, dtype: torch.dtype) -> Affine:
    return weights[f"{name}.weight"].to(dtype), weights[f"{name}.bias"].to(dtype)


def plain_linear(weight: Tensor, bias: Tensor, gelu: bool = False) -> Layer:
    """A linear layer of torch."""
    layer = partial(F.linear, weight=weight, bias=bias)
    return (lambda x: torch.ops.aten.gelu_(layer(x))) if gelu else layer


def packed_linear(weight: Tensor, bias: Tensor, gelu: bool = False) -> Layer:
    """A linear layer of oneDNN on weights in its own order. Uses private operations of torch: check `can_pack`."""
    run = torch.ops.mkldnn._linear_pointwise
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    activation = "gelu" if gelu else "none"
    return lambda x: run(x, packed, bias, activation, [], "none")


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch has oneDNN's packed linear layers for a dtype on this CPU."""
    x = torch.zeros(16, 16, dtype=dtype)
    try:
        packed_linear(x, x[0])(x)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True
