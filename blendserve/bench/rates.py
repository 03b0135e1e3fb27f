"""What this machine gives at best, in this run: FLOP/s of a large matmul and bytes/s of a large copy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from blendserve.timing import Clock

SIDES = (1024, 2048)  # of square matrices; the better one counts
COPIED = 1 << 28  # bytes: far more than caches hold
TRIES = 5


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second."""

    flops: float  # of matmuls in the reader's dtype
    bytes: float  # copied: each is read once and written once


def measure_rates(
    dtype: torch.dtype, device: torch.device, sides: tuple[int, ...] = SIDES, copied: int = COPIED
) -> Rates:
    """The best of a few tries: whatever else runs only ever takes away."""
    return Rates(max(_flops(n, dtype, device) for n in sides), _copied(copied, device))


def _flops(n: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty(n, n, dtype=dtype, device=device)
    torch.mm(a, b, out=out)
    best = 0.0
    for _ in range(TRIES):
        clock = Clock(device)
        torch.mm(a, b, out=out)
        best = max(best, 2.0 * n**3 / clock.elapsed())
    return best


def _copied(size: int, device: torch.device) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    best = 0.0
    for _ in range(TRIES):
        clock = Clock(device)
        target.copy_(source)
        best = max(best, size / clock.elapsed())
    return best
