"""Native calls against the layer loop: halves of layers, decoding steps, int8 weights, and where the loop serves."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blendserve.errors import ConfigError
from blendserve.kernels import team
from blendserve.kernels.cpu.decoder import INT8_GROUP, NativeLayers, to_int8
from blendserve.kernels.cpu.isa import LEVELS
from blendserve.kernels.selfcheck import cpu_status
from blendserve.models import forward, runner
from blendserve.models.forward import Row, run_rows
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel
from blendserve.models.native import native_layers, native_weights
from blendserve.models.runner import append, append_each, decode_each, decode_in_int8, native_decoder
from blendserve.models.thread_tuner import Series, ThreadTuner
from tests.support.kernels import EMULATED, plain_torch, threads
from tests.support.models import wide_model

COVERED = [
    *("llama-yarn", "llama-biased", "mistral-window", "ministral-window", "qwen2-window", "qwen3-window"),
    *("phi3-window", "granite", "smollm3", "cwm", "internlm3", "seed_oss"),
]
LOOPED = ["gemma2", "cohere2", "glm4", "olmo2", "qwen3_moe", "starcoder2"]
DTYPES = [
    pytest.param(
        dtype,
        marks=pytest.mark.skipif(
            not any(cpu_status(level).active for level in LEVELS.values() if level.dtype == name),
            reason=f"no {name} kernels on this CPU",
        ),
        id=name,
    )
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32))
]
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
HALVES = pytest.mark.skipif(
    not cpu_status(LEVELS["avx512_bf16"]).active, reason=cpu_status(LEVELS["avx512_bf16"]).reason
)
TOKENS = 300


@cache
def wide_adapter(name: str, dtype: torch.dtype = torch.bfloat16) -> DecoderModel:
    return DecoderModel.of(wide_model(name, dtype))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def caches(adapter: DecoderModel, n: int) -> list[KVCache]:
    """Random KV, the same in every call."""
    made, generator = [KVCache(adapter, TOKENS) for _ in range(n)], torch.Generator().manual_seed(0)
    for one in made:
        for part in (one.keys, one.values):
            part.copy_(torch.randn(part.shape, generator=generator))
    return made


def agree(a: Tensor, b: Tensor) -> bool:
    """To the bit; in fp32, where the loop's linear layers are torch's, to rounding."""
    if a.dtype == torch.bfloat16:
        return torch.equal(a, b)
    return bool((a - b).abs().max() <= 3e-4 * a.abs().max())


@HALVES
@torch.inference_mode()
@pytest.mark.parametrize("n_rows", [1, 8, 9, 67, 200])
@pytest.mark.parametrize("name", COVERED)
def test_both_halves_of_a_layer_give_the_bits_of_the_loop(name: str, n_rows: int) -> None:
    model = wide_adapter(name)
    native = native_layers(model, n_rows)
    assert native is not None
    ropes = model.rope(torch.arange(n_rows).mul(3) % 250)
    for l in range(model.n_layers):
        hidden, attended = (draw(n_rows, n) for n in (model.embeddings.shape[1], model.qkv_sizes[0]))
        fresh = model.project(l, hidden)
        wanted = (fresh.q, fresh.k, fresh.v, *(model.rotate(x, ropes[l]) for x in (fresh.q, fresh.k)))
        for n in (1, 3):
            with threads(n):
                assert all(map(torch.equal, native.qkv(l, hidden, ropes[l]), wanted))
                assert torch.equal(native.out(l, hidden, attended), model.finish(l, hidden, attended))


@HALVES
@torch.inference_mode()
def test_halves_on_matrix_tiles_are_equal_to_rounding() -> None:
    """Emulated: tiles sum in another order."""
    model, levels = wide_adapter("qwen3-window"), (LEVELS["avx512_bf16"], EMULATED)
    hidden, attended = draw(20, model.embeddings.shape[1]), draw(20, model.qkv_sizes[0])
    rope, weights = model.rope(torch.arange(20))[0], native_weights(model)
    made = [NativeLayers(level, weights, model.rope_tables[0]) for level in levels]
    found = [(*native.qkv(0, hidden, rope), native.out(0, hidden, attended)) for native in made]
    for vectors, tiles in zip(*found, strict=True):
        assert bool(((vectors - tiles).abs() <= 0.03 * vectors.abs().max()).all())


@HALVES
@torch.inference_mode()
@pytest.mark.parametrize("name", ["llama-yarn", "qwen3-window", "smollm3"])
def test_a_pass_in_halves_gives_the_loop_s_logits_and_kv(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = wide_adapter(name), []
    for native in (True, False):
        if not native:
            monkeypatch.setattr(forward, "native_layers", lambda model, n_rows: None)
        cache = KVCache(model, 80)
        found.append((append(model, cache, 0, [i % 97 for i in range(80)]), cache.keys, cache.values))
    assert all(map(torch.equal, *found))


@EACH_DTYPE
@pytest.mark.parametrize("name", COVERED)
def test_a_step_equals_the_layer_loop(name: str, dtype: torch.dtype) -> None:
    adapter = wide_adapter(name, dtype)
    assert native_decoder(adapter)[0] is not None, native_decoder(adapter)[1]

    @given(
        rows=st.lists(
            st.tuples(st.integers(0, 2), st.integers(0, 255), st.integers(0, 96)),
            min_size=1,
            max_size=8,
            unique_by=lambda row: row[:2],
        )
    )
    def check(rows: list[tuple[int, int, int]]) -> None:
        mine, other = caches(adapter, 3), caches(adapter, 3)
        got = append_each(adapter, [Row(mine[c], at, token) for c, at, token in rows])
        want = run_rows(adapter, [Row(other[c], at, token) for c, at, token in rows])
        assert agree(got, want)
        for a, b in zip(mine, other, strict=True):
            assert agree(a.keys, b.keys)
            assert agree(a.values, b.values)

    check()


@EACH_DTYPE
def test_bits_of_a_step_depend_on_neither_other_rows_nor_threads(dtype: torch.dtype) -> None:
    adapter = wide_adapter("qwen3-window", dtype)
    tokens = list(range(1, 9))
    (together,) = caches(adapter, 1)
    logits = append(adapter, together, 126, tokens)
    for n in (1, 2, 3):
        with threads(n):
            (apart,) = caches(adapter, 1)
            rows = [append(adapter, apart, 126 + i, [token]) for i, token in enumerate(tokens)]
            assert torch.equal(logits, torch.cat(rows))
            assert torch.equal(together.keys, apart.keys)


@pytest.mark.parametrize("name", LOOPED)
def test_a_form_without_a_kernel_is_run_by_the_loop_and_named(name: str) -> None:
    adapter = wide_adapter(name)
    decoder, reason = native_decoder(adapter)
    assert decoder is None
    assert reason
    with torch.inference_mode():
        assert native_layers(adapter, 20) is None
    with pytest.raises(ConfigError) as found:
        decode_in_int8(adapter)
    assert found.value.setting == "model.decode_weights"


@HALVES
def test_fp32_gradients_and_switched_off_kernels_run_the_loop() -> None:
    model = wide_adapter("llama-yarn")
    assert native_layers(model, 20) is None, "gradients would be lost"
    with torch.inference_mode():
        assert native_layers(model, 20) is not None
        assert native_layers(wide_adapter("llama-yarn", torch.float32), 20) is None
        with plain_torch():
            assert native_layers(model, 20) is None


@EACH_DTYPE
def test_a_step_that_differs_from_the_loop_does_not_serve(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "run_rows", lambda model, rows: run_rows(model, rows).roll(1, dims=-1))
    decoder, reason = native_decoder(DecoderModel.of(wide_model("llama-yarn", dtype)))
    assert decoder is None
    assert "differ" in reason  # allow: one of several reasons, told apart by what they say


@EACH_DTYPE
@pytest.mark.parametrize("shape", [(96, 64), (50, 130), (16, 62)])
def test_int8_weights_are_within_half_a_step_of_the_matrix(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """Read back from the blocks by their documented layout; a step is a 127th of the largest of 64 inputs."""
    level = max((x for x in LEVELS.values() if getattr(torch, x.dtype) == dtype), key=lambda x: len(x.needs))
    level = LEVELS["avx512_bf16"] if level.name == "amx" else level
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    lanes, per_word = (8 if level.name == "avx2" else 16), (2 if dtype == torch.bfloat16 else 1)
    blocks = to_int8(weight, level)
    scales = blocks[..., : 4 * lanes].contiguous().view(torch.float32)
    for o in range(shape[0]):
        for i in range(shape[1]):
            row, group = blocks[o // lanes, i // INT8_GROUP], i // INT8_GROUP
            at = (i % INT8_GROUP // per_word * lanes + o % lanes) * per_word + i % per_word
            scale = float(scales[o // lanes, group, o % lanes])
            assert abs(int(row[4 * lanes + at]) * scale - float(weight[o, i])) <= 0.51 * scale


@EACH_DTYPE
@pytest.mark.parametrize("name", ["llama-biased", "phi3-window"])
def test_int8_decoding_is_that_of_a_model_with_rounded_weights(name: str, dtype: torch.dtype) -> None:
    """Answers alone are decoded so: prefill and what checks the model keep the model's own weights."""
    model = deepcopy(wide_model(name, dtype))
    adapter = DecoderModel.of(model)
    (cache,) = caches(adapter, 1)
    own = run_rows(adapter, [Row(cache, 9, 5)])
    decode_in_int8(adapter)
    assert agree(append_each(adapter, [Row(cache, 9, 5)]), own)
    assert not agree(decode_each(adapter, [Row(cache, 9, 5)]), own)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                for group in torch.split(module.weight, INT8_GROUP, dim=1):
                    scale = group.float().abs().amax(-1, keepdim=True) / 127
                    group.copy_((group / scale).round() * scale)
    rounded = DecoderModel.of(model)
    for n_rows in (1, 5, 8, 11):  # more than one call takes
        (mine,), (other,) = caches(adapter, 1), caches(rounded, 1)
        got = decode_each(adapter, [Row(mine, 40 + i, 3 * i) for i in range(n_rows)])
        want = run_rows(rounded, [Row(other, 40 + i, 3 * i) for i in range(n_rows)])
        bound = 0.12 if dtype == torch.bfloat16 else 1e-3  # the model rounds weights to bf16 once more
        assert (got - want).abs().max() <= bound * want.abs().max()


@threads(4)
def test_fewer_threads_serve_while_they_are_faster() -> None:
    """A machine whose seconds depend on the threads alone, and whose caller waits for them."""
    now, seconds = 0.0, {1: 0.02, 2: 0.03, 4: 0.05}
    tuner = ThreadTuner(lambda: 4, lambda: now, lambda: 0.0)
    series = Series(tuner)

    def unit() -> None:
        nonlocal now
        now += seconds[team.size()]

    for _ in range(100):
        series.run(unit)
    assert tuner.threads == 1
    seconds = {1: 0.02, 2: 0.012, 4: 0.008}
    for _ in range(200):
        series.run(unit)
    assert tuner.threads == 4
