"""The `query` policy's pass: the suffix alone runs over the reused KV, and we watch what it looks at.

Costs S = suffix rows through all layers; every layer's stored KV is placed on the way, so that the blending pass finds
it there. Tokens without KV (missing chunks) are hidden from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blendserve.blend.assemble import Assembly, Layout
from blendserve.blend.cache import KVCache
from blendserve.models.adapter import Adapter, AttentionSpec, Ropes
from blendserve.native import attention as native


def suffix_attention(
    adapter: Adapter, hidden: Tensor, layout: Layout, cache: KVCache, assembly: Assembly, ropes: Ropes
) -> Tensor:
    """Embedded suffix rows [S, E] -> a score per position [T].

    That is, summed over layers, the norm over rows of the mean over heads of attention times the norm of the value.
    """
    n, start = layout.n_tokens, layout.n_tokens - layout.n_suffix
    suffix = slice(start, n)
    hide = {w: _hidden(layout, w).to(adapter.device) for w in {spec.window for spec in adapter.specs}}
    positions, unknown = torch.arange(start, n), layout.fresh & (torch.arange(n) < start)
    absent = layout.fresh[:start].nonzero()[:, 0].to(adapter.device)
    scores = torch.zeros(n, device=adapter.device)
    for l in range(adapter.n_layers):
        assembly.place(l)
        cache.values[l][:, absent] = 0  # memory may hold NaN there, and a weight of 0 does not hide that
        rows = adapter.project(l, hidden)
        rope = ropes[l].at(suffix)
        cache.write(l, suffix, adapter.rotate(rows.k, rope), rows.v)
        q = adapter.rotate(rows.q, rope)
        spec = adapter.specs[l]
        keys, values = cache.keys[l, :, :n], cache.values[l, :, :n]
        if native.takes(q, keys, values, spec.scale):
            seen = native.Seen(positions, spec.scale, spec.window, spec.softcap)
            attended, looked = native.watch(q, keys, values, seen, unknown)
        else:
            weights, attended = _attend(q, keys, values, spec, hide[spec.window])
            looked = _looked(weights, values)
        scores += looked
        if l + 1 < adapter.n_layers:
            hidden = adapter.finish(l, hidden, attended)
    return scores.cpu()


def _looked(weights: Tensor, values: Tensor) -> Tensor:
    """weights [H, S, T], values [K, T, D] -> [T] fp32: what each key contributes to these rows, without direction."""
    length = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32)  # [K, T]
    per_kv_head = weights.view(len(values), -1, *weights.shape[1:]).sum(
        dim=1, dtype=torch.float32
    )  # [K, S, T]
    taken = (per_kv_head * length[:, None]).sum(dim=0) / len(weights)
    score: Tensor = taken.square().sum(dim=0).sqrt()
    return score


def _hidden(layout: Layout, window: int | None) -> Tensor:
    """[S, T - from], True where a suffix row must not look: later positions, positions without KV or out of its window.

    Only the last columns are given where nothing before them is hidden from anybody.
    """
    n, s = layout.n_tokens, layout.n_suffix
    at = torch.arange(n)
    rows = at[n - s :, None]
    hide = (layout.fresh & (at < n - s))[None] | (at[None] > rows)
    if window is not None:
        hide |= at[None] <= rows - window
    seen_by_all = int((~hide.any(dim=0)).long().cumprod(0).sum())
    return hide[:, seen_by_all:]


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, hide: Tensor
) -> tuple[Tensor, Tensor]:
    """q [H, S, D] over [K, T, D] -> weights [H, S, T] and output [S, H * D]. S is a question: small."""
    n_heads, s, dim = q.shape
    n_kv, n = keys.shape[:2]
    stacked = q.reshape(n_kv, -1, dim)
    weights = torch.empty(n_kv, n_heads // n_kv * s, n, dtype=q.dtype, device=q.device)
    for head in range(n_kv):  # see attention.py: a batched matmul would copy the keys
        torch.addmm(weights[head], stacked[head], keys[head].T, beta=0, alpha=spec.scale, out=weights[head])
    if spec.softcap is not None:
        weights.div_(spec.softcap).tanh_().mul_(spec.softcap)
    weights.view(n_heads, s, n)[..., n - hide.shape[1] :].masked_fill_(hide, float("-inf"))
    torch.softmax(weights, dim=-1, out=weights)
    out = torch.stack([torch.mm(weights[head], values[head]) for head in range(n_kv)])
    return weights.view(n_heads, s, n), out.view(n_heads, s, dim).transpose(0, 1).reshape(s, n_heads * dim)
