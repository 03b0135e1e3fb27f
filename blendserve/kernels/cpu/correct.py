"""The corrections in the compiled kernel: what it takes, and the call."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from blendserve.kernels import team
from blendserve.kernels.cpu.isa import Level
from blendserve.kernels.cpu.library import dtype_of, loaded
from blendserve.kernels.rotary import HALVES, Rotary
from blendserve.kernels.types import CorrectionParams, Prior, RecomputedTokens, Rope

STEP, MAX_DIM = 32, 256


class CorrectCall(ctypes.Structure):
    """`CorrectCall` of correct.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "fresh_keys", "fresh_values", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("from", "at", "first", "others", "other_first")),
        *((name, ctypes.c_void_p) for name in ("prior_weights", "prior_constant", "foreign")),
        *((name, ctypes.c_int64) for name in ("k_head", "k_row", "v_head", "v_row")),
        *((name, ctypes.c_int64) for name in ("fk_head", "fk_row", "fv_head", "fv_row", "turn_row")),
        *((name, ctypes.c_int64) for name in ("kv", "dim", "width", "rows", "chunks")),
        *(
            (name, ctypes.c_float)
            for name in (
                *("weight", "still", "key_scale", "value_scale", "penalty"),
                *("trust", "prior_key_scale", "prior_value_scale"),
            )
        ),
        ("threads", ctypes.c_int64),
    )


def fits(
    level: Level,
    keys: Tensor,
    values: Tensor,
    fresh: RecomputedTokens,
    rope: Rope,
    rotary: Rotary,
    params: CorrectionParams,
    prior: Prior | None = None,
) -> bool:
    """Whether this instruction set's kernel is made for these."""
    cos, sin, dtype = rope.cos, rope.sin, dtype_of(level)
    parts = (keys, values, cos, sin)
    return (
        rotary.form == HALVES
        and all(x.dtype == dtype and x.device.type == "cpu" and x.stride(-1) == 1 for x in parts)
        and cos.stride(0) == sin.stride(0)
        and keys.shape[-1] % STEP == cos.shape[-1] % STEP == 0
        and 0 < cos.shape[-1] <= keys.shape[-1] <= MAX_DIM
    )


def correct(
    level: Level,
    keys: Tensor,
    values: Tensor,
    fresh: RecomputedTokens,
    rope: Rope,
    rotary: Rotary,
    params: CorrectionParams,
    prior: Prior | None = None,
) -> None:
    """ops.correct for what `fits`."""
    run(loaded(level), keys, values, fresh, rope, params, prior)


def run(
    library: ctypes.CDLL,
    keys: Tensor,
    values: Tensor,
    fresh: RecomputedTokens,
    rope: Rope,
    params: CorrectionParams,
    prior: Prior | None = None,
) -> None:
    """The call itself. The GIL is free meanwhile."""
    cos, sin = rope.cos, rope.sin
    first, other_first = (torch.tensor([0, *sizes]).cumsum(0) for sizes in (fresh.sizes, fresh.other_sizes))
    indices = (fresh.rows, fresh.at, first, fresh.others, other_first)
    parts = (keys, values, fresh.keys, fresh.values)
    # A name for what is made here: it must live until the call is done.
    expected = (None, None) if prior is None else tuple(x.float().contiguous() for x in prior)
    foreign = torch.tensor(fresh.foreign, dtype=torch.float32)
    pointers = (None if x is None else x.data_ptr() for x in (*parts, cos, sin, *indices, *expected, foreign))
    strides = (*(stride for x in parts for stride in x.stride()[:2]), cos.stride(0))
    sizes = (keys.shape[0], keys.shape[2], cos.shape[1], len(fresh.at), len(fresh.sizes))
    constants = (
        params.weight,
        params.zero_prior,
        params.key_scale,
        params.value_scale,
        -1.0 if params.penalty is None else params.penalty,
        params.prior_trust,
        params.prior_key_scale,
        params.prior_value_scale,
    )
    call = CorrectCall(*pointers, *strides, *sizes, *constants, team.size())
    library.blendserve_correct(ctypes.byref(call))
