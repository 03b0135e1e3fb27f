"""What is found of a model's norms and MLPs, and that nothing changes by it: every bit is the model's own."""

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
from tests.support.models import KINDS, tiny_model

DTYPES = [torch.float32, torch.bfloat16]


def some_rows(module: Any, width: int, seed: int = 0) -> Tensor:
    dtype = next(module.parameters()).dtype
    return torch.randn(9, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_norms_and_mlps_are_the_models_own(name: str, dtype: torch.dtype) -> None:
    model: Any = deepcopy(tiny_model(name)).to(dtype)
    layer, norms = model.model.layers[1], Norms()
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
            assert torch.equal(call_norm(norm, x)[1], module(x))
    mlp = getattr(layer, "mlp", None)
    gated = None if mlp is None else GatedMLPs().of(mlp)
    if gated is not None and mlp is not None:
        x = some_rows(mlp, 64)
        with Linears():
            assert torch.equal(gated(x), mlp(x))


def test_what_is_found() -> None:
    model: Any = deepcopy(tiny_model("llama")).to(torch.bfloat16)
    layer = model.model.layers[0]
    assert Norms().of(layer.input_layernorm).form == FORMS[0]
    assert GatedMLPs().of(layer.mlp) is not None
    assert Norms().of(torch.nn.LayerNorm(64).to(torch.bfloat16)).form is None
    layer.mlp.forward = lambda x: layer.mlp.down_proj(layer.mlp.up_proj(x))
    assert GatedMLPs().of(layer.mlp) is None


@torch.inference_mode()
def test_hooks_are_still_called() -> None:
    model: Any = deepcopy(tiny_model("llama")).to(torch.bfloat16)
    layer, calls = model.model.layers[0], []
    norm, mlp = Norms().of(layer.input_layernorm), GatedMLPs().of(layer.mlp)
    assert mlp is not None
    x = some_rows(layer, 64)
    for module in (layer.input_layernorm, layer.mlp):
        module.register_forward_hook(lambda *_: calls.append(1))
    call_norm(norm, x)
    mlp(x)
    assert len(calls) == 2
