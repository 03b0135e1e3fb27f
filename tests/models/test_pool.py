"""Memory of caches: used again when nobody refers to it any more, and never before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blendserve.models import pool as module
from blendserve.models.pool import pooled_empty

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    module._kept.clear()


def make(n: int = 1000, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return pooled_empty((2, n, 3), dtype, CPU)


def test_memory_is_used_again() -> None:
    first = make()
    at = first.data_ptr()
    assert at % module.ALIGNED == 0
    del first
    assert make(1100).data_ptr() == at  # a little more fits, too
    assert make(900, torch.float32).shape == (2, 900, 3)


def test_never_while_a_view_of_it_is_alive() -> None:
    view = make()[1, 5:]
    view.fill_(1.0)
    other = make()
    other.fill_(2.0)
    assert (view == 1.0).all()
    assert not len(module._kept)


@pytest.mark.parametrize("n", [100, 100_000])
def test_not_for_something_far_smaller_or_larger(n: int) -> None:
    make()
    assert len(module._kept) == 1
    other = make(n)
    assert not len(module._kept)
    assert other.shape == (2, n, 3)


def test_one_is_kept() -> None:
    several = [make() for _ in range(3)]
    several.clear()
    assert len(module._kept) == 1


def test_nothing_at_all_has_pooled_empty() -> None:
    assert make(0).shape == (2, 0, 3)
