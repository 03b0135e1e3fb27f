"""Attention, RoPE and corrections in float64, and flash-attn by them: what kernels are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blendserve.kernels.rotary import Rotary
from blendserve.kernels.rows import AttentionPlan
from blendserve.kernels.types import AttentionSpec, CorrectionParams, Prior, RecomputedTokens, Rope


def visible_keys(at: Sequence[int], window: int | None, absent: Sequence[int] = ()) -> list[Tensor]:
    """The keys that each row sees."""
    seen = [torch.arange(max(0, p + 1 - (window or p + 1)), p + 1) for p in at]
    hidden = torch.tensor(absent, dtype=torch.long)
    return [keys[~torch.isin(keys, hidden)] for keys in seen] if absent else seen


def attention(
    q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, seen: Sequence[Tensor]
) -> list[Tensor]:
    """Each row over the keys that it sees -> [S, H * D], and each key's score [T]."""
    q, keys, values = (x.detach().double().cpu() for x in (q, keys, values))
    n_kv, total, dim = keys.shape
    is_seen = torch.zeros(len(seen), total, dtype=torch.bool)
    for s, visible in enumerate(seen):
        is_seen[s, visible] = True
    used = is_seen.any(dim=0).nonzero()[:, 0]  # others may be NaN
    k, v = keys[:, used], values[:, used]
    logits = spec.scale * torch.einsum("kgsd,knd->kgsn", q.reshape(n_kv, -1, len(seen), dim), k)
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    logits = logits.masked_fill(~is_seen[:, used], -torch.inf)
    peak, beside = logits.amax(-1, keepdim=True), torch.zeros(())
    if spec.sinks is not None:
        sink = spec.sinks.double().cpu().view(n_kv, -1, 1, 1)
        peak = torch.maximum(peak, sink)
        beside = torch.exp(sink - peak)
    weights = torch.exp(logits - peak)
    weights /= weights.sum(-1, keepdim=True) + beside
    scores = torch.zeros(total, dtype=torch.float64)
    scores[used] = (weights * v.norm(dim=-1)[:, None, None]).flatten(0, 1).mean(0).square().sum(0).sqrt()
    return [torch.einsum("kgsn,knd->skgd", weights, v).flatten(1), scores]


def attend(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> list[Tensor]:
    absent = [] if plan.masked_keys is None else plan.masked_keys.nonzero()[:, 0].tolist()
    found = attention(q, keys, values, spec, visible_keys(plan.positions.tolist(), spec.window, absent))
    return found[: 1 if plan.masked_keys is None else 2]


def attend_at(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, at: Tensor) -> list[Tensor]:
    return attention(q, keys, values, spec, visible_keys(at.tolist(), spec.window))[:1]


# RoPE, placement and corrections


def turned(x: Tensor, rope: Rope, form: Rotary, inverse: bool = False) -> Tensor:
    """x [..., S, D] in float64, pair after pair of dims."""
    out, cos, sin = x.detach().double().cpu().clone(), rope.cos.double().cpu(), rope.sin.double().cpu()
    half = cos.shape[-1] // 2
    for i in range(half):
        c, s = cos[:, i * form.step], sin[:, i * form.step]
        if inverse:
            length = c**2 + s**2
            c, s = c / length, -s / length
        a, b = (2 * i, 2 * i + 1) if form.neighbours else (i, i + half)
        one, other = out[..., a].clone(), out[..., b].clone()
        out[..., a], out[..., b] = one * c - other * s, other * c + one * s
    return out


def place(parts: Sequence[Any], keys: Tensor, values: Tensor, rope: Rope, rotary: Rotary) -> list[Tensor]:
    wanted = [keys.double().cpu(), values.double().cpu()]
    for start, k, v in parts:
        here = slice(start, start + k.shape[1])
        wanted[0][:, here], wanted[1][:, here] = turned(k, rope.at(here), rotary), v
    return wanted


def correct(
    keys: Tensor, values: Tensor, fresh: RecomputedTokens, rope: Rope, rotary: Rotary,
    params: CorrectionParams, prior: Prior | None = None,
) -> list[Tensor]:  # fmt: skip
    """Head after head, token after token; the ridge by least squares with rows added for the penalty."""
    at, others, n = fresh.recomputed_index, fresh.reused_index, len(fresh.recomputed_index)
    dims = [keys.shape[-1], values.shape[-1]]
    width, dim = sum(dims), dims[0]
    old = torch.cat([turned(keys, rope, rotary, inverse=True), values.double()], dim=-1)
    new_keys = turned(fresh.keys[:, fresh.row_index], rope.at(at), rotary, inverse=True)
    new = torch.cat([new_keys, fresh.values[:, fresh.row_index].double()], dim=-1)
    which, which_other = (
        torch.tensor([c for c, k in enumerate(sizes) for _ in range(k)], dtype=torch.long)
        for sizes in (fresh.recomputed_per_chunk, fresh.reused_per_chunk)
    )
    foreign = torch.tensor(fresh.context_weight, dtype=torch.float64)[:, None]

    def halves(key: Any, value: Any) -> Tensor:
        return torch.tensor([key] * dims[0] + [value] * dims[1], dtype=torch.float64)

    scale, out = halves(params.key_scale, params.value_scale), [keys.double(), values.double()]
    for head in range(len(keys)):
        stored, rest = old[head], old[head][others]
        moved, shift = new[head] - stored[at], torch.zeros(len(others), width, dtype=torch.float64)
        if prior is not None:
            expected = foreign[which] * (stored[at] @ prior.weights[head].double() + prior.constant[head])
            shares = []
            for e, m in zip(torch.split(expected, dims, -1), torch.split(moved, dims, -1), strict=True):
                trust = params.prior_shrinkage / max(1, n)
                slope = (float((e * m).sum() / (e * e).sum()) + trust) / (1 + trust) if e.any() else 1.0
                shares.append(min(1.0, max(0.0, slope)))
            moved = moved - halves(*shares) * expected
            said = foreign[which_other] * (rest @ prior.weights[head].double() + prior.constant[head])
            shift += halves(*shares) * halves(params.prior_key_scale, params.prior_value_scale) * said
        overall = moved.sum(0) / (n + params.zero_shrinkage)
        means = []
        for c, k in enumerate(fresh.recomputed_per_chunk):
            beyond = (moved[which == c] - overall).sum(0)
            means.append(overall + beyond / (k + params.chunk_shrinkage))
        mean = torch.stack(means)
        shift += scale * mean[which_other]
        if params.penalty is not None and n:
            centre = stored[at].mean(0)
            x, x_other = foreign[which] * (stored[at] - centre), foreign[which_other] * (rest - centre)
            sizes = []
            wholes = torch.split(foreign[which] * stored[at], dims, -1)
            for centred, whole in zip(torch.split(x, dims, -1), wholes, strict=True):
                spread, length = float(centred.square().mean()), float(whole.square().mean())
                sizes.append(max(spread, length / 4096, 1e-12) ** 0.5)
            x, x_other = x / halves(*sizes), x_other / halves(*sizes)
            added = params.penalty**0.5 * torch.eye(width, dtype=torch.float64)
            y = torch.cat([moved - mean[which], torch.zeros_like(added)])
            shift += scale * (x_other @ torch.linalg.lstsq(torch.cat([x, added]), y).solution)
        out[0][head, others] += turned(shift[:, :dim], rope.at(others), rotary)
        out[1][head, others] += shift[:, dim:]
    return out


class FlashAttn:
    """The package's functions as its documentation has them: `causal` is aligned at the bottom right."""

    @staticmethod
    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, window_size: tuple[int, int],
        softcap: float = 0.0,
    ) -> Tensor:  # fmt: skip
        assert causal
        assert window_size[1] == (-1 if window_size[0] < 0 else 0)
        n, end = q.shape[1], k.shape[1]
        spec = AttentionSpec(softmax_scale, window_size[0] + 1 or None, softcap or None)
        seen = visible_keys(range(end - n, end), spec.window)
        heads, keys, values = (x[0].transpose(0, 1) for x in (q, k, v))
        return attention(heads, keys, values, spec, seen)[0].view(1, *q.shape[1:]).to(q.dtype)

    @classmethod
    def flash_attn_varlen_func(
        cls, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, **options: Any,
    ) -> Tensor:  # fmt: skip
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        q_parts, k_parts, v_parts = (
            x.tensor_split(ends.tolist()[1:-1])
            for x, ends in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))
        )
        assert max(map(len, q_parts)) == max_seqlen_q
        assert max(map(len, k_parts)) == max_seqlen_k
        parts = zip(q_parts, k_parts, v_parts, strict=True)
        return torch.cat([cls.flash_attn_func(a[None], b[None], c[None], **options)[0] for a, b, c in parts])
