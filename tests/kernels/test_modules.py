"""A reader's own modules: which form that kernels know they have, and that a rotation moves stored keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from blendserve.blend.precompute import ChunkComputer
from blendserve.kernels import verify
from blendserve.kernels.activation import Activation
from blendserve.kernels.norm import FORMS as NORM_FORMS
from blendserve.kernels.norm import form_of
from blendserve.kernels.ops import linear
from blendserve.kernels.rotary import FORMS, HALVES, Rotary
from blendserve.models.linear_layers import Linears, call_linear
from tests.support.blending import assert_near, distance, model_kv, some_prompt
from tests.support.kernels import turned
from tests.support.models import BLEND_KINDS, TINY, tiny_adapter

EVERY_KIND = pytest.mark.parametrize("name", BLEND_KINDS)


# Rotations


@EVERY_KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_moved_layer_0_key_is_the_direct_one_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    adapter = tiny_adapter(name, dtype)
    prompt = some_prompt([13, 13, 13])
    stored = ChunkComputer(adapter, prompt.prefix).compute([chunk.ids for chunk in prompt.chunks])
    forward = model_kv(adapter, prompt.ids)[0][0]
    for span, kv in zip(prompt.spans, stored, strict=True):
        direct = forward[:, span.start : span.stop]
        ropes = adapter.rope(torch.arange(span.start, span.stop + 1))
        assert torch.equal(adapter.rotate(kv.keys[0], ropes[0].at(slice(0, -1))), direct)
        assert distance(adapter.rotate(kv.keys[0], ropes[0].at(slice(1, None))), direct) > 0.1


def test_every_family_turns_by_a_known_form_and_as_its_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family of another form would be placed by its own function, in many launches."""
    forms = {name: tiny_adapter(name).rotary.form for name in TINY}
    assert set(forms.values()) == set(FORMS)
    monkeypatch.setenv(verify.SWITCH, "0")
    for name in BLEND_KINDS:
        adapter, form = tiny_adapter(name), forms[name]
        x = torch.randn(2, 8, adapter.head_dim)
        for rope in adapter.rope(torch.arange(8)):
            assert form is not None
            assert_near(adapter.rotate(x, rope), turned(x, rope, form).float(), 1e-5)


def test_a_rotation_of_another_kind_has_no_form() -> None:
    rope = tiny_adapter("llama").rope(torch.arange(8))[0]
    own, x = tiny_adapter("llama").rotary.own, torch.randn(2, 8, 16)
    assert Rotary.of(own, rope, x).form == HALVES
    assert Rotary.of(lambda q, k, cos, sin: own(q, k, cos, -sin), rope, x).form is None


# Norms, activations, linear layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "form"), [(LlamaRMSNorm, 0), (HeliumRMSNorm, 1), (Gemma2RMSNorm, 2), (CohereLayerNorm, None)]
)
def test_a_norm_is_known_by_what_it_computes(kind: Any, form: int | None, dtype: torch.dtype) -> None:
    module = kind(96).to(dtype)
    torch.nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(0))
    found = form_of(module, module.weight, getattr(module, "variance_epsilon", None) or module.eps)
    if dtype == torch.float32 and form in (0, 1):
        assert found in NORM_FORMS[:2], "where nothing is rounded, they are one"
    else:
        assert found == (None if form is None else NORM_FORMS[form])


def test_an_activation_is_known_by_what_it_computes() -> None:
    like = torch.zeros(1)
    assert Activation.of(torch.nn.SiLU(), like).is_silu
    assert not Activation.of(lambda x: x * torch.sigmoid(1.001 * x), like).is_silu
    assert not Activation.of(torch.nn.GELU(), like).is_silu


def test_gradients_pass_through_a_linear_layer() -> None:
    x, weight = torch.randn(3, 32).bfloat16(), torch.randn(8, 32).bfloat16().requires_grad_()
    assert linear(x, weight, None).requires_grad


@torch.inference_mode()
def test_a_hook_on_a_borrowed_module_is_still_called() -> None:
    module, calls = nn.Linear(32, 32, dtype=torch.bfloat16), list[int]()
    module.register_forward_hook(lambda *_: calls.append(1))
    call_linear(module, torch.randn(3, 32).bfloat16())
    assert calls


@torch.inference_mode()
def test_modules_of_a_borrowed_model_use_it_only_while_the_mode_is_entered() -> None:
    mlp = tiny_adapter("llama", torch.bfloat16).model.model.layers[0].mlp  # type: ignore[union-attr, index]
    x, inputs = torch.randn(5, 64).bfloat16(), list[Any]()

    class Listening(Linears):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.linear:
                inputs.append(args[0])
            return super().__torch_function__(func, types, args, kwargs)

    before = mlp(x)
    with Listening():
        inside = mlp(x)
    with pytest.raises(RuntimeError), Listening():
        torch.zeros(2) + torch.zeros(3)
    assert len(inputs) == 3
    assert torch.equal(mlp(x), before)
    assert len(inputs) == 3
    # Two roundings of another order each, seen through a layer.
    assert float((inside - before).abs().max()) <= 2**-6 * float(before.abs().max())
