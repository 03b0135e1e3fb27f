"""Packed chunks against chunk after chunk. flash-attn's place is taken by the formula, over each pair of segments."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blendserve.blend.precompute import GPU_STACK_TOKENS, STACK_TOKENS, ChunkComputer
from blendserve.core import Span
from blendserve.kernels import ops, verify
from blendserve.kernels.chunks import ChunkStack
from blendserve.kernels.cuda import packed
from blendserve.kernels.operation import Operation
from blendserve.kernels.ops import ATTEND_CHUNKS
from blendserve.kernels.reference import formula
from blendserve.kernels.types import AttentionSpec
from blendserve.kernels.verify import Kind, attention_trouble
from blendserve.models.adapter import Adapter
from tests.support.blending import assert_near, some_ids
from tests.support.models import KINDS, tiny_adapter

ALWAYS_PACKED = Operation(replace(ATTEND_CHUNKS.backends[0], fits=lambda *_: True, trouble=lambda *_: ""))
DENSE = verify.ONE_ROW + verify.SIDE_BY_SIDE


class Formula:
    """What flash-attn documents of `flash_attn_varlen_func`: bottom right, for each pair of segments."""

    def __init__(self) -> None:
        self.calls = 0

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float = 0.0,
    ) -> Tensor:
        self.calls += 1
        assert causal
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        spec = AttentionSpec(
            softmax_scale, None if window_size[0] < 0 else window_size[0] + 1, softcap or None
        )
        out = torch.full_like(q, float("nan"))
        pairs = list(zip(*(x.tolist() for x in (cu_seqlens_q, cu_seqlens_k)), strict=True))
        for (q0, k0), (q1, k1) in pairwise(pairs):
            assert 0 < q1 - q0 <= max_seqlen_q
            assert q1 - q0 <= k1 - k0 <= max_seqlen_k
            at = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)
            rows, keys, values = (x.transpose(0, 1) for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
            out[q0:q1] = formula(rows, keys, values, at, spec).view(out[q0:q1].shape).to(q.dtype)
        assert (len(q), len(k)) == pairs[-1]
        return out


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Formula:
    package = Formula()
    monkeypatch.setattr(packed, "flash_attn", lambda: package)
    monkeypatch.setattr(ops, "ATTEND_CHUNKS", ALWAYS_PACKED)
    return package


@pytest.mark.parametrize("name", ["llama", *KINDS])
@pytest.mark.parametrize("behind", [0, 9])
def test_equals_chunk_after_chunk(
    name: str, behind: int, flash: Formula, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, chunks = tiny_adapter(name), [some_ids(n, seed=n) for n in (30, 1, 0, 12, 30)]
    got = ChunkComputer(adapter, some_ids(behind)).compute(chunks)
    assert flash.calls == (adapter.n_layers - 1) * (2 if behind else 1)
    monkeypatch.undo()
    wanted = ChunkComputer(adapter, some_ids(behind)).compute(chunks)
    for one, other in zip(got, wanted, strict=True):
        assert_near(one.keys, other.keys, 1e-4)
        assert_near(one.values, other.values, 1e-4)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_neither_order_nor_company_matters(lengths: list[int], seed: int) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(packed, "flash_attn", Formula)
    patch.setattr(ops, "ATTEND_CHUNKS", ALWAYS_PACKED)
    try:
        computer = ChunkComputer(tiny_adapter("gemma2"), some_ids(4))
        chunks = [some_ids(n, seed=i) for i, n in enumerate(lengths)]
        order = torch.randperm(len(chunks), generator=torch.Generator().manual_seed(seed)).tolist()
        together, turned = computer.compute(chunks), computer.compute([chunks[i] for i in order])
        for i, kv in zip(order, turned, strict=True):
            assert_near(kv.values, together[i].values, 1e-5)
            assert_near(kv.keys, computer.compute([chunks[i]])[0].keys, 1e-5)
    finally:
        patch.undo()


@pytest.mark.parametrize(("windowed", "softcapped"), [(False, False), (True, False), (False, True)])
def test_the_proof_passes_what_is_right_and_nothing_else(
    windowed: bool, softcapped: bool, flash: Formula, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = Kind(torch.device("cpu"), torch.float32, 3, 16, windowed, softcapped)
    assert attention_trouble.__wrapped__((packed.packed_twice,), kind, DENSE) == ""

    def top_left(*args: Any, **options: Any) -> Tensor:
        """Right only where there is no front, as flash-attn before 2.1."""
        out = Formula().flash_attn_varlen_func(*args, **options)
        fronts = options["cu_seqlens_k"] - options["cu_seqlens_q"]
        return out.roll(1, 0) if fronts.any() else out

    monkeypatch.setattr(flash, "flash_attn_varlen_func", top_left)
    assert "off by" in attention_trouble.__wrapped__((packed.packed_twice,), kind, DENSE)


def test_without_a_gpu_or_flash_attn_nothing_is_packed() -> None:
    q = torch.zeros(4, 3, 16, dtype=torch.bfloat16)
    stack = ChunkStack([Span(0, 3)], 0, 2, q.device)
    assert not packed.fits(q, q[:2], q[:2], (q[:2, :0], q[:2, :0]), AttentionSpec(1.0), stack)


@pytest.mark.parametrize(
    ("per_token", "rows"), [(131_072, 8192), (23_040, GPU_STACK_TOKENS), (1 << 21, STACK_TOKENS)]
)
def test_stacks_of_a_gpu_are_larger_within_bounds(
    per_token: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    computer = ChunkComputer(tiny_adapter("llama"), ())
    assert computer.stack_tokens == STACK_TOKENS
    monkeypatch.setattr(Adapter, "device", torch.device("cuda", 0))
    monkeypatch.setattr(Adapter, "kv_bytes_per_token", per_token)
    assert computer.stack_tokens == rows
