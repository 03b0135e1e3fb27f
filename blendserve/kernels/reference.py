"""Every operation in its plain form: on any device, in any dtype, in torch. Kernels are checked against it.

The signatures and docstrings are those of ops.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from blendserve.kernels.chunks import ChunkStack, one_after_another
from blendserve.kernels.norm import Norm
from blendserve.kernels.packed import PackedMatrix
from blendserve.kernels.rotary import Rotary
from blendserve.kernels.rows import AttentionPlan
from blendserve.kernels.types import (
    Activation,
    AttentionSpec,
    CorrectionParams,
    Prior,
    RecomputedTokens,
    RecordView,
    Rope,
)

MAX_BLOCK = 96  # rows; larger blocks waste work beyond the diagonal, smaller ones fill the matmul badly
SCORE_BUDGET = 2**22  # elements of one kv head's scores in a block: bounds memory at long contexts
LEAST_SPREAD = 1 / 64  # of the size of stored keys and values, for the ridge regression


def attend(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Tensor:
    """Attention that is causal by *position*: row i sees key j iff position(j) <= position(i).

    Rotated queries q [H, S, D], rows anywhere in ascending order, over keys and values [K, T, D] -> [S, H * D]; values
    may have other dims than keys, and what is returned has theirs.
    Equals softmax(softcap(scale q k^T) + causal mask by position) v; a sink is one more score, and its column is left
    out of the weights. ops.attend raises ValueError where keys are too few.

    Rows go in blocks, each over the keys from its first row's window to its last position: no S x T mask or score matrix
    is made. The query heads that share a kv head are stacked into one matmul, so keys are never repeated.
    """
    n_heads, n_rows, dim = q.shape
    n_kv = keys.shape[0]
    width = values.shape[2]
    group = n_heads // n_kv
    q = q.view(n_kv, group, n_rows, dim)
    out = torch.empty(n_rows, n_kv, group, width, dtype=q.dtype, device=q.device)
    start = 0
    while start < n_rows:
        end = int(plan.positions_on_host[start]) + 1
        stop = min(n_rows, start + max(1, min(MAX_BLOCK, SCORE_BUDGET // (group * end))))
        seen = plan.keys_seen(start, stop)
        hidden = plan.hidden_keys(slice(start, stop), seen)
        for head in range(n_kv):  # one matmul a kv head: a batched one would copy the keys, which are a slice
            qb = q[head, :, start:stop].reshape(-1, dim)
            scores = torch.addmm(q.new_empty(()), qb, keys[head, seen].T, beta=0, alpha=spec.scale)
            if spec.softcap is not None:
                scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
            scores = scores.view(group, stop - start, -1).masked_fill_(hidden, float("-inf"))
            sinks = None if spec.sinks is None else spec.sinks.view(n_kv, group, 1, 1)[head]
            mixed = torch.mm(_softmax(scores, sinks).flatten(0, 1), values[head, seen])
            out[start:stop, head] = mixed.view(group, stop - start, width).transpose(0, 1)
        start = stop
    return out.view(n_rows, n_heads * width)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights over keys of scores [..., T]; sinks: [..., 1] of the same number of dimensions."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]


def attend_with_scores(
    q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan
) -> tuple[Tensor, Tensor]:
    """`attend` without the keys in `plan.masked_keys` [T]; also each key's score [T] fp32. S is a question: small.

    A key's score is the norm over rows of the mean over heads of its weight times the norm of its value.
    """
    n_heads, s, dim = q.shape
    n_kv, n = keys.shape[:2]
    hide = plan.hidden
    stacked = q.reshape(n_kv, -1, dim)
    weights = torch.empty(n_kv, n_heads // n_kv * s, n, dtype=q.dtype, device=q.device)
    torch.baddbmm(weights, stacked, keys.mT, beta=0, alpha=spec.scale, out=weights)
    if spec.softcap is not None:
        weights.div_(spec.softcap).tanh_().mul_(spec.softcap)
    weights.view(n_heads, s, n)[..., n - hide.shape[1] :].masked_fill_(hide, float("-inf"))
    if spec.sinks is None:
        torch.softmax(weights, dim=-1, out=weights)
    else:
        weights = _softmax(weights.view(n_heads, s, n), spec.sinks[:, None, None]).reshape(weights.shape)
    attended = (weights @ values).view(n_heads, s, -1).transpose(0, 1).reshape(s, -1)
    length = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32)  # [K, T]
    per_kv_head = weights.view(n_kv, -1, s, n).sum(dim=1, dtype=torch.float32)  # [K, S, T]
    per_row = (per_kv_head * length[:, None]).sum(dim=0) / n_heads
    return attended, per_row.square().sum(dim=0).sqrt()


def attend_at(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, at: Tensor) -> Tensor:
    """One row q [H, 1, D] at position `at` [1] that only the device knows, over [K, T, D] -> [1, H * D].

    Keys that the row does not see get no weight, and their values must be finite.
    """
    n_kv, n_keys, dim = keys.shape
    scores = spec.scale * (q.reshape(n_kv, -1, dim) @ keys.transpose(1, 2)).float()  # [K, g, T]
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    position = torch.arange(n_keys, device=q.device)
    hidden = position > at
    if spec.window is not None:
        hidden |= position <= at - spec.window
    sinks = None if spec.sinks is None else spec.sinks.view(n_kv, -1, 1)
    weights = _softmax(scores.masked_fill(hidden, float("-inf")), sinks).to(q.dtype)
    return (weights @ values).reshape(1, -1)


def attend_chunks(
    q: Tensor, k: Tensor, v: Tensor, prefix_kv: tuple[Tensor, Tensor], spec: AttentionSpec, stack: ChunkStack
) -> Tensor:
    """Rotated rows of all chunks of a stack, q [H, S, D], k and v [K, S, D], each over [prefix | itself] -> [S, H * D].

    prefix_kv: keys (after RoPE) and values [K, F, D] of the prefix.
    """
    return one_after_another(attend, q, k, v, prefix_kv, spec, stack)


def rotate(x: Tensor, rope: Rope, rotary: Rotary) -> Tensor:
    """x [heads, S, D] rotated by RoPE to the positions of `rope` [S]."""
    return rotary.rotate(x, rope)


def place(chunks: Sequence[RecordView], keys: Tensor, values: Tensor, rope: Rope, rotary: Rotary) -> None:
    """Copy stored chunks into one layer's cache, keys and values [K, T, D], and rotate the keys.

    rope: of positions [T].
    """
    for start, k, v in chunks:
        here = slice(start, start + k.shape[1])
        keys[:, here] = rotary.rotate(k.to(keys.device), rope.at(here))
        values[:, here] = v


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [S, I] times weight [O, I], plus bias [O] -> [S, O]."""
    if x.shape[-1] % 2:  # oneDNN's bf16 tiles also read the number behind an odd row
        x = x.contiguous()
    return F.linear(x, weight, bias)


def packed_linear(x: Tensor, weight: PackedMatrix, bias: Tensor | None = None) -> Tensor:
    """`linear` with quantised weights, rounded to their dtype; few rows may be multiplied by what is not rounded."""
    return linear(x, weight.numbers().to(weight.dtype).to(x.dtype), bias)


def take(weight: PackedMatrix, rows: Tensor) -> Tensor:
    """Rows [S] of quantised weights [V, E] -> [S, E]."""
    return weight.numbers().to(weight.dtype)[rows]


def add_norm(x: Tensor, add: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """x + add [S, E] (without `add`, x itself) and its norm, with the bits of the model's own modules."""
    total = x if add is None else x + add
    return total, norm.own(total)


def gated_activation(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up [S, I], with the bits of the model's own function. Kernels overwrite `gate`."""
    return activation(gate) * up


def correct(
    keys: Tensor, values: Tensor, fresh: RecomputedTokens, rope: Rope, rotary: Rotary, params: CorrectionParams,
    prior: Prior | None = None,
) -> None:  # fmt: skip
    """Correct reused tokens' keys (after RoPE) and values [K, N, D] by the deviations of their chunks' recomputed tokens.

    In place; rope: of positions [N]. Formulas: blend/corrections.
    """
    at = fresh.recomputed_index
    others = fresh.reused_index
    rotate = rotary.rotate
    dim = keys.shape[-1]
    inverse = rope.inverse
    elsewhere = rope.at(others)
    wide = torch.promote_types(keys.dtype, torch.float32)
    (ours, our_weight), (theirs, their_weight) = (
        _by_token(tuple(sizes), tuple(fresh.context_weight), wide, keys.device)
        for sizes in (fresh.recomputed_per_chunk, fresh.reused_per_chunk)
    )
    before_rope = torch.cat([rotate(keys, inverse), values], dim=-1)
    known = before_rope[:, at].to(wide)
    now = torch.cat(
        [rotate(fresh.keys[:, fresh.row_index], inverse.at(at)), fresh.values[:, fresh.row_index]], dim=-1
    )
    moved = now - known
    rule = None  # how a token moves by what is stored of it
    if prior is not None:
        share = _share(expected := our_weight * _by(prior, known), moved, params.prior_shrinkage, dim)
        moved = moved - share * expected
        share = share * _halves(known, dim, params.prior_key_scale, params.prior_value_scale)
        rule = Prior(share * prior.weights.to(wide), share[:, 0] * prior.constant.to(wide))
    scale = _halves(known, dim, params.key_scale, params.value_scale)
    means = _means(moved, ours, len(fresh.context_weight), params)
    shift = scale * means[:, theirs]
    if params.penalty is not None and len(at):
        fitted = _fit(known, our_weight, moved - means[:, ours], params.penalty, dim)
        found = Prior(scale * fitted.weights, scale * fitted.constant)
        rule = found if rule is None else Prior(*(a + b for a, b in zip(rule, found, strict=True)))
    if rule is not None:
        shift = shift + their_weight * _by(rule, before_rope[:, others].to(wide))
    by_key = shift[..., :dim]
    by_value = shift[..., dim:]
    keys.index_add_(1, others, rotate(by_key.to(keys.dtype), elsewhere))
    values.index_add_(1, others, by_value.to(keys.dtype))


@lru_cache(maxsize=16)
def _by_token(
    sizes: tuple[int, ...], weights: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Each token's chunk [S] and its chunk's weight [S, 1], once a prompt: a layer must not make the host wait."""
    chunk = torch.repeat_interleave(torch.tensor(sizes))
    return chunk.to(device), torch.tensor(weights, dtype=dtype)[chunk, None].to(device)


def _halves(like: Tensor, dim: int, key: float, value: float) -> Tensor:
    """[2D]: of keys, which have `dim` numbers, and of values."""
    return torch.cat([like.new_full((dim,), key), like.new_full((like.shape[-1] - dim,), value)])


def _by(rule: Prior, stored: Tensor) -> Tensor:
    """What a rule says of stored keys and values [K, S, 2D]."""
    return stored @ rule.weights.to(stored.dtype) + rule.constant.to(stored.dtype)[:, None]


def _sums(x: Tensor, dim: int) -> Tensor:
    """Sum [K, S, 2D] over tokens and over the `dim` numbers of keys, and of values, each in its places."""
    halves = (x[..., :dim], x[..., dim:])
    return torch.cat(
        [half.sum(dim=(1, 2), keepdim=True).expand(-1, 1, half.shape[-1]) for half in halves], -1
    )


def _share(expected: Tensor, moved: Tensor, trust: float, dim: int) -> Tensor:
    """How much of what was expected [K, S, 2D] counts: of keys and of values of each head, [K, 1, 2D].

    The slope of what moved on it, drawn towards 1 as by `trust` more tokens that moved as expected; 0 to 1.
    """
    n = max(1, moved.shape[1])
    both, squares = (_sums(expected * x, dim) for x in (moved, expected))
    slope = torch.where(squares > 0, (both / squares + trust / n) / (1 + trust / n), 1.0)
    return slope.clamp(0, 1)


def _means(moved: Tensor, chunk: Tensor, n_chunks: int, params: CorrectionParams) -> Tensor:
    """Deviations [K, S, F] of the recomputed tokens, each of a chunk [S] -> the mean [K, chunks, F] of each, shrunk.

    All chunks' towards zero, as if `zero_shrinkage` more tokens had not moved; a chunk's own towards that.
    """
    overall = moved.sum(dim=1, keepdim=True) / (moved.shape[1] + params.zero_shrinkage)
    is_of = (chunk == torch.arange(n_chunks, device=chunk.device)[:, None]).to(moved.dtype)  # [chunks, S]
    n = is_of.sum(dim=1, keepdim=True)
    return overall + (is_of @ moved - n * overall) / (n + params.chunk_shrinkage)


def _fit(known: Tensor, foreign: Tensor, left: Tensor, penalty: float, dim: int) -> Prior:
    """Ridge regression of `left` [K, S, 2D] on stored keys and values [K, S, 2D], centred, and of unit size each.

    -> W and c such that foreign [S, 1] * (known W + c) predicts `left`. The size is at least LEAST_SPREAD of the
    numbers themselves: what equal tokens differ by is rounding, and says nothing of other tokens.
    """
    mean = known.mean(dim=1, keepdim=True)
    x = foreign * (known - mean)
    # All dims of keys are scaled alike, and all of values.
    numbers = x.shape[1] * _halves(x, dim, dim, x.shape[-1] - dim)
    spread, length = (_sums(part.square(), dim) / numbers for part in (x, foreign * known))
    size = torch.maximum(spread, LEAST_SPREAD**2 * length).sqrt().clamp(min=1e-6)
    weights = _ridge(x / size, left, penalty) / size.mT
    return Prior(weights, -(mean @ weights)[:, 0])


def _ridge(x: Tensor, y: Tensor, penalty: float) -> Tensor:
    """W [K, F, G] with the least |x W - y|^2 + penalty |W|^2, for x [K, S, F], y [K, S, G]."""
    few = x.shape[1] < x.shape[2]  # then the system of the rows is the smaller one; both have this solution
    gram = x @ x.mT if few else x.mT @ x
    gram.diagonal(dim1=1, dim2=2).add_(penalty)
    factor, _ = torch.linalg.cholesky_ex(gram)  # NaN in, NaN out: what is wrong is told by the gate, not here
    left = y if few else x.mT @ y
    for part, upper in ((factor, False), (factor.mT, True)):  # cholesky_solve takes 100 launches on a GPU
        left = torch.linalg.solve_triangular(part, left, upper=upper)
    return x.mT @ left if few else left
