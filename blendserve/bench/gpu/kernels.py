"""Attention and placing alone: seconds, and the share of what this machine does at best."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from blendserve.bench.figures import Figures
from blendserve.bench.gpu.plan import SUFFIX, Heads
from blendserve.bench.rates import Rates
from blendserve.kernels.cuda import masked
from blendserve.kernels.cuda.dense import BACKENDS
from blendserve.kernels.ops import ATTEND, place
from blendserve.kernels.rows import plan_rows
from blendserve.kernels.types import AttentionSpec
from blendserve.models.adapter import Adapter
from blendserve.timing import Clock

RATIO = 0.15
WARM, TIMED = 3, 20


def seconds_of(call: Callable[[], object], device: torch.device, times: int = TIMED) -> float:
    """Of one call among many that the device gets one behind the other."""
    for _ in range(WARM):
        call()
    clock = Clock(device)
    clock.elapsed()
    start = clock.elapsed()
    for _ in range(times):
        call()
    return (clock.elapsed() - start) / times


def attention(heads: Heads, context: int, device: torch.device, rates: Rates) -> Figures:
    """Blended rows, 15% of the context and the suffix: ours against SDPA with a boolean mask, and all rows at once."""
    n = context + SUFFIX
    generator = torch.Generator().manual_seed(0)
    chosen = torch.rand(n, generator=generator) < RATIO
    chosen[context:] = True
    at = chosen.nonzero()[:, 0]
    q, keys, values = (
        torch.randn(shape, generator=generator).to(device, heads.dtype)
        for shape in ((heads.heads, n, heads.dim), *((heads.kv_heads, n, heads.dim) for _ in range(2)))
    )
    spec, group = AttentionSpec(heads.dim**-0.5), heads.heads // heads.kv_heads
    some, rows = q[:, at.to(device)], plan_rows(at.to(device), group, None, at)
    every = plan_rows(torch.arange(n, device=device), group, None, torch.arange(n))
    ours = ATTEND.select_backend(some, keys, values, spec, rows)
    dense = ATTEND.select_backend(q, keys, values, spec, every)
    mask = torch.arange(n, device=device)[None] <= rows.positions[:, None]
    calls = {
        f"rows: {ours.name}": partial(ours.run, some, keys, values, spec, rows),
        "rows: SDPA, boolean mask": partial(_masked, some, keys, values, mask, spec.scale),
        "rows: SDPA, masks by blocks": partial(masked.attend, some, keys, values, spec, rows),
        f"all: {dense.name}": partial(dense.run, q, keys, values, spec, every),
    }
    seconds = {name: seconds_of(call, device) for name, call in calls.items()}
    work = {True: _flops(heads, at), False: _flops(heads, torch.arange(n))}
    theirs = min(s for name, s in seconds.items() if "SDPA" in name and name.startswith("rows"))
    return {
        "heads": str(heads),
        "context": context,
        "rows": len(at),
        "seconds": seconds,
        "share_of_flops": {k: work[k.startswith("rows")] / s / rates.flops for k, s in seconds.items()},
        "faster_than_masked_sdpa": theirs / seconds[f"rows: {ours.name}"],
        "same": float((calls[f"rows: {ours.name}"]() - calls["rows: SDPA, boolean mask"]()).abs().max()),
    }


def _flops(heads: Heads, at: Tensor) -> float:
    return 4.0 * heads.heads * heads.dim * float((at + 1).sum())


def _masked(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The mask is given: making it is not on its bill."""
    with sdpa_kernel(BACKENDS):
        out = F.scaled_dot_product_attention(
            q[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=len(q) != len(keys)
        )
    return out[0].transpose(0, 1).reshape(q.shape[1], -1)


def link(device: torch.device, size: int) -> float:
    """Bytes a second from pinned memory to the device; what a copy gives where there is no such way."""
    source = torch.ones(size, dtype=torch.uint8)
    if device.type == "cuda":
        source = source.pin_memory()
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return size / seconds_of(lambda: target.copy_(source, non_blocking=True), device, times=5)


def placing(adapter: Adapter, chunks: int, chunk: int, rates: Rates) -> Figures:
    """One layer of chunks on the device, as the product places them: each byte is read once and written once."""
    device, n = adapter.device, chunks * chunk
    shape = (adapter.n_kv_heads, chunk, adapter.head_dim)
    layer = [
        (
            torch.randn(shape, device=device).to(adapter.dtype),
            torch.randn(shape, device=device).to(adapter.dtype),
        )
        for _ in range(chunks)
    ]
    cache = torch.zeros(2, shape[0], n, shape[2], device=device, dtype=adapter.dtype)
    placed = [(chunk * i, k, v) for i, (k, v) in enumerate(layer)]
    rope = adapter.rope(torch.arange(n, device=device))[0]
    with torch.inference_mode():
        seconds = seconds_of(lambda: place(placed, cache[0], cache[1], rope, adapter.rotary), device)
    moved = 2 * chunks * layer[0][0].numel() * adapter.dtype.itemsize
    return {"chunks": chunks, "seconds": seconds, "share_of_copy": moved / seconds / rates.bytes}
