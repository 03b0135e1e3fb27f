"""The kernels against their formulas, on random numbers, before they may serve."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from blendserve.core import Span
from blendserve.native import attention, linear, ridge
from blendserve.native.build import Unavailable

BOUND = 0.03  # attention's outputs reach 4; they and the weights are rounded to 8 bits of mantissa
POSITIONS = (0, 1, 2, 3, 17, 63, 64, 65, 255, 256, 257, 400, 401, 402, 511, 512, 600, 700, 701)
RIDGE_BOUND = 0.05  # its outputs reach 5; they and the weights are rounded to 8 bits of mantissa
ROUNDING = 2**-8  # of a linear layer's output


def check(loaded: ctypes.CDLL) -> None:
    """Raises Unavailable unless everything comes out right."""
    with torch.inference_mode():
        _check_attention(loaded)
        _check_linear(loaded)
        _check_ridge(loaded)


def _check_attention(loaded: ctypes.CDLL) -> None:
    """With and without window and softcap; memory behind the last key holds NaN."""
    generator, end = torch.Generator().manual_seed(0), POSITIONS[-1] + 1
    shapes = ((6, len(POSITIONS), 64), (2, 720, 64), (2, 720, 64))
    q, keys, values = (_random(shape, generator) for shape in shapes)
    keys[:, end:] = values[:, end:] = float("nan")
    at = torch.tensor(POSITIONS)
    for window, softcap in ((None, None), (70, None), (None, 2.0), (300, 2.0)):
        got = attention.run(loaded, q, keys, values, attention.Seen(at, 0.25, window, softcap))
        wanted = formula(q, keys[:, :end], values[:, :end], at, 0.25, window, softcap)
        off = float((got.double() - wanted).abs().max())
        if not off < BOUND:  # NaN is not
            raise Unavailable(
                f"attention is wrong here: off by {off:.3g} with window {window} and softcap {softcap}"
            )


def _check_linear(loaded: ctypes.CDLL) -> None:
    """For few rows and for many, with sizes that fill no vector."""
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 7, 150):
        x, weight, bias = (_random(shape, generator) for shape in ((rows, 90), (142, 90), (142,)))
        wanted = x.double() @ weight.double().T + bias.double()
        off = float(((linear.run(loaded, x, weight, bias) - wanted).abs() - ROUNDING * wanted.abs()).max())
        if not off < 1e-4:
            raise Unavailable(f"linear is wrong here: off by {off:.3g} beyond rounding at {rows} rows")


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


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


def _check_ridge(loaded: ctypes.CDLL) -> None:
    """Two chunks with a hole between them, and fewer recomputed tokens than features."""
    from blendserve.blend.correct import move_plainly  # which imports the kernels

    generator = torch.Generator().manual_seed(0)
    keys, values, spans = (
        _random((2, 90, 32), generator),
        _random((2, 90, 32), generator),
        (Span(0, 31), Span(40, 90)),
    )
    at = torch.arange(1, 90, 3)
    left = torch.randn((2, len(at), 64), generator=generator)
    means = torch.randn((2, 2, 64), generator=generator)
    wide = values.double()
    wanted = move_plainly(keys.double(), wide, at, left.double(), means.double(), spans, 5.0)
    got = ridge.run(loaded, keys, values, at, left, means, spans, 5.0)
    off = max(
        float((a.double() - b)[:, s.start : s.stop].abs().max())
        for a, b in ((got, wanted), (values, wide))
        for s in spans
    )
    if not off < RIDGE_BOUND:
        raise Unavailable(f"the ridge correction is wrong here: off by {off:.3g}")
