"""The peak memory of one request, above the model and above the KV that it leaves.

Each method runs in a fresh process: what other requests left in the allocator would hide what this one needs. The process
loads the model, reads the whole store once (its map is page cache, which all processes share), runs a short prompt for
what libraries set up once, returns freed memory to the system, resets the peak that Linux keeps (VmHWM, by
/proc/self/clear_refs), and runs the request. On a GPU torch's own count is used.
"""

from __future__ import annotations

import ctypes
import gc
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

from blendserve.bench.fixture import PromptFixture
from blendserve.bench.harness import Metrics
from blendserve.bench.workload import make_workload
from blendserve.config import ModelConfig
from blendserve.errors import InputError
from blendserve.evaluate.methods import MethodSpec
from blendserve.models.loader import load_model

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # the word that clear_refs resets VmHWM at


Shape = tuple[int, int, int, int]
"""the arguments of make_workload: chunks, their tokens, those of the suffix, seed"""


def peak_memory(model: ModelConfig, shape: Shape, folder: Path, method: MethodSpec) -> Metrics:
    """Measure one request; {} where the system does not tell a peak. folder: of the store. Raises BlendserveError."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(measure_here, model, shape, folder, method).result()
        except BrokenProcessPool:
            raise InputError(f"the process that measures the memory of {method} was killed") from None


def measure_here(model: ModelConfig, shape: Shape, folder: Path, method: MethodSpec) -> Metrics:
    """The same in this process."""
    loaded = load_model(model)
    workload = make_workload(loaded, *shape)
    with PromptFixture(loaded, workload, (method,), folder) as fixture:
        fixture.store.verify()
        fixture.workload = replace(workload, passages=())
        fixture.run(method)
        fixture.workload = workload
        meter = PeakMeter(loaded.decoder.device)
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
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(fields[name].split()[0]) * 1024
