"""The operations of the forward pass, and the backends of each. This is the only place that chooses.

    operation             backends, native ones first
    attend                native | flash-attn | SDPA (flash) | Triton | SDPA | plain torch
    attend_with_scores    native | plain torch
    attend_at             Triton | plain torch
    attend_chunks         flash-attn varlen | one chunk after another
    rotate                native | the model's own function
    place                 native | Triton | the model's own function
    linear                native (bf16) | torch
    correct               native | plain torch
    add_norm              native | the model's own module
    gated_activation      native | the model's own function

A backend may serve if it supports the tensors and computed the right numbers on this machine (selfcheck.py). The first in
the table serves, with an exception: on a CPU attention and linear layers are timed once for each class of shapes
(autotune.py), where "native" is one backend for each instruction set. Native corrections take an eighth of torch's time;
the others are single passes over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from blendserve.kernels import reference, selfcheck, shape_classes, switches
from blendserve.kernels.activation import Activation
from blendserve.kernels.chunks import ChunkStack
from blendserve.kernels.cpu import bindings, sdpa
from blendserve.kernels.cpu.isa import LEVELS, Level
from blendserve.kernels.cuda import dense, packed, scattered
from blendserve.kernels.cuda import place as cuda_place
from blendserve.kernels.dispatch import Backend, KernelOp, Tuning, TuningResult
from blendserve.kernels.norm import Norm
from blendserve.kernels.rotary import Rotary
from blendserve.kernels.rows import AttentionPlan, plan_rows
from blendserve.kernels.selfcheck import Kind
from blendserve.kernels.types import (
    AttentionSpec,
    CorrectionParams,
    Prior,
    RecomputedTokens,
    RecordView,
    Rope,
)

R = TypeVar("R")


def _native(
    function: str,
    run: Callable[..., R],
    supports: Callable[..., bool],
    levels: Sequence[Level] = tuple(LEVELS.values()),
) -> Iterator[Backend[..., R]]:
    """Backends of the CPU's instruction sets that have the function, the widest first."""
    for level in reversed(levels):
        if function in level.sources:
            yield Backend(
                f"{level.title} kernel",
                partial(run, level),
                partial(supports, level),
                partial(_native_reason, function, level),
                is_native=True,
            )


def _native_reason(function: str, level: Level, *_: object, **__: object) -> str:
    """Of the same source for the same dtype, the widest instruction set serves."""
    source = level.sources[function]
    for wider in LEVELS.values():
        same = wider.dtype == level.dtype and wider.sources.get(function) == source
        if same and wider.needs > level.needs and selfcheck.cpu_status(wider).active:
            return f"{wider.title} has the same kernel"
    status = selfcheck.cpu_status(level)
    return "" if status.active else status.reason


def _attention_reason(
    check: Callable[..., str],
    forms: tuple[selfcheck.Attend, ...],
    rows: tuple[tuple[int, ...], ...],
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    spec: AttentionSpec,
    plan: object,
) -> str:
    return check(forms, Kind.of(q, keys, spec), rows)


def _sdpa_reason(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> str:
    """Supported windows hide nothing, so the check needs none."""
    return selfcheck.attention_trouble(
        (dense.sdpa,), Kind.of(q, keys, AttentionSpec(spec.scale)), _dense_rows
    )


def _cpu_sdpa_reason(
    q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan
) -> str:
    if not switches.is_native_on():
        return f"switched off by {switches.NATIVE}=0"
    rows = (*_dense_rows, *selfcheck.SCATTERED)
    return selfcheck.attention_trouble((sdpa.attend,), Kind.of(q, keys, spec), rows)


_dense_rows = selfcheck.ONE_ROW + selfcheck.DENSE
_scattered_reason = partial(
    _attention_reason,
    selfcheck.triton_trouble,
    scattered.FORMS,
    selfcheck.ONE_ROW + selfcheck.SCATTERED,
)

ATTEND = KernelOp(
    *_native("attention", bindings.attention, bindings.supports_attention),
    Backend(  # contiguous rows on a GPU
        "flash-attn",
        dense.flash,
        dense.fits_flash,
        partial(_attention_reason, selfcheck.attention_trouble, (dense.flash,), _dense_rows),
    ),
    Backend("torch's FlashAttention", dense.sdpa, dense.fits_sdpa, _sdpa_reason),
    Backend("Triton kernel", scattered.attend, scattered.fits_gpu, _scattered_reason),  # any rows on a GPU
    Backend("torch's SDPA", sdpa.attend, sdpa.fits, _cpu_sdpa_reason),
    Backend("plain torch", reference.attend_reference),
    tuning=Tuning("attend", shape_classes.attention_class, shape_classes.attention_calls),
)
ATTEND_WITH_SCORES = KernelOp(
    *_native("attention", bindings.attention_with_key_scores, bindings.supports_attention),
    Backend("plain torch", reference.attend_with_scores_reference),
    tuning=Tuning("attend_with_scores", shape_classes.scores_class, shape_classes.attention_calls),
)
ATTEND_AT = KernelOp(
    Backend("Triton kernel", scattered.attend_at, scattered.fits_at, _scattered_reason),
    Backend("plain torch", reference.attend_at_reference),
)
ROTATE = KernelOp(
    *_native("scatter_kv", bindings.apply_rope, bindings.supports_rope),
    Backend("the model's own function", reference.rotate_reference),
)


def _placing_reason(
    chunks: Sequence[RecordView], keys: Tensor, values: Tensor, rope: Rope, rotary: Rotary
) -> str:
    assert rotary.form is not None
    return selfcheck.placing_trouble(rotary.form, keys.device, keys.dtype, keys.shape[-1])


PLACE = KernelOp(
    *_native("scatter_kv", bindings.scatter_kv, bindings.supports_scatter),
    Backend("Triton kernel", cuda_place.place, cuda_place.fits, _placing_reason),
    Backend("the model's own function", reference.place_reference),
)
# In fp32 torch's own sums make layer 0's keys the model's own to the bit; bf16's rounding hides the difference.
LINEAR = KernelOp(
    *_native(
        "linear",
        bindings.linear,
        bindings.supports_linear,
        [level for level in LEVELS.values() if level.dtype == "bfloat16"],
    ),
    Backend("torch", reference.linear_reference),
    tuning=Tuning("linear", shape_classes.linear_class, shape_classes.linear_calls),
)
CORRECT = KernelOp(
    *_native("correct_kv", bindings.correct_kv, bindings.supports_correction),
    Backend("plain torch", reference.correct_reference),
)
ADD_NORM = KernelOp(
    *_native("add_rms_norm", bindings.add_rms_norm, bindings.supports_norm),
    Backend("the model's own module", reference.add_norm_reference),
)
GATED_ACTIVATION = KernelOp(
    *_native("silu_and_mul", bindings.silu_and_mul, bindings.supports_silu_and_mul),
    Backend("the model's own function", reference.gated_activation_reference),
)


def tuning_results() -> list[TuningResult]:
    """The backends for all classes of shapes that this process has met on the CPU: times, and why others do not serve."""
    return [result for operation in OPERATIONS.values() for result in operation.tuning_results()]


def forget() -> None:
    """Read the switches and select backends anew at the next calls."""
    switches.read_again()
    for operation in OPERATIONS.values():
        operation.forget()


def attend(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Tensor:
    """Attention that is causal by *position*: row i sees key j iff position(j) <= position(i).

    Rotated queries q [H, S, D], rows anywhere in ascending order, over keys and values [K, T, D] -> [S, H * D].
    Equals softmax(softcap(scale q k^T) + causal mask by position) v. Raises ValueError where keys are too few.
    """
    if plan.host_positions is not None and plan.kv_len > keys.shape[1]:
        raise ValueError(f"a row at position {plan.kv_len - 1} needs more than {keys.shape[1]} keys")
    return ATTEND(q, keys, values, spec, plan)


def attend_with_scores(
    q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan
) -> tuple[Tensor, Tensor]:
    """The same without the keys in `plan.masked_keys` [T]; also each key's score [T] fp32.

    A key's score is the norm over rows of the mean over heads of its weight times the norm of its value.
    """
    return ATTEND_WITH_SCORES(q, keys, values, spec, plan)


def attend_at(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, at: Tensor) -> Tensor:
    """One row q [H, 1, D] at position `at` [1] that only the device knows, over [K, T, D] -> [1, H * D]."""
    return ATTEND_AT(q, keys, values, spec, at)


def rotate(x: Tensor, rope: Rope, rotary: Rotary) -> Tensor:
    """x [heads, S, D] rotated by RoPE to the positions of `rope` [S]."""
    return ROTATE(x, rope, rotary)


def place(chunks: Sequence[RecordView], keys: Tensor, values: Tensor, rope: Rope, rotary: Rotary) -> None:
    """Copy stored chunks into one layer's cache, keys and values [K, T, D], and rotate the keys.

    rope: of positions [T].
    """
    PLACE(chunks, keys, values, rope, rotary)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [S, I] times weight [O, I], plus bias [O] -> [S, O]."""
    return LINEAR(x, weight, bias)


def correct(
    keys: Tensor,
    values: Tensor,
    fresh: RecomputedTokens,
    rope: Rope,
    rotary: Rotary,
    params: CorrectionParams,
    prior: Prior | None = None,
) -> None:
    """Correct reused tokens' keys (after RoPE) and values [K, N, D] by the deviations of their chunks' recomputed tokens.

    In place; rope: of positions [N]. Formulas: blend/corrections.
    """
    CORRECT(keys, values, fresh, rope, rotary, params, prior)


def add_norm(x: Tensor, add: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """x + add [S, E] (without `add`, x itself) and its norm, with the bits of the model's own modules."""
    return ADD_NORM(x, add, norm)


def gated_activation(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up [S, I], with the bits of the model's own function. `gate` is overwritten."""
    return GATED_ACTIVATION(gate, up, activation)


def _one_after_another(
    q: Tensor, k: Tensor, v: Tensor, prefix_kv: tuple[Tensor, Tensor], spec: AttentionSpec, stack: ChunkStack
) -> Tensor:
    attended = []
    for span in stack.spans:
        here = slice(span.start, span.stop)
        keys, values = (torch.cat([x, own[:, here]], dim=1) for x, own in zip(prefix_kv, (k, v), strict=True))
        attended.append(attend(q[:, here], keys, values, spec, stack.plan(len(span), spec.window)))
    return torch.cat(attended)


def _packed_reason(
    q: Tensor, k: Tensor, v: Tensor, prefix_kv: tuple[Tensor, Tensor], spec: AttentionSpec, stack: ChunkStack
) -> str:
    return selfcheck.attention_trouble((packed.packed_twice,), Kind.of(q, k, spec), _dense_rows)


ATTEND_CHUNKS = KernelOp(
    Backend("flash-attn, packed", packed.attend, packed.fits, _packed_reason),
    Backend("one chunk after another", _one_after_another),
)


def attend_chunks(
    q: Tensor, k: Tensor, v: Tensor, prefix_kv: tuple[Tensor, Tensor], spec: AttentionSpec, stack: ChunkStack
) -> Tensor:
    """Rotated rows of all chunks of a stack, q [H, S, D], k and v [K, S, D], each over [prefix | itself] -> [S, H * D].

    prefix_kv: keys (after RoPE) and values [K, F, D] of the prefix.
    """
    return ATTEND_CHUNKS(q, k, v, prefix_kv, spec, stack)


def attention_backends(
    n_heads: int, n_kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device, spec: AttentionSpec
) -> tuple[str, str]:
    """Names of the attention backends for such heads: of contiguous rows and of scattered ones."""
    q = torch.zeros(n_heads, 64, dim, dtype=dtype, device=device)
    keys = torch.zeros(n_kv_heads, 128, dim, dtype=dtype, device=device)
    plans = (
        plan_rows(at.to(device), n_heads // n_kv_heads, spec.window, at)
        for at in (torch.arange(64), 2 * torch.arange(64))
    )
    contiguous, scattered_rows = (ATTEND.select(q, keys, keys, spec, plan).name for plan in plans)
    return contiguous, scattered_rows


# The table above, by name.
OPERATIONS: dict[str, KernelOp[..., Any]] = {
    "attend": ATTEND,
    "attend_with_scores": ATTEND_WITH_SCORES,
    "attend_at": ATTEND_AT,
    "attend_chunks": ATTEND_CHUNKS,
    "rotate": ROTATE,
    "place": PLACE,
    "linear": LINEAR,
    "correct": CORRECT,
    "add_norm": ADD_NORM,
    "gated_activation": GATED_ACTIVATION,
}
