"""Kernels that cannot be had, are switched off or are wrong: plain torch serves, and status tells why."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from blendserve import cpu_cap
from blendserve.errors import ConfigError
from blendserve.kernels import race, verify
from blendserve.kernels.cpu import build, isa, library
from blendserve.kernels.cpu.isa import LEVELS
from blendserve.kernels.cpu.library import dtype_of
from blendserve.kernels.ops import ATTEND, attend
from blendserve.kernels.reference import attend_reference
from blendserve.kernels.rows import plan_rows
from blendserve.kernels.types import AttentionSpec
from blendserve.models.loader import fast_dtype
from tests.support.blending import assert_near

BOTH = LEVELS["avx512_bf16"], LEVELS["avx2"]
HERE = next((level for level in BOTH if verify.cpu_status(level).active), LEVELS["avx2"])
needs_kernels = pytest.mark.skipif(not verify.cpu_status(HERE).active, reason=verify.cpu_status(HERE).reason)


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """Kernels as a new process with an empty cache would look for them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.delenv(verify.SWITCH, raising=False)
    library.loaded.cache_clear()
    verify._cpu_status.cache_clear()
    monkeypatch.setenv(race.SWITCH, "0")
    yield monkeypatch
    library.loaded.cache_clear()
    verify._cpu_status.cache_clear()


def change_sources(anew: pytest.MonkeyPatch, folder: Path, name: str, old: str, new: str) -> None:
    """Attention and linear layers will be built, quickly and alone, from sources in which `old` is `new`."""
    shutil.copytree(build.SOURCES, folder)
    for level in LEVELS.values():
        for operation in level.sources.keys() - {"attend", "linear"}:
            anew.delitem(level.sources, operation, raising=False)
    text = (folder / name).read_text()
    assert text.count(old) == 1
    (folder / name).write_text(text.replace(old, new))
    anew.setattr(build, "SOURCES", folder)
    anew.setattr(build, "COMPILE", (*build.COMPILE, "-O1"))


def check_torch_serves(reason: str) -> None:
    assert not verify.cpu_status(HERE).active
    assert reason in verify.cpu_status(HERE).reason
    q, keys = (torch.randn(shape).to(dtype_of(HERE)) for shape in ((4, 3, 64), (2, 9, 64)))
    args = q, keys, keys, AttentionSpec(0.125), plan_rows(torch.tensor([1, 4, 8]), 2)
    assert "kernel" not in ATTEND.select_backend(*args).name
    assert_near(attend(*args), attend_reference(*args), 0.05)


def test_switched_off(anew: pytest.MonkeyPatch) -> None:
    anew.setenv(verify.SWITCH, "0")
    check_torch_serves("BLENDSERVE_NATIVE=0")


@needs_kernels
def test_the_switch_works_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(verify.SWITCH, "0")
    check_torch_serves("BLENDSERVE_NATIVE=0")
    monkeypatch.delenv(verify.SWITCH)
    assert verify.cpu_status(HERE).active


@needs_kernels
def test_no_compiler(anew: pytest.MonkeyPatch) -> None:
    anew.setenv("CXX", "no-such-compiler")
    check_torch_serves("no C++ compiler: 'no-such-compiler'")


@needs_kernels
def test_a_compiler_that_fails(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in HERE.sources.values():
        (tmp_path / name).touch()
    (tmp_path / "linear.cpp").write_text("this is not C++;")
    anew.setattr(build, "SOURCES", tmp_path)
    check_torch_serves("compiling failed")
    assert not list((tmp_path / "blendserve" / "native").glob("*.so"))


@needs_kernels
def test_a_cache_that_cannot_be_written(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "blendserve").write_text("a file where the folder should be")
    check_torch_serves("cannot be written")


def test_a_cpu_without_the_instructions(anew: pytest.MonkeyPatch) -> None:
    anew.setattr(isa, "cpu_flags", lambda: HERE.needs - {"fma"})
    check_torch_serves("this CPU lacks fma" if platform.machine() == "x86_64" else "has kernels")


def test_a_cap_leaves_wider_sets_alone(anew: pytest.MonkeyPatch) -> None:
    anew.setattr(isa, "cpu_flags", lambda: frozenset().union(*(level.needs for level in LEVELS.values())))
    anew.setattr(isa, "_may_use_tiles", lambda: True)
    anew.delenv(cpu_cap.SWITCH, raising=False)
    if platform.machine() != "x86_64":
        pytest.skip("no instruction sets that are known")
    assert isa.allowed() == cpu_cap.SETS
    anew.setenv(cpu_cap.SWITCH, "avx512")
    assert isa.allowed() == ("avx2", "avx512")
    assert isa.missing(LEVELS["amx"]) == "capped to avx512"
    assert fast_dtype() == torch.float32


def test_an_unknown_cap_is_refused(anew: pytest.MonkeyPatch) -> None:
    anew.setenv(cpu_cap.SWITCH, "avx1024")
    with pytest.raises(ConfigError, match="cannot be 'avx1024': use one of avx2, avx512, avx512_bf16, amx"):
        cpu_cap.cap()


def test_a_cap_tells_torch_and_its_libraries_what_they_were_not_told() -> None:
    program = """
import blendserve, os, torch
print(os.environ["ONEDNN_MAX_CPU_ISA"], os.environ["ATEN_CPU_CAPABILITY"], torch.backends.cpu.get_cpu_capability())
"""
    here = {**os.environ, cpu_cap.SWITCH: "avx2", "ATEN_CPU_CAPABILITY": "default"}
    here.pop("ONEDNN_MAX_CPU_ISA", None)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=here
    )
    assert done.stdout.split() == ["AVX2", "default", "DEFAULT"]


@needs_kernels
def test_a_kernel_with_a_broken_mask_is_not_used(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    change_sources(anew, tmp_path / "wrong", "attend.h", "+ 1) : 0, at + 1}", "+ 1) : 0, at + 2}")
    check_torch_serves("attention is wrong here")


@needs_kernels
def test_a_linear_layer_that_loses_an_input_is_not_used(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    change_sources(
        anew,
        tmp_path / "wrong",
        "linear.cpp",
        "k < c.depth; k += PER_WORD",
        "k < c.depth - PER_WORD; k += PER_WORD",
    )
    check_torch_serves("linear is wrong here")


@needs_kernels
def test_the_second_process_finds_what_the_first_compiled(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    anew.setattr(build, "SOURCES", tmp_path)
    for source in HERE.sources.values():
        (tmp_path / source).write_text(f'extern "C" void {Path(source).stem}() {{}}')
    first = build.build(HERE)
    made = first.stat().st_mtime_ns
    anew.setattr(build, "compile_level", None)
    assert build.build(HERE) == first
    assert first.stat().st_mtime_ns == made


@needs_kernels
def test_one_openmp_runtime_serves_torch_and_the_kernels() -> None:
    program = """
import pathlib, torch
from blendserve.kernels import race, verify
from blendserve.kernels.cpu.isa import LEVELS
assert any(verify.cpu_status(level).active for level in LEVELS.values())
lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
print(len({line.split()[-1] for line in lines if "libgomp" in line or "libomp" in line or "libiomp" in line}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
