"""A kernel serves only after it gave the formula's numbers on this very GPU, in this dtype and for this kind of head.

Asked once a process and kind, before the first real rows: what would be compiled in the middle of a request is compiled
here (seconds at the first time on a machine; triton and inductor keep what they compiled on disk).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from blendserve.blend.rows import RowPlan, plan_rows
from blendserve.models.adapter import AttentionSpec

Attend = Callable[[Tensor, Tensor, Tensor, AttentionSpec, RowPlan], Tensor]

# Rounding of values that reach 4, of the weights and of the output; sums are kept in fp32. tf32 would fail the last one.
BOUNDS = {torch.bfloat16: 0.03, torch.float16: 0.005, torch.float32: 2e-5}
KEYS, SCALE = 700, 0.25


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kernel is compiled for."""

    device: torch.device
    dtype: torch.dtype
    group: int
    dim: int
    windowed: bool
    softcapped: bool

    @classmethod
    def of(cls, q: Tensor, keys: Tensor, spec: AttentionSpec) -> Kind:
        group = q.shape[0] // keys.shape[0]
        return cls(q.device, q.dtype, group, q.shape[2], spec.window is not None, spec.softcap is not None)


@cache
def trouble(attends: tuple[Attend, ...], kind: Kind, rows: tuple[tuple[int, ...], ...]) -> str:
    """What is wrong with a kernel, "" if nothing. attends: its forms; rows: positions below KEYS to try each with."""
    try:
        for attend in attends:
            for positions in rows:
                off = _off(attend, kind, positions)
                if not off < BOUNDS[kind.dtype]:  # NaN is not
                    return f"off by {off:.3g} for {kind}"
    except Exception as error:  # whatever a compiler, a driver or a GPU without room for the tile may say
        return f"{type(error).__name__}: {str(error).strip() or 'no reason given'}".splitlines()[0]
    return ""


@torch.inference_mode()
def _off(attend: Attend, kind: Kind, positions: tuple[int, ...]) -> float:
    """The largest difference to the formula; memory behind the last key holds NaN."""
    generator = torch.Generator().manual_seed(0)
    at = torch.tensor(positions)
    end = positions[-1] + 1
    q, keys, values = (
        torch.randn(shape, generator=generator).to(kind.dtype)
        for shape in ((2 * kind.group, len(at), kind.dim), (2, KEYS, kind.dim), (2, KEYS, kind.dim))
    )
    scale = SCALE * (64 / kind.dim) ** 0.5  # scores spread alike in heads of every size
    spec = AttentionSpec(scale, 70 if kind.windowed else None, 2.0 if kind.softcapped else None)
    wanted = formula(q, keys[:, :end], values[:, :end], at, spec)
    keys[:, end:] = values[:, end:] = float("nan")
    plan = plan_rows(at.to(kind.device), kind.group, spec.window, at)
    got = attend(q.to(kind.device), keys.to(kind.device), values.to(kind.device), spec, plan)
    return float((got.cpu().double() - wanted).abs().max())


def formula(q: Tensor, keys: Tensor, values: Tensor, at: Tensor, spec: AttentionSpec) -> Tensor:
    """softmax(softcap(scale * q k^T) + mask) v in float64, over a dense mask, for rows at `at` [S] -> [S, H * D]."""
    keys, values = (x.double().repeat_interleave(len(q) // len(keys), dim=0) for x in (keys, values))
    scores = spec.scale * (q.double() @ keys.transpose(1, 2))
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    key, row = torch.arange(keys.shape[1]), at[:, None]
    hidden = (key > row) | (key <= row - (spec.window or keys.shape[1] + 1))
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return (weights @ values).transpose(0, 1).flatten(1)
