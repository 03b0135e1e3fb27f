"""Kernels that cannot be had, are switched off or are wrong: plain torch serves, and status tells why."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from blendserve.blend.attention import attend, attend_plainly, plan_rows

from blendserve import native
from blendserve.models.adapter import AttentionSpec
from blendserve.native import build, library

needs_kernels = pytest.mark.skipif(not native.status().active, reason=native.status().reason)


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """Kernels as a new process with an empty cache would look for them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(native.SWITCH, raising=False)
    library._state.cache_clear()
    yield monkeypatch
    library._state.cache_clear()


def change_sources(anew: pytest.MonkeyPatch, folder: Path, name: str, old: str, new: str) -> None:
    """The kernels will be built, quickly, from sources in which `old` is `new`."""
    shutil.copytree(build.SOURCES, folder)
    text = (folder / name).read_text()
    assert text.count(old) == 1
    (folder / name).write_text(text.replace(old, new))
    anew.setattr(build, "SOURCES", folder)
    anew.setattr(build, "COMPILE", (*build.COMPILE, "-O1"))


def check_torch_serves(reason: str) -> None:
    assert not native.status().active
    assert reason in native.status().reason
    q, keys = torch.randn(4, 3, 64).bfloat16(), torch.randn(2, 9, 64).bfloat16()
    args = q, keys, keys, AttentionSpec(0.125), plan_rows(torch.tensor([1, 4, 8]), 2)
    assert torch.equal(attend(*args), attend_plainly(*args))


def test_switched_off(anew: pytest.MonkeyPatch) -> None:
    anew.setenv(native.SWITCH, "0")
    check_torch_serves("BLENDSERVE_NATIVE=0")


@needs_kernels
def test_the_switch_works_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "0")
    check_torch_serves("BLENDSERVE_NATIVE=0")
    monkeypatch.delenv(native.SWITCH)
    assert native.status().active


@needs_kernels
def test_no_compiler(anew: pytest.MonkeyPatch) -> None:
    anew.setenv("CXX", "no-such-compiler")
    check_torch_serves("no C++ compiler: 'no-such-compiler'")


@needs_kernels
def test_a_compiler_that_fails(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken.cpp").write_text("this is not C++;")
    anew.setattr(build, "SOURCES", tmp_path)
    check_torch_serves("compiling failed")
    assert not list((tmp_path / "blendserve" / "native").glob("*.so"))


@needs_kernels
def test_a_cache_that_cannot_be_written(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "blendserve").write_text("a file where the folder should be")
    check_torch_serves("cannot be written")


def test_a_cpu_without_the_instructions(anew: pytest.MonkeyPatch) -> None:
    anew.setattr(build, "_cpu_flags", lambda: build.NEEDED - {"avx512_bf16"})
    check_torch_serves("this CPU lacks avx512_bf16" if platform.machine() == "x86_64" else "has kernels")


@needs_kernels
def test_a_kernel_with_a_broken_mask_is_not_used(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    change_sources(anew, tmp_path / "wrong", "attention.cpp", "+ 1) : 0, at + 1}", "+ 1) : 0, at + 2}")
    check_torch_serves("attention is wrong here")


@needs_kernels
def test_a_linear_layer_that_loses_an_input_is_not_used(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    change_sources(anew, tmp_path / "wrong", "linear.cpp", "k < c.depth; k += 2", "k < c.depth - 2; k += 2")
    check_torch_serves("linear is wrong here")


@needs_kernels
def test_the_second_process_finds_what_the_first_compiled(anew: pytest.MonkeyPatch) -> None:
    anew.setattr(build, "COMPILE", (*build.COMPILE, "-O1"))
    first = build.build()
    made = first.stat().st_mtime_ns
    anew.setattr(build, "_compile", None)
    assert build.build() == first
    assert first.stat().st_mtime_ns == made


@needs_kernels
def test_one_openmp_runtime_serves_torch_and_the_kernels() -> None:
    program = """
import pathlib, torch
from blendserve import native
assert native.status().active, native.status()
lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
print(len({line.split()[-1] for line in lines if "libgomp" in line or "libomp" in line or "libiomp" in line}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
