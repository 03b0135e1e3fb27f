"""Where kernels come from: compiled once, prebuilt, or not at all; then torch serves, and the status says why."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blendserve import cpu_cap
from blendserve.errors import ConfigError
from blendserve.kernels import ops, selfcheck, switches
from blendserve.kernels.cpu import build, isa
from blendserve.kernels.cpu.isa import LEVELS, Level, in_use, missing
from blendserve.kernels.cpu.library import STRUCTS, loaded
from blendserve.models.loader import fast_dtype

ROOT = Path(__file__).parents[3]
HERE = [level for level in LEVELS.values() if not missing(level)]
COMPILER = os.environ.get("CXX") or "g++"
needs_compiler = pytest.mark.skipif(
    not HERE or shutil.which(COMPILER) is None, reason="no kernels for this CPU, or no compiler to make them"
)
SOURCE = 'extern "C" void blendserve_silu_and_mul() {}\n'


@pytest.fixture
def level(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Level]:
    """A level of one short source, as a new process with an empty cache would look for it; its check is a double."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "toy.cpp").write_text(SOURCE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in (("SOURCES", sources), ("PREBUILT", tmp_path / "prebuilt")):
        monkeypatch.setattr(build, name, value)
    monkeypatch.delenv(switches.NATIVE, raising=False)
    monkeypatch.setattr(selfcheck, "check_level", loaded)
    toy = replace(LEVELS["avx2"], sources={"silu_and_mul": "toy.cpp"})
    monkeypatch.setattr(build, "LEVELS", {"avx2": toy})
    selfcheck.forget()
    yield toy
    selfcheck.forget()


def is_refused(level: Level) -> bool:
    status = selfcheck.cpu_status(level)
    assert status.reason
    return not status.active


def made(folder: Path) -> list[Path]:
    return list(folder.glob("cache/blendserve/native/*.so"))


def test_a_new_process_reads_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch serves while the kernels are off."""
    linear = (torch.zeros(2, 8).bfloat16(),) * 2, None
    before = [selfcheck.cpu_status(level).active for level in LEVELS.values()]
    monkeypatch.setenv(switches.NATIVE, "0")
    ops.forget()
    assert all(map(is_refused, LEVELS.values()))
    with torch.inference_mode():
        assert "kernel" not in ops.linear.select(*linear[0], linear[1]).name
    monkeypatch.delenv(switches.NATIVE)
    ops.forget()
    assert [selfcheck.cpu_status(level).active for level in LEVELS.values()] == before


def fields_of(struct: str) -> str:
    """The fields of a C++ struct as library.py names them."""
    found = ""
    for field in filter(None, map(str.strip, struct.split(";"))):
        kind, *names = re.split(r"[\s,]+", field.removeprefix("const "))
        letter = {"int64_t": "q", "float": "f"}.get(kind, "P")
        assert letter != "P" or all("*" in kind + name for name in names)
        found += "".join("P" if "*" in kind + name else letter for name in names)
    return found


def test_structs_and_functions_are_those_of_the_header() -> None:
    header = re.sub(r"//.*", "", (build.SOURCES / "kernels.h").read_text())
    expanded = {
        name: re.sub(r"(\d+)(\w)", lambda m: int(m[1]) * m[2], fields).replace(" ", "")
        for name, fields in STRUCTS.items()
    }
    functions = dict(re.findall(r"blendserve_(\w+)\(const (\w+)& args\);", header))
    assert functions.keys() == set().union(*(level.sources for level in LEVELS.values()))
    structs = dict(re.findall(r"struct (\w+) \{([^}]*)\};", header))
    assert {name: fields_of(structs.get(functions.get(name, name), "")) for name in STRUCTS} == expanded
    assert functions.keys() | (structs.keys() - set(functions.values())) == STRUCTS.keys()


@needs_compiler
def test_compiled_once_and_found_by_the_next_process(
    level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert selfcheck.cpu_status(level).active
    (first,) = made(tmp_path)
    monkeypatch.setattr(build, "compile_level", None)
    selfcheck.forget()
    assert selfcheck.cpu_status(level).active
    assert build.build(level) == first


@needs_compiler
@pytest.mark.parametrize(
    "fault", ["old CPU", "no compiler", "broken source", "unwritable cache", "broken object", "refused"]
)
def test_without_kernels_the_reason_is_told(
    fault: str, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "old CPU":
        monkeypatch.setattr(isa, "cpu_flags", lambda: level.needs - {"fma"})
    elif fault == "no compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
    elif fault == "broken source":
        (build.SOURCES / "toy.cpp").write_text("this is not C++;")
    elif fault == "unwritable cache":
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "blendserve").write_text("a file where the folder should be")
    elif fault == "broken object":
        (tmp_path / "prebuilt").mkdir()
        build.prebuilt(level).write_bytes(b"not a shared object")
    else:

        def refuse(level: Level) -> None:
            loaded(level)
            raise build.Unavailable("gated activations are wrong here")

        monkeypatch.setattr(selfcheck, "check_level", refuse)
    assert is_refused(level)
    assert bool(made(tmp_path)) == (fault == "refused")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="no instruction sets that are known")
def test_a_cap_leaves_wider_sets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "cpu_flags", lambda: frozenset().union(*(x.needs for x in LEVELS.values())))
    monkeypatch.setattr(isa, "may_use_tiles", lambda: True)
    monkeypatch.delenv(cpu_cap.SWITCH, raising=False)
    assert isa.allowed() == cpu_cap.SETS
    monkeypatch.setenv(cpu_cap.SWITCH, "avx512")
    assert isa.allowed() == ("avx2", "avx512")
    assert missing(LEVELS["amx"])
    assert fast_dtype() == torch.float32
    monkeypatch.setenv(cpu_cap.SWITCH, "avx1024")
    with pytest.raises(ConfigError) as error:
        cpu_cap.cap()
    assert error.value.setting == cpu_cap.SWITCH


# Prebuilt


@needs_compiler
def test_prebuilt_kernels_serve_without_a_compiler_if_they_are_of_these_sources(
    level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.prebuild() == [build.prebuilt(level)]
    first = build.prebuilt(level).stat().st_mtime_ns
    (build.PREBUILT / "avx2-0123.so").touch()
    assert build.prebuild() == [build.prebuilt(level)] == list(build.PREBUILT.glob("*.so"))
    assert build.prebuilt(level).stat().st_mtime_ns == first
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert selfcheck.cpu_status(level).active
    assert not made(tmp_path)
    (build.SOURCES / "toy.h").write_text("// another")
    selfcheck.forget()
    assert is_refused(level)


# Processes


@needs_compiler
def test_the_command_compiles_with_the_standard_library_alone(tmp_path: Path) -> None:
    """As `make demo` runs it, while pip installs torch; a double stands for the compiler."""
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && echo > "$2"; shift; done\n')
    compiler.chmod(0o755)
    code = "import runpy; runpy.run_module('blendserve.kernels.cpu.build', run_name='__main__')"
    for cxx, names in (("no-such-compiler", set()), (str(compiler), {level.name for level in in_use()})):
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "CXX": cxx}
        done = subprocess.run([sys.executable, "-S", "-c", code], env=environment, capture_output=True)
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
    done = subprocess.run(
        [sys.executable, "-c", PROCESS], capture_output=True, text=True, check=True, env=here
    )
    assert done.stdout.split() == ["1", "AVX2", "default", "DEFAULT"]
