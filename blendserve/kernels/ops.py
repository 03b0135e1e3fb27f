"""The operations that someone must compute, and who computes each: the only place that chooses.

    operation             backends, ours first
    attend                compiled | flash-attn | SDPA (flash) | Triton | FlexAttention | masked SDPA | SDPA | reference
    attend_with_scores    compiled | reference
    attend_at             Triton | reference
    attend_chunks         flash-attn varlen | one chunk after another
    rotate                compiled | reference
    place                 compiled | Triton | reference
    linear                compiled (bf16) | torch
    correct               compiled | reference
    add_norm              compiled | the model's own module
    gated_activation      compiled | the model's own function
    pack, decode          compiled | reference
    reconstruct           compiled | reference

A backend may serve where it is made for such tensors (`fits`) and is right on this machine (verify.py, asked once for
each kind of them). The reference always may. The first that may does it, but for four operations on a CPU, where
"compiled" is one backend for each instruction set: who attends, multiplies and corrects is measured, once for each class
of shapes (samples.py), by the rule of race.py. The others are many small passes over memory that give the plain form's
bits in one, and need no race.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from blendserve.kernels import coding, reference, samples, verify
from blendserve.kernels.activation import Activation
from blendserve.kernels.chunks import ChunkStack
from blendserve.kernels.cpu import attend as cpu_attend
from blendserve.kernels.cpu import coding as cpu_coding
from blendserve.kernels.cpu import correct as cpu_correct
from blendserve.kernels.cpu import gate as cpu_gate
from blendserve.kernels.cpu import linear as cpu_linear
from blendserve.kernels.cpu import norm as cpu_norm
from blendserve.kernels.cpu import place as cpu_place
from blendserve.kernels.cpu import sdpa
from blendserve.kernels.cpu.isa import LEVELS, Level
from blendserve.kernels.cuda import dense, flex, masked, packed, scattered
from blendserve.kernels.cuda import place as cuda_place
from blendserve.kernels.norm import Norm
from blendserve.kernels.operation import Backend, Operation, Racing, Row
from blendserve.kernels.rotary import Rotary
from blendserve.kernels.rows import RowPlan, plan_rows
from blendserve.kernels.types import (
    AttentionSpec,
    CorrectionParams,
    Prior,
    RecomputedTokens,
    RecordView,
    Rope,
)
from blendserve.kernels.verify import Kind

R = TypeVar("R")


def _compiled(
    operation: str,
    run: Callable[..., R],
    fits: Callable[..., bool],
    levels: Sequence[Level] = tuple(LEVELS.values()),
) -> Iterator[Backend[..., R]]:
    """The backends of the CPU's instruction sets that have such a kernel, the widest first."""
    for level in reversed(levels):
        if operation in level.sources:
            yield Backend(
                f"{level.title} kernel",
                partial(run, level),
                partial(fits, level),
                partial(_cpu_trouble, level),
                is_ours=True,
            )


def _any(*_: object, **__: object) -> bool:
    return True


def _cpu_trouble(level: Level, *_: object, **__: object) -> str:
    """Where the same sources are compiled for a wider set, and right, there is nothing to race."""
    for wider in LEVELS.values():
        same = wider.dtype == level.dtype and wider.sources == level.sources
        if same and wider.needs > level.needs and verify.cpu_status(wider).active:
            return f"{wider.title} has the same kernel"
    status = verify.cpu_status(level)
    return "" if status.active else status.reason


def _attention_trouble(
    check: Callable[..., str],
    forms: tuple[verify.Attend, ...],
    rows: tuple[tuple[int, ...], ...],
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    spec: AttentionSpec,
    plan: object,
) -> str:
    return check(forms, Kind.of(q, keys, spec), rows)


def _sdpa_trouble(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan) -> str:
    """A window that hides nothing is none."""
    kind = Kind.of(q, keys, AttentionSpec(spec.scale))
    return verify.attention_trouble((dense.sdpa,), kind, verify.ONE_ROW + verify.SIDE_BY_SIDE)


def _cpu_sdpa_trouble(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan) -> str:
    if verify.is_switched_off():
        return f"switched off by {verify.SWITCH}=0"
    rows = verify.ONE_ROW + verify.SIDE_BY_SIDE + verify.SCATTERED
    return verify.attention_trouble((sdpa.attend,), Kind.of(q, keys, spec), rows)


_dense_rows = verify.ONE_ROW + verify.SIDE_BY_SIDE
_scattered_trouble = partial(
    _attention_trouble, verify.triton_trouble, scattered.FORMS, verify.ONE_ROW + verify.SCATTERED
)

ATTEND = Operation(
    *_compiled("attend", cpu_attend.attend, cpu_attend.fits),
    Backend(  # rows side by side on a GPU
        "flash-attn",
        dense.flash,
        dense.fits_flash,
        partial(_attention_trouble, verify.attention_trouble, (dense.flash,), _dense_rows),
    ),
    Backend("torch's FlashAttention", dense.sdpa, dense.fits_sdpa, _sdpa_trouble),
    Backend(
        "Triton kernel", scattered.attend, scattered.fits_gpu, _scattered_trouble
    ),  # rows anywhere on a GPU
    Backend(
        "FlexAttention",
        flex.attend,
        flex.fits,
        partial(
            _attention_trouble,
            verify.triton_trouble,
            (flex.attend,),
            (*verify.ONE_ROW[1:], *verify.SCATTERED),
        ),
    ),
    Backend("SDPA with masks", masked.attend, masked.fits),
    Backend("torch's SDPA", sdpa.attend, sdpa.fits, _cpu_sdpa_trouble),
    Backend("plain torch", reference.attend_reference),
    racing=Racing("attend", samples.attention_class, samples.attention_samples),
)
ATTEND_WITH_SCORES = Operation(
    *_compiled("attend", cpu_attend.attend_with_scores, cpu_attend.fits),
    Backend("plain torch", reference.attend_with_scores_reference),
    racing=Racing("attend_with_scores", samples.scores_class, samples.scores_samples),
)
ATTEND_AT = Operation(
    Backend("Triton kernel", scattered.attend_at, scattered.fits_at, _scattered_trouble),
    Backend("plain torch", reference.attend_at_reference),
)
ROTATE = Operation(
    *_compiled("place", cpu_place.rotate, cpu_place.fits_rotation),
    Backend("the model's own function", reference.rotate_reference),
)


def _placing_trouble(
    chunks: Sequence[RecordView], keys: Tensor, values: Tensor, rope: Rope, rotary: Rotary
) -> str:
    assert rotary.form is not None
    return verify.placing_trouble(rotary.form, keys.device, keys.dtype, keys.shape[-1])


PLACE = Operation(
    *_compiled("place", cpu_place.place, cpu_place.fits),
    Backend("Triton kernel", cuda_place.place, cuda_place.fits, _placing_trouble),
    Backend("the model's own function", reference.place_reference),
)
# In fp32 torch's own sums alone make layer 0's keys the model's own to the bit; bf16's rounding hides the difference.
LINEAR = Operation(
    *_compiled(
        "linear",
        cpu_linear.linear,
        cpu_linear.fits,
        [level for level in LEVELS.values() if level.dtype == "bfloat16"],
    ),
    Backend("torch", reference.linear_reference),
    racing=Racing("linear", samples.linear_class, samples.linear_samples),
)
CORRECT = Operation(
    *_compiled("correct", cpu_correct.correct, cpu_correct.fits),
    Backend("plain torch", reference.correct_reference),
    racing=Racing("correct", samples.correction_class, samples.correction_samples),
)
ADD_NORM = Operation(
    *_compiled("norm", cpu_norm.add_norm, cpu_norm.fits),
    Backend("the model's own module", reference.add_norm_reference),
)
GATED_ACTIVATION = Operation(
    *_compiled("gate", cpu_gate.gated_activation, cpu_gate.fits),
    Backend("the model's own function", reference.gated_activation_reference),
)


RACED: tuple[Operation[..., Any], ...] = (ATTEND, ATTEND_WITH_SCORES, LINEAR, CORRECT)


def measured() -> list[Row]:
    """Who serves for which shapes, as far as this process has met them on the CPU: times, and why others do not."""
    return [row for operation in RACED for row in operation.measured()]


def attend(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan) -> Tensor:
    """Attention that is causal by *position*: row i sees key j iff position(j) <= position(i).

    Rotated queries q [H, S, D], rows anywhere in ascending order, over keys and values [K, T, D] -> [S, H * D].
    Equals softmax(softcap(scale q k^T) + causal mask by position) v. Raises ValueError where keys are too few.
    """
    if plan.known is not None and plan.end > keys.shape[1]:
        raise ValueError(f"a row at position {plan.end - 1} needs more than {keys.shape[1]} keys")
    return ATTEND(q, keys, values, spec, plan)


def attend_with_scores(
    q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan
) -> tuple[Tensor, Tensor]:
    """The same where nobody sees the keys in `plan.absent` [T]; also how much each key is looked at.

    That is, per key, the norm over rows of the mean over heads of weight times norm of the value [T] fp32.
    """
    return ATTEND_WITH_SCORES(q, keys, values, spec, plan)


def attend_at(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, at: Tensor) -> Tensor:
    """One row q [H, 1, D] at position `at` [1] that only the device knows, over [K, T, D] -> [1, H * D]."""
    return ATTEND_AT(q, keys, values, spec, at)


def rotate(x: Tensor, rope: Rope, rotary: Rotary) -> Tensor:
    """x [heads, S, D] turned by RoPE to the positions of `rope` [S]."""
    return ROTATE(x, rope, rotary)


def place(chunks: Sequence[RecordView], keys: Tensor, values: Tensor, rope: Rope, rotary: Rotary) -> None:
    """Stored chunks to their places in one layer's cache, keys and values [K, T, D]: keys turned, values as they are.

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
    """Move the other tokens' keys (after RoPE) and values [K, N, D] as the recomputed tokens of their chunks moved.

    In place; rope: of positions [N]. blend/corrections tells what is computed.
    """
    CORRECT(keys, values, fresh, rope, rotary, params, prior)


def add_norm(x: Tensor, add: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """x + add [S, E] (without `add`, x itself), and that normed: to the bit as the reader's own modules round."""
    return ADD_NORM(x, add, norm)


def gated_activation(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up [S, I], to the bit as the reader's own function rounds. `gate` is used up."""
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


def _packed_trouble(
    q: Tensor, k: Tensor, v: Tensor, prefix_kv: tuple[Tensor, Tensor], spec: AttentionSpec, stack: ChunkStack
) -> str:
    return verify.attention_trouble((packed.packed_twice,), Kind.of(q, k, spec), _dense_rows)


ATTEND_CHUNKS = Operation(
    Backend("flash-attn, packed", packed.attend, packed.fits, _packed_trouble),
    Backend("one chunk after another", _one_after_another),
)


def attend_chunks(
    q: Tensor, k: Tensor, v: Tensor, prefix_kv: tuple[Tensor, Tensor], spec: AttentionSpec, stack: ChunkStack
) -> Tensor:
    """Rotated rows of all chunks of a stack, q [H, S, D], k and v [K, S, D], each over [prefix | itself] -> [S, H * D].

    prefix_kv: keys (after RoPE) and values [K, F, D] that all of them stand behind.
    """
    return ATTEND_CHUNKS(q, k, v, prefix_kv, spec, stack)


def attention_backends(
    n_heads: int, n_kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device, spec: AttentionSpec
) -> tuple[str, str]:
    """Who attends for such heads: for rows that stand side by side, and for rows anywhere."""
    q = torch.zeros(n_heads, 64, dim, dtype=dtype, device=device)
    keys = torch.zeros(n_kv_heads, 128, dim, dtype=dtype, device=device)
    plans = (
        plan_rows(at.to(device), n_heads // n_kv_heads, spec.window, at)
        for at in (torch.arange(64), 2 * torch.arange(64))
    )
    side_by_side, anywhere = (ATTEND.select_backend(q, keys, keys, spec, plan).name for plan in plans)
    return side_by_side, anywhere


PACK = Operation(*_compiled("pack", cpu_coding.pack, _any), Backend("reference", coding.pack_reference))


def pack(values: np.ndarray, contexts: np.ndarray, means: np.ndarray, model: coding.SymbolModel) -> bytes:
    """Symbols [C, N] of int8 -> the bytes that `decode` reads.

    contexts [C]: the tokens'. means [N]: what to expect of each axis.
    """
    return PACK(values, contexts, means, model)


RECONSTRUCT = Operation(
    *_compiled("reconstruct", cpu_coding.reconstruct, cpu_coding.fits_reconstruct),
    Backend("reference", coding.reconstruct_reference),
)


def reconstruct(
    below: Tensor, symbols: Tensor | None, layer: coding.LayerMap, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Codes of the layer below [C, W], and symbols [C, N], all of int8 -> heads [W / D, C, D] and codes.

    symbols: None = all of them 0. The heads are those of keys and behind them those of values.
    """
    return RECONSTRUCT(below, symbols, layer, dim, dtype)


DECODE = Operation(
    *_compiled("decode", cpu_coding.decode, cpu_coding.fits_decode),
    Backend("reference", coding.decode_reference),
)


def decode(
    segment: memoryview,
    below: tuple[np.ndarray | None, Tensor],
    means: np.ndarray,
    model: coding.SymbolModel,
    layer: coding.LayerMap,
    dim: int,
    dtype: torch.dtype,
) -> tuple[Tensor, np.ndarray, Tensor]:
    """Bytes of a layer -> heads [W / D, C, D] as `reconstruct` gives them, symbols [C, N] and codes [C, W], both int8.

    below: symbols [C, M] and codes [C, W] of the layer below; symbols are None where it has none. means [N]: what to
    expect of each axis. Raises ValueError for bytes that are no such symbols.
    """
    return DECODE(segment, below, means, model, layer, dim, dtype)


# The table above, by name.
OPERATIONS: dict[str, Operation[..., Any]] = {
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
    "pack": PACK,
    "reconstruct": RECONSTRUCT,
    "decode": DECODE,
}
