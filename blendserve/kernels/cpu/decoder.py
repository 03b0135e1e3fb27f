"""A model's layers in native calls: its weights bound once, the two halves of a layer, and a whole decoding step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from blendserve.kernels import team
from blendserve.kernels.cpu.bindings import FEW, MAX_DIM, ROPE_STEP, matrix, packed, q8_0_blocks
from blendserve.kernels.cpu.isa import Level
from blendserve.kernels.cpu.library import LAYOUTS, dtype_of, loaded, pack, pointer
from blendserve.kernels.norm import NormForm
from blendserve.kernels.packed import UNIT, PackedMatrix
from blendserve.kernels.types import Activation, AttentionSpec, Rope, gelu_tanh

MAX_ROWS = FEW  # of a step
Weight = Tensor | PackedMatrix
_LAYER_BYTES = LAYOUTS["LayerWeights"].size


class LayerTensors(NamedTuple):
    """A layer's weights in the order of `LayerWeights` in kernels.h."""

    matrices: tuple[Weight, ...]  # q, k, v, o, gate, up, down
    biases: tuple[Tensor | None, ...]  # of these
    # before attention, of q, of k, after attention, before the MLP, after it
    norms: tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class DecodeWeights:
    """A dense decoder of RMS norms, RoPE by halves and a gated MLP, as the model stores it.

    E: hidden size, I: inner size of the MLP.
    """

    layers: Sequence[LayerTensors]
    specs: Sequence[AttentionSpec]  # of each layer
    norm: Tensor  # [E]
    head: tuple[Weight, Tensor | None]  # [V, E] and [V]
    n_heads: int
    n_kv_heads: int
    head_dim: int
    inner: int  # I
    eps: float  # of all norms
    norm_form: NormForm  # of all norms
    residual_scale: float | None
    activation: Activation  # of gates: F.silu or gelu_tanh

    @property
    def has_gelu(self) -> bool:
        return self.activation is gelu_tanh

    @property
    def has_quantised(self) -> bool:
        """Whether any matrix is quantised."""
        matrices = (self.head[0], *(x for layer in self.layers for x in layer.matrices))
        return any(isinstance(x, PackedMatrix) for x in matrices)

    @property
    def tensors(self) -> list[Weight]:
        parts = [x for layer in self.layers for part in layer for x in part]
        return [x for x in (*parts, self.norm, *self.head) if x is not None]


def unsupported(level: Level, weights: DecodeWeights, int8: bool = False) -> str:
    """Why this instruction set's kernel cannot run such a model, or its weights in int8, "" if it can."""
    dtype = dtype_of(level)
    dim = weights.head_dim
    if any(x.dtype != dtype or x.device.type != "cpu" or not x.is_contiguous() for x in weights.tensors):
        return f"weights are not contiguous {level.dtype} in the CPU's memory"
    if dim % ROPE_STEP or dim > MAX_DIM:
        return f"heads have {dim} dimensions"
    if any(x.shape[-1] % 2 or x.shape[0] % 2 for x in weights.tensors):
        return "a size is odd"
    inputs = {x.shape[1] for x in weights.tensors if x.dim() == 2}
    if int8 and any(n % UNIT for n in inputs):
        return f"a size is no multiple of {UNIT}"
    return ""


def int8_copy(weights: DecodeWeights, level: Level) -> DecodeWeights:
    """A copy whose matrices are Q8_0: half of bf16's bytes."""

    def pack(weight: Weight) -> Weight:
        if isinstance(weight, PackedMatrix):
            return weight
        return packed(level, "Q8_0", (weight.shape[0], weight.shape[1]), q8_0_blocks(weight))

    layers = [layer._replace(matrices=tuple(map(pack, layer.matrices))) for layer in weights.layers]
    return replace(weights, layers=layers, head=(pack(weights.head[0]), weights.head[1]))


class NativeLayers:
    """The two halves of each layer around attention, and decoding steps. Stateless: threads may share it."""

    def __init__(
        self, level: Level, weights: DecodeWeights, ropes: Sequence[int], int8_rows: bool = False
    ) -> None:
        """ropes: for each layer the index of its angles among the model's, -1 without RoPE.

        int8_rows: steps round what quantised weights are multiplied with to int8.
        """
        self.weights = weights
        self._kernels = loaded(level)
        self._int8_rows = int8_rows
        rows = []
        for tensors, spec, rope in zip(weights.layers, weights.specs, ropes, strict=True):
            matrices = chain(*map(matrix, tensors.matrices))
            vectors = map(pointer, (*tensors.biases, *tensors.norms, spec.sinks))
            rows.append((*matrices, *vectors, rope, spec.window or 0, spec.scale, spec.softcap or 0.0))
        self._table = pack("LayerWeights", rows)

    def qkv(self, l: int, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Norm, projections and RoPE of layer l: hidden [S, E] -> q [H, S, D], k and v [K, S, D], and q and k rotated."""
        w = self.weights
        n, dim = hidden.shape
        cos = rope.cos
        sin = rope.sin
        heads = (w.n_heads, w.n_kv_heads, w.n_kv_heads)
        width = cos.shape[-1]
        q, k, v = (torch.empty(n, h, w.head_dim, dtype=hidden.dtype) for h in heads)
        rotated = [torch.empty(h, n, w.head_dim, dtype=hidden.dtype) for h in heads[:2]]
        self._kernels.layer_qkv(
            self._at(l), *map(pointer, (hidden, cos, sin, q, k, v, *rotated)),
            hidden.stride(0), cos.stride(0), width, n, dim, w.n_heads, w.n_kv_heads, w.head_dim,
            w.norm_form.rounds_first, w.eps, w.norm_form.offset, team.size(),
        )  # fmt: skip
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        q_rotated, k_rotated = rotated if width else (q, k)
        return q, k, v, q_rotated, k_rotated

    def out(self, l: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """The rest of layer l: hidden [S, E] and attention's output [S, H * D] -> hidden [S, E]."""
        w = self.weights
        n, dim = hidden.shape
        out = torch.empty(n, dim, dtype=hidden.dtype)
        self._kernels.layer_out(
            self._at(l), *map(pointer, (hidden, attended, out)),
            hidden.stride(0), attended.stride(0), n, dim, attended.shape[1], w.inner,
            w.norm_form.rounds_first, w.has_gelu, w.eps, w.norm_form.offset, w.residual_scale or 0.0, team.size(),
        )  # fmt: skip
        return out

    def _at(self, l: int) -> int:
        return self._table.data_ptr() + l * _LAYER_BYTES

    def decode(
        self, hidden: Tensor, ropes: Sequence[Rope], caches: Sequence[tuple[Tensor, Tensor, int]]
    ) -> Tensor:
        """A step: embedded rows [S, E], S at most MAX_ROWS -> logits [S, V]; their KV is written to the caches.

        ropes: the model's tables, at the rows' positions. caches: for each row keys and values [L, K, T, D], and its
        position. The GIL is free during the call.
        """
        w = self.weights
        n_rows = len(caches)
        hidden = hidden.contiguous()
        logits = torch.empty(n_rows, w.head[0].shape[0], dtype=hidden.dtype)
        tables = [(rope.cos.contiguous(), rope.sin.contiguous()) for rope in ropes]
        angles = pack("RopeTable", [(*map(pointer, table), table[0].shape[-1]) for table in tables])
        scale = ropes[0].query_scale if ropes else None
        scales = [1.0] * n_rows if scale is None else scale.tolist()
        about = zip(caches, scales, strict=True)
        rows = pack(
            "DecodeRow", [(pointer(k), pointer(v), x, *k.stride()[:3], at) for (k, v, at), x in about]
        )
        self._kernels.decode_step(
            *map(pointer, (self._table, angles, rows, hidden, w.norm)),
            *matrix(w.head[0]), pointer(w.head[1]), pointer(logits),
            len(w.layers), n_rows, hidden.shape[1], w.inner, w.n_heads, w.n_kv_heads, w.head_dim, logits.shape[1],
            w.norm_form.rounds_first, w.has_gelu, w.eps, w.norm_form.offset, w.residual_scale or 0.0, self._int8_rows,
            team.size(),
        )  # fmt: skip
        return logits
