"""The compiled ridge correction against the plain one in float64, and against itself on other threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blendserve import native
from blendserve.blend.correct import move_plainly
from blendserve.core import Span
from blendserve.native.ridge import move, takes
from tests.blend.helpers import assert_near

pytestmark = pytest.mark.skipif(not native.status().active, reason=native.status().reason)


def some_case(
    heads: int, dim: int, lengths: list[int], rows: int, seed: int
) -> tuple[tuple[Tensor, ...], list[Span]]:
    """Keys and values out of a larger cache, recomputed tokens, and chunks with a hole of 2 behind each."""
    generator = torch.Generator().manual_seed(seed)
    spans, end = [], 0
    for length in lengths:
        spans.append(Span(end, end + length))
        end += length + 2
    keys = torch.randn(heads, end, dim, generator=generator).bfloat16()
    values = torch.randn(heads, end + 9, dim, generator=generator).bfloat16()[:, :end]
    inside = torch.cat([torch.arange(s.start, s.stop) for s in spans])
    at = inside[torch.randperm(len(inside), generator=generator)[:rows]].sort().values
    left = torch.randn(heads, len(at), 2 * dim, generator=generator)
    return (keys, values, at, left, torch.randn(heads, len(spans), 2 * dim, generator=generator)), spans


cases = given(
    st.sampled_from([1, 2, 3]),
    st.sampled_from([32, 64, 96, 128]),
    st.lists(st.sampled_from([1, 5, 6, 7, 96, 130]), min_size=1, max_size=3),
    st.sampled_from([1, 3, 40, 150]),
    st.integers(0, 99),
)


@cases
def test_equals_the_plain_form(heads: int, dim: int, lengths: list[int], rows: int, seed: int) -> None:
    (keys, values, at, left, means), spans = some_case(heads, dim, lengths, rows, seed)
    assert takes(keys, values)
    wide = values.double()
    wanted = move_plainly(keys.double(), wide, at, left.double(), means.double(), spans, 16.0 * dim)
    got = move(keys, values, at, left, means, spans, 16.0 * dim)
    for span in spans:
        here = slice(span.start, span.stop)
        assert_near(got[:, here].double(), wanted[:, here], 0.04)
        assert_near(values[:, here].double(), wide[:, here], 0.04)


def test_a_chunk_out_of_place_is_seen() -> None:
    (keys, values, at, left, means), spans = some_case(2, 64, [40, 50], 30, 0)
    wanted = move_plainly(keys.double(), values.double(), at, left.double(), means.double(), spans, 1e3)
    got = move(keys, values, at, left, means.flip(1), spans, 1e3)
    with pytest.raises(AssertionError):
        assert_near(got[:, :40].double(), wanted[:, :40], 0.04)


def test_threads_do_not_matter() -> None:
    found = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            (keys, values, at, left, means), spans = some_case(3, 64, [300, 200], 100, 1)
            found.append((move(keys, values, at, left, means, spans, 1e3), values))
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_refuses_what_it_cannot_do() -> None:
    keys = torch.zeros(2, 8, 64, dtype=torch.bfloat16)
    assert not takes(keys.float(), keys.float())
    assert not takes(torch.zeros(2, 8, 48, dtype=torch.bfloat16), keys)
    assert not takes(keys.transpose(1, 2), keys.transpose(1, 2))
