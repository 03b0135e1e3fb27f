"""Stored chunks rotated and put into the cache, in Triton: see blendserve/kernels/cuda/place.py for what it is given.

One program moves BLOCK tokens of one kv head of one chunk. Chunks are wherever they are: their addresses are numbers in a
table, so that one launch serves any number of them and nothing is compiled anew for it.
"""

import triton
import triton.language as tl

FIELDS = tl.constexpr(8)  # of a row of the table


@triton.jit
def _rounded(x, dtype: tl.constexpr, WIDE: tl.constexpr):
    """A step's result as the model's own function leaves it: in the model's dtype, unless it computes in fp32."""
    if WIDE:
        return x
    return x.to(dtype).to(tl.float32)


@triton.jit
def chunks_into_cache(
    table,  # [chunks, 8] int64: addresses of keys and values, first position, tokens, strides of both [K, C, D]
    keys,  # [K, T, D], the cache's
    values,  # [K, T, D]
    cos,  # [T, R]
    sin,
    k_head,
    k_row,
    v_head,
    v_row,
    turn_row,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,  # R: the first dims of a head, which are rotated
    NEIGHBOURS: tl.constexpr,  # pairs are (2i, 2i + 1), else (i, i + R / 2)
    STEP: tl.constexpr,  # columns of cos from one pair to the next
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,  # all addresses and strides of chunks are multiples of 16
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid: (blocks of the longest chunk, chunks, K)."""
    dtype: tl.constexpr = keys.dtype.element_ty
    HALF: tl.constexpr = TURNED // 2
    row = table + tl.program_id(1) * FIELDS
    n_tokens = tl.load(row + 3)
    first = tl.program_id(0) * BLOCK
    if first < n_tokens:
        head = tl.program_id(2).to(tl.int64)
        k_from = tl.load(row).to(tl.pointer_type(dtype))
        v_from = tl.load(row + 1).to(tl.pointer_type(dtype))
        from_head, from_row = tl.load(row + 4), tl.load(row + 5)
        v_from_head, v_from_row = tl.load(row + 6), tl.load(row + 7)
        if ALIGNED:
            k_from, v_from = tl.multiple_of(k_from, 16), tl.multiple_of(v_from, 16)
            from_head, from_row = tl.multiple_of(from_head, 16), tl.multiple_of(from_row, 16)
            v_from_head, v_from_row = tl.multiple_of(v_from_head, 16), tl.multiple_of(v_from_row, 16)
        token = first + tl.arange(0, BLOCK)
        inside = (token < n_tokens)[:, None]
        at = (tl.load(row + 2) + token)[:, None]  # int64
        token = token.to(tl.int64)[:, None]
        k_from += head * from_head + token * from_row
        v_from += head * v_from_head + token * v_from_row
        k_to = keys + head * k_head + at * k_row
        v_to = values + head * v_head + at * v_row

        dims = tl.arange(0, BLOCK_D)[None, :]
        there = inside & (dims < DIM)
        tl.store(v_to + dims, tl.load(v_from + dims, mask=there), mask=there)
        if TURNED < DIM:
            rest = there & (dims >= TURNED)
            tl.store(k_to + dims, tl.load(k_from + dims, mask=rest), mask=rest)
        if TURNED > 0:
            pair = tl.arange(0, BLOCK_D // 2)[None, :]  # R / 2 is no more than half of D
            turned = inside & (pair < HALF)
            one = pair * 2 if NEIGHBOURS else pair
            other = one + (1 if NEIGHBOURS else HALF)
            x = tl.load(k_from + one, mask=turned, other=0.0).to(tl.float32)
            y = tl.load(k_from + other, mask=turned, other=0.0).to(tl.float32)
            c = tl.load(cos + at * turn_row + pair * STEP, mask=turned, other=0.0).to(tl.float32)
            s = tl.load(sin + at * turn_row + pair * STEP, mask=turned, other=0.0).to(tl.float32)
            new_x = _rounded(x * c, dtype, WIDE) - _rounded(y * s, dtype, WIDE)
            new_y = _rounded(y * c, dtype, WIDE) + _rounded(x * s, dtype, WIDE)
            tl.store(k_to + one, new_x.to(dtype), mask=turned)
            tl.store(k_to + other, new_y.to(dtype), mask=turned)
