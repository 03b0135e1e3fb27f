"""Attention that is causal by position, in Triton: see blendserve/kernels/cuda/scattered.py for what it is given and why.

One program holds a tile of queries and walks over the keys that any of them sees:

    keys ->  0 .. lo ....... inner ........ outer ....... hi .. T
                  [ window's  | seen by the  | diagonal   ]
                  [ edge      | whole tile   | strip      ]
                    masked      no mask        masked

A tile is BLOCK_M neighbours of the list (row 0, head 0), (row 0, head 1), .. (row 1, head 0), ..: the query heads of one
kv head stand side by side, so that its keys are loaded once for all of them, whatever their number is.
Softmax is online and in base 2 (arXiv 2205.14135); few tiles over many keys are split over keys, and `join` puts the
parts together (flash-decoding).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(at, is_row, is_dim, MASKED: tl.constexpr, EVEN: tl.constexpr):
    """Rows of dims, zeros for what is none of either. Unless MASKED, all are rows; EVEN: all are dims."""
    if MASKED:
        return tl.load(at, mask=is_row if EVEN else is_row & is_dim, other=0.0)
    return tl.load(at) if EVEN else tl.load(at, mask=is_dim, other=0.0)


@triton.jit
def _walk(
    q, acc, total, peak, at, lo, hi, end, keys, values, k_row, v_row, dims, dim, window, scale, softcap,
    BLOCK_N: tl.constexpr, EVEN: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys [lo, hi) of one tile, lo a multiple of BLOCK_N. Unless MASKED, they are whole blocks that all rows see.

    end: keys that may be read. scale holds log2(e) where there is no softcap, softcap where there is one.
    """
    for start in tl.range(lo, hi, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k_at = keys + n[None, :] * k_row + dims[:, None]  # [D, N]
        v_at = values + n[:, None] * v_row + dims[None, :]  # [N, D]
        k = _load(k_at, (n < end)[None, :], (dims < dim)[:, None], MASKED, EVEN)
        v = _load(v_at, (n < end)[:, None], (dims < dim)[None, :], MASKED, EVEN)
        score = tl.dot(q, k, input_precision=PRECISION) * scale
        if SOFTCAP:  # c * tanh(x / c), where scale has the 1 / c; exp overflows to a tanh of 1
            score = (softcap * LOG2E) * (1.0 - 2.0 / (tl.exp2(score * (2.0 * LOG2E)) + 1.0))
        if MASKED:
            seen = n[None, :] <= at[:, None]
            if WINDOW:
                seen = seen & (n[None, :] > at[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
        new = tl.maximum(peak, tl.max(score, axis=1))
        if MASKED:  # a row may have seen nothing yet: -inf - -inf is NaN
            base = tl.where(new == float("-inf"), 0.0, new)
        else:
            base = new
        weight = tl.exp2(score - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weight, axis=1)
        acc = acc * fade[:, None]
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision=PRECISION)
        peak = new
    return acc, total, peak


@triton.jit(do_not_specialize=["rows", "n_keys", "splits", "window"])
def rows_over_keys(
    queries,  # [H, S, D]
    keys,  # [K, T, D]
    values,  # [K, T, D]
    positions,  # [S] int64, ascending
    sinks,  # with SINKS [H] fp32
    out,  # [S, H * D]; with SPLIT [splits, S, H, D] fp32
    logs,  # with SPLIT [splits, S, H] fp32: log2 of the sum of weights
    q_head, q_row, k_head, k_row, v_head, v_row, rows, n_keys, splits, window, scale, softcap,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (K * splits, tiles); the tiles with the most keys start first."""
    EVEN: tl.constexpr = DIM == BLOCK_D
    kv_head = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    heads = tl.num_programs(0) // splits * GROUP

    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    alive = m < rows * GROUP
    row = tl.minimum(m // GROUP, rows - 1)  # what lies behind the last row repeats it, and is not written
    head = kv_head * GROUP + m % GROUP
    dims = tl.arange(0, BLOCK_D)
    at = tl.load(positions + row).to(tl.int32)
    first = tl.load(positions + tile * BLOCK_M // GROUP).to(tl.int32)
    last = tl.load(positions + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, rows - 1)).to(tl.int32)

    q_at = (
        queries + (head.to(tl.int64) * q_head)[:, None] + (row.to(tl.int64) * q_row)[:, None] + dims[None, :]
    )
    q = _load(q_at, alive[:, None], (dims < DIM)[None, :], False, EVEN)
    k_base = keys + kv_head.to(tl.int64) * k_head
    v_base = values + kv_head.to(tl.int64) * v_head

    lo = 0
    hi = tl.minimum(last + 1, n_keys)
    if WINDOW:
        lo = tl.maximum(0, first - window + 1) // BLOCK_N * BLOCK_N
    if SPLIT:  # an equal share of whole blocks; the last ones may get none
        blocks = tl.cdiv(hi - lo, BLOCK_N)
        share = tl.cdiv(blocks, splits) * BLOCK_N
        lo = tl.minimum(lo + split * share, tl.cdiv(hi, BLOCK_N) * BLOCK_N)
        hi = tl.minimum(lo + share, hi)
    inner = lo
    if WINDOW:  # from here on every row's window has begun
        inner = tl.minimum(
            tl.maximum(lo, tl.cdiv(last - window + 1, BLOCK_N) * BLOCK_N), tl.cdiv(hi, BLOCK_N) * BLOCK_N
        )
    outer = tl.minimum(first + 1, hi) // BLOCK_N * BLOCK_N  # up to here the first row sees all
    outer = tl.maximum(inner, outer)

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    if SINKS:  # as a key that has been seen, by one split
        peak = tl.where(split == 0, tl.load(sinks + head) * LOG2E, peak)
        total = tl.where(split == 0, 1.0, total)
    if SOFTCAP:
        scale = scale / softcap
    else:
        scale = scale * LOG2E
    if WINDOW:
        acc, total, peak = _walk(
            q, acc, total, peak, at, lo, inner, hi, k_base, v_base, k_row, v_row, dims, DIM, window, scale, softcap,
            BLOCK_N, EVEN, True, WINDOW, SOFTCAP, PRECISION,
        )  # fmt: skip
    acc, total, peak = _walk(
        q, acc, total, peak, at, inner, outer, hi, k_base, v_base, k_row, v_row, dims, DIM, window, scale, softcap,
        BLOCK_N, EVEN, False, WINDOW, SOFTCAP, PRECISION,
    )  # fmt: skip
    acc, total, peak = _walk(
        q, acc, total, peak, at, outer, hi, hi, k_base, v_base, k_row, v_row, dims, DIM, window, scale, softcap,
        BLOCK_N, EVEN, True, WINDOW, SOFTCAP, PRECISION,
    )  # fmt: skip

    if SPLIT:
        slot = (split * rows + row).to(tl.int64) * heads + head
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a split may have nothing that a row sees
        log = tl.where(total == 0.0, float("-inf"), peak + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(logs + slot, log, mask=alive)
        o_at = out + (slot * DIM)[:, None] + dims[None, :]
    else:
        acc = acc / total[:, None]
        o_at = out + ((row.to(tl.int64) * heads + head) * DIM)[:, None] + dims[None, :]
    tl.store(o_at, acc.to(out.dtype.element_ty), mask=alive[:, None] & (dims < DIM)[None, :])


@triton.jit(do_not_specialize=["splits"])
def join(
    parts,  # [splits, S, H, D] fp32
    logs,  # [splits, S, H] fp32
    out,  # [S, H * D]
    splits,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MOST: tl.constexpr,
):
    """The parts of one row and head, each by its share of the weights. Grid: (S * H,); MOST >= splits."""
    which, count = tl.program_id(0), tl.num_programs(0)
    split, dims = tl.arange(0, MOST), tl.arange(0, BLOCK_D)
    slot = split.to(tl.int64) * count + which
    log = tl.load(logs + slot, mask=split < splits, other=float("-inf"))
    weight = tl.exp2(log - tl.max(log, axis=0))
    inside = (split < splits)[:, None] & (dims < DIM)[None, :]
    part = tl.load(parts + (slot * DIM)[:, None] + dims[None, :], mask=inside, other=0.0)
    joined = tl.sum(part * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    tl.store(out + which.to(tl.int64) * DIM + dims, joined.to(out.dtype.element_ty), mask=dims < DIM)
