"""The peak memory of one request, above the model and above the KV that it leaves.

Each method runs in a fresh process: what other requests left in the allocator would hide what this one needs. The process
loads the model, reads the whole store once (its map is page cache, which all processes share), runs a short prompt for
what libraries set up once, returns freed memory to the system, resets the peak that Linux keeps (VmHWM, by
/proc/self/clear_refs), and runs the request. On a GPU torch's own count is taken.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from blendserve.bench.fixture import PromptFixture
from blendserve.bench.harness import Metrics
from blendserve.bench.workload import make_workload
from blendserve.config import ModelConfig
from blendserve.errors import BlendserveError, InputError
from blendserve.evaluate.methods import TRANSFORMERS, parse_methods
from blendserve.models.loader import load_model

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # what clear_refs wants written


def peak_memory(
    model: Mapping[str, Any], shape: tuple[int, int, int], seed: int, method: str, folder: str
) -> Metrics:
    """Of one request; {} where the system does not tell a peak. Raises InputError when the process fails.

    shape: as for make_workload; folder: of the store with the chunks.
    """
    task = json.dumps([dict(model), shape, seed, method, folder])
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, input=task, capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise InputError(f"the process that measures the memory of {method} failed: {why}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def measure_here(model: dict[str, Any], shape: list[int], seed: int, name: str, folder: str) -> Metrics:
    """The same in this process."""
    reader = load_model(ModelConfig(**model))
    chunks, chunk_tokens, suffix_tokens = shape
    workload = make_workload(reader, chunks, chunk_tokens, suffix_tokens, seed)
    method = next(m for m in parse_methods((TRANSFORMERS, name), ()) if m.name == name)
    with PromptFixture(reader, workload, (method,), Path(folder)) as fixture:
        fixture.store.verify()
        fixture.workload = replace(workload, passages=())
        fixture.run(method)
        fixture.workload = workload
        meter = PeakMeter(reader.adapter.device)
        kv_bytes = fixture.run(method)["kv_bytes"]
        peak = meter.peak()
    if peak is None:
        return {}
    return {"peak_bytes": peak, "kv_bytes": kv_bytes, "above_kv_ratio": (peak - kv_bytes) / kv_bytes}


class PeakMeter:
    """Peak bytes of this process from now on, above what it holds now."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._before: int | None = None
        gc.collect()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            self._before = torch.cuda.memory_allocated(self._cuda)
            return
        with suppress(AttributeError, OSError):  # glibc alone; elsewhere the peak is a little low
            ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError, LookupError):
            CLEAR.write_text(RESET_PEAK)
            self._before = status_bytes("VmRSS")

    def peak(self) -> int | None:
        """None where the system does not tell."""
        if self._before is None:
            return None
        now = torch.cuda.max_memory_allocated(self._cuda) if self._cuda else status_bytes("VmHWM")
        return int(now) - self._before


def status_bytes(name: str) -> int:
    """A size from /proc/self/status. Raises LookupError, OSError."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


if __name__ == "__main__":
    try:
        print(json.dumps(measure_here(*json.load(sys.stdin))))
    except BlendserveError as error:
        sys.exit(f"{error}")
