"""Attention for rows at any positions, in Triton: which tile, how many splits, and the call.

Tiles are chosen from a table and never tuned at run time: tuning would compile and time a dozen kernels in front of the
first user, again for every dtype and head size. The table's tiles were compiled for sm_80, sm_86, sm_90, sm_100 and
sm_120: their shared memory fits, and no or few registers are spilled (tests/kernels/cuda/test_compiled.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from blendserve.kernels.cuda.available import are_supported, capability, has_triton, processors
from blendserve.kernels.rows import AttentionPlan
from blendserve.kernels.types import AttentionSpec

DTYPES = {torch.bfloat16, torch.float16, torch.float32}
FEW = 16  # queries of one kv head that the small tile holds: decoding, and the last layer
MOST_SPLITS = 32
LEAST_BLOCKS = 4  # of keys in a split: below, joining costs more than waiting


@dataclass(frozen=True, slots=True)
class Tile:
    """How one program works: queries at once, keys at a time, and what the compiler is told."""

    queries: int
    keys: int
    warps: int
    stages: int  # of keys and values on their way while others are multiplied


def tile_for(dtype: torch.dtype, dim: int, queries: int, roomy: bool = True) -> Tile:
    """queries: of one kv head, S * H / K. roomy: a GPU with 160 KB of shared memory or more a processor."""
    if dtype == torch.float32:  # for checking, not for speed: three tf32 products for each of its own
        return Tile(16, 32, 4, 1) if queries <= FEW or dim > 128 else Tile(32, 32, 4, 1)
    if queries <= FEW:
        return Tile(16, 64, 4, 3) if dim <= 128 else Tile(16, 32, 4, 2)
    if dim > 128:
        return Tile(64, 32, 8, 2)
    return Tile(128, 64, 8, 3 if roomy else 2)


def splits_for(programs: int, keys: int, tile: Tile, room: int) -> int:
    """Parts of the keys, each for a program of its own, when there are fewer programs than the GPU has room for."""
    if programs >= room:
        return 1
    return max(1, min(room // programs, keys // (LEAST_BLOCKS * tile.keys), MOST_SPLITS))


def supports(q: Tensor, keys: Tensor, values: Tensor, *_: object) -> bool:
    """Whether these are on a GPU, triton is there, and the kernel is made for them."""
    return q.device.type == "cuda" and has_triton() and is_made_for(q, keys, values)


def is_made_for(q: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether the kernel is made for these on any device: a GPU, or Triton's interpreter."""
    return keys.shape == values.shape and are_supported(DTYPES, q, keys, values)


def attend(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Tensor:
    """ops.attend: q [H, S, D] over keys and values [K, T, D] -> [S, H * D].

    The host never waits for the GPU.
    """
    n_kv = keys.shape[0]
    queries = q.shape[1] * (q.shape[0] // keys.shape[0])
    tile = tile_for(q.dtype, q.shape[2], queries, _roomy(q.device))
    seen = keys.shape[1] if plan.host_positions is None else plan.kv_len
    if plan.window is not None:
        seen = min(seen, plan.window + queries)
    splits = splits_for(-(-queries // tile.queries) * n_kv, seen, tile, processors(q.device))
    return run(q, keys, values, spec, plan.positions, tile, splits)


def attend_at(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, at: Tensor) -> Tensor:
    """ops.attend_at."""
    return attend(q, keys, values, spec, AttentionPlan(at, q.shape[0] // keys.shape[0], spec.window))


def run(
    q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, positions: Tensor, tile: Tile, splits: int
) -> Tensor:
    """The call itself: on a GPU, or in triton's interpreter."""
    from blendserve.kernels.cuda.triton_kernels.attention import join, rows_over_keys

    n_heads, n_rows, dim = q.shape
    n_kv, n_keys = keys.shape[:2]
    group = n_heads // n_kv
    out = torch.empty(n_rows, n_heads * dim, dtype=q.dtype, device=q.device)
    if not n_rows:
        return out
    parts = out
    logs = out
    if splits > 1:
        parts = torch.empty(splits, n_rows, n_heads, dim, dtype=torch.float32, device=q.device)
        logs = torch.empty(splits, n_rows, n_heads, dtype=torch.float32, device=q.device)
    grid = (n_kv * splits, -(-n_rows * group // tile.queries))
    width = max(16, 1 << (dim - 1).bit_length())
    with torch.cuda.device(q.device if q.is_cuda else -1):  # triton launches where torch is
        rows_over_keys[grid](
            q, keys, values, positions.contiguous(), q if spec.sinks is None else spec.sinks, parts, logs,
            q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
            n_rows, n_keys, splits, spec.window or 0, float(spec.scale), float(spec.softcap or 0.0),
            GROUP=group, DIM=dim, BLOCK_M=tile.queries, BLOCK_N=tile.keys, BLOCK_D=width,
            WINDOW=spec.window is not None, SOFTCAP=spec.softcap is not None, SINKS=spec.sinks is not None,
            SPLIT=splits > 1, PRECISION="tf32x3" if q.dtype == torch.float32 else "ieee",
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if splits > 1:
            join[(n_rows * n_heads,)](
                parts, logs, out, splits, DIM=dim, BLOCK_D=width, MOST=MOST_SPLITS, num_warps=4
            )
    return out


def _roomy(device: torch.device) -> bool:
    """The processors of data centres have the shared memory; the same generation's graphics cards do not."""
    return capability(device) in {(8, 0), (9, 0), (10, 0), (10, 3)}


def _as(
    few: bool, split: bool, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan
) -> Tensor:
    """One compiled form of the kernel, whatever the rows."""
    tile = tile_for(q.dtype, q.shape[2], 1 if few else FEW + 1, _roomy(q.device))
    return run(q, keys, values, spec, plan.positions, tile, 3 if split else 1)


# The compiled forms, each of which is checked before use.
FORMS = tuple(partial(_as, few, split) for few in (True, False) for split in (False, True))
