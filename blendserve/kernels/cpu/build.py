"""The kernels' source -> a shared object in the user's cache, one an instruction set, compiled once for each compiler.

No torch headers, so this takes a few seconds. The object is linked against no OpenMP of its own: at load it binds to the
one that torch brought into the process, and shares its threads.
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
COMPILE = ("-std=c++17", "-O3", "-ffp-contract=off", "-fopenmp", "-fPIC", "-c")
LINK = ("-shared", "-Wl,-z,now")  # a missing symbol is found at load, not at the first call
WAIT_SECONDS = 60  # for another process that is compiling


class Unavailable(Exception):
    """There are no kernels here; the message says why. Never leaves this package."""


def build(level: Level) -> Path:
    """The shared object of an instruction set, compiled first if need be. Raises Unavailable, naming what is missing."""
    if reason := missing(level):
        raise Unavailable(reason)
    compiler = _compiler()
    target = cache_folder() / "native" / f"{level.name}-{digest(level, compiler)}.so"
    if not target.exists():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(target.with_suffix(".lock"), timeout=WAIT_SECONDS):
                if not target.exists():
                    _compile(level, compiler, target)
        except Timeout:
            raise Unavailable(f"another process has been compiling {target} for {WAIT_SECONDS} s") from None
        except OSError as error:
            raise Unavailable(f"{target.parent} cannot be written: {error.strerror}") from None
    return target


def _compiler() -> str:
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        raise Unavailable(f"no C++ compiler: {name!r} is not installed")
    return path


def digest(level: Level, compiler: str) -> str:
    """Of all that the shared object is made of and with."""
    version = _run([compiler, "--version"])
    files = (*_sources(level), *sorted(SOURCES.glob("*.h")))
    options = repr((COMPILE, level.compile, LINK)).encode()
    parts = (*(file.read_bytes() for file in files), options, version.encode())
    return hashlib.blake2b(b"\0".join(parts), digest_size=12).hexdigest()


def _sources(level: Level) -> list[Path]:
    return [SOURCES / name for name in sorted(set(level.sources.values()))]


def _compile(level: Level, compiler: str, target: Path) -> None:
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
