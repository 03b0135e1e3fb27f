"""The kernels against their formulas, on random numbers, before they may serve."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from blendserve.native import attention, linear, move, place
from blendserve.native.build import Unavailable

BOUND = 0.03  # attention's outputs reach 4; they and the weights are rounded to 8 bits of mantissa
POSITIONS = (0, 1, 2, 3, 17, 63, 64, 65, 255, 256, 257, 400, 401, 402, 511, 512, 600, 700, 701)
MOVE_BOUND = 0.05  # its outputs reach 5; they and the weights are rounded to 8 bits of mantissa
ROUNDING = 2**-8  # of a linear layer's output


def check(loaded: ctypes.CDLL) -> None:
    """Raises Unavailable unless everything comes out right."""
    with torch.inference_mode():
        _check_attention(loaded)
        _check_linear(loaded)
        _check_place(loaded)
        _check_move(loaded)


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


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A head [x1 | x2] of as many numbers as cos and sin have, rotated; those behind them stay."""
    first, second = x[..., : cos.shape[-1]].chunk(2, dim=-1)
    rotated = x[..., : cos.shape[-1]] * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([rotated, x[..., cos.shape[-1] :]], dim=-1)


def some_turn(n: int, width: int, length: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """cos and sin [n, width] of some angles, `length` long as YaRN's."""
    angles = torch.rand((n, width // 2), generator=generator).mul(6.0).repeat(1, 2)
    return (length * angles.cos()).bfloat16(), (length * angles.sin()).bfloat16()


def _check_place(loaded: ctypes.CDLL) -> None:
    """Two chunks with a hole between them, to the bit, where a part of each head is rotated and where all of it is."""
    generator = torch.Generator().manual_seed(0)
    for width in (32, 96):
        cos, sin = some_turn(90, width, 1.0, generator)
        chunks: list[place.Part] = []
        wanted = torch.zeros(2, 2, 90, 96, dtype=torch.bfloat16)
        for here in (slice(0, 31), slice(40, 90)):
            k, v = (_random((2, here.stop - here.start, 96), generator) for _ in "kv")
            wanted[0, :, here], wanted[1, :, here] = turned(k, cos[here], sin[here]), v
            chunks.append((here.start, k, v))
        keys, values = torch.zeros(2, 2, 90, 96, dtype=torch.bfloat16)
        place.run(loaded, chunks, keys, values, cos, sin)
        if not (torch.equal(keys, wanted[0]) and torch.equal(values, wanted[1])):
            raise Unavailable(f"placing is wrong here, where {width} of 96 numbers are rotated")


def _check_move(loaded: ctypes.CDLL) -> None:
    """Two chunks with a hole between them, and fewer recomputed tokens than features."""
    from blendserve.blend.correct import move_plainly  # which imports the kernels
    from blendserve.models.adapter import Rope

    generator = torch.Generator().manual_seed(0)
    keys, values, fresh_keys, fresh_values = (_random((2, n, 32), generator) for n in (90, 90, 40, 40))
    at = torch.tensor([*range(1, 31, 3), *range(40, 90, 3)])
    others = torch.tensor([i for i in (*range(31), *range(40, 90)) if i not in at.tolist()])
    cos, sin = some_turn(90, 32, 1.0, generator)
    for how in (move.How(16.0, 0.0, 0.5, None), move.How(16.0, 40.0, 1.0, 5.0)):
        given = [x.clone() for x in (keys, values)]
        wide = [x.double() for x in (keys, values)]
        fresh = move.Fresh(fresh_keys, fresh_values, torch.arange(2, 29), at, (10, 17), others, (21, 33))
        move.run(loaded, given[0], given[1], fresh, cos, sin, how)
        exact = fresh._replace(keys=fresh_keys.double(), values=fresh_values.double())
        rope = Rope(cos.double(), sin.double())
        move_plainly(wide[0], wide[1], exact, rope, how, lambda x, rope: turned(x, rope.cos, rope.sin))
        off = max(float((a.double() - b).abs().max()) for a, b in zip(given, wide, strict=True))
        if not off < MOVE_BOUND:
            raise Unavailable(f"moving is wrong here: off by {off:.3g} with {how}")
