"""Chunks side by side behind one front, attended in a single launch: flash-attn's variable lengths.

    rows  [ chunk 0 | chunk 1 | ... ]
    keys  [ front chunk 0 | front chunk 1 | ... ]      the front anew for each: a chunk's keys lie in one piece

A row sees the front and its own chunk up to itself, which is "causal" aligned at the bottom right of each pair. Where
this is not to be had, chunks attend one after another: the same numbers, in more launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from blendserve.blend.rows import RowPlan
from blendserve.core import Span
from blendserve.gpu.available import capability, flash_attn
from blendserve.gpu.dense import HALVES, MAX_DIM, ROWS
from blendserve.gpu.proven import Kind, trouble
from blendserve.models.adapter import AttentionSpec


@dataclass(frozen=True)
class Pack:
    """Which rows and keys belong together; made once for all layers."""

    rows_end: Tensor  # [B + 1] int32, on the device: chunk b has rows rows_end[b] .. rows_end[b + 1]
    keys_end: Tensor  # [B + 1] int32, likewise its keys, the front's among them
    keys: Tensor  # [their number] int64: where each lies in [ front | chunk 0 | chunk 1 | ... ]
    most_rows: int
    most_keys: int

    @classmethod
    def of(cls, spans: Sequence[Span], n_front: int, device: torch.device) -> Pack:
        """spans: of the chunks' rows, one behind another, none empty."""
        lengths = [len(span) for span in spans]
        front = torch.arange(n_front)
        keys = torch.cat([torch.cat([front, n_front + torch.arange(s.start, s.stop)]) for s in spans])
        return cls(
            _ends(lengths).to(device),
            _ends([n_front + n for n in lengths]).to(device),
            keys.to(device),
            max(lengths),
            n_front + max(lengths),
        )


def takes(q: Tensor, keys: Tensor, spec: AttentionSpec) -> bool:
    """Whether flash-attn can do it on this GPU, and does it right. q [H, S, D], keys [K, S, D]."""
    return (
        q.device.type == "cuda"
        and q.dtype == keys.dtype
        and q.dtype in HALVES
        and q.shape[-1] <= MAX_DIM
        and capability(q.device) >= (8, 0)
        and hasattr(flash_attn(), "flash_attn_varlen_func")
        and not trouble((_twice,), Kind.of(q, keys, spec), ROWS)
    )


def attend(
    q: Tensor, keys: Tensor, values: Tensor, front: tuple[Tensor, Tensor], spec: AttentionSpec, pack: Pack
) -> Tensor:
    """Rotated rows of all chunks, q [H, S, D], keys and values [K, S, D], behind the front's [K, F, D] -> [S, H * D]."""
    packed = (
        torch.cat([ahead, own], dim=1).index_select(1, pack.keys).transpose(0, 1)
        for ahead, own in zip(front, (keys, values), strict=True)
    )
    package = flash_attn()
    assert package is not None, "ask `takes` first"
    left = -1 if spec.window is None else spec.window - 1
    softcap = {} if spec.softcap is None else {"softcap": spec.softcap}  # older versions have none
    out: Tensor = package.flash_attn_varlen_func(
        q.transpose(0, 1),
        *packed,
        cu_seqlens_q=pack.rows_end,
        cu_seqlens_k=pack.keys_end,
        max_seqlen_q=pack.most_rows,
        max_seqlen_k=pack.most_keys,
        softmax_scale=spec.scale,
        causal=True,
        window_size=(left, 0 if left >= 0 else -1),
        **softcap,
    )
    return out.reshape(q.shape[1], -1)


def _twice(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: RowPlan) -> Tensor:
    """Rows that stand side by side, as blend.attention.attend has them: packed twice, the second time looked at."""
    n, end = q.shape[1], plan.end
    front = keys[:, : end - n], values[:, : end - n]
    rows, own, plain = (
        torch.cat([x, x], dim=1) for x in (q, keys[:, end - n : end], values[:, end - n : end])
    )
    pack = Pack.of([Span(0, n), Span(n, 2 * n)], end - n, q.device)
    return attend(rows, own, plain, front, spec, pack)[n:]


def _ends(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
