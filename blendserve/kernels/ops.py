"""The operations that someone must compute, and who computes each: the only place that chooses.

    operation             backends, best first
    attend                compiled | flash-attn | SDPA (flash) | Triton | FlexAttention | SDPA with masks | reference
    attend_with_scores    compiled | reference
    attend_at             Triton | reference
    attend_chunks         flash-attn varlen | one chunk after another
    rotate                compiled | reference
    place                 compiled | Triton | reference
    linear                compiled | torch
    correct               compiled | reference
    add_norm              compiled | the model's own module
    gated_activation      compiled | the model's own function

A backend serves where it is made for such tensors (`fits`), is right on this machine (verify.py, asked once for each
kind of them) and is the faster one (`is_fastest`). The reference always can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from blendserve.kernels import reference, verify
from blendserve.kernels.activation import Activation
from blendserve.kernels.chunks import ChunkStack
from blendserve.kernels.cpu import attend as cpu_attend
from blendserve.kernels.cpu import correct as cpu_correct
from blendserve.kernels.cpu import gate as cpu_gate
from blendserve.kernels.cpu import linear as cpu_linear
from blendserve.kernels.cpu import norm as cpu_norm
from blendserve.kernels.cpu import place as cpu_place
from blendserve.kernels.cpu.isa import LEVELS, Level
from blendserve.kernels.cuda import dense, flex, masked, packed, scattered
from blendserve.kernels.cuda import place as cuda_place
from blendserve.kernels.norm import Norm
from blendserve.kernels.rotary import Rotary
from blendserve.kernels.rows import RowPlan, plan_rows
from blendserve.kernels.types import AttentionSpec, CorrectionParams, RecomputedTokens, Rope, StoredChunk
from blendserve.kernels.verify import Kind

P = ParamSpec("P")
R = TypeVar("R")


def _always(*_: object, **__: object) -> bool:
    return True


def _no_trouble(*_: object, **__: object) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Backend(Generic[P, R]):
    """One way to compute an operation. All of its functions take what the operation takes."""

    name: str
    run: Callable[P, R]
    fits: Callable[P, bool] = _always  # whether it is made for these
    trouble: Callable[P, str] = _no_trouble  # why it may not serve on this machine, "" where it may
    is_fastest: Callable[P, bool] = _always

    def serves(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Whether it can, may and should."""
        return (
            self.fits(*args, **kwargs)
            and self.is_fastest(*args, **kwargs)
            and not self.trouble(*args, **kwargs)
        )


class Operation(Generic[P, R]):
    """A row of the table: the first backend that serves does it."""

    def __init__(self, *backends: Backend[P, R]) -> None:
        self.backends = backends

    def select_backend(self, *args: P.args, **kwargs: P.kwargs) -> Backend[P, R]:
        return next(b for b in self.backends if b.serves(*args, **kwargs))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.select_backend(*args, **kwargs).run(*args, **kwargs)


def _compiled(
    operation: str,
    run: Callable[..., R],
    fits: Callable[..., bool],
    is_fastest: Callable[..., bool] = _always,
) -> Iterator[Backend[..., R]]:
    """The backends of the CPU's instruction sets that have such a kernel, the widest first."""
    for level in reversed(LEVELS.values()):
        if operation in level.sources:
            yield Backend(
                f"{level.title} kernel",
                partial(run, level),
                partial(fits, level),
                partial(_cpu_trouble, level),
                partial(is_fastest, level),
            )


def _cpu_trouble(level: Level, *_: object, **__: object) -> str:
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
    Backend("plain torch", reference.attend_reference),
)
ATTEND_WITH_SCORES = Operation(
    *_compiled("attend", cpu_attend.attend_with_scores, cpu_attend.fits),
    Backend("plain torch", reference.attend_with_scores_reference),
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
    chunks: Sequence[StoredChunk], keys: Tensor, values: Tensor, rope: Rope, rotary: Rotary
) -> str:
    assert rotary.form is not None
    return verify.placing_trouble(rotary.form, keys.device, keys.dtype, keys.shape[-1])


PLACE = Operation(
    *_compiled("place", cpu_place.place, cpu_place.fits),
    Backend("Triton kernel", cuda_place.place, cuda_place.fits, _placing_trouble),
    Backend("the model's own function", reference.place_reference),
)
LINEAR = Operation(
    *_compiled("linear", cpu_linear.linear, cpu_linear.fits, cpu_linear.is_fastest),
    Backend("torch", reference.linear_reference),
)
CORRECT = Operation(
    *_compiled("correct", cpu_correct.correct, cpu_correct.fits),
    Backend("plain torch", reference.correct_reference),
)
ADD_NORM = Operation(
    *_compiled("norm", cpu_norm.add_norm, cpu_norm.fits),
    Backend("the model's own module", reference.add_norm_reference),
)
GATED_ACTIVATION = Operation(
    *_compiled("gate", cpu_gate.gated_activation, cpu_gate.fits),
    Backend("the model's own function", reference.gated_activation_reference),
)


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


def place(chunks: Sequence[StoredChunk], keys: Tensor, values: Tensor, rope: Rope, rotary: Rotary) -> None:
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
) -> None:
    """Move the other tokens' keys (after RoPE) and values [K, N, D] as the recomputed tokens of their chunks moved.

    In place; rope: of positions [N]. blend/corrections tells what is computed.
    """
    CORRECT(keys, values, fresh, rope, rotary, params)


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
