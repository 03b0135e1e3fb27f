"""The steps of the GPU bench, one after the other while there is time; what is known is written after each.

A step that fails costs its own figures and no others: a GPU may be had for this one run.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from blendserve.bench.figures import Figures
from blendserve.bench.gpu import agree, decoding, kernels
from blendserve.bench.gpu.plan import PINNED, STORE, Cell, Heads, Plan
from blendserve.bench.gpu.prefills import Stand, forget, on_cpu
from blendserve.bench.rates import Rates, measure_rates
from blendserve.kernels.cuda.available import capability, flash_attn, has_triton
from blendserve.provenance import machine, versions

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Step:
    """A part of the run."""

    name: str
    seconds: float  # that it takes at most, by guess: with less left it is left out
    run: Callable[[], None]


class Bench:
    """One run; `figures` is what came out so far."""

    def __init__(self, plan: Plan, minutes: float, out: Path, folder: Path | None, say: Say) -> None:
        """folder: where stores are put meanwhile; None = the system's temporary folder."""
        self.plan, self.out, self._folder, self._say = plan, out, folder, say
        self._end = time.perf_counter() + 60 * minutes
        self._stand: Stand | None = None
        self._rates, self._link = Rates(1.0, 1.0), 1.0
        self.figures: Figures = {
            "bench": "gpu",
            "rehearsal": plan.device.type != "cuda",
            "versions": versions(),
            "machine": machine(),
            "device": about(plan.device),
            "kernels": [],
            "readers": [],
            "attention": [],
            "placing": [],
            "stands": [],
            "cells": [],
            "decoding": [],
            "waits": {},
            "left_out": [],
            "failed": [],
        }

    def go(self) -> bool:
        """Every step for which there is time -> whether none failed and everything agreed."""
        try:
            for step in self._steps():
                self._try(step)
                self._write()
        finally:
            self._leave()
        checks = [*self.figures["kernels"], *self.figures["readers"]]
        return not self.figures["failed"] and all(check["ok"] for check in checks)

    def _steps(self) -> Iterator[Step]:
        plan = self.plan
        yield Step("rates", 0, self._measure_rates)
        for heads in plan.kinds:
            yield Step(f"check, {heads}", 20, partial(self._check, heads))
        first, *others = plan.cells
        yield self._cell(first)
        yield Step("waits", 10, partial(self._waits, first))
        for context in plan.decoded:
            yield Step(f"decoding behind {context}", 15, partial(self._decode, context))
        for name in plan.readers:
            yield Step(f"compare {name}", 30, partial(self._compare, name))
        for cell in (cell for cell in others if cell.model == first.model):
            yield self._cell(cell)
        for heads, context in plan.timed:
            yield Step(f"attention, {heads}, behind {context}", 15, partial(self._attention, heads, context))
        for cell in (cell for cell in others if cell.model != first.model):
            yield self._cell(cell)

    def _cell(self, cell: Cell) -> Step:
        new = self._stand is None or self._stand.name != cell.model
        guess = (2 + 0.5 * cell.chunks + 45 * new) if self.plan.device.type == "cuda" else 0
        return Step(f"prefill {cell}", guess, partial(self._prefill, cell))

    def _try(self, step: Step) -> None:
        left = self._end - time.perf_counter()
        if left < step.seconds:
            self.figures["left_out"].append(step.name)
            return
        self._say(f"{step.name} ({left:.0f} s left)")
        try:
            step.run()
        except Exception:
            self.figures["failed"].append({"step": step.name, "why": traceback.format_exc()})
            self._say(f"{step.name} failed: {traceback.format_exc(limit=1).splitlines()[-1]}")

    def _measure_rates(self) -> None:
        plan = self.plan
        self._rates = measure_rates(plan.dtype, plan.device, plan.matmuls, plan.copied)
        self._link = kernels.link(plan.device, plan.copied)
        self.figures["rates"] = {
            "flops": self._rates.flops,
            "copied_bytes": self._rates.bytes,
            "bytes_from_pinned": self._link,
        }

    def _check(self, heads: Heads) -> None:
        self.figures["kernels"].append(agree.kernels(heads, self.plan.device, self.plan.longest))

    def _compare(self, name: str) -> None:
        chunk = min(self.plan.chunk, 128)  # the CPU has to do it too
        self.figures["readers"].append(agree.whole(name, on_cpu(name), self.plan.device, chunk))

    def _attention(self, heads: Heads, context: int) -> None:
        found = kernels.attention(heads, context, self.plan.device, self._rates)
        self.figures["attention"].append(found)

    def _prefill(self, cell: Cell) -> None:
        if self._stand is None or self._stand.name != cell.model:
            self._leave()
            self._stand = Stand(cell.model, self.plan, self._folder)
            self.figures["stands"].append(self._stand.about)
            placed = kernels.placing(self._stand.adapter, 6, self.plan.chunk, self._rates)
            self.figures["placing"].append({"model": cell.model, **placed})
        link = self._link if cell.source in (PINNED, STORE) else self._rates.bytes
        self.figures["cells"].append(self._stand.measure(cell, self._rates, link))

    def _waits(self, cell: Cell) -> None:
        assert self._stand is not None, "its first cell failed"
        self.figures["waits"] = self._stand.waits(cell)

    def _decode(self, context: int) -> None:
        assert self._stand is not None, "its first cell failed"
        adapter = self._stand.adapter
        found = decoding.measure(adapter, context, self.plan.new_tokens, self.plan.repeats)
        weights = sum(p.numel() * p.element_size() for p in adapter.model.parameters())
        read = weights + context * adapter.kv_bytes_per_token  # by every token; a copy reads and writes
        bound = read / (2 * self._rates.bytes)
        self.figures["decoding"].append({"model": self._stand.name, "limit": bound, **found})

    def _leave(self) -> None:
        if self._stand is not None:
            self._stand.close()
        self._stand = None
        forget(self.plan.device)

    def _write(self) -> None:
        self.out.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.out.with_suffix(".part")
        scratch.write_text(json.dumps(self.figures, indent=1))
        scratch.replace(self.out)


def about(device: torch.device) -> Figures:
    """The GPU, and which of the optional packages are there."""
    package = flash_attn()
    facts: Figures = {
        "name": device.type,
        "triton": has_triton(),
        "flash_attn": getattr(package, "__version__", "") if package else "",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "name": properties.name,
            "capability": capability(device),
            "memory": properties.total_memory,
            "processors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return facts
