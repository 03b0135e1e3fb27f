"""Copies a layer of stored KV into the cache of a GPU in one launch and rotates the keys.

Written out in torch that is a dozen launches a chunk and layer, hundreds a layer for a long prompt. In 16 bits
the rotation has the bits of the formula (kernels/rotary.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blendserve.kernels.cuda.available import has_triton
from blendserve.kernels.rotary import Rotary
from blendserve.kernels.types import RecordView, Rope

BLOCK = 32  # tokens of one program


def supports(chunks: Sequence[RecordView], keys: Tensor, values: Tensor, rope: Rope, rotary: Rotary) -> bool:
    """Whether the kernel is made to place these, and triton is there."""
    parts = [keys, values, *(x for _, k, v in chunks for x in (k, v))]
    return (
        keys.device.type == "cuda"
        and has_triton()
        and keys.shape == values.shape
        and rope.cos.stride() == rope.sin.stride()
        and rope.cos.stride(-1) == 1
        and all(x.device == keys.device and x.dtype == keys.dtype and x.stride(-1) == 1 for x in parts)
    )


def place(
    chunks: Sequence[RecordView], cache_keys: Tensor, cache_values: Tensor, rope: Rope, rotary: Rotary
) -> None:
    """ops.place: on a GPU, or in triton's interpreter. Nothing waits for the device."""
    from blendserve.kernels.cuda.triton_kernels.place import chunks_into_cache

    cos, sin = rope.cos, rope.sin
    if not any(k.shape[1] for _, k, _ in chunks):
        return
    if any(start + k.shape[1] > cache_keys.shape[1] for start, k, _ in chunks):
        raise ValueError(f"a chunk ends behind the cache's {cache_keys.shape[1]} tokens")
    rows = [
        (k.data_ptr(), v.data_ptr(), start, k.shape[1], *k.stride()[:2], *v.stride()[:2])
        for start, k, v in chunks
    ]
    aligned = all(number % 16 == 0 for row in rows for number in (*row[:2], *row[4:]))
    n_kv, _, dim = cache_keys.shape
    longest = max(k.shape[1] for _, k, _ in chunks)
    grid = (-(-longest // BLOCK), len(rows), n_kv)
    table = torch.tensor(rows, dtype=torch.int64)
    if cache_keys.is_cuda:  # from pinned memory, so that the host does not wait
        table = table.pin_memory().to(cache_keys.device, non_blocking=True)
    with torch.cuda.device(cache_keys.device if cache_keys.is_cuda else -1):  # triton launches where torch is
        chunks_into_cache[grid](
            table, cache_keys, cache_values, cos, sin,
            *cache_keys.stride()[:2], *cache_values.stride()[:2], cos.stride(0),
            DIM=dim, TURNED=cos.shape[-1], NEIGHBOURS=rotary.neighbours, STEP=rotary.step, WIDE=rotary.wide,
            ALIGNED=aligned, BLOCK=BLOCK, BLOCK_D=max(16, 1 << (dim - 1).bit_length()), num_warps=4,
        )  # fmt: skip
