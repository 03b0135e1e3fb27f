"""A BERT sentence encoder over packed tokens: sentence-transformers' vectors without its padding and its imports.

All tokens of a batch run through the linear layers side by side, and each window attends to itself alone. So no token is
padding, and a window's vector depends on the others of its batch no more than the rows of a matmul depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from blendserve.kernels import ops
from blendserve.kernels.rows import RowPlan, plan_rows
from blendserve.kernels.types import AttentionSpec
from blendserve.retrieve.bert_folder import BertFolder
from blendserve.retrieve.encoder import Window

TOKENS_A_THREAD = 1024  # in a batch: enough for a matmul, and what layers pass on stays in the caches
FEW, MANY = 16, 64  # rows are filled up to a multiple: a matmul of a new size is prepared for milliseconds
# Of a torch without oneDNN, or with another one.
NO_PACKING = AttributeError, NotImplementedError, RuntimeError

Affine = tuple[Tensor, Tensor]  # weight and bias
Map = Callable[[Tensor], Tensor]


class _Layer(NamedTuple):
    qkv: Map
    out: Map
    out_norm: Affine
    up: Map  # with its activation
    down: Map
    down_norm: Affine


class Bert:
    """An Encoder on the CPU, of a folder for which `is_plain_bert` says so."""

    def __init__(
        self, folder: BertFolder, dtype: torch.dtype, by_kernels: bool, packed: bool = False
    ) -> None:
        """by_kernels: linear layers and attention by kernels/ops, one window after another; else by torch alone.

        packed: linear layers by oneDNN over weights in its own order, the first of an MLP with its activation.

        Raises OSError, LookupError or safetensors' error for files that are damaged; one of NO_PACKING.
        """
        self.tokenizer = folder.tokenizer()
        names = ("[CLS]", "[SEP]")
        self._first, self._last = (self.tokenizer.token_to_id(name) for name in names)
        self.dimension = int(folder.config["hidden_size"])
        self.max_tokens, self.overhead = folder.max_tokens, len(names)
        self.dtype = str(dtype).removeprefix("torch.")
        self._heads = int(folder.config["num_attention_heads"])
        self._spec = AttentionSpec((self.dimension // self._heads) ** -0.5)
        self.between: Callable[[], None] = lambda: None
        self._eps, self._pooling = float(folder.config["layer_norm_eps"]), folder.pooling
        self._attend = self._attend_by_kernels if by_kernels else self._attend_by_torch
        linear = packed_linear if packed else partial(_plain, ops.linear if by_kernels else F.linear)
        self._read(folder.weights(), int(folder.config["num_hidden_layers"]), dtype, linear)

    @property
    def batch_tokens(self) -> int:
        return TOKENS_A_THREAD * torch.get_num_threads()

    @torch.inference_mode()
    def encode(self, windows: Sequence[Window], of_question: bool) -> np.ndarray:
        """As Encoder says."""
        lengths = [len(window.ids) + self.overhead for window in windows]
        ids = [i for window in windows for i in (self._first, *window.ids.tolist(), self._last)]
        missing = -len(ids) % (FEW if len(ids) <= MANY else MANY)
        if missing:  # a window of nothing, whose vector is dropped
            lengths.append(missing)
            ids += [0] * missing
        pooled = self._pool(self._layers(torch.tensor(ids), lengths), lengths)
        vectors: np.ndarray = pooled[: len(windows)].numpy()
        return vectors

    def _layers(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Token ids of all windows, packed [N] -> the last layer's states [N, E]."""
        x = self._words[ids] + self._places[torch.cat([torch.arange(n) for n in lengths])]
        x = self._norm(x, self._first_norm).to(self._stack[0].out_norm[0].dtype)
        for layer in self._stack:
            self.between()
            attended = self._attend(layer.qkv(x), lengths)
            x = self._norm(layer.out(attended).add_(x), layer.out_norm)
            x = self._norm(layer.down(layer.up(x)).add_(x), layer.down_norm)
        return x

    def _attend_by_kernels(self, qkv: Tensor, lengths: Sequence[int]) -> Tensor:
        """[N, 3 E] -> [N, E]. Every row stands where its window ends: causal by position is everything then."""
        qkv = qkv.view(len(qkv), 3, self._heads, -1).permute(1, 2, 0, 3)
        chosen: dict[int, tuple[Callable[..., Tensor], RowPlan]] = {}  # by length: windows of one lie alike
        out = []
        for end, n in zip(accumulate(lengths), lengths, strict=True):
            q, k, v = qkv[:, :, end - n : end]
            if n not in chosen:
                plan = plan_rows(torch.full((n,), n - 1), 1)
                chosen[n] = ops.ATTEND.select_backend(q, k, v, self._spec, plan).run, plan
            attend, plan = chosen[n]
            out.append(attend(q, k, v, self._spec, plan))
        return torch.cat(out)

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

    def _read(
        self, weights: dict[str, Tensor], n_layers: int, dtype: torch.dtype, linear: Callable[..., Map]
    ) -> None:
        """Take the weights over. Embeddings stay as they are: of them, only the rows that are looked up are read."""

        def affine(name: str) -> Affine:
            return weights[f"{name}.weight"], weights[f"{name}.bias"]

        def typed(parts: Sequence[Tensor]) -> Affine:
            weight, bias = (part.to(dtype) for part in parts)
            return weight, bias

        def layer(name: str) -> _Layer:
            three = [affine(f"{name}.attention.self.{part}") for part in ("query", "key", "value")]
            qkv = [torch.cat(parts) for parts in zip(*three, strict=True)]
            return _Layer(
                linear(*typed(qkv)),
                linear(*typed(affine(f"{name}.attention.output.dense"))),
                typed(affine(f"{name}.attention.output.LayerNorm")),
                linear(*typed(affine(f"{name}.intermediate.dense")), gelu=True),
                linear(*typed(affine(f"{name}.output.dense"))),
                typed(affine(f"{name}.output.LayerNorm")),
            )

        kinds = weights["embeddings.token_type_embeddings.weight"]
        self._words = weights["embeddings.word_embeddings.weight"]
        self._places = weights["embeddings.position_embeddings.weight"] + kinds[0]
        self._first_norm = affine("embeddings.LayerNorm")
        self._stack = [layer(f"encoder.layer.{n}") for n in range(n_layers)]


def _plain(run: Callable[..., Tensor], weight: Tensor, bias: Tensor, gelu: bool = False) -> Map:
    """A linear layer over the weights as they are stored."""
    layer = partial(run, weight=weight, bias=bias)
    return (lambda x: torch.ops.aten.gelu_(layer(x))) if gelu else layer


def packed_linear(weight: Tensor, bias: Tensor, gelu: bool = False) -> Map:
    """A linear layer by oneDNN over weights in its own order: private to torch, hence one form of several."""
    operations = torch.ops.mkldnn
    run, ordered = operations._linear_pointwise, operations._reorder_linear_weight(weight)
    after = "gelu" if gelu else "none"
    return lambda x: run(x, ordered, bias, after, [], "none")
