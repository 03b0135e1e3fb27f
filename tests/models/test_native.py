"""Native calls against the layer loop: halves of layers, decoding steps, int8 weights, and where the loop serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blendserve.config import ModelConfig
from blendserve.errors import ConfigError
from blendserve.kernels import autotune, switches, team
from blendserve.kernels.cpu.isa import LEVELS
from blendserve.kernels.ops import attend
from blendserve.kernels.packed import UNIT
from blendserve.kernels.selfcheck import cpu_status, widest
from blendserve.kv import stacked
from blendserve.models import forward, runner
from blendserve.models.forward import Row, run_rows
from blendserve.models.kv_cache import KVCache
from blendserve.models.loader import load_model
from blendserve.models.model import DecoderModel
from blendserve.models.native import native_layers
from blendserve.models.runner import append_each, decode_each, decode_in_int8, native_decoder
from blendserve.models.thread_tuner import Series, ThreadTuner
from tests.support.kernel_switches import loop_over_kernels_of_steps, plain_torch, threads
from tests.support.models import wide_model

COVERED = [
    *("llama-yarn", "llama-biased", "mistral-window", "ministral-window", "qwen2-window", "qwen3-window"),
    *(
        "phi3-window",
        "granite",
        "granite_swa",
        "ministral3",
        "smollm3",
        "cwm",
        "internlm3",
        "seed_oss",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma3_text-capped",
        "vaultgemma",
        "llama-yarn/8",
    ),
]
FP32_ALONE = ("granite_swa", "ministral3")
LOOPED = ["cohere2", "glm4", "olmo2", "qwen3_moe", "starcoder2", "exaone4"]
ACTIVE = {level.dtype for level in LEVELS.values() if cpu_status(level).active}
DTYPES = [getattr(torch, name) for name in ("bfloat16", "float32") if name in ACTIVE]
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
HALVES = pytest.mark.skipif("bfloat16" not in ACTIVE, reason="no kernels in bf16")

ROWS = [(0, 0, 1), (1, 7, 3), (1, 8, 50), (1, 9, 96), (2, 200, 5), (0, 255, 9), (2, 100, 17), (2, 101, 33)]
# Roundings to bf16, one after another, of
IN_LAYER = 12  # norm, values, weights of keys, attended, o, sum; norm, gate, silu, times up, down, sum
OF_KEYS = 5  # norm, keys, their norm, cos and sin, rotated; logits have two


@cache
def wide_decoder(name: str, dtype: torch.dtype = torch.bfloat16) -> DecoderModel:
    return DecoderModel.of(wide_model(name, dtype))


def outcome(
    step: Callable[[DecoderModel, list[Row]], Tensor],
    model: DecoderModel,
    rows: Sequence[tuple[int, int, int]],
) -> list[Tensor]:
    """Run rows (cache, position, token) behind three caches of random KV -> logits, and all KV afterwards."""
    caches, generator = [KVCache(model, 300) for _ in range(3)], torch.Generator().manual_seed(0)
    parts = [part for cache in caches for part in map(stacked, (cache.keys, cache.values))]
    for part in parts:
        part.copy_(torch.randn(part.shape, generator=generator).bfloat16())  # the same numbers in every dtype
    return [step(model, [Row(caches[c], at, token) for c, at, token in rows]), *parts]


def written(found: list[Tensor], rows: Sequence[tuple[int, int, int]]) -> list[list[Tensor]]:
    """Of an outcome, in fp64: fresh keys and values [K, rows, D] of each layer, and the logits."""
    logits, *parts = (part.double() for part in found)
    sides = [torch.stack([parts[2 * c + side][:, :, at] for c, at, _ in rows], dim=2) for side in (0, 1)]
    return [*map(list, zip(*sides, strict=True)), [logits]]


def agree(a: Tensor, b: Tensor) -> bool:
    """To the bit; in fp32, where the loop's linear layers are torch's, to rounding."""
    if a.dtype == torch.bfloat16:
        return torch.equal(a, b)
    return bool((a - b).abs().max() <= 3e-4 * a.abs().max())


@HALVES
@torch.inference_mode()
@pytest.mark.parametrize("n_rows", [1, 8, 9, 67, 200])
@pytest.mark.parametrize("name", [name for name in COVERED if name not in FP32_ALONE])
def test_a_pass_in_halves_gives_the_bits_of_the_loop(
    name: str, n_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = wide_decoder(name), [(0, 50 + i, i % 97) for i in range(n_rows)]
    native = list[list[Tensor]]()
    for n in (1, 3):
        with threads(n):
            assert native_layers(model, n_rows)
            native.append(outcome(run_rows, model, rows))
    monkeypatch.setattr(forward, "native_layers", lambda model, n_rows: None)
    expected = outcome(run_rows, model, rows)
    assert all(all(map(torch.equal, found, expected)) for found in native)


@pytest.mark.parametrize("first", [backend.name for backend in attend.backends])
def test_a_real_model_has_its_step_whatever_attention_the_layer_loop_takes(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop takes the fastest one, so the comparison of the two must not rest on how it rounds."""
    monkeypatch.setattr(attend, "order", {})
    monkeypatch.setattr(switches, "is_autotune_on", lambda: True)
    monkeypatch.setattr(
        autotune, "fastest_first", lambda *given: sorted(given[-1], key=lambda b: b.name != first)
    )
    model = load_model(ModelConfig()).decoder
    if widest("decode_step", model.dtype):
        decoder, reason = native_decoder(model)
        assert decoder, reason


@EACH_DTYPE
@pytest.mark.parametrize("name", COVERED)
def test_a_step_equals_the_layer_loop(name: str, dtype: torch.dtype) -> None:
    model = wide_decoder(name, dtype)
    if dtype == torch.bfloat16 and name in FP32_ALONE:
        assert native_decoder(model)[0] is None
        return
    assert native_decoder(model)[0] is not None, native_decoder(model)[1]
    row = st.tuples(st.integers(0, 2), st.integers(0, 255), st.integers(0, 96))

    @given(rows=st.lists(row, min_size=1, max_size=8, unique_by=lambda row: row[:2]))
    def check(rows: list[tuple[int, int, int]]) -> None:
        with loop_over_kernels_of_steps(model):
            expected = outcome(run_rows, model, rows)
        assert all(map(agree, outcome(append_each, model, rows), expected))

    check()


@HALVES
@pytest.mark.parametrize("name", [name for name in COVERED if name not in FP32_ALONE])
def test_a_step_and_the_loop_are_as_near_to_fp64_as_bf16_allows(name: str) -> None:
    """With whatever kernels the loop has here: AMX's add in another order.

    A rounding moves a number by eps / 4 of it in the mean; sums in fp32 add next to nothing. What layer l writes is
    at most IN_LAYER for each layer below and OF_KEYS more away from the embeddings. Of random signs, they add up as a
    root: the bound, their sum, leaves room for layers that amplify what they get.
    """
    model, plain = wide_decoder(name), deepcopy(wide_model(name, torch.bfloat16))
    for parameter in plain.parameters():
        parameter.data = parameter.data.double()
    with plain_torch():
        exact = written(outcome(run_rows, DecoderModel.of(plain), ROWS), ROWS)
    for step in (append_each, run_rows):
        found = written(outcome(step, model, ROWS), ROWS)
        for l, pairs in enumerate(zip(found, exact, strict=True)):
            for got, expected in zip(*pairs, strict=True):
                error = float((got - expected).norm() / expected.norm())
                assert error <= (IN_LAYER * l + OF_KEYS) * torch.finfo(torch.bfloat16).eps / 4, (step, l)


@EACH_DTYPE
@pytest.mark.parametrize("name", ["qwen3-window", "llama-yarn/8"])
def test_bits_of_a_step_depend_on_neither_other_rows_nor_threads(name: str, dtype: torch.dtype) -> None:
    def one_by_one(model: DecoderModel, rows: list[Row]) -> Tensor:
        return torch.cat([append_each(model, [row]) for row in rows])

    model, rows = wide_decoder(name, dtype), [(1, 126 + i, 1 + i) for i in range(8)]
    assert native_decoder(model)[0] is not None, native_decoder(model)[1]
    together = outcome(append_each, model, rows)
    for n in (1, 2, 3):
        with threads(n):
            for step in (append_each, one_by_one):
                assert all(map(torch.equal, outcome(step, model, rows), together))


@pytest.mark.parametrize("name", LOOPED)
def test_a_form_without_a_kernel_is_run_by_the_loop_and_named(name: str) -> None:
    decoder = wide_decoder(name)
    native, reason = native_decoder(decoder)
    assert native is None
    assert reason
    with torch.inference_mode():
        assert native_layers(decoder, 20) is None
    with pytest.raises(ConfigError) as found:
        decode_in_int8(decoder)
    assert found.value.setting == "model.decode"


@HALVES
def test_fp32_gradients_and_switched_off_kernels_run_the_loop() -> None:
    model = wide_decoder("llama-yarn")
    assert native_layers(model, 20) is None, "gradients would be lost"
    with torch.inference_mode():
        assert native_layers(model, 20) is not None
        assert native_layers(wide_decoder("llama-yarn", torch.float32), 20) is None
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
@pytest.mark.parametrize("name", ["llama-biased", "phi3-window"])
def test_int8_decoding_is_that_of_a_model_with_rounded_weights(name: str, dtype: torch.dtype) -> None:
    """Answers alone are decoded so: prefill and what checks the model keep the model's own weights."""
    reference = deepcopy(wide_model(name, dtype))
    model = DecoderModel.of(reference)
    rows = [(0, 40 + i, 3 * i) for i in range(11)]  # more than one call takes
    with loop_over_kernels_of_steps(model):
        own = outcome(run_rows, model, rows[:5])[0]
    decode_in_int8(model)
    assert agree(outcome(append_each, model, rows[:5])[0], own)
    assert not agree(outcome(decode_each, model, rows[:5])[0], own)
    for module in reference.modules():
        if isinstance(module, torch.nn.Linear):
            for group in torch.split(module.weight.data, UNIT, dim=1):
                scale = group.float().abs().amax(-1, keepdim=True) / 127
                group.copy_((group / scale).round() * scale.half())
    rounded = DecoderModel.of(reference)
    for n in (1, 5, 8, 11):
        got, want = outcome(decode_each, model, rows[:n])[0], outcome(run_rows, rounded, rows[:n])[0]
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


@threads(4)
def test_threads_that_share_a_series_do_not_see_each_other() -> None:
    """The units of one are faster with one thread, those of the other with all."""
    now = 0.0
    tuner = ThreadTuner(lambda: 4, lambda: now, lambda: 0.0)
    series = Series(tuner)

    def unit(seconds: dict[int, float]) -> None:
        nonlocal now
        now += seconds[team.size()]

    with ThreadPoolExecutor(1) as other:
        for _ in range(100):
            series.run(lambda: unit({1: 0.02, 2: 0.03, 4: 0.05}))
            other.submit(threads(4)(series.run), lambda: unit({1: 0.08, 2: 0.04, 4: 0.02})).result()
        assert (tuner.threads, other.submit(lambda: tuner.threads).result()) == (1, 4)
