"""The memory of a cache is reused."""

from __future__ import annotations

import torch
from torch import Tensor

from blendserve.models.kv_cache import ALIGNMENT, recycled_empty


def cache_memory(n: int = 1000, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return recycled_empty((2, n, 3), dtype, torch.device("cpu"))


def test_the_memory_of_a_cache_is_reused_once_no_view_of_it_is_left() -> None:
    first = cache_memory()
    at, view = first.data_ptr(), first[1, 5:]
    assert at % ALIGNMENT == 0
    del first
    view.fill_(1.0)
    other = cache_memory()
    other.fill_(2.0)
    assert (view == 1.0).all()
    del other, view  # that of the view is dropped last, and kept
    assert cache_memory(1100).data_ptr() == at  # a little more fits, too
    assert cache_memory(900, torch.float32).shape == (2, 900, 3)
    assert cache_memory(0).shape == (2, 0, 3)
