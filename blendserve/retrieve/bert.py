"""A BERT sentence encoder over packed tokens: sentence-transformers' vectors without its padding and its imports.

All tokens of a batch run through the linear layers side by side, and each window attends to itself alone. So no token is
padding, and a window's vector depends on the others of its batch no more than the rows of a matmul depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain, groupby
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blendserve.kernels import ops
from blendserve.kernels.rows import plan_rows
from blendserve.kernels.types import AttentionSpec
from blendserve.retrieve.bert_folder import BertFolder
from blendserve.retrieve.encoder import Window

TOKENS_A_THREAD = 1024  # in a batch: enough for a matmul, and what layers pass on stays in the caches

Affine = tuple[Tensor, Tensor]  # weight and bias


class _Layer(NamedTuple):
    qkv: Affine
    out: Affine
    out_norm: Affine
    up: Affine
    down: Affine
    down_norm: Affine


class Bert:
    """An Encoder on the CPU, of a folder for which `is_plain_bert` says so."""

    def __init__(self, folder: BertFolder, dtype: torch.dtype, by_kernels: bool) -> None:
        """by_kernels: linear layers and attention by kernels/ops, one window after another; else by torch alone.

        Raises OSError, LookupError or safetensors' error for files that are damaged.
        """
        self.tokenizer = folder.tokenizer()
        names = ("[CLS]", "[SEP]")
        self._first, self._last = (self.tokenizer.token_to_id(name) for name in names)
        self.dimension = int(folder.config["hidden_size"])
        self.max_tokens, self.overhead = folder.max_tokens, len(names)
        self.dtype = str(dtype).removeprefix("torch.")
        self._heads = int(folder.config["num_attention_heads"])
        self._spec = AttentionSpec((self.dimension // self._heads) ** -0.5)
        self._eps, self._pooling = float(folder.config["layer_norm_eps"]), folder.pooling
        self._attend = self._attend_by_kernels if by_kernels else self._attend_by_torch
        self._linear: Callable[..., Tensor] = ops.linear if by_kernels else F.linear
        self._read(folder.weights(), int(folder.config["num_hidden_layers"]), dtype)

    @property
    def batch_tokens(self) -> int:
        return TOKENS_A_THREAD * torch.get_num_threads()

    @torch.inference_mode()
    def encode(self, windows: Sequence[Window], of_question: bool) -> np.ndarray:
        """As Encoder says."""
        lengths = [len(window.ids) + self.overhead for window in windows]
        ids = chain.from_iterable((self._first, *window.ids.tolist(), self._last) for window in windows)
        vectors: np.ndarray = self._pool(self._layers(torch.tensor(list(ids)), lengths), lengths).numpy()
        return vectors

    def _layers(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Token ids of all windows, packed [N] -> the last layer's states [N, E]."""
        x = self._words[ids] + self._places[torch.cat([torch.arange(n) for n in lengths])]
        x = self._norm(x, self._first_norm).to(self._stack[0].qkv[0].dtype)
        for layer in self._stack:
            attended = self._attend(self._linear(x, *layer.qkv), lengths)
            x = self._norm(self._linear(attended, *layer.out).add_(x), layer.out_norm)
            wide = torch.ops.aten.gelu_(self._linear(x, *layer.up))
            x = self._norm(self._linear(wide, *layer.down).add_(x), layer.down_norm)
        return x

    def _attend_by_kernels(self, qkv: Tensor, lengths: Sequence[int]) -> Tensor:
        """[N, 3 E] -> [N, E]. Every row stands where its window ends: causal by position is everything then."""
        plans = {n: plan_rows(torch.full((n,), n - 1), 1) for n in set(lengths)}
        q, k, v = qkv.view(len(qkv), 3, self._heads, -1).permute(1, 2, 0, 3)
        spans = [(slice(end - n, end), n) for end, n in zip(accumulate(lengths), lengths, strict=True)]
        return torch.cat([ops.attend(q[:, at], k[:, at], v[:, at], self._spec, plans[n]) for at, n in spans])

    def _attend_by_torch(self, qkv: Tensor, lengths: Sequence[int]) -> Tensor:
        """The same, windows of one length together."""
        out, start = qkv.new_empty(len(qkv), self.dimension), 0
        for length, same in groupby(lengths):
            n = len(list(same))
            rows = slice(start, start + n * length)
            q, k, v = qkv[rows].view(n, length, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, scale=self._spec.scale)
            out[rows].view(n, length, self._heads, -1).copy_(mixed.transpose(1, 2))
            start = rows.stop
        return out

    def _pool(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """States of all windows, packed [N, E] -> one vector each, [n, E] fp32."""
        n = torch.tensor(lengths)
        if self._pooling == "cls":
            return hidden[n.cumsum(0) - n].float()
        sums = torch.zeros(len(lengths), self.dimension)
        sums.index_add_(0, torch.repeat_interleave(n), hidden.float())
        return sums / n[:, None]

    def _norm(self, x: Tensor, weights: Affine) -> Tensor:
        return F.layer_norm(x, (self.dimension,), *weights, self._eps)

    def _read(self, weights: dict[str, Tensor], n_layers: int, dtype: torch.dtype) -> None:
        """Take the weights over. Embeddings stay as they are: of them, only the rows that are looked up are read."""

        def affine(name: str) -> Affine:
            return weights[f"{name}.weight"], weights[f"{name}.bias"]

        def layer(name: str) -> _Layer:
            three = [affine(f"{name}.attention.self.{part}") for part in ("query", "key", "value")]
            weight, bias = (torch.cat(parts) for parts in zip(*three, strict=True))
            rest = (
                "attention.output.dense",
                "attention.output.LayerNorm",
                "intermediate.dense",
                "output.dense",
                "output.LayerNorm",
            )
            parts = ((weight, bias), *(affine(f"{name}.{part}") for part in rest))
            return _Layer(*((w.to(dtype), b.to(dtype)) for w, b in parts))

        kinds = weights["embeddings.token_type_embeddings.weight"]
        self._words = weights["embeddings.word_embeddings.weight"]
        self._places = weights["embeddings.position_embeddings.weight"] + kinds[0]
        self._first_norm = affine("embeddings.LayerNorm")
        self._stack = [layer(f"encoder.layer.{n}") for n in range(n_layers)]
