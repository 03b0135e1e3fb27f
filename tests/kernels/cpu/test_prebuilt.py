"""Kernels that came with the package: taken without a compiler, checked as any others, if they are of these sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blendserve import cpu_cap
from blendserve.kernels import verify
from blendserve.kernels.cpu import build, isa, library, prebuild
from blendserve.kernels.cpu.isa import LEVELS, Level, in_use, missing

ROOT = Path(__file__).parents[3]
COMMAND = "import runpy; runpy.run_module('blendserve.kernels.cpu.build', run_name='__main__')"

HERE = [level for level in LEVELS.values() if not missing(level)]
pytestmark = pytest.mark.skipif(
    not HERE or shutil.which("g++") is None,
    reason="this CPU has no kernels, or there is no compiler to make them",
)


@pytest.fixture(scope="module")
def precompiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `prebuild` leaves: an instruction set of this machine, compiled quickly and once for all tests."""
    folder, level = tmp_path_factory.mktemp("precompiled") / "prebuilt", HERE[0]
    with pytest.MonkeyPatch.context() as patch:
        _build_into(folder, level, patch)
        patch.delenv("CXX", raising=False)
        assert prebuild.prebuild() == [build.prebuilt(level)]
    return folder


@pytest.fixture
def level(precompiled: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Level]:
    """The same, where nothing else could bring it."""
    level, folder = HERE[0], tmp_path / "prebuilt"
    shutil.copytree(precompiled, folder)
    _build_into(folder, level, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(verify.SWITCH, raising=False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    _forget()
    yield level
    _forget()


def _build_into(folder: Path, level: Level, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(build, "PREBUILT", folder)
    patch.setattr(prebuild, "PREBUILT", folder)
    patch.setattr(prebuild, "LEVELS", {level.name: level})
    patch.setattr(build, "COMPILE", (*build.COMPILE, "-O1"))


def _forget() -> None:
    library.loaded.cache_clear()
    verify._cpu_status.cache_clear()


def test_they_serve_without_a_compiler(level: Level, tmp_path: Path) -> None:
    assert verify.cpu_status(level).active
    assert not (tmp_path / "cache" / "blendserve" / "native").exists()


def test_those_of_other_sources_are_left_alone(
    level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(build.SOURCES, tmp_path / "changed")
    with (tmp_path / "changed" / "attend.cpp").open("a") as source:
        source.write("// another\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "changed")
    _forget()
    assert "no C++ compiler" in verify.cpu_status(level).reason


def test_a_broken_one_is_not_used(level: Level) -> None:
    build.prebuilt(level).write_bytes(b"not a shared object")
    _forget()
    assert not verify.cpu_status(level).active


def test_compiling_again_keeps_what_is_there_and_drops_the_rest(
    level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = build.PREBUILT / "avx2-0123.so"
    other.touch()
    made = build.prebuilt(level).stat().st_mtime_ns
    assert prebuild.prebuild() == [build.prebuilt(level)]
    assert build.prebuilt(level).stat().st_mtime_ns == made
    assert not other.exists()


def test_the_command_compiles_what_this_cpu_uses_with_the_standard_library_alone(tmp_path: Path) -> None:
    """As `make demo` runs it, while pip installs torch."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-S", "-c", COMMAND]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    made = {path.name.partition("-")[0] for path in (tmp_path / "blendserve" / "native").glob("*.so")}
    assert made == {level.name for level in in_use()}, done.stdout


def test_the_command_fails_where_there_is_no_compiler(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CXX": "no-such-compiler"}
    done = subprocess.run(
        [sys.executable, "-m", "blendserve.kernels.cpu.build"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "no-such-compiler" in done.stderr


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("avx2", ["avx2"]),
        ("avx512", ["avx512"]),
        ("avx512_bf16", ["avx512_bf16"]),
        ("amx", ["avx512_bf16", "amx"]),
    ],
)
def test_levels_in_use_are_the_widest_of_the_models_dtype(
    flags: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(cpu_cap.SWITCH, raising=False)
    monkeypatch.setattr(isa, "cpu_flags", lambda: LEVELS[flags].needs)
    monkeypatch.setattr(isa, "_may_use_tiles", lambda: True)
    assert [level.name for level in in_use()] == names
