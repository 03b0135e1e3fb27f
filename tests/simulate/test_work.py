"""The simulator's count of a prefill's work, against the engine's own, which looks at a layout token by token."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from blendserve.blend.layout import lay_out
from blendserve.blend.policies.base import make_policy
from blendserve.blend.work import work_of
from blendserve.config import BlendConfig
from blendserve.core import Chunk, ChunkKV, Prompt
from blendserve.simulate.config import ComputeConfig, CorpusConfig, RequestsConfig
from blendserve.simulate.work import Work
from blendserve.store.memory import MemoryChunk


@given(
    found=st.lists(st.booleans(), min_size=1, max_size=6),
    size=st.integers(1, 40),
    prefix=st.integers(1, 9),
    question=st.integers(1, 9),
    ratio=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
)
def test_counts_are_the_engine_s(
    found: list[bool], size: int, prefix: int, question: int, ratio: float
) -> None:
    def stored(n: int) -> MemoryChunk:
        return MemoryChunk(ChunkKV(torch.zeros(1, 1, n, 2), torch.zeros(1, 1, n, 2)))

    prompt = Prompt((1,) * prefix, tuple(Chunk((2,) * size) for _ in found), (3,) * question)
    views = [stored(size) if there else None for there in found]
    layout = lay_out(prompt, stored(prefix), views, behind_prefix=True)
    wanted = work_of(layout, make_policy(BlendConfig(ratio=ratio)), 1).row()
    work = Work(
        ComputeConfig(ratio=ratio),
        CorpusConfig(chunk_tokens=size),
        RequestsConfig(prefix_tokens=prefix, question_tokens=question, chunks=len(found)),
    )
    assert torch.allclose(torch.tensor(work.counts(found)).double(), torch.tensor(wanted).double(), rtol=1e-6)
