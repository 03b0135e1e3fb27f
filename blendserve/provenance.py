"""Where figures come from: versions, commit, and the machine with what its CPU can do."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import blendserve

PACKAGES = ("torch", "transformers", "faiss-cpu", "lmdb", "numpy")
# Of what a CPU can do, what decides about speed here; x86 first, then ARM, weakest first.
INSTRUCTION_SETS = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "i8mm", "bf16", "sve", "sve2"),
)
CPUINFO = Path("/proc/cpuinfo")


def versions() -> dict[str, str]:
    """Of this package, its commit, Python, and the packages that figures depend on; "" for one that is not there."""
    return {
        "blendserve": blendserve.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def machine() -> dict[str, Any]:
    """The CPU, what of it is used, and the GPU where there is one."""
    import torch  # a second; what only asks for versions does without

    return {
        "cpu": cpu_name(),
        "instruction_sets": list(instruction_sets()),
        "torch_uses": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "system": platform.system(),
    }


def describe(facts: dict[str, Any]) -> str:
    """What `machine` found, in one line."""
    sets = " ".join(facts["instruction_sets"]) or "no instruction set that we ask for"
    gpu = f", {facts['gpu']}" if facts["gpu"] else ""
    return f"{facts['cpu']} ({sets}), {facts['cores']} cores{gpu}, {facts['system']}"


def environment() -> dict[str, Any]:
    """All of it, as a run's folder keeps it."""
    return {**versions(), "machine": describe(machine())}


def cpu_name() -> str:
    """As the system calls it."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def instruction_sets() -> tuple[str, ...]:
    """Those of INSTRUCTION_SETS that the CPU has; none where the system does not say."""
    known = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return tuple(name for name in INSTRUCTION_SETS if name in known)


@cache
def commit() -> str:
    """Of the checkout that this code runs from, with a + where files differ from it; "" outside of one."""
    if not _git("ls-files", Path(__file__).name):  # installed within a checkout of something else
        return ""
    return _git("describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*")


def _git(*command: str) -> str:
    """What git says of this folder; "" where it fails."""
    try:
        done = subprocess.run(
            ["git", *command],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpuinfo(name: str) -> str:
    """The first value of this name; "" where there is none."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return ""
    return next(
        (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), ""
    )
