"""The kernels for matrix tiles, over tiles in emulation: on any CPU with AVX512-BF16 against the formula, themselves in
other company, and other threads. On a CPU with tiles verify.py asks the real ones the same before they serve."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from blendserve.kernels import verify
from blendserve.kernels.cpu import attend, build, correct, linear
from blendserve.kernels.cpu.attend import PAD
from blendserve.kernels.cpu.isa import LEVELS, Level, missing
from blendserve.kernels.cpu.library import loaded
from blendserve.kernels.types import CorrectionParams
from blendserve.kernels.verify import PLAIN_HALVES
from tests.kernels.cpu import test_correct, test_linear
from tests.kernels.cpu.test_attend import Case, looked_at, some_case, threads
from tests.support.blending import assert_near

AMX, BF16 = LEVELS["amx"], LEVELS["avx512_bf16"]
EMULATED = "-DBLENDSERVE_EMULATED_TILES"
needs_vectors = pytest.mark.skipif(not verify.cpu_status(BF16).active, reason=verify.cpu_status(BF16).reason)
few = settings(max_examples=25)  # an emulated product takes 60 times as long as a real one


@cache
def emulated() -> tuple[Level, ctypes.CDLL]:
    level = replace(BF16, title="AMX, emulated", compile=(*BF16.compile, EMULATED), sources=AMX.sources)
    return level, loaded(level)


def compiled(folder: Path, text: str, *options: str) -> Path:
    """A shared object of this source and the kernels' headers."""
    (folder / "probe.cpp").write_text(text)
    made = folder / "probe.so"
    compiler = shutil.which("g++")
    assert compiler is not None
    options = (*build.COMPILE[:-1], "-O1", *BF16.compile, f"-I{build.SOURCES}", "-shared", *options)
    command = [compiler, *options, str(folder / "probe.cpp"), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]
    return made


# The emulation itself

PRODUCT = """
#include "tiles.h"
extern "C" void product(const void* a, const void* b, float* c) {
    TileScope scope;
    _tile_loadd(0, c, 64);
    _tile_loadd(1, a, 64);
    _tile_stream_loadd(2, b, 64);
    _tile_dpbf16ps(0, 1, 2);
    _tile_stored(0, c, 64);
}
"""


def by_definition(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """TDPBF16PS in numpy's fp32: a [16, 32], b [32, 16] as matrices, c [16, 16]."""
    sums = np.zeros((2, 16, 16), np.float32)
    for k in range(16):
        for half in (0, 1):
            sums[half] += a[:, 2 * k + half, None] * b[None, 2 * k + half]
    out: np.ndarray = c + (sums[0] + sums[1])
    return out


@needs_vectors
def test_a_product_is_intels_definition_to_the_bit(tmp_path: Path) -> None:
    library = ctypes.CDLL(str(compiled(tmp_path, PRODUCT, EMULATED)))
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, m, generator=generator).bfloat16() for n, m in ((16, 32), (32, 16)))
    a[3, 4] = 1e-40  # counts as 0, as does what becomes so small
    a[5], b[:, 7] = 1e-30, 1e-30
    c = torch.randn(16, 16, generator=generator)
    wanted = by_definition(a.masked_fill(a.abs() < 1e-38, 0).float().numpy(), b.float().numpy(), c.numpy())
    words = b.view(16, 2, 16).transpose(1, 2).contiguous()  # rows 2k and 2k + 1 of every column side by side
    product: Callable[..., None] = library.product
    product(*(ctypes.c_void_p(x.data_ptr()) for x in (a, words, c)))
    assert np.array_equal(c.numpy(), wanted)


KEPT = """
#include "attend_amx.cpp"
extern "C" int kept(const Call* call) {
    TileShapes before{1, 0, {}, {64, 4}, {3, 16}}, after;
    _tile_loadconfig(&before);
    blendserve_attend(call);
    _tile_storeconfig(&after);
    return std::memcmp(&before, &after, sizeof after);
}
extern "C" int released(const Call* call) {
    TileShapes none{}, after;
    _tile_release();
    blendserve_attend(call);
    _tile_storeconfig(&after);
    return std::memcmp(&none, &after, sizeof after);
}
"""


@needs_vectors
def test_a_thread_has_the_tiles_back_that_it_had(tmp_path: Path) -> None:
    library = ctypes.CDLL(str(compiled(tmp_path, KEPT, EMULATED)))

    class Probe:
        def __init__(self, name: str) -> None:
            self.function, self.said = getattr(library, name), -1

        def blendserve_attend(self, call: object) -> None:
            self.said = self.function(call)

    case = some_case(64, [3, 40, 63])
    for name in ("kept", "released"):
        probe = Probe(name)
        attend.run(probe, case.q, case.keys, case.values, case.spec, case.at)  # type: ignore[arg-type]
        assert probe.said == 0


def test_the_real_instructions_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the compiler knows them; a CPU that has them is not needed."""
    monkeypatch.setattr(build, "COMPILE", (*build.COMPILE, "-O1"))
    compiler = shutil.which("g++")
    if compiler is None or missing(replace(BF16, needs=frozenset())):
        pytest.skip("no compiler for x86_64")
    empty = tmp_path / "empty.cpp"
    empty.touch()
    knows = [compiler, *AMX.compile, "-c", str(empty), "-o", str(tmp_path / "empty.o")]
    if subprocess.run(knows, capture_output=True, check=False).returncode:
        pytest.skip("the compiler does not know tiles")
    build.compile_level(AMX, compiler, tmp_path / "amx.so")
    exported = {
        name for name in AMX.sources if f"blendserve_{name}".encode() in (tmp_path / "amx.so").read_bytes()
    }
    assert exported == set(AMX.sources)


@needs_vectors
def test_what_a_cpu_with_tiles_is_asked_before_they_serve() -> None:
    verify.check_cpu(*emulated())


# Attention

EDGES = (1, 2, 15, 16, 17, 63, 64, 65, 300, 511, 512, 513, 600)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    total, seed = draw(st.sampled_from(EDGES)), draw(st.integers(0, 999))
    share = draw(st.sampled_from([0.02, 0.2, 1.0]))
    chosen = torch.rand(total, generator=torch.Generator().manual_seed(seed)) < share
    chosen[draw(st.integers(0, total - 1))] = True
    return some_case(
        total,
        chosen.nonzero()[:, 0].tolist(),
        n_kv=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 3, 4, 7])),
        dim=draw(st.sampled_from([16, 32, 48, 64, 80, 112, 128])),
        window=draw(st.none() | st.integers(1, total + 5)),
        softcap=draw(st.none() | st.floats(0.5, 30)),
        seed=seed,
    )


def attended(case: Case, at: Tensor | None = None) -> Tensor:
    return attend.run(emulated()[1], case.q, case.keys, case.values, case.spec, case.at if at is None else at)


@needs_vectors
@few
@given(cases())
def test_attention_equals_the_formula(case: Case) -> None:
    with threads(2):  # values reach about 4; weights and output are each rounded to 8 bits of mantissa
        assert_near(attended(case).double(), case.formula(), 0.04)


@needs_vectors
def test_the_check_sees_rows_that_are_one_position_off() -> None:
    case = some_case(300, [3, 4, 9, 200, 210], window=5)
    assert_near(attended(case).double(), case.formula(), 0.04)
    with pytest.raises(AssertionError, match="max difference"):
        assert_near(attended(case, case.at - 1).double(), case.formula(), 0.04)


@needs_vectors
@few
@given(cases(), st.integers(0, 999))
def test_a_row_sees_neither_threads_nor_which_others_are_computed_with_it(case: Case, seed: int) -> None:
    rows = torch.rand(len(case.at), generator=torch.Generator().manual_seed(seed)) < 0.3
    rows[-1] = True
    with threads(2):
        together = attended(case)
    with threads(1):
        assert torch.equal(attended(case), together)
        assert torch.equal(attended(case.only(rows)), together[rows])


@needs_vectors
def test_few_rows_and_many_over_many_blocks_are_one_computation() -> None:
    """Few go by keys, many by heads whose keys are packed once."""
    case = some_case(1300, list(range(0, 1300, 3)))
    assert_near(attended(case).double(), case.formula(), 0.04)
    last = torch.arange(len(case.at)) > len(case.at) - 9
    assert torch.equal(attended(case.only(last)), attended(case)[last])


@needs_vectors
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_scores_far_apart_neither_overflow_nor_lose_the_winner(softcap: float | None) -> None:
    case = some_case(600, [0, 5, 300, 599], size=300.0, softcap=softcap)
    assert_near(attended(case).double(), case.formula(), 0.04)


@needs_vectors
@few
@given(cases(), st.integers(0, 999))
def test_watching_tells_how_much_each_key_is_looked_at(case: Case, seed: int) -> None:
    case = case.only(torch.arange(len(case.at)) < 64)
    n = int(case.at[-1]) + 1
    hidden = torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.3
    hidden[case.at] = False
    marks, squares = torch.zeros(n + PAD, dtype=torch.uint8), torch.zeros(n)
    marks[:n] = hidden
    keys, values = case.keys[:, :n], case.values[:, :n].masked_fill(hidden[:, None], 0)
    out = attend.run(emulated()[1], case.q, keys, values, case.spec, case.at, marks, squares)
    wanted, looked = looked_at(case, hidden)
    assert_near(out.double(), wanted, 0.04)
    torch.testing.assert_close(squares.sqrt().double(), looked, rtol=0.01, atol=1e-6)


# Linear layers and corrections


@needs_vectors
@few
@given(test_linear.cases(), st.integers(0, 999))
def test_linear_is_the_exact_sum_rounded_once_whoever_comes_with_it(
    case: test_linear.Case, seed: int
) -> None:
    x, weight, bias = case
    wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    with threads(2):
        got = linear.run(emulated()[1], *case)
    assert ((got.double() - wanted).abs() <= 2**-8 * wanted.abs() + 1e-4).all()
    rows = torch.rand(len(x), generator=torch.Generator().manual_seed(seed)) < 0.4
    rows[0] = True
    with threads(1):
        assert torch.equal(linear.run(emulated()[1], x[rows], weight, bias), got[rows])


@needs_vectors
def test_linear_over_whole_tiles_and_panels() -> None:
    """As readers have them: weights are used where they lie, and the next panel is asked for."""
    for rows, outs in ((9, 64), (40, 192), (100, 112)):
        x, weight, bias = test_linear.some_case(rows, outs, 576)
        assert bias is not None
        wanted = x.double() @ weight.double().T + bias.double()
        got = linear.run(emulated()[1], x, weight, bias)
        assert ((got.double() - wanted).abs() <= 2**-8 * wanted.abs() + 1e-4).all()


@needs_vectors
@few
@given(
    st.sampled_from([1, 2, 3]),
    st.sampled_from([(32, 32), (64, 64), (96, 32), (128, 128), (160, 96)]),
    st.lists(st.sampled_from([1, 5, 15, 16, 17, 96, 130]), min_size=1, max_size=3),
    st.sampled_from([1, 3, 31, 32, 40, 150]),
    st.sampled_from([test_correct.SHIFT, test_correct.RIDGE]),
    st.integers(0, 99),
)
def test_corrections_equal_the_plain_form_on_any_threads(
    heads: int, dims: tuple[int, int], lengths: list[int], n: int, params: CorrectionParams, seed: int
) -> None:
    case = test_correct.Case(BF16, heads, *dims, lengths, n, seed)
    made = []
    for count in (1, 2):
        keys, values = case.keys.clone(), case.values.clone()
        with threads(count):
            correct.run(emulated()[1], keys, values, case.fresh, case.rope, params)
        made.append((keys, values))
    for got, wanted in zip(made[0], case.plainly(params), strict=True):
        assert_near(got.double(), wanted, 0.04)
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@needs_vectors
def test_a_hard_system_is_solved_as_well_as_in_fp32() -> None:
    """Few tokens and next to no penalty: what the numbers' second halves are for."""
    case = test_correct.Case(BF16, 2, 64, 64, [300, 200], 200, 3)
    params = test_correct.RIDGE._replace(penalty=0.5)
    wanted = case.plainly(params)
    off = []
    for library in (emulated()[1], loaded(BF16)):
        keys, values = case.keys.clone(), case.values.clone()
        correct.run(library, keys, values, case.fresh, case.rope, params)
        off.append(max(float((a - b).abs().max()) for a, b in zip((keys, values), wanted, strict=True)))
    assert off[0] < 1.2 * off[1]
    assert correct.fits(BF16, case.keys, case.values, case.fresh, case.rope, PLAIN_HALVES, params)
