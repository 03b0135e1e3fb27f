"""A decoding step in one native call against the layer loop: bits, coverage, and the way back where they differ."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blendserve.errors import ConfigError
from blendserve.kernels import team
from blendserve.kernels.cpu.decoder import INT8_GROUP, to_int8
from blendserve.kernels.cpu.isa import LEVELS
from blendserve.kernels.selfcheck import cpu_status
from blendserve.models.forward import Row, run_rows
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel
from blendserve.models.native import native_decoder
from blendserve.models.runner import append, append_each, decode_each, decode_in_int8
from blendserve.models.threads import StepThreads
from tests.support.models import TINY, wide_model

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
TOKENS = 300


@cache
def wide_adapter(name: str, dtype: torch.dtype) -> DecoderModel:
    return DecoderModel.of(wide_model(name, dtype))


def caches(adapter: DecoderModel, n: int) -> list[KVCache]:
    """Random KV, the same in every call."""
    made, generator = [KVCache(adapter, TOKENS) for _ in range(n)], torch.Generator().manual_seed(0)
    for one in made:
        for part in (one.keys, one.values):
            part.copy_(torch.randn(part.shape, generator=generator))
    return made


def agree(a: Tensor, b: Tensor) -> bool:
    """To the bit; in fp32, where the loop's linear layers are torch's, to rounding."""
    return (
        torch.equal(a, b) if a.dtype == torch.bfloat16 else bool((a - b).abs().max() <= 3e-4 * a.abs().max())
    )


@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_one_request_equal_one_row_at_a_time(dtype: torch.dtype) -> None:
    adapter = wide_adapter("llama-yarn", dtype)
    (together,), (apart,) = caches(adapter, 1), caches(adapter, 1)
    at, tokens = 126, list(range(1, 9))
    got = append(adapter, together, at, tokens)
    want = torch.cat([append(adapter, apart, at + i, [token]) for i, token in enumerate(tokens)])
    assert torch.equal(got, want)
    assert torch.equal(together.keys, apart.keys)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_threads(dtype: torch.dtype, threads: int) -> None:
    adapter, before = wide_adapter("qwen3-window", dtype), torch.get_num_threads()
    results = []
    try:
        for n in (before, threads):
            torch.set_num_threads(n)
            (only,) = caches(adapter, 1)
            results.append(append(adapter, only, 200, [5]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("name", LOOPED)
def test_a_form_without_a_kernel_is_decoded_by_the_loop_and_named(name: str) -> None:
    adapter = wide_adapter(name, torch.float32)
    decoder, reason = native_decoder(adapter)
    assert decoder is None
    assert reason
    (only,) = caches(adapter, 1)
    assert append(adapter, only, 3, [4]).shape == (1, adapter.vocab_size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_that_differs_from_the_loop_does_not_serve(dtype: torch.dtype) -> None:
    def other_loop(adapter: DecoderModel, rows: Sequence[Row]) -> Tensor:
        return run_rows(adapter, rows).roll(1, dims=-1)

    decoder, reason = native_decoder(DecoderModel.of(wide_model("llama-yarn", dtype)), loop=other_loop)
    assert decoder is None
    assert "differ" in reason  # allow: one of several reasons, told apart by what they say


@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama-biased", "phi3-window"])
def test_int8_decoding_is_that_of_a_model_with_rounded_weights(name: str, dtype: torch.dtype) -> None:
    model = deepcopy(wide_model(name, dtype))
    adapter = DecoderModel.of(model)
    decoder, reason = native_decoder(adapter, int8=True)
    assert decoder is not None, reason
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                for group in torch.split(module.weight, INT8_GROUP, dim=1):
                    scale = group.float().abs().amax(-1, keepdim=True) / 127
                    group.copy_((group / scale).round() * scale)
    rounded = DecoderModel.of(model)
    for n_rows in (1, 5, 8):
        (mine,), (other,) = caches(adapter, 1), caches(rounded, 1)
        rows = [(40 + i, 3 * i) for i in range(n_rows)]
        got = decoder([Row(mine, at, token) for at, token in rows])
        want = run_rows(rounded, [Row(other, at, token) for at, token in rows])
        bound = 0.12 if dtype == torch.bfloat16 else 1e-3  # the model rounds weights to bf16 once more
        assert (got - want).abs().max() <= bound * want.abs().max()


def test_int8_decoding_of_another_form_is_refused_by_setting() -> None:
    with pytest.raises(ConfigError) as found:
        decode_in_int8(DecoderModel.of(wide_model("gemma2", torch.float32)))
    assert found.value.setting == "model.decode_weights"


@pytest.mark.parametrize("dtype", DTYPES)
def test_answers_alone_are_decoded_in_int8(dtype: torch.dtype) -> None:
    """Prefill and what checks the model keep the model's own weights."""
    adapter = DecoderModel.of(wide_model("qwen2-window", dtype))
    decode_in_int8(adapter)
    decoder = native_decoder(adapter, int8=True)[0]
    assert decoder is not None
    results = []
    for step in (append_each, run_rows, decode_each, lambda _, rows: decoder(rows)):
        (only,) = caches(adapter, 1)
        results.append(step(adapter, [Row(only, 9, 5)]))
    assert agree(results[0], results[1])
    assert torch.equal(results[2], results[3])
    assert not agree(results[0], results[2])


def test_every_covered_kind_is_a_known_one() -> None:
    assert set(COVERED) | set(LOOPED) <= set(TINY)


class Machine:
    """Steps whose seconds depend on their threads alone."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds, self.now = seconds, 0.0
        self.tuner = StepThreads(lambda: max(seconds), lambda: self.now)

    def run(self, steps: int) -> None:
        def step() -> Tensor:
            self.now += self.seconds[team.size()]
            return torch.empty(0)

        for _ in range(steps):
            self.tuner.run(step)


def test_fewer_threads_serve_while_they_are_faster() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        machine = Machine({1: 0.02, 2: 0.03, 4: 0.05})
        machine.run(100)
        assert machine.tuner.threads == 1
        machine.seconds = {1: 0.02, 2: 0.012, 4: 0.008}
        machine.run(200)
        assert machine.tuner.threads == 4
    finally:
        torch.set_num_threads(before)
