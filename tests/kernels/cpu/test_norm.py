"""The compiled norms and gated activations against torch's and the families' own, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from blendserve.kernels import verify
from blendserve.kernels.activation import Activation
from blendserve.kernels.cpu import gate, norm
from blendserve.kernels.cpu.isa import LEVELS, Level
from blendserve.kernels.cpu.library import dtype_of, loaded
from blendserve.kernels.norm import FORMS, NormForm, form_of
from tests.kernels.cpu.test_attend import threads

HERE = [level for level in LEVELS.values() if "norm" in level.sources and verify.cpu_status(level).active]
needs_kernels = pytest.mark.skipif(not HERE, reason=verify.cpu_status(LEVELS["avx2"]).reason)
levels = pytest.mark.parametrize("level", HERE, ids=lambda level: level.name)


@needs_kernels
@levels
@given(
    rows=st.sampled_from([1, 3, 40]),
    dim=st.sampled_from([8, 16, 31, 40, 64, 90, 576, 1000, 2080, 8192]),
    form=st.sampled_from(FORMS),
    adds=st.booleans(),
    apart=st.sampled_from([0, 6]),
    seed=st.integers(0, 99),
)
@torch.inference_mode()
def test_norms_are_torchs_to_the_bit(
    level: Level, rows: int, dim: int, form: NormForm, adds: bool, apart: int, seed: int
) -> None:
    generator, dtype = torch.Generator().manual_seed(seed), dtype_of(level)
    x, add = (3 * torch.randn(2, rows, dim + apart, generator=generator).to(dtype))[:, :, :dim]
    weight = torch.randn(dim, generator=generator).to(dtype)
    wanted = x + add if adds else x
    total, normed = norm.run(loaded(level), x, add if adds else None, weight, 1e-5, form)
    assert torch.equal(total, wanted)
    assert torch.equal(normed, form.normed(wanted, weight, 1e-5))


@needs_kernels
@levels
@torch.inference_mode()
def test_many_rows_on_threads_are_still_torchs(level: Level) -> None:
    x = torch.randn(3000, 576, generator=torch.Generator().manual_seed(0)).to(dtype_of(level))
    weight = torch.ones(576, dtype=x.dtype)
    with threads(2):
        normed = norm.run(loaded(level), x, x, weight, 1e-5, FORMS[0])[1]
        assert torch.equal(normed, FORMS[0].normed(x + x, weight, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "form"),
    [(LlamaRMSNorm, FORMS[0]), (HeliumRMSNorm, FORMS[1]), (Gemma2RMSNorm, FORMS[2]), (CohereLayerNorm, None)],
)
def test_a_module_is_known_by_what_it_computes(kind: Any, form: NormForm | None, dtype: torch.dtype) -> None:
    module = kind(96).to(dtype)
    torch.nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(0))
    found = form_of(module, module.weight, getattr(module, "variance_epsilon", None) or module.eps)
    if dtype == torch.float32 and form in FORMS[:2]:
        assert found in FORMS[:2], "where nothing is rounded, they are one"
    else:
        assert found == form


@needs_kernels
@levels
@torch.inference_mode()
def test_gates_are_torchs_to_the_bit(level: Level) -> None:
    """All that bf16 holds, but what becomes too small for it, and its NaN; as many of fp32."""
    dtype, generator = dtype_of(level), torch.Generator().manual_seed(0)
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite() & ((x.abs() > 1e-30) | (x == 0)) & (x > -80)].to(dtype)
    if dtype == torch.float32:
        x = x * (1 + torch.rand(x.shape, generator=generator))
    x = x[: len(x) // 60 * 60].view(-1, 60)
    up = torch.randn(x.shape, generator=generator).to(dtype)
    for width in (60, 53):  # some fill no vector
        a, b = x[:, :width].clone(), up[:, :width]
        assert torch.equal(gate.run(loaded(level), a, b), F.silu(x[:, :width].contiguous()) * b)
    edges = torch.tensor([[float("inf"), float("-inf"), float("nan"), -0.0, 0.0, 1e30, -1e30, -88.0]]).to(
        dtype
    )
    got, wanted = gate.run(loaded(level), edges.clone(), torch.ones_like(edges)), F.silu(edges)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-36, equal_nan=True)


@needs_kernels
@levels
@torch.inference_mode()
def test_gate_and_up_may_lie_side_by_side(level: Level) -> None:
    both = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)).to(dtype_of(level))
    left, right = (x.clone() for x in both.chunk(2, dim=-1))
    got = gate.run(loaded(level), *both.chunk(2, dim=-1))
    assert torch.equal(got, F.silu(left) * right)
    assert torch.equal(both[:, 64:], right)


def test_an_activation_is_known_by_what_it_computes() -> None:
    like = torch.zeros(1)
    assert Activation.of(torch.nn.SiLU(), like).is_silu

    def close(x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.001 * x)

    assert not Activation.of(close, like).is_silu
    assert not Activation.of(torch.nn.GELU(), like).is_silu
