"""Quantised weights in strips, made of a file's blocks: against the package gguf and its numbers' products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from blendserve.kernels import selfcheck
from blendserve.kernels.cpu import bindings
from blendserve.kernels.cpu.bindings import FEW
from blendserve.kernels.cpu.isa import LEVELS, Level
from blendserve.kernels.cpu.library import dtype_of
from blendserve.kernels.packed import KINDS, UNIT, PackedMatrix
from blendserve.kernels.selfcheck import cpu_status
from blendserve.models.weights import QuantisedMatrix
from tests.support.kernel_switches import threads

gguf: Any = pytest.importorskip("gguf")
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
OUTPUTS, INPUTS = 142, 512  # the last strip is not full
# where a block has fp16 scales; else at its beginning
HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}


def level(name: str) -> Level:
    found = LEVELS[name]
    if not cpu_status(found).active:
        pytest.skip(f"no kernels for {name}")
    return found


@pytest.fixture(params=["avx2", "avx512", "avx512_bf16"])
def packer(request: pytest.FixtureRequest) -> Level:
    return level(request.param)


def random_blocks(kind: str) -> QuantisedMatrix:
    """Any bytes, apart from scales, which are near .01."""
    generator, form = np.random.default_rng(0), KINDS[kind]
    shape = OUTPUTS * INPUTS // form.inputs, form.n_bytes
    blocks = generator.integers(0, 256, shape, dtype=np.uint8)
    for at in HALVES.get(kind, (0, 2) if form.has_min else (0,)):
        scales = (0.01 * generator.standard_normal(len(blocks))).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return QuantisedMatrix(kind, (OUTPUTS, INPUTS), blocks.reshape(OUTPUTS, -1))


def strips(packer: Level, matrix: QuantisedMatrix) -> PackedMatrix:
    return bindings.packed(packer, matrix.kind, matrix.shape, matrix.blocks)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


def test_sizes_of_blocks_are_those_of_gguf() -> None:
    for kind, form in KINDS.items():
        number = gguf.GGMLQuantizationType[kind]
        assert number == form.form
        assert gguf.GGML_QUANT_SIZES[number] == (form.inputs, form.n_bytes)


@EACH_KIND
@torch.inference_mode()
def test_numbers_have_the_bits_of_gguf(kind: str, packer: Level) -> None:
    matrix = random_blocks(kind)
    found, expected = strips(packer, matrix), matrix.dequantise()
    assert torch.equal(found.numbers(), expected)
    assert torch.equal(bindings.take(packer, found, torch.arange(OUTPUTS)), expected.to(dtype_of(packer)))


@EACH_KIND
@torch.inference_mode()
def test_few_rows_are_multiplied_by_the_numbers_unrounded(kind: str, packer: Level) -> None:
    matrix = random_blocks(kind)
    found, exact = strips(packer, matrix), matrix.dequantise().double()
    x = torch.randn(FEW, INPUTS, generator=torch.Generator().manual_seed(0)).to(dtype_of(packer))
    eps = torch.finfo(x.dtype).eps
    together = bindings.packed_linear(packer, x, found, None)
    assert distance(together, x.double() @ exact.T) <= max(eps / 2, 1e-6)
    for n in range(1, FEW + 1):
        with threads(1 + n % 3):
            assert torch.equal(bindings.packed_linear(packer, x[:n], found, None), together[:n])


@EACH_KIND
@torch.inference_mode()
def test_rows_in_int8_are_those_rounded_in_groups_of_32(kind: str, packer: Level) -> None:
    matrix = random_blocks(kind)
    found, exact = strips(packer, matrix), matrix.dequantise().double()
    x = torch.randn(FEW, INPUTS, generator=torch.Generator().manual_seed(0)).to(dtype_of(packer))
    x[1, 64:96] = 0
    groups = x.float().view(FEW, -1, UNIT)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    rounded = ((groups / scales.clamp_min(1e-30)).round() * scales).view_as(x)
    together = bindings.packed_linear(packer, x, found, None, int8_rows=True)
    # of bf16 output; a tie of a row's number may be rounded to the other side
    assert distance(together, rounded.double() @ exact.T) <= 1e-3 + torch.finfo(x.dtype).eps / 2
    for n in (1, 2, 5, 7):
        with threads(1 + n % 3):
            assert torch.equal(
                bindings.packed_linear(packer, x[:n], found, None, int8_rows=True), together[:n]
            )


@EACH_KIND
@pytest.mark.parametrize("n_rows", [FEW + 1, 33, 131])
@torch.inference_mode()
def test_many_rows_have_the_bits_of_a_dequantised_model(kind: str, n_rows: int, packer: Level) -> None:
    matrix = random_blocks(kind)
    found, dense = strips(packer, matrix), matrix.dequantise().to(dtype_of(packer))
    x = torch.randn(n_rows, INPUTS, generator=torch.Generator().manual_seed(0)).to(dense.dtype)
    expected = bindings.linear(packer, x, dense, None)
    for n in (1, 3):
        with threads(n):
            assert torch.equal(bindings.packed_linear(packer, x, found, None), expected)


@EACH_KIND
@torch.inference_mode()
def test_tiles_multiply_rows_as_a_dequantised_model(kind: str) -> None:
    matrix, tiles = random_blocks(kind), level("amx")
    found, dense = strips(level("avx512_bf16"), matrix), matrix.dequantise().bfloat16()
    for n_rows in (FEW + 1, 33, 131):
        x = torch.randn(n_rows, INPUTS, generator=torch.Generator().manual_seed(0)).bfloat16()
        assert torch.equal(
            bindings.packed_linear(tiles, x, found, None), bindings.linear(tiles, x, dense, None)
        )


def test_kernels_that_are_one_position_off_do_not_serve(
    packer: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear, take = bindings.packed_linear, bindings.take
    check = selfcheck.packed_trouble.__wrapped__
    assert check(packer, "Q6_K") == ""
    with monkeypatch.context() as patch:
        patch.setattr(bindings, "packed_linear", lambda level, x, *rest: linear(level, x.roll(1, 0), *rest))
        assert check(packer, "Q6_K")
    monkeypatch.setattr(bindings, "take", lambda level, weight, rows: take(level, weight, rows.roll(1)))
    assert check(packer, "Q6_K")


@EACH_KIND
@torch.inference_mode()
def test_damaged_blocks_are_wrong_numbers_alone(kind: str, packer: Level) -> None:
    generator = np.random.default_rng(1)
    for fill in (0, 255, None):
        blocks = random_blocks(kind).blocks
        blocks[:] = generator.integers(0, 256, blocks.shape) if fill is None else fill
        found = strips(packer, QuantisedMatrix(kind, (OUTPUTS, INPUTS), blocks))
        bindings.take(packer, found, torch.arange(OUTPUTS))
        for n in (1, 7, 20):
            made = bindings.packed_linear(packer, torch.ones(n, INPUTS, dtype=dtype_of(packer)), found, None)
            assert made.shape == (n, OUTPUTS)


@torch.inference_mode()
def test_parts_of_a_fused_matrix_are_its_strips(packer: Level) -> None:
    found = strips(packer, random_blocks("Q4_K"))
    whole, parts = found.numbers(), found.split([64, 48, 30])
    assert all(map(torch.equal, (part.numbers() for part in parts), torch.split(whole, [64, 48, 30])))
    with pytest.raises(ValueError):  # noqa: PT011
        found.split([70, 72])


@torch.inference_mode()
def test_a_dense_matrix_in_int8_is_within_half_a_step(packer: Level) -> None:
    x = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0))
    found = (
        bindings.packed(packer, "Q8_0", (OUTPUTS, INPUTS), bindings.q8_0_blocks(x))
        .numbers()
        .view(OUTPUTS, -1, 32)
    )
    steps = x.view(OUTPUTS, -1, 32).abs().amax(-1, keepdim=True) / 127
    assert bool(((found - x.view_as(found)).abs() <= 0.6 * steps).all())
