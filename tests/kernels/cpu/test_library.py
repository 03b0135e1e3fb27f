"""Where kernels come from: compiled once, prebuilt, or not at all; then torch serves, and the status says why."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blendserve import cpu_cap
from blendserve.errors import ConfigError
from blendserve.kernels import selfcheck, switches
from blendserve.kernels.cpu import build, isa
from blendserve.kernels.cpu.isa import LEVELS, Level, in_use, missing
from blendserve.kernels.cpu.library import LAYOUTS, loaded
from blendserve.models.loader import fast_dtype
from blendserve.paths import write_sealed
from tests.support.kernel_switches import forget

ROOT = Path(__file__).parents[3]
HERE = [level for level in LEVELS.values() if not missing(level)]
COMPILER = os.environ.get("CXX") or "g++"
needs_compiler = pytest.mark.skipif(
    not HERE or shutil.which(COMPILER) is None, reason="no kernels for this CPU, or no compiler to make them"
)


def look_again() -> None:
    """Read the switches, build, load and check at the next call, as a new process does."""
    forget()
    selfcheck.checked.cache_clear()
    loaded.cache_clear()


@pytest.fixture
def level(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Level]:
    """A level of one short source, as a new process with an empty cache would look for it; its check is a double."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "toy.cpp").write_text('extern "C" void blendserve_silu_and_mul() {}\n')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in (("SOURCES", sources), ("PREBUILT", tmp_path / "prebuilt")):
        monkeypatch.setattr(build, name, value)
    monkeypatch.delenv(switches.NATIVE, raising=False)
    monkeypatch.setattr(selfcheck, "check_level", loaded)
    toy = replace(LEVELS["avx2"], sources={"silu_and_mul": "toy.cpp"})
    monkeypatch.setattr(build, "LEVELS", {"avx2": toy})
    look_again()
    yield toy
    look_again()


def is_refused(level: Level) -> bool:
    status = selfcheck.cpu_status(level)
    assert status.reason
    return not status.active


def made(folder: Path) -> list[Path]:
    return list(folder.glob("cache/blendserve/native/*.so"))


def test_each_function_of_the_header_has_sources_and_arguments() -> None:
    functions = set().union(*(level.sources for level in LEVELS.values()))
    assert functions == {name for name in LAYOUTS if name.islower()}
    assert (LAYOUTS["KvSegment"].format, LAYOUTS["layer_out"].format) == ("PPqqqqqq", "PPPPqqqqqqqqfffq")


@needs_compiler
def test_compiled_once_and_found_by_the_next_process(
    level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert selfcheck.cpu_status(level).active
    (first,) = made(tmp_path)
    monkeypatch.setattr(build, "compile_level", None)
    look_again()
    assert selfcheck.cpu_status(level).active
    assert build.build(level) == first


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[: len(content) // 2],
    "a page short": lambda content: content[:-4096],
    "empty": lambda content: b"",
    "zeros, as after a power cut": lambda content: bytes(len(content)),
    "a bit": lambda content: content[:100] + bytes([content[100] ^ 1]) + content[101:],
}


@needs_compiler
@pytest.mark.parametrize("where", ["cache", "package"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_object_is_never_loaded(damage: str, where: str, level: Level, tmp_path: Path) -> None:
    """It is compiled again. A process that maps it would be killed at the first call."""
    if where == "package":
        assert build.main("all") == 0
    whole = build.build(level)
    damaged = DAMAGE[damage](whole.read_bytes())
    whole.write_bytes(damaged)
    again = build.build(level)
    assert again.read_bytes() != damaged
    assert (again == whole) == (where == "cache")
    assert selfcheck.cpu_status(level).active


def wrong(level: Level) -> None:
    loaded(level)
    raise build.Unavailable("gated activations are wrong here")


def broken_object(level: Level, folder: Path, patch: pytest.MonkeyPatch) -> None:
    build.PREBUILT.mkdir()
    write_sealed(build.prebuilt(level), b"not a shared object")


FAULTS: dict[str, Callable[[Level, Path, pytest.MonkeyPatch], object]] = {
    "old CPU": lambda level, _, patch: patch.setattr(isa, "cpu_flags", lambda: level.needs - {"fma"}),
    "no compiler": lambda level, _, patch: patch.setenv("CXX", "no-such-compiler"),
    "broken compiler": lambda level, folder, patch: patch.setattr(
        build, "find_compiler", lambda: str(folder)
    ),
    "broken source": lambda level, _, patch: (build.SOURCES / "toy.cpp").write_text("this is not C++;"),
    "broken object": broken_object,
    "refused": lambda level, _, patch: patch.setattr(selfcheck, "check_level", wrong),
    "switched off": lambda level, _, patch: patch.setenv(switches.NATIVE, "0"),
}


@needs_compiler
@pytest.mark.parametrize("fault", FAULTS)
def test_without_kernels_the_reason_is_told(
    fault: str, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[fault](level, tmp_path, monkeypatch)
    look_again()
    assert is_refused(level)
    assert bool(made(tmp_path)) == (fault == "refused")
    assert build.main("all") == int("compiler" in fault or fault == "broken source")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="no instruction sets that are known")
def test_a_cap_leaves_wider_sets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "cpu_flags", lambda: frozenset().union(*(x.needs for x in LEVELS.values())))
    monkeypatch.setattr(isa, "may_use_tiles", lambda: True)
    monkeypatch.delenv(cpu_cap.SWITCH, raising=False)
    assert isa.allowed() == cpu_cap.SETS
    assert fast_dtype() == torch.bfloat16
    monkeypatch.setenv(cpu_cap.SWITCH, "avx512")
    assert isa.allowed() == ("avx2", "avx512")
    assert missing(LEVELS["amx"])
    assert fast_dtype() == torch.float32
    monkeypatch.setenv(cpu_cap.SWITCH, "avx1024")
    with pytest.raises(ConfigError) as error:
        cpu_cap.cap()
    assert error.value.setting == cpu_cap.SWITCH


@needs_compiler
def test_prebuilt_kernels_serve_without_a_compiler_if_they_are_of_these_sources(
    level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_here = build.prebuilt(level)
    assert build.main("all") == 0
    first = made_here.stat().st_mtime_ns
    (build.PREBUILT / "avx2-0123.so").touch()
    assert build.main("all") == 0
    assert list(build.PREBUILT.glob("*.so")) == [made_here]
    assert made_here.stat().st_mtime_ns == first
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert selfcheck.cpu_status(level).active
    assert not made(tmp_path)
    (build.SOURCES / "toy.h").write_text("// another")
    look_again()
    assert is_refused(level)


@needs_compiler
def test_the_command_compiles_with_the_standard_library_alone(tmp_path: Path) -> None:
    """As `make demo` runs it, while pip installs torch; a double stands for the compiler."""
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && echo > "$2"; shift; done\n')
    compiler.chmod(0o755)
    command = [sys.executable, "-S", "-m", "blendserve.kernels.cpu.build"]
    for cxx, names in (("no-such-compiler", set()), (str(compiler), {level.name for level in in_use()})):
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "CXX": cxx}
        done = subprocess.run(command, env=environment, capture_output=True)
        assert done.returncode == (0 if names else 1)
        found = (tmp_path / "blendserve" / "native").glob("*.so")
        assert {path.name.partition("-")[0] for path in found} == names


PROCESS = """
import blendserve, os, pathlib, torch
from blendserve.kernels.cpu.isa import LEVELS
from blendserve.kernels.cpu.library import loaded
loaded(LEVELS["avx2"])
lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
runtimes = {line.split()[-1] for line in lines if any(x in line for x in ("libgomp", "libomp", "libiomp"))}
told = os.environ["ONEDNN_MAX_CPU_ISA"], os.environ["ATEN_CPU_CAPABILITY"]
print(len(runtimes), *told, torch.backends.cpu.get_cpu_capability())
"""


@needs_compiler
def test_a_process_under_a_cap() -> None:
    """One OpenMP runtime serves torch and the kernels, and libraries are told the cap unless they have their own."""
    here = {**os.environ, cpu_cap.SWITCH: "avx2", "ATEN_CPU_CAPABILITY": "default"}
    here.pop("ONEDNN_MAX_CPU_ISA", None)
    command = [sys.executable, "-c", PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=here)
    assert done.stdout.split() == ["1", "AVX2", "default", "DEFAULT"]
