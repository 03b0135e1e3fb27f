"""Chunks packed for flash-attn, in a whole precompute; a double stands for the package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from blendserve.blend.precompute import GPU_STACK_TOKENS, STACK_TOKENS, ChunkComputer
from blendserve.kernels import ops, verify
from blendserve.kernels.cuda import packed
from blendserve.kernels.operation import Operation
from blendserve.kernels.verify import Kind, attention_trouble
from blendserve.models.adapter import Adapter
from tests.support.blending import assert_near, some_ids
from tests.support.kernels import FlashAttn
from tests.support.models import BLEND_KINDS, tiny_adapter

BACKEND = replace(ops.ATTEND_CHUNKS.backends[0], fits=lambda *_: True, trouble=lambda *_: "")
DENSE = verify.ONE_ROW + verify.SIDE_BY_SIDE


@pytest.mark.parametrize("name", BLEND_KINDS)
@pytest.mark.parametrize("behind", [0, 9])
def test_equals_chunk_after_chunk(name: str, behind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, chunks = tiny_adapter(name), [some_ids(n, seed=n) for n in (30, 1, 0, 12, 30)]
    wanted = ChunkComputer(adapter, some_ids(behind)).compute(chunks)
    monkeypatch.setattr(packed, "flash_attn", lambda: FlashAttn)
    monkeypatch.setattr(ops, "ATTEND_CHUNKS", Operation(BACKEND))
    for one, other in zip(ChunkComputer(adapter, some_ids(behind)).compute(chunks), wanted, strict=True):
        assert_near(one.keys, other.keys, 1e-4)
        assert_near(one.values, other.values, 1e-4)


@pytest.mark.parametrize(("windowed", "softcapped"), [(False, False), (True, False), (False, True)])
def test_the_proof_passes_what_is_right_and_nothing_else(
    windowed: bool, softcapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "flash_attn", lambda: FlashAttn)
    kind = Kind(torch.device("cpu"), torch.float32, 3, 16, windowed, softcapped)
    attention_trouble.cache_clear()
    assert attention_trouble((packed.packed_twice,), kind, DENSE) == ""

    class TopLeft(FlashAttn):
        """Right only where there is no front, as flash-attn before 2.1."""

        @classmethod
        def flash_attn_varlen_func(cls, *args: Any, **options: Any) -> Tensor:
            out = FlashAttn.flash_attn_varlen_func(*args, **options)
            return out.roll(1, 0) if (options["cu_seqlens_k"] - options["cu_seqlens_q"]).any() else out

    monkeypatch.setattr(packed, "flash_attn", lambda: TopLeft)
    attention_trouble.cache_clear()
    assert attention_trouble((packed.packed_twice,), kind, DENSE)
    attention_trouble.cache_clear()


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
