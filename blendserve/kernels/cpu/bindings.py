"""One function for each compiled kernel: pointers and strides of its tensors, and the call. The GIL is free meanwhile.

`supports_...` says whether a level's kernel is made for such tensors. The functions of kernels.h check nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from blendserve.kernels import team
from blendserve.kernels.cpu.isa import Level
from blendserve.kernels.cpu.library import dtype_of, loaded, pack, pointer
from blendserve.kernels.norm import Norm
from blendserve.kernels.packed import KINDS, STRIP, UNIT, PackedMatrix
from blendserve.kernels.rotary import HALVES, Rotary
from blendserve.kernels.rows import AttentionPlan
from blendserve.kernels.types import (
    Activation,
    AttentionSpec,
    CorrectionParams,
    Prior,
    RecomputedTokens,
    RecordView,
    Rope,
    gelu_tanh,
)

MAX_DIM = 256
ATTENTION_LANES = 16
KEY_PAD = 64  # masked_keys is read this far behind the last key
SCORED_ROWS = 64  # rows whose key scores one call sums: it keeps their weights
ROPE_STEP = 32
WORD = 4  # bytes: a row of inputs and one of outputs are whole words
DENSE = 0  # form of a matrix: rows of numbers
FEW = 8  # rows, up to which linear transposes weights instead of rows
MIN_NORM = 8  # numbers of a row: torch sums fewer in another order
GATED: dict[Activation, str] = {F.silu: "silu_and_mul", gelu_tanh: "gelu_and_mul"}  # -> kernel


def _is_native(level: Level, *tensors: Tensor) -> bool:
    """Whether these have the level's dtype, on the CPU, with contiguous rows."""
    dtype = dtype_of(level)
    return all(x.dtype == dtype and x.device.type == "cpu" and x.stride(-1) == 1 for x in tensors)


def _is_word(level: Level, size: int) -> bool:
    """Whether so many numbers are a whole number of words."""
    return size * dtype_of(level).itemsize % WORD == 0


# Attention


def supports_attention(
    level: Level, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan
) -> bool:
    return (
        _is_native(level, q, keys, values)
        and q.shape[-1] == keys.shape[-1] == values.shape[-1]
        and q.shape[-1] % ATTENTION_LANES == 0
        and q.shape[-1] <= MAX_DIM
        and spec.scale > 0
        and not any(x.requires_grad for x in (q, keys, values))
    )


def attention(
    level: Level, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan,
    masked: Tensor | None = None, key_scores: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """ops.attend: q [H, S, D] over keys and values [K, T, D] -> [S, H * D].

    masked: [T + KEY_PAD] uint8. key_scores: [T] fp32, gets squared norms.
    """
    n_heads, n_rows, dim = q.shape
    n_kv = keys.shape[0]
    positions = plan.positions.contiguous()
    out = torch.empty(n_rows, n_heads * dim, dtype=q.dtype)
    loaded(level).attention(
        *map(pointer, (q, keys, values, out, positions, masked, key_scores, spec.sinks)),
        *q.stride()[:2], *keys.stride()[:2], *values.stride()[:2],
        n_rows, n_kv, n_heads // n_kv, dim, spec.window or 0,
        spec.scale, spec.softcap or 0.0, team.size(),
    )  # fmt: skip
    return out


def attention_with_key_scores(
    level: Level, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan
) -> tuple[Tensor, Tensor]:
    """ops.attend_with_scores."""
    n_keys = keys.shape[1]
    absent = plan.masked_keys
    assert absent is not None
    masked = torch.zeros(n_keys + KEY_PAD, dtype=torch.uint8)
    masked[:n_keys] = absent
    squares = torch.zeros(n_keys)
    out = torch.empty(q.shape[1], q.shape[0] * q.shape[2], dtype=q.dtype)
    for start in range(0, q.shape[1], SCORED_ROWS):
        rows = slice(start, start + SCORED_ROWS)
        part = torch.zeros(n_keys)
        some = replace(plan, positions=plan.positions[rows])
        out[rows] = attention(level, q[:, rows], keys, values, spec, some, masked, part)
        squares += part
    return out, squares.sqrt_()


# Linear layers, norms, activations


def supports_linear(level: Level, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        x.dim() == 2
        and _is_native(level, x, weight)
        and all(_is_word(level, size) for size in weight.shape)
        and (bias is None or _is_native(level, bias))
        and not torch.is_grad_enabled()
    )


def linear(level: Level, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """ops.linear, over the weights as the model stores them."""
    return _linear(loaded(level).linear, x, weight, weight.stride(0), bias)


def packed_linear(
    level: Level, x: Tensor, weight: PackedMatrix, bias: Tensor | None, int8_rows: bool = False
) -> Tensor:
    """ops.packed_linear. int8_rows: few rows are rounded to int8 in groups of UNIT."""
    return _linear(loaded(level).packed_linear, x, weight, 0, bias, int8_rows)


def _linear(
    run: Callable[..., int], x: Tensor, weight: Tensor | PackedMatrix, w_row: int, bias: Tensor | None,
    int8_rows: bool = False,
) -> Tensor:  # fmt: skip
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype)
    run(
        pointer(x), *matrix(weight), pointer(bias), pointer(out), 0,
        x.stride(0), w_row, outputs, rows, outputs, inputs, int8_rows, team.size(),
    )  # fmt: skip
    return out


def matrix(weight: Tensor | PackedMatrix) -> tuple[int, int]:
    """The fields of `Matrix` in kernels.h."""
    return (
        (pointer(weight.strips), weight.form)
        if isinstance(weight, PackedMatrix)
        else (pointer(weight), DENSE)
    )


# Quantised weights


def supports_packed_linear(level: Level, x: Tensor, weight: PackedMatrix, bias: Tensor | None) -> bool:
    """AMX multiplies many rows alone, by rounded weights."""
    return (
        x.dim() == 2
        and _is_native(level, x)
        and weight.dtype == dtype_of(level)
        and _is_word(level, weight.shape[0])
        and (bias is None or _is_native(level, bias))
        and (len(x) > FEW or "decode_step" in level.sources)
        and not torch.is_grad_enabled()
    )


def supports_take(level: Level, weight: PackedMatrix, rows: Tensor) -> bool:
    return weight.dtype == dtype_of(level) and rows.dtype == torch.int64 and rows.device.type == "cpu"


def take(level: Level, weight: PackedMatrix, rows: Tensor) -> Tensor:
    """ops.take."""
    out = torch.empty(len(rows), weight.shape[1], dtype=weight.dtype)
    rows = rows.contiguous()
    loaded(level).take(*matrix(weight), pointer(rows), pointer(out), len(rows), weight.shape[1], team.size())
    return out


def packed(
    level: Level,
    kind: str,
    shape: tuple[int, int],
    blocks: npt.NDArray[np.uint8],
    strips: Tensor | None = None,
) -> PackedMatrix:
    """A matrix of blocks of GGUF [outputs, bytes of a row], in strips; these are memory of its `strips_bytes`, or new."""
    outputs, inputs = shape
    if strips is None:
        strips = torch.empty(strips_bytes(kind, shape), dtype=torch.uint8)
    assert blocks.shape == (outputs, inputs // KINDS[kind].inputs * KINDS[kind].n_bytes)
    assert strips.numel() == strips_bytes(kind, shape)
    assert blocks.strides[1] == 1
    made = PackedMatrix(kind, shape, dtype_of(level), strips)
    rows = blocks.ctypes.data
    row = blocks.strides[0]
    loaded(level).pack(rows, pointer(strips), row, made.form, outputs, inputs, team.size())
    return made


@torch.inference_mode()
def q8_0_blocks(weight: Tensor) -> npt.NDArray[np.uint8]:
    """A dense matrix [O, I] in blocks of Q8_0: int8, and an fp16 scale for every 32 inputs."""
    groups = weight.float().view(len(weight), -1, UNIT)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    codes = (groups / scales.clamp_min(torch.finfo(torch.float32).tiny)).round().to(torch.int8)
    blocks = torch.cat([scales.half().view(torch.int8), codes], dim=-1).flatten(1)
    return blocks.view(torch.uint8).numpy()


def strips_bytes(kind: str, shape: tuple[int, int]) -> int:
    """Bytes of a matrix [O, I] in strips."""
    return -(-shape[0] // STRIP) * (shape[1] // KINDS[kind].inputs) * KINDS[kind].strip_bytes


def supports_norm(level: Level, x: Tensor, add: Tensor | None, norm: Norm) -> bool:
    return (
        norm.form is not None
        and norm.weight is not None
        and x.dim() == 2
        and _is_native(level, x, norm.weight, *(() if add is None else (add,)))
        and x.shape[1] >= MIN_NORM
        and not torch.is_grad_enabled()
    )


def add_rms_norm(level: Level, x: Tensor, add: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """ops.add_norm."""
    assert norm.form is not None
    rows, dim = x.shape
    out = torch.empty(rows, dim, dtype=x.dtype)
    total = x if add is None else torch.empty(rows, dim, dtype=x.dtype)
    loaded(level).add_rms_norm(
        *map(pointer, (x, add, norm.weight, None if add is None else total, out)),
        x.stride(0), 0 if add is None else add.stride(0), rows, dim, norm.form.rounds_first,
        norm.eps, norm.form.offset, team.size(),
    )  # fmt: skip
    return total, out


def supports_gated_activation(level: Level, gate: Tensor, up: Tensor, activation: Activation) -> bool:
    return (
        activation in GATED
        and gate.dim() == 2
        and _is_native(level, gate, up)
        and not torch.is_grad_enabled()
    )


def gated_activation(level: Level, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """ops.gated_activation, in place of `gate`."""
    at = gate.data_ptr()
    row = gate.stride(0)
    run = getattr(loaded(level), GATED[activation])
    run(at, up.data_ptr(), at, row, up.stride(0), row, *gate.shape, team.size())
    return gate


silu_and_mul = gelu_and_mul = gated_activation  # as the self-check names them


# RoPE, stored KV, corrections


def _can_rotate(level: Level, rope: Rope, rotary: Rotary, dim: int, *tensors: Tensor) -> bool:
    cos, sin = rope.cos, rope.sin
    return (
        rotary == HALVES
        and _is_native(level, *tensors, cos, sin)
        and cos.stride(0) == sin.stride(0)
        and cos.shape[-1] % ROPE_STEP == 0
        and 0 < cos.shape[-1] <= dim <= MAX_DIM
    )


def supports_rope(level: Level, x: Tensor, rope: Rope, rotary: Rotary) -> bool:
    return _can_rotate(level, rope, rotary, x.shape[-1], x) and not torch.is_grad_enabled()


def apply_rope(level: Level, x: Tensor, rope: Rope, rotary: Rotary) -> Tensor:
    """ops.rotate."""
    out = torch.empty(x.shape, dtype=x.dtype)
    scatter_kv(level, [(0, x, None)], out, out, rope, rotary)
    return out


def supports_scatter(
    level: Level, chunks: Sequence[RecordView], keys: Tensor, values: Tensor, rope: Rope, rotary: Rotary
) -> bool:
    stored = [x for _, k, v in chunks for x in (k, v)]
    is_equal = keys.shape[-1] == values.shape[-1]
    return is_equal and _is_native(level, values, *stored) and supports_rope(level, keys, rope, rotary)


def scatter_kv(
    level: Level, chunks: Sequence[tuple[int, Tensor, Tensor | None]], keys: Tensor, values: Tensor, rope: Rope,
    rotary: Rotary,
) -> None:  # fmt: skip
    """ops.place."""
    cos, sin = rope.cos, rope.sin
    table = pack("KvSegment", [_segment(*chunk) for chunk in chunks])
    loaded(level).scatter_kv(
        *map(pointer, (table, keys, values, cos, sin)),
        *keys.stride()[:2], *values.stride()[:2], cos.stride(0),
        len(chunks), keys.shape[0], keys.shape[2], cos.shape[1], team.size(),
    )  # fmt: skip


def _segment(start: int, keys: Tensor, values: Tensor | None) -> tuple[int, ...]:
    strides = *keys.stride()[:2], *(keys if values is None else values).stride()[:2]
    return keys.data_ptr(), pointer(values), *strides, start, keys.shape[1]


def supports_correction(
    level: Level,
    keys: Tensor,
    values: Tensor,
    fresh: RecomputedTokens,
    rope: Rope,
    rotary: Rotary,
    *_: object,
) -> bool:
    dim = keys.shape[-1]
    parts = (keys, values, fresh.keys, fresh.values)
    is_equal = dim == values.shape[-1]
    return is_equal and dim % ROPE_STEP == 0 and _can_rotate(level, rope, rotary, dim, *parts)


def correct_kv(
    level: Level, keys: Tensor, values: Tensor, fresh: RecomputedTokens, rope: Rope, rotary: Rotary,
    params: CorrectionParams, prior: Prior | None = None,
) -> None:  # fmt: skip
    """ops.correct."""
    cos, sin = rope.cos, rope.sin
    first, first_reused = (
        torch.tensor([0, *sizes]).cumsum(0) for sizes in (fresh.recomputed_per_chunk, fresh.reused_per_chunk)
    )
    # Tensors that are made here have a name: they must live until the call returns.
    weights, constant = (None, None) if prior is None else (x.float().contiguous() for x in prior)
    context_weight = torch.tensor(fresh.context_weight, dtype=torch.float32)
    parts = keys, values, fresh.keys, fresh.values
    indices = fresh.row_index, fresh.recomputed_index, first, fresh.reused_index, first_reused
    loaded(level).correct_kv(
        *map(pointer, (*parts, cos, sin, *indices, weights, constant, context_weight)),
        *(stride for x in parts for stride in x.stride()[:2]), cos.stride(0),
        keys.shape[0], keys.shape[2], cos.shape[1], len(fresh.recomputed_index), len(fresh.recomputed_per_chunk),
        params.chunk_shrinkage, params.zero_shrinkage, params.key_scale, params.value_scale,
        -1.0 if params.penalty is None else params.penalty,
        params.prior_shrinkage, params.prior_key_scale, params.prior_value_scale, team.size(),
    )  # fmt: skip
