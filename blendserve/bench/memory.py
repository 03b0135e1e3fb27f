"""The peak memory of one request, above the model and above the KV that it leaves.

Each method runs in a fresh process: what other requests left behind in the allocator would hide what this one needs.
There: load the model, read the whole store once (its map is page cache, shared and not the request's own; read now, it is
resident before we begin), run a short prompt for what libraries set up once, give freed memory back to the system, reset
the peak that Linux keeps (VmHWM, through /proc/self/clear_refs), run the request. On a GPU torch's own count is taken.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from blendserve.bench.config import TtftConfig
from blendserve.bench.figures import Figures
from blendserve.bench.harness import Harness
from blendserve.bench.workload import make_workload
from blendserve.errors import BlendserveError, InputError
from blendserve.evaluate.methods import MethodSpec
from blendserve.models.loader import load_reader

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # what clear_refs wants written


def peak_of(config: TtftConfig, method: str, folder: Path) -> Figures:
    """One method's memory over the store in `folder`, which holds its chunks. Raises InputError."""
    task = {"config": config.model_dump(mode="json"), "method": method, "folder": str(folder)}
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise InputError(f"the process that measures the memory of {method} ended early: {why}")
    figures: Figures = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def main() -> None:
    """The measuring process: a task on stdin, figures on stdout."""
    task = json.load(sys.stdin)
    config = TtftConfig(**task["config"])
    variant = next(v for v in config.variants if v.name == task["method"])
    print(json.dumps(_measure(config, variant, Path(task["folder"]))))


def _measure(config: TtftConfig, variant: MethodSpec, folder: Path) -> Figures:
    reader = load_reader(config.reader)
    workload = make_workload(reader, config.chunks, config.chunk_tokens, config.suffix_tokens, config.seed)
    with Harness(reader, workload, (variant,), folder) as contest:
        contest.store.verify()
        contest.workload = replace(workload, passages=())
        contest.run(variant)
        contest.workload = workload
        meter = Meter(reader.adapter.device)
        if meter.trouble:
            return {"done": False, "why": meter.trouble}
        kv_bytes = contest.run(variant).kv_bytes
        peak = meter.peak()
    return {
        "done": True,
        "why": "",
        "peak_bytes": peak,
        "kv_bytes": kv_bytes,
        "above_kv_bytes": peak - kv_bytes,
        "above_kv_share": (peak - kv_bytes) / kv_bytes,
    }


class Meter:
    """Peak bytes of this process, from now on and above what it holds now."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self.trouble = ""  # why this system cannot tell
        gc.collect()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            self._before = torch.cuda.memory_allocated(self._cuda)
            return
        _give_back()
        try:
            CLEAR.write_text(RESET_PEAK)
            self._before = _bytes_of("VmRSS")
        except (OSError, LookupError):
            self.trouble = "only Linux with /proc/self/clear_refs tells the peak memory of a request"

    def peak(self) -> int:
        if self._cuda:
            return int(torch.cuda.max_memory_allocated(self._cuda)) - self._before
        return _bytes_of("VmHWM") - self._before


def _bytes_of(field: str) -> int:
    """A size from /proc/self/status. Raises LookupError, OSError."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def _give_back() -> None:
    """Freed memory to the system, where the C library knows how (glibc); else the peak is told a little low."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    try:
        main()
    except BlendserveError as error:
        sys.exit(f"{error}")
