"""The origin of measured figures: versions, commit, CPU and GPU."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blendserve

if TYPE_CHECKING:
    from importlib.abc import Traversable

PACKAGES = ("torch", "transformers", "faiss-cpu", "lmdb", "numpy")
# The instruction sets that matter for speed: x86, then ARM, the oldest first.
INSTRUCTION_SETS = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "i8mm", "bf16", "sve", "sve2"),
)
CPUINFO = Path("/proc/cpuinfo")


def versions() -> dict[str, str]:
    """Versions of this package, its commit, Python, and PACKAGES; "" for a missing one."""
    return {
        "blendserve": blendserve.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        **{name: package_version(name) for name in PACKAGES},
    }


def machine() -> dict[str, Any]:
    """CPU, instruction sets, threads and GPU."""
    import torch  # takes a second, and `versions` does not need it

    flags = (cpuinfo("flags") or cpuinfo("Features")).split()
    return {
        "cpu": cpu_name(),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in flags],
        "torch_uses": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "system": platform.system(),
    }


def describe(facts: dict[str, Any]) -> str:
    """The result of `machine` in one line."""
    sets = " ".join(facts["instruction_sets"]) or "no known instruction set"
    gpu = f", {facts['gpu']}" if facts["gpu"] else ""
    return f"{facts['cpu']} ({sets}), {facts['cores']} cores{gpu}, {facts['system']}"


def environment() -> dict[str, Any]:
    """Versions and machine, as recorded in the folder of a run."""
    return {**versions(), "machine": describe(machine())}


def cpu_name() -> str:
    """The CPU's name, as the system reports it."""
    return cpuinfo("model name") or platform.processor() or platform.machine()


def cpuinfo(name: str) -> str:
    """The first value of this name in /proc/cpuinfo; "" if there is none."""
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    found = re.search(rf"^{name}\s*:(.*)", text, re.MULTILINE)
    return found[1].strip() if found else ""


@cache
def commit() -> str:
    """The commit of this code's checkout, with a + if files were changed; "" outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    is_tracked = [*git, "ls-files", "--error-unmatch", Path(__file__).name]  # else another project's checkout
    describe = [*git, "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        subprocess.run(is_tracked, check=True, capture_output=True, timeout=10)
        return subprocess.run(describe, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


@cache
def code_digest(*parts: str) -> str:
    """A digest of the code in these files and folders of the package."""
    digest = hashlib.blake2b(digest_size=12)
    for file in (file for part in parts for file in _files(files(blendserve) / part)):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _files(place: Traversable) -> Iterator[Traversable]:
    if place.is_file():
        yield place
    elif place.name not in ("__pycache__", "data", "prebuilt"):
        for inner in sorted(place.iterdir(), key=lambda each: each.name):
            yield from _files(inner)


def package_version(package: str) -> str:
    """The installed version; "" if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
