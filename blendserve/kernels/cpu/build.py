"""The kernels' source -> a shared object in the user's cache, compiled once for each source and compiler.

No torch headers, so this takes a few seconds. The object is linked against no OpenMP of its own: at load it binds to the
one that torch brought into the process, and shares its threads.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

from blendserve.paths import cache_folder

SOURCES = Path(__file__).parent
COMPILE = ("-std=c++17", "-O3", "-march=x86-64-v4", "-mavx512bf16", "-fopenmp", "-fPIC", "-c")
LINK = ("-shared", "-Wl,-z,now")  # a missing symbol is found at load, not at the first call
NEEDED = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_bf16"})
WAIT_SECONDS = 60  # for another process that is compiling


class Unavailable(Exception):
    """There are no kernels here; the message says why. Never leaves this package."""


def build() -> Path:
    """The shared object, compiled first if need be. Raises Unavailable."""
    check_cpu()
    compiler = _compiler()
    target = cache_folder() / "native" / f"{_digest(compiler)}.so"
    if not target.exists():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(target.with_suffix(".lock"), timeout=WAIT_SECONDS):
                if not target.exists():
                    _compile(compiler, target)
        except Timeout:
            raise Unavailable(f"another process has been compiling {target} for {WAIT_SECONDS} s") from None
        except OSError as error:
            raise Unavailable(f"{target.parent} cannot be written: {error.strerror}") from None
    return target


def check_cpu() -> None:
    """Raises Unavailable, naming what this machine lacks."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise Unavailable(f"{platform.system()} on {platform.machine()}: only Linux on x86_64 has kernels")
    missing = NEEDED - _cpu_flags()
    if missing:
        raise Unavailable(f"this CPU lacks {', '.join(sorted(missing))}")


def _cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def _compiler() -> str:
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        raise Unavailable(f"no C++ compiler: {name!r} is not installed")
    return path


def _digest(compiler: str) -> str:
    version = _run([compiler, "--version"])
    files = sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")))
    parts = (*(file.read_bytes() for file in files), repr((COMPILE, LINK)).encode(), version.encode())
    return hashlib.blake2b(b"\0".join(parts), digest_size=12).hexdigest()


def _compile(compiler: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as folder:
        linked, made = Path(folder, "made.so"), []
        for source in sorted(SOURCES.glob("*.cpp")):
            made.append(str(Path(folder, source.stem + ".o")))
            _run([compiler, *COMPILE, str(source), "-o", made[-1]])
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
