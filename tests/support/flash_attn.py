"""A double of the package flash-attn, which needs a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blendserve.kernels.types import AttentionSpec
from tests.support.kernel_formulas import attention, visible_keys


class FlashAttn:
    """The functions of flash-attn as its documentation has them: causal is aligned at the bottom right."""

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
