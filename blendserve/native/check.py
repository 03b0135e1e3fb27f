"""The kernels against the formula, on random numbers, before they may serve."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from blendserve.native.attention import Seen, run
from blendserve.native.build import Unavailable

BOUND = 0.03  # outputs reach 4; they and the weights are rounded to 8 bits of mantissa
POSITIONS = (0, 1, 2, 3, 17, 63, 64, 65, 255, 256, 257, 400, 401, 402, 511, 512, 600, 700, 701)


def check(loaded: ctypes.CDLL) -> None:
    """Raises Unavailable unless attention comes out right, with and without window and softcap."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, len(POSITIONS), 64), (2, 720, 64), (2, 720, 64))
    q, keys, values = (torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes)
    keys[:, POSITIONS[-1] + 1 :] = values[:, POSITIONS[-1] + 1 :] = float("nan")
    at = torch.tensor(POSITIONS)
    with torch.inference_mode():
        for window, softcap in ((None, None), (70, None), (None, 2.0), (300, 2.0)):
            got = run(loaded, q, keys, values, Seen(at, 0.25, window, softcap))
            wanted = formula(q, keys[:, : at[-1] + 1], values[:, : at[-1] + 1], at, 0.25, window, softcap)
            off = float((got.double() - wanted).abs().max())
            if not off < BOUND:  # NaN is not
                raise Unavailable(
                    f"the kernel is wrong here: off by {off:.3g} (window {window}, softcap {softcap})"
                )


def formula(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    at: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """softmax(softcap(scale * q k^T) + mask) v in float64, over a dense mask -> [S, H * D]."""
    group, n = q.shape[0] // keys.shape[0], keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=0) for x in (keys, values))
    scores = scale * (q.double() @ keys.transpose(1, 2))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    key = torch.arange(n)
    hidden = (key > at[:, None]) | (key <= at[:, None] - (window or n + 1))
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return (weights @ values).transpose(0, 1).flatten(1)
