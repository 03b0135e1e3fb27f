"""The two halves of a layer as native calls: the bits of the layer loop, for every covered family and number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blendserve.kernels.cpu.decoder import NativeLayers
from blendserve.kernels.cpu.isa import LEVELS
from blendserve.kernels.rows import Rows
from blendserve.kernels.selfcheck import cpu_status
from blendserve.models import forward
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel
from blendserve.models.native_layers import native_layers
from blendserve.models.native_weights import decode_weights
from blendserve.models.runner import append
from tests.support.kernels import EMULATED, threads
from tests.support.models import wide_model
from tests.support.switches import plain_torch

COVERED = [
    *("llama-yarn", "llama-biased", "mistral-window", "ministral-window", "qwen2-window", "qwen3-window"),
    *("phi3-window", "granite", "smollm3", "cwm", "internlm3", "seed_oss"),
]
LOOPED = ["gemma2", "cohere2", "glm4", "olmo2", "qwen3_moe", "starcoder2"]
pytestmark = pytest.mark.skipif(
    not cpu_status(LEVELS["avx512_bf16"]).active, reason=cpu_status(LEVELS["avx512_bf16"]).reason
)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@torch.inference_mode()
@pytest.mark.parametrize("n_rows", [1, 8, 9, 67, 200])
@pytest.mark.parametrize("name", COVERED)
def test_both_halves_give_the_bits_of_the_loop(name: str, n_rows: int) -> None:
    model = DecoderModel.of(wide_model(name, torch.bfloat16))
    native = native_layers(model, n_rows)
    assert native is not None
    rows = Rows.on(model.device, torch.arange(n_rows).mul(3) % 250)
    ropes = model.rope(rows.device)
    for l in range(model.n_layers):
        hidden = draw(n_rows, model.embeddings.shape[1])
        attended = draw(n_rows, model.n_heads * model.head_dim)
        fresh = model.project(l, hidden)
        wanted = (fresh.q, fresh.k, fresh.v, *(model.rotate(x, ropes[l]) for x in (fresh.q, fresh.k)))
        assert all(map(torch.equal, native.qkv(l, hidden, ropes[l]), wanted))
        assert torch.equal(native.out(l, hidden, attended), model.finish(l, hidden, attended))
        for n in (1, 3):
            with threads(n):
                assert all(map(torch.equal, native.qkv(l, hidden, ropes[l]), wanted))
                assert torch.equal(native.out(l, hidden, attended), model.finish(l, hidden, attended))


@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama-yarn", "qwen3-window", "smollm3"])
def test_a_pass_through_all_layers_gives_the_same_logits_and_kv(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = DecoderModel.of(wide_model(name, torch.bfloat16))
    found = []
    for native in (True, False):
        if not native:
            monkeypatch.setattr(forward, "native_layers", lambda model, n_rows: None)
        cache = KVCache(model, 80)
        found.append((append(model, cache, 0, [i % 97 for i in range(80)]), cache.keys, cache.values))
    assert all(map(torch.equal, *found))


@torch.inference_mode()
@pytest.mark.parametrize("name", LOOPED)
def test_other_families_run_the_loop(name: str) -> None:
    assert native_layers(DecoderModel.of(wide_model(name, torch.bfloat16)), 20) is None


def test_fp32_gradients_and_switched_off_kernels_run_the_loop() -> None:
    model = DecoderModel.of(wide_model("llama-yarn", torch.bfloat16))
    assert native_layers(model, 20) is None, "gradients would be lost"
    with torch.inference_mode():
        assert native_layers(model, 20) is not None
        assert native_layers(DecoderModel.of(wide_model("llama-yarn", torch.float32)), 20) is None
        with plain_torch():
            assert native_layers(model, 20) is None


@torch.inference_mode()
def test_on_matrix_tiles_they_are_equal_to_rounding() -> None:
    """Emulated: tiles sum in another order."""
    model = DecoderModel.of(wide_model("qwen3-window", torch.bfloat16))
    vectors, tiles = (
        NativeLayers(level, decode_weights(model), model.rope_tables[0])
        for level in (LEVELS["avx512_bf16"], EMULATED)
    )
    rope = model.rope(torch.arange(20))[0]
    hidden, attended = draw(20, model.embeddings.shape[1]), draw(20, model.n_heads * model.head_dim)
    pairs = zip(
        (*vectors.qkv(0, hidden, rope), vectors.out(0, hidden, attended)),
        (*tiles.qkv(0, hidden, rope), tiles.out(0, hidden, attended)),
        strict=True,
    )
    for a, b in pairs:
        assert bool(((a - b).abs() <= 0.03 * a.abs().max()).all())
