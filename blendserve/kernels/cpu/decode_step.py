"""A decoding step in one native call: the weights of a model bound once, and the call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blendserve.kernels import team
from blendserve.kernels.cpu.isa import Level
from blendserve.kernels.cpu.library import dtype_of, loaded
from blendserve.kernels.norm import NormForm
from blendserve.kernels.types import AttentionSpec, Rope

MAX_ROWS, MAX_HEAD_DIM, ROPE_STEP = 8, 256, 32
GROUP = 64  # inputs of an output that share a scale


Linear = tuple[Tensor, Tensor | None]  # weight [outputs, inputs] and bias [outputs]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of a decoder layer as the model stores them; None where its family has none.

    E: hidden size, I: inner size of the MLP.
    """

    norm_before_attention: Tensor  # [E]
    q: Linear  # E -> H * D
    k: Linear  # E -> K * D
    v: Linear  # E -> K * D
    head_norms: tuple[Tensor | None, Tensor | None]  # [D], of queries and of keys
    o: Linear  # H * D -> E
    norm_after_attention: Tensor | None  # [E]
    norm_before_mlp: Tensor  # [E]
    gate: Linear  # E -> I
    up: Linear  # E -> I
    down: Linear  # I -> E
    norm_after_mlp: Tensor | None  # [E]

    @property
    def tensors(self) -> list[Tensor | None]:
        """In the order of `DecodeLayer`."""
        attention = (self.norm_before_attention, *self.q, *self.k, *self.v, *self.head_norms, *self.o)
        mlp = (self.norm_before_mlp, *self.gate, *self.up, *self.down)
        return [*attention, self.norm_after_attention, *mlp, self.norm_after_mlp]


@dataclass(frozen=True, slots=True)
class DecodeWeights:
    """A dense decoder of RMS norms, RoPE by halves and a SiLU-gated MLP, as the native step reads it."""

    layers: Sequence[LayerWeights]
    specs: Sequence[AttentionSpec]  # of each layer
    norm: Tensor  # [E]
    head: Linear  # E -> V
    n_heads: int
    n_kv_heads: int
    head_dim: int
    eps: float  # of all norms
    norm_form: NormForm  # of all norms
    residual_scale: float | None

    @property
    def tensors(self) -> list[Tensor]:
        parts = [x for layer in self.layers for x in layer.tensors]
        return [x for x in (*parts, self.norm, *self.head) if x is not None]


class DecodeLayer(ctypes.Structure):
    """`DecodeLayer` of decode_step.cpp, field by field."""

    POINTERS = (
        *("norm_before_attention", "q", "q_bias", "k", "k_bias", "v", "v_bias", "q_norm", "k_norm"),
        *("o", "o_bias", "norm_after_attention"),
        *("norm_before_mlp", "gate", "gate_bias", "up", "up_bias", "down", "down_bias", "norm_after_mlp"),
    )
    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in ("rope", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


class RopeTable(ctypes.Structure):
    """`RopeTable` of decode_step.cpp, field by field."""

    _fields_ = (("cos", ctypes.c_void_p), ("sin", ctypes.c_void_p), ("width", ctypes.c_int64))


class DecodeRow(ctypes.Structure):
    """`DecodeRow` of decode_step.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("layer_stride", "head_stride", "row_stride", "at")),
    )


class DecodeCall(ctypes.Structure):
    """`DecodeCall` of decode_step.cpp, field by field."""

    POINTERS = ("layers", "ropes", "rows", "hidden", "norm", "head", "head_bias", "logits")
    SIZES = ("n_layers", "n_rows", "dim", "inner", "heads", "kv", "head_dim", "vocabulary", "rounds_first")
    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in SIZES),
        *((name, ctypes.c_float) for name in ("eps", "offset", "residual_scale")),
        *((name, ctypes.c_int64) for name in ("is_int8", "threads")),
    )


def unsupported(level: Level, weights: DecodeWeights) -> str:
    """Why this instruction set's kernel cannot run such a model, "" if it can."""
    dtype, dim = dtype_of(level), weights.head_dim
    if any(x.dtype != dtype or x.device.type != "cpu" or not x.is_contiguous() for x in weights.tensors):
        return f"weights are not contiguous {level.dtype} in the CPU's memory"
    if dim % ROPE_STEP or dim > MAX_HEAD_DIM:
        return f"heads have {dim} dimensions"
    if any(x.shape[-1] % 2 or x.shape[0] % 2 for x in weights.tensors):
        return "a size is odd"
    return ""


class DecodeStep:
    """A model's decoding step on one instruction set. Stateless between calls; threads may share it."""

    def __init__(
        self, level: Level, weights: DecodeWeights, ropes: Sequence[int], int8: bool = False
    ) -> None:
        """ropes: for each layer the number of its angles among those that calls are given; -1: it has no RoPE.

        int8: matrices are copied to int8 with a scale for every GROUP inputs of an output: half of bf16's bytes.
        """
        self._run = loaded(level).blendserve_decode_step
        self._int8 = int8
        self._weights = weights  # with the two below: the memory that pointers name
        self._tensors = [[_stored(x, level, int8) for x in layer.tensors] for layer in weights.layers]
        self._head = [_stored(x, level, int8) for x in weights.head]
        layers = [
            DecodeLayer(
                *map(_pointer, tensors),
                *(rope, spec.window or 0, spec.scale, spec.softcap or 0.0),
            )
            for tensors, spec, rope in zip(self._tensors, weights.specs, ropes, strict=True)
        ]
        self._layers = (DecodeLayer * len(layers))(*layers)
        self._inner = weights.layers[0].gate[0].shape[0]

    def __call__(
        self, hidden: Tensor, ropes: Sequence[Rope], caches: Sequence[tuple[Tensor, Tensor, int]]
    ) -> Tensor:
        """Embedded rows [S, E], S at most 8 -> logits [S, V]; their KV is written to the caches.

        ropes: of the rows' positions. caches: for each row keys and values [L, K, T, D], and its position. The GIL is
        free during the call.
        """
        w, n_rows = self._weights, len(caches)
        hidden = hidden.contiguous()
        logits = torch.empty(n_rows, w.head[0].shape[0], dtype=hidden.dtype)
        tables = [(rope.cos.contiguous(), rope.sin.contiguous()) for rope in ropes]
        table = (RopeTable * max(1, len(tables)))(
            *(RopeTable(cos.data_ptr(), sin.data_ptr(), cos.shape[-1]) for cos, sin in tables)
        )
        rows = (DecodeRow * n_rows)(
            *(DecodeRow(k.data_ptr(), v.data_ptr(), *k.stride()[:3], at) for k, v, at in caches)
        )
        pointers = (
            *(ctypes.addressof(x) for x in (self._layers, table, rows)),
            *(_pointer(x) for x in (hidden, w.norm, *self._head, logits)),
        )
        sizes = (len(w.layers), n_rows, hidden.shape[1], self._inner, w.n_heads, w.n_kv_heads, w.head_dim)
        form = w.norm_form
        call = DecodeCall(
            *(*pointers, *sizes, logits.shape[1], form.rounds_first),
            *(w.eps, form.offset, w.residual_scale or 0.0, self._int8, team.size()),
        )
        self._run(ctypes.byref(call))
        return logits


def _stored(x: Tensor | None, level: Level, int8: bool) -> Tensor | None:
    """A matrix as int8 if wanted; everything else as it is."""
    return to_int8(x, level) if int8 and x is not None and x.dim() == 2 else x


@torch.inference_mode()
def to_int8(weight: Tensor, level: Level) -> Tensor:
    """weight [outputs, inputs] -> bytes [outputs / L, inputs / GROUP, block], as int8_rows.h reads them."""
    lanes, per_word = vector_layout(level)
    outs, depth = weight.shape
    x = torch.zeros(-(-outs // lanes) * lanes, -(-depth // GROUP) * GROUP)
    x[:outs, :depth] = weight
    blocks = x.view(len(x) // lanes, lanes, -1, GROUP)
    scales = (blocks.abs().amax(-1) / 127).transpose(1, 2).contiguous()  # [outputs / L, groups, L]
    divisor = scales.clamp_min(torch.finfo(torch.float32).tiny).transpose(1, 2)[..., None]
    numbers = (
        (blocks / divisor)
        .round()
        .to(torch.int8)
        .view(len(x) // lanes, lanes, -1, GROUP // per_word, per_word)
    )
    return torch.cat(
        [scales.view(torch.int8), numbers.permute(0, 2, 3, 1, 4).flatten(2)], dim=-1
    ).contiguous()


def vector_layout(level: Level) -> tuple[int, int]:
    """Lanes of a vector, and numbers of a word (numbers.h)."""
    return (8 if level.name == "avx2" else 16), (2 if level.dtype == "bfloat16" else 1)


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
