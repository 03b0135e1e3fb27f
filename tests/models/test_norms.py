"""A model's norms, MLPs and cache memory: equal to its own modules to the bit, and memory is reused."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from blendserve.kernels.norm import FORMS
from blendserve.models.linear_layers import Linears
from blendserve.models.mlp import GatedMLPs
from blendserve.models.norms import Norms, call_norm, norm_heads
from blendserve.models.pool import ALIGNED, pooled_empty
from tests.support.models import KINDS, tiny_model


def some_rows(module: Any, width: int, seed: int = 0) -> Tensor:
    dtype = next(module.parameters()).dtype
    return torch.randn(9, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_norms_and_mlps_are_the_models_own(name: str, dtype: torch.dtype) -> None:
    model: Any = deepcopy(tiny_model(name)).to(dtype)
    layer, norms, calls = model.model.layers[1], Norms(), list[int]()
    for part, module in layer.named_modules():
        if "Norm" not in type(module).__name__:
            continue
        norm, width = norms.of(module), module.weight.shape[-1]
        if part.endswith(("q_norm", "k_norm")) and width == layer.self_attn.head_dim:
            x = some_rows(module, 2 * width).view(9, 2, width)
            assert torch.equal(norm_heads(norm, x), module(x))
        elif module.weight.dim() == 1:
            x, add = some_rows(module, width), some_rows(module, width, 1)
            total, normed = call_norm(norm, x, add)
            assert torch.equal(total, x + add)
            assert torch.equal(normed, module(x + add))
            assert name != "llama-yarn" or norm.form == FORMS[0]
            module.register_forward_hook(lambda *_: calls.append(1))
            call_norm(norm, x)
    mlp = getattr(layer, "mlp", None)
    gated = None if mlp is None else GatedMLPs().of(mlp)
    if mlp is not None and gated is not None:
        x = some_rows(mlp, 64)
        with Linears():
            assert torch.equal(gated(x), mlp(x))
    assert name != "llama-yarn" or (len(calls), gated is not None) == (2, True)  # hooks are still called


def cache_memory(n: int = 1000, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return pooled_empty((2, n, 3), dtype, torch.device("cpu"))


def test_the_memory_of_a_cache_is_reused_once_no_view_of_it_is_left() -> None:
    first = cache_memory()
    at, view = first.data_ptr(), first[1, 5:]
    assert at % ALIGNED == 0
    del first
    view.fill_(1.0)
    other = cache_memory()
    other.fill_(2.0)
    assert (view == 1.0).all()
    del other, view  # that of the view is dropped last, and kept
    assert cache_memory(1100).data_ptr() == at  # a little more fits, too
    assert cache_memory(900, torch.float32).shape == (2, 900, 3)
    assert cache_memory(0).shape == (2, 0, 3)


@pytest.mark.parametrize("n", [100, 100_000])
def test_far_smaller_and_larger_caches_get_memory_of_their_own(n: int) -> None:
    first = cache_memory()
    at = first.data_ptr()
    del first
    other = cache_memory(n)
    assert other.shape == (2, n, 3)
    assert other.data_ptr() != at
