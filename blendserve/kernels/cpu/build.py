"""The kernels' source -> a shared object in the user's cache, one an instruction set, compiled once for each compiler.

No torch headers, so this takes a few seconds. The object is linked against no OpenMP of its own: at load it binds to the
one that torch brought into the process, and shares its threads.

Objects that were compiled beforehand, for machines without a compiler, lie in `prebuilt/` (prebuild.py) under a digest
of what they were made of, and are taken first.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

from blendserve.kernels.cpu.isa import Level, missing
from blendserve.paths import cache_folder

SOURCES = Path(__file__).parent
PREBUILT = SOURCES / "prebuilt"
COMPILE = ("-std=c++17", "-O3", "-ffp-contract=off", "-fopenmp", "-fPIC", "-c")
LINK = ("-shared", "-Wl,-z,now")  # a missing symbol is found at load, not at the first call
WAIT_SECONDS = 60  # for another process that is compiling


class Unavailable(Exception):
    """There are no kernels here; the message says why. Never leaves this package."""


def build(level: Level) -> Path:
    """The shared object of an instruction set, compiled first if need be. Raises Unavailable, naming what is missing."""
    if reason := missing(level):
        raise Unavailable(reason)
    if (made := prebuilt(level)).exists():
        return made
    compiler = find_compiler()
    target = cache_folder() / "native" / f"{level.name}-{digest(level, compiler)}.so"
    if not target.exists():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(target.with_suffix(".lock"), timeout=WAIT_SECONDS):
                if not target.exists():
                    compile_level(level, compiler, target)
        except Timeout:
            raise Unavailable(f"another process has been compiling {target} for {WAIT_SECONDS} s") from None
        except OSError as error:
            raise Unavailable(f"{target.parent} cannot be written: {error.strerror}") from None
    return target


def prebuilt(level: Level) -> Path:
    """Where the shared object of these very sources lies if it came with the package."""
    return PREBUILT / f"{level.name}-{_digest(level)}.so"


def find_compiler() -> str:
    """The compiler's path. Raises Unavailable."""
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        raise Unavailable(f"no C++ compiler: {name!r} is not installed")
    return path


def digest(level: Level, compiler: str) -> str:
    """Of all that the shared object is made of and with."""
    return _digest(level, _run([compiler, "--version"]))


def _digest(level: Level, version: str = "") -> str:
    files = (*_sources(level), *sorted(SOURCES.glob("*.h")))
    options = repr((COMPILE, level.compile, LINK)).encode()
    parts = (*(file.read_bytes() for file in files), options, version.encode())
    return hashlib.blake2b(b"\0".join(parts), digest_size=12).hexdigest()


def _sources(level: Level) -> list[Path]:
    return [SOURCES / name for name in sorted(set(level.sources.values()))]


def compile_level(level: Level, compiler: str, target: Path) -> None:
    """Raises Unavailable, OSError. The target is there whole or not at all."""
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as folder:
        linked, made = Path(folder, "made.so"), []
        for source in _sources(level):
            made.append(str(Path(folder, source.stem + ".o")))
            _run([compiler, *COMPILE, *level.compile, str(source), "-o", made[-1]])
        _run([compiler, *LINK, *made, "-o", str(linked)])
        os.replace(linked, target)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"the compiler cannot be run: {error}") from None
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), f"exit {done.returncode}")
        raise Unavailable(f"compiling failed: {said}")
    return done.stdout
