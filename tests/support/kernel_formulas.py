"""Attention as float64 loops, and the package flash-attn by them: what backends are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blendserve.kernels.rows import AttentionPlan
from blendserve.kernels.types import AttentionSpec


def visible_keys(at: Sequence[int], window: int | None, absent: Sequence[int] = ()) -> list[list[int]]:
    """The keys that each row sees."""
    return [[j for j in range(max(0, p + 1 - (window or p + 1)), p + 1) if j not in absent] for p in at]


def attention(
    q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, seen: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Row after row over the keys that it sees -> [S, H * D], and each key's score [T]."""
    q, keys, values = (x.detach().double().cpu() for x in (q, keys, values))
    n_kv, total, dim = keys.shape
    out, scores = [], torch.zeros(total, dtype=torch.float64)
    for s, visible in enumerate(seen):
        k, v = keys[:, visible], values[:, visible]
        logits = spec.scale * torch.einsum("kgd,knd->kgn", q[:, s].view(n_kv, -1, dim), k)
        if spec.softcap is not None:
            logits = spec.softcap * torch.tanh(logits / spec.softcap)
        weights = torch.exp(logits - logits.amax(-1, keepdim=True))
        weights /= weights.sum(-1, keepdim=True)
        out.append(torch.einsum("kgn,knd->kgd", weights, v).flatten())
        scores[list(visible)] += (weights * v.norm(dim=-1)[:, None]).flatten(0, 1).mean(0) ** 2
    return [torch.stack(out), scores.sqrt()]


def attend(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> list[Tensor]:
    absent = [] if plan.masked_keys is None else plan.masked_keys.nonzero()[:, 0].tolist()
    found = attention(q, keys, values, spec, visible_keys(plan.positions.tolist(), spec.window, absent))
    return found[: 1 if plan.masked_keys is None else 2]


def attend_at(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, at: Tensor) -> list[Tensor]:
    return attention(q, keys, values, spec, visible_keys(at.tolist(), spec.window))[:1]


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
