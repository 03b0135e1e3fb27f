"""A model's norms, MLPs and linear layers equal its own modules; the memory of a cache is reused."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blendserve.kernels.norm import FORMS
from blendserve.models import linear_layers
from blendserve.models.linear_layers import Linears, call_linear
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


@torch.inference_mode()
def test_a_hook_on_a_borrowed_module_is_still_called() -> None:
    module, calls = nn.Linear(32, 32, dtype=torch.bfloat16), list[int]()
    module.register_forward_hook(lambda *_: calls.append(1))
    call_linear(module, torch.randn(3, 32).bfloat16())
    assert calls


@torch.inference_mode()
def test_modules_of_a_borrowed_model_use_kernels_only_while_the_mode_is_entered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mlp, x, calls = tiny_model("llama").model.layers[0].mlp, torch.randn(5, 64), list[Tensor]()
    monkeypatch.setattr(linear_layers, "linear", lambda x, *rest: calls.append(x) or F.linear(x, *rest))  # type: ignore[func-returns-value]
    with Linears():
        inside = mlp(x)
    with pytest.raises(RuntimeError), Linears():
        torch.zeros(2) + torch.zeros(3)
    assert torch.equal(mlp(x), inside)
    assert len(calls) == 3
