"""The emulation of matrix tiles by which the table runs the AMX kernels, and what emulation cannot show."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from blendserve.kernels import verify
from blendserve.kernels.cpu import attend, build, correct
from blendserve.kernels.cpu.isa import LEVELS, missing
from blendserve.kernels.cpu.library import loaded
from tests.support.kernels import BF16, EMULATED, NAN, RIDGE, TABLE, Draw, correct_formula

AMX = LEVELS["amx"]
needs_vectors = pytest.mark.skipif(not verify.cpu_status(BF16).active, reason=verify.cpu_status(BF16).reason)

PROBE = """
#include "attend_amx.cpp"
extern "C" void product(const void* a, const void* b, float* c) {
    TileScope scope;
    _tile_loadd(0, c, 64);
    _tile_loadd(1, a, 64);
    _tile_stream_loadd(2, b, 64);
    _tile_dpbf16ps(0, 1, 2);
    _tile_stored(0, c, 64);
}
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


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder, compiler = tmp_path_factory.mktemp("probe"), shutil.which("g++")
    assert compiler is not None
    (folder / "probe.cpp").write_text(PROBE)
    options = *build.COMPILE[:-1], "-O1", *EMULATED.compile, f"-I{build.SOURCES}", "-shared"
    subprocess.run(
        [compiler, *options, str(folder / "probe.cpp"), "-o", str(folder / "probe.so")], check=True
    )
    return ctypes.CDLL(str(folder / "probe.so"))


@needs_vectors
def test_a_product_is_intels_definition_to_the_bit(probe: ctypes.CDLL) -> None:
    """TDPBF16PS: two sums in fp32, of even and of odd inputs."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, m, generator=generator).bfloat16() for n, m in ((16, 32), (32, 16)))
    a[3, 4] = 1e-40  # counts as 0, as does what becomes so small
    a[5], b[:, 7] = 1e-30, 1e-30
    c = torch.randn(16, 16, generator=generator)
    x, y = a.masked_fill(a.abs() < 1e-38, 0).float().numpy(), b.float().numpy()
    sums = np.zeros((2, 16, 16), np.float32)
    for k in range(16):
        for half in (0, 1):
            sums[half] += x[:, 2 * k + half, None] * y[None, 2 * k + half]
    wanted = c.numpy() + (sums[0] + sums[1])
    words = b.view(16, 2, 16).transpose(1, 2).contiguous()  # rows 2k and 2k + 1 of every column side by side
    probe.product(*(ctypes.c_void_p(x.data_ptr()) for x in (a, words, c)))
    assert np.array_equal(c.numpy(), wanted)


@needs_vectors
@pytest.mark.parametrize("name", ["kept", "released"])
def test_a_thread_has_the_tiles_back_that_it_had(probe: ctypes.CDLL, name: str) -> None:
    class Library:
        said = -1

        def blendserve_attend(self, call: object) -> None:
            self.said = getattr(probe, name)(call)

    library = Library()
    q, keys, values, spec, plan = TABLE["attend"].make(Draw(torch.bfloat16, "cpu", 0, NAN), at=[3, 40, 63])
    attend.run(library, q, keys, values, spec, plan.positions)  # type: ignore[arg-type]
    assert library.said == 0


def test_the_real_instructions_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the compiler knows them; a CPU that has them is not needed."""
    monkeypatch.setattr(build, "COMPILE", (*build.COMPILE, "-O0"))
    compiler = shutil.which("g++")
    if compiler is None or missing(replace(BF16, needs=frozenset())):
        pytest.skip("no compiler for x86_64")
    (tmp_path / "empty.cpp").touch()
    knows = [compiler, *AMX.compile, "-c", str(tmp_path / "empty.cpp"), "-o", str(tmp_path / "empty.o")]
    if subprocess.run(knows, capture_output=True, check=False).returncode:
        pytest.skip("the compiler does not know tiles")
    build.compile_level(AMX, compiler, tmp_path / "amx.so")
    found = (tmp_path / "amx.so").read_bytes()
    assert all(f"blendserve_{name}".encode() in found for name in AMX.sources)


@needs_vectors
def test_a_hard_system_is_solved_as_well_as_in_fp32() -> None:
    """Few tokens and next to no penalty: what the numbers' second halves are for."""
    params = type(RIDGE)(*RIDGE[:4], 0.5, *RIDGE[5:])
    make, off = TABLE["correct"].make, []
    for level in (EMULATED, BF16):
        args = make(Draw(torch.bfloat16, "cpu", 3, NAN), lengths=[300, 200], n=200, params=params)
        wanted = correct_formula(*args)
        assert correct.fits(level, *args)
        correct.correct(level, *args)
        off.append(
            max(float((a - b).abs().nan_to_num(0).max()) for a, b in zip(args[:2], wanted, strict=True))
        )
    assert off[0] < 1.2 * off[1]


@needs_vectors
def test_the_emulated_kernels_are_loaded() -> None:
    """Or the table would skip all of them."""
    assert loaded(EMULATED) is not loaded(BF16)
