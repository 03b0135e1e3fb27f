"""The emulation of matrix tiles by which the table runs the AMX kernels, and what emulation cannot show."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blendserve.kernels import selfcheck
from blendserve.kernels.cases import CASES, Draw
from blendserve.kernels.cpu import bindings, build
from blendserve.kernels.cpu.isa import LEVELS, missing
from blendserve.kernels.cpu.library import bind, loaded
from tests.support.kernels import BF16, EMULATED

AMX = LEVELS["amx"]
needs_vectors = pytest.mark.skipif(
    not selfcheck.cpu_status(BF16).active, reason=selfcheck.cpu_status(BF16).reason
)

PROBE = """
#include "attention_amx.cpp"
static TileShapes before{1, 0, {}, {64, 4}, {3, 16}};
extern "C" void configure() { _tile_loadconfig(&before); }
extern "C" int is_kept() {
    TileShapes after;
    _tile_storeconfig(&after);
    return !std::memcmp(&before, &after, sizeof after);
}
"""


@needs_vectors
def test_a_thread_has_the_tiles_back_that_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the emulated kernels, which are loaded: or the table would skip all of them."""
    assert loaded(EMULATED) is not loaded(BF16)
    (tmp_path / "probe.cpp").write_text(PROBE)
    options = *build.COMPILE[:-1], "-O1", *EMULATED.compile, f"-I{build.SOURCES}", "-shared"
    command = [build.find_compiler(), *options, str(tmp_path / "probe.cpp"), "-o", str(tmp_path / "probe.so")]
    subprocess.run(command, check=True)
    probe = ctypes.CDLL(str(tmp_path / "probe.so"))
    monkeypatch.setattr(bindings, "loaded", lambda level: bind(probe, ["attention"]))
    args = CASES["attend"](Draw(torch.bfloat16), at=[3, 40, 63])
    probe.configure()
    bindings.attention(EMULATED, *args)
    assert probe.is_kept()


@pytest.mark.skipif(selfcheck.cpu_status(AMX).active, reason="they were compiled for this CPU")
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
