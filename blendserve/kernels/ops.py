"""The operations of the forward pass, and the backends of each in the order of preference; "plain torch" (reference.py)
comes last. This is the only place that chooses.

A backend may serve if it supports the tensors and computed the right numbers on this machine (selfcheck.py; torch's norm
is taken as it is). The first in the table serves, with an exception: on a CPU attention and linear layers are measured
once for each kind of rows (autotune.py), where "native" is one backend for each instruction set. Native corrections take
an eighth of torch's time; the others are single passes over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blendserve.kernels import autotune, norm, reference, sdpa, selfcheck, switches
from blendserve.kernels.chunks import one_after_another
from blendserve.kernels.cpu import bindings
from blendserve.kernels.cpu.isa import LEVELS, Level
from blendserve.kernels.cuda import flash, scattered
from blendserve.kernels.cuda import place as cuda_place
from blendserve.kernels.dispatch import Backend, KernelOp
from blendserve.kernels.rotary import Rotary
from blendserve.kernels.rows import AttentionPlan, plan_rows
from blendserve.kernels.selfcheck import DENSE, ONE_ROW, SCATTERED, Kind
from blendserve.kernels.types import AttentionSpec, RecordView, Rope


def _native(
    function: str, run: Callable[..., Any], supports: Callable[..., bool], dtypes: Sequence[str] = ()
) -> Iterator[Backend]:
    """Backends of the CPU's instruction sets that have the function, the widest first. dtypes: () = all."""
    for level in reversed(LEVELS.values()):
        if function in level.sources and (not dtypes or level.dtype in dtypes):
            reason = partial(_native_reason, function, level)
            yield Backend(f"{level.title} kernel", partial(run, level), partial(supports, level), reason)


def _native_reason(function: str, level: Level, *_: object) -> str:
    """Why a native kernel does not serve: the widest instruction set serves, of the same source for the same dtype."""
    source = level.sources[function]
    for wider in LEVELS.values():
        same = wider.dtype == level.dtype and wider.sources.get(function) == source
        if same and wider.needs > level.needs and selfcheck.cpu_status(wider).active:
            return f"{wider.title} has the same kernel"
    status = selfcheck.cpu_status(level)
    return "" if status.active else status.reason


def _packed(
    function: str, run: Callable[..., Any], supports: Callable[..., bool], weight: int
) -> Iterator[Backend]:
    """`_native` for quantised weights, which are the argument at `weight`: each kind is checked before its first use."""
    for level in reversed(LEVELS.values()):
        if function in level.sources:

            def reason(*args: Any, level: Level = level) -> str:
                return _native_reason(function, level) or selfcheck.packed_trouble(level, args[weight].kind)

            yield Backend(f"{level.title} kernel", partial(run, level), partial(supports, level), reason)


def _flash_reason(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: object) -> str:
    return selfcheck.attention_trouble((flash.attend,), Kind.of(q, keys, values, spec), ONE_ROW + DENSE)


def _packed_chunks_reason(
    q: Tensor, k: Tensor, v: Tensor, prefix: object, spec: AttentionSpec, *_: object
) -> str:
    return selfcheck.packed_chunks_trouble(Kind.of(q, k, v, spec))


def _sdpa_reason(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> str:
    """Why SDPA does not serve. On a GPU, supported windows hide nothing: the check needs none."""
    on_gpu = q.device.type == "cuda"
    if not on_gpu and not switches.is_native_on():
        return f"switched off by {switches.NATIVE}=0"
    kind = Kind.of(q, keys, values, AttentionSpec(spec.scale) if on_gpu else spec)
    return selfcheck.attention_trouble((sdpa.attend,), kind, ONE_ROW + DENSE + (() if on_gpu else SCATTERED))


def _triton_reason(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: object) -> str:
    return selfcheck.attention_trouble(scattered.FORMS, Kind.of(q, keys, values, spec), ONE_ROW + SCATTERED)


def _placing_reason(chunks: object, keys: Tensor, values: Tensor, rope: Rope, rotary: Rotary) -> str:
    return selfcheck.placing_trouble(rotary, keys.device, keys.dtype, keys.shape[-1], rope.cos.shape[-1])


def _has_keys(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> None:
    if plan.host_positions is not None and plan.kv_len > keys.shape[1]:
        raise ValueError(f"a row at position {plan.kv_len - 1} needs more than {keys.shape[1]} keys")


def _fits_cache(
    chunks: Sequence[RecordView], keys: Tensor, values: Tensor, rope: Rope, rotary: Rotary
) -> None:
    """Kernels get pointers: chunks of other sizes than the cache's would read and write other memory."""
    for start, k, v in chunks:
        stop = start + k.shape[1]
        is_alike = k.dtype == keys.dtype and v.dtype == values.dtype
        is_alike = is_alike and k.shape == (keys.shape[0], k.shape[1], keys.shape[2])
        is_alike = is_alike and v.shape == (values.shape[0], k.shape[1], values.shape[2])
        if not is_alike or start < 0 or stop > min(keys.shape[1], values.shape[1], len(rope.cos)):
            raise ValueError(
                f"a chunk of {k.dtype} {tuple(k.shape)} and {v.dtype} {tuple(v.shape)} at token {start} does not fit a "
                f"cache of {keys.dtype} {tuple(keys.shape)} and {values.dtype} {tuple(values.shape)}"
            )


attend = KernelOp(
    reference.attend,
    *_native("attention", bindings.attention, bindings.supports_attention),
    Backend("flash-attn", flash.attend, flash.supports, _flash_reason),
    Backend("torch's SDPA", sdpa.attend, sdpa.supports, _sdpa_reason),
    Backend("Triton kernel", scattered.attend, scattered.supports, _triton_reason),
    rows=autotune.attention_rows,
    validate=_has_keys,
)
attend_with_scores = KernelOp(
    reference.attend_with_scores,
    *_native("attention", bindings.attention_with_key_scores, bindings.supports_attention),
    rows=autotune.scored_rows,
)
attend_at = KernelOp(
    reference.attend_at,
    Backend("Triton kernel", scattered.attend_at, scattered.supports, _triton_reason),
)
attend_chunks = KernelOp(
    reference.attend_chunks,
    Backend("flash-attn, packed", flash.attend_chunks, flash.supports_chunks, _packed_chunks_reason),
    Backend("one chunk after another", partial(one_after_another, attend)),
)
rotate = KernelOp(reference.rotate, *_native("scatter_kv", bindings.apply_rope, bindings.supports_rope))
place = KernelOp(
    reference.place,
    *_native("scatter_kv", bindings.scatter_kv, bindings.supports_scatter),
    Backend("Triton kernel", cuda_place.place, cuda_place.supports, _placing_reason),
    validate=_fits_cache,
)
# In fp32 torch's own sums make layer 0's keys the model's own to the bit; bf16's rounding hides the difference.
linear = KernelOp(
    reference.linear,
    *_native("linear", bindings.linear, bindings.supports_linear, ["bfloat16"]),
    rows=autotune.linear_rows,
)
packed_linear = KernelOp(
    reference.packed_linear,
    *_packed("packed_linear", bindings.packed_linear, bindings.supports_packed_linear, weight=1),
)
take = KernelOp(reference.take, *_packed("take", bindings.take, bindings.supports_take, weight=0))
correct = KernelOp(
    reference.correct, *_native("correct_kv", bindings.correct_kv, bindings.supports_correction)
)
add_norm = KernelOp(
    reference.add_norm,
    *_native("add_rms_norm", bindings.add_rms_norm, bindings.supports_norm),
    Backend("torch's fused norm", norm.fused_add_norm, norm.is_fused),
)
gated_activation = KernelOp(
    reference.gated_activation,
    *_native("silu_and_mul", bindings.gated_activation, bindings.supports_gated_activation),
)

_ALL: Sequence[KernelOp[..., Any]] = (
    attend, attend_with_scores, attend_at, attend_chunks, rotate, place, linear, packed_linear, take, correct, add_norm,
    gated_activation
)  # fmt: skip
OPERATIONS = {operation.name: operation for operation in _ALL}


def attention_backends(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> tuple[str, str]:
    """Names of the attention backends for such rows q [H, S, D] over [K, 2 S, D]: contiguous, and scattered."""
    group = len(q) // len(keys)
    rows = torch.arange(q.shape[1])
    plans = (plan_rows(at.to(q.device), group, spec.window, at) for at in (rows, 2 * rows))
    contiguous, anywhere = (attend.select(q, keys, values, spec, plan).name for plan in plans)
    return contiguous, anywhere
