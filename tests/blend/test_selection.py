"""How many tokens of which chunks are recomputed: shares of segments, their floors, and the best of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from blendserve.blend.layout import Layout
from blendserve.blend.policies import Policy
from blendserve.blend.prefill import PrefillPlan, blend_prefill
from blendserve.blend.selection import Share
from blendserve.config import BlendConfig
from blendserve.core import run
from tests.support.blending import lay, some_prompt
from tests.support.models import tiny_decoder

PROMPT = some_prompt([30, 40, 20], prefix=5)  # the first chunk is exact


@dataclass(frozen=True)
class ByChunk(Policy):
    """The last tokens of each chunk, twice the share of the chunk before it."""

    def shares(self, layout: Layout) -> Iterator[Share]:
        for i, segments in layout.chunks():
            yield Share(tuple(segments), self.ratio * 2**i)

    def rank(self, layout: Layout, scores: Tensor | None) -> Tensor:
        return torch.arange(layout.n_tokens)


def recomputed(ratio: float) -> list[int]:
    """Positions that a prefill recomputes with a ratio by chunk."""
    decoder = tiny_decoder("llama")
    plan = PrefillPlan(lay(decoder, PROMPT), BlendConfig(correction="none"), ByChunk(ratio))
    done = run(blend_prefill(decoder, plan))
    assert plan.policy.selection(plan.layout).n == len(done.recomputed)
    found: list[int] = done.recomputed.tolist()
    return found


def test_a_ratio_by_chunk_is_one_method() -> None:
    """A fifth of 40 tokens and two fifths of 20."""
    assert recomputed(0.1) == [*range(75 - 8, 75), *range(95 - 8, 95)]


@pytest.mark.floors
def test_the_floor_holds_for_each_chunk() -> None:
    assert recomputed(0.01) == [*range(75 - 16, 75), *range(95 - 16, 95)]
    assert recomputed(0.0) == []
