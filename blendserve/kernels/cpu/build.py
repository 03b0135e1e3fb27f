"""Compile the kernels' sources into a shared object per instruction set, once per compiler, in the user's cache.

    python -m blendserve.kernels.cpu.build      compiles what this CPU uses; needs the standard library alone
    python -m blendserve.kernels.cpu.build all  compiles all into the package, for a wheel; needs none of their CPUs

The sources use no torch headers, so this takes a few seconds. The object links no OpenMP of its own: when it is loaded
it binds to the one that torch brought into the process, and shares its threads.

A wheel carries objects for machines without a compiler in `prebuilt/`, named by a digest of their sources; they are used
first. An object ends in a digest of itself, which loaders ignore: a cut one would kill the process that calls it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blendserve.kernels.cpu.isa import LEVELS, Level, in_use, missing
from blendserve.paths import cached_path, is_sealed, write_sealed

SOURCES = Path(__file__).parent
PREBUILT = SOURCES / "prebuilt"
COMPILE = ("-std=c++17", "-O3", "-ffp-contract=off", "-fopenmp", "-fPIC", "-c")
LINK = ("-shared", "-Wl,-z,now")  # a missing symbol is found at load, not at the first call
COMPILE_SECONDS = 300  # of one compiler process at most; a file takes over a minute on a busy machine
PARALLEL = 2  # compiler processes; a level is nine short files


class Unavailable(Exception):
    """There are no kernels here; the message says why. Never leaves this package."""


def build(level: Level) -> Path:
    """The shared object of an instruction set, compiled first if need be. Raises Unavailable, naming what is missing."""
    if reason := missing(level):
        raise Unavailable(reason)
    if is_sealed(made := prebuilt(level)):
        return made
    compiler = find_compiler()
    target = cached_path("native", f"{level.name}-{_digest(level, _run([compiler, '--version']))}.so")
    if not is_sealed(target):
        try:
            import fcntl  # start-up: Unix alone, and `missing` has refused every other system

            target.parent.mkdir(parents=True, exist_ok=True)
            with target.with_suffix(".lock").open("a") as lock:  # the system releases it if its holder dies
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not is_sealed(target):
                    compile_level(level, compiler, target)
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


def _digest(level: Level, version: str = "") -> str:
    """A digest of all that the shared object is made of and with."""
    files = (*_sources(level), *sorted(SOURCES.glob("*.h")))
    options = repr((COMPILE, level.compile, LINK)).encode()
    parts = (*(file.read_bytes() for file in files), options, version.encode())
    return hashlib.blake2b(b"\0".join(parts), digest_size=12).hexdigest()


def _sources(level: Level) -> list[Path]:
    return [SOURCES / name for name in sorted(set(level.sources.values()))]


def compile_level(level: Level, compiler: str, target: Path) -> None:
    """Compile and link a level's sources; `target` appears complete or not at all. Raises Unavailable, OSError."""
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as folder:
        objects = {source: str(Path(folder, source.stem + ".o")) for source in _sources(level)}
        commands = [
            [compiler, *COMPILE, *level.compile, str(source), "-o", made] for source, made in objects.items()
        ]
        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(_run, commands))
        linked = Path(folder, "linked.so")
        _run([compiler, *LINK, *objects.values(), "-o", str(linked)])
        write_sealed(target, linked.read_bytes())


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"the compiler cannot be run: {error}") from None
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), f"exit {done.returncode}")
        raise Unavailable(f"compiling failed: {said}")
    return done.stdout


def prebuild() -> list[Path]:
    """Compile all levels that `prebuilt/` lacks, and drop those of other sources. Raises Unavailable, OSError."""
    PREBUILT.mkdir(exist_ok=True)
    made = [prebuilt(level) for level in LEVELS.values()]
    for old in set(PREBUILT.glob("*.so")) - set(made):
        old.unlink()
    for level, target in zip(LEVELS.values(), made, strict=True):
        if not is_sealed(target):
            compile_level(level, find_compiler(), target)
    return made


def main(which: str = "") -> int:
    """Compile what this CPU uses, or all. 0 = all of it is there, 1 = compiling failed or there is no compiler."""
    levels = in_use()
    try:
        if which == "all":
            print(*prebuild(), sep="\n")
            return 0
        if not levels:
            print("This CPU or system has no compiled kernels; plain PyTorch is used.")
        for level in levels:
            print(f"CPU kernels for {level.title}: {build(level)}")
    except (Unavailable, OSError) as error:
        print(f"The CPU kernels were not compiled: {error}. Plain PyTorch is slower.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
