"""Whole prefills of readers in the shape of well-known ones, with random weights made on the device.

From token ids to the first token, by the product's own blender over its own LMDB store, with and without its tiers.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel

from blendserve.bench.figures import Figures, interleaved, ratios, spread
from blendserve.bench.gpu.agree import some_prompt
from blendserve.bench.gpu.plan import DEVICE, PINNED, PREFIX, STORE, SUFFIX, Cell, Plan
from blendserve.bench.harness import SPARE_BYTES, STAGES, forward, scratch
from blendserve.bench.rates import Rates
from blendserve.bench.roofline import Counts, limit, prefill_work
from blendserve.blend.blender import Blender, Prefilled
from blendserve.blend.priors import Priors
from blendserve.config import ReaderConfig, StoreConfig, TiersConfig
from blendserve.core import Prompt
from blendserve.errors import StoreError
from blendserve.evaluate.methods import TRANSFORMERS, MethodSpec, parse_methods
from blendserve.kernels.cuda.dense import BACKENDS
from blendserve.models.adapter import Adapter
from blendserve.models.loader import load_reader
from blendserve.models.random_model import random_model
from blendserve.models.shapes import shape_config
from blendserve.models.toy import toy_llama
from blendserve.store import KVStore, open_store
from blendserve.timing import Clock

SPARE = 1.3  # of a tier's bytes: pinned memory is given out in powers of two


def make_adapter(name: str, plan: Plan) -> Adapter:
    """A reader of this shape, on the device."""
    if name == "toy":
        return Adapter(toy_llama(97, 1024).to(plan.device, plan.dtype))
    model = random_model(shape_config(name), plan.dtype, device=plan.device)
    return Adapter(model.to(plan.device).eval())


@dataclass(frozen=True, slots=True)
class Run:
    """One prefill, from token ids to the first token."""

    seconds: float
    queued: float  # seconds until the host had told the device everything: near the whole, and launches are the limit
    stages: dict[str, float]
    done: Prefilled | None  # None for transformers


class Stand:
    """A reader with the KV of its longest prompt in an LMDB store. Close it before the next one is made."""

    def __init__(self, name: str, plan: Plan, parent: Path | None) -> None:
        self.name, self.plan = name, plan
        self._scratch = scratch(parent)
        self._folder = self._scratch.__enter__()
        self.adapter = make_adapter(name, plan)
        most = max(cell.chunks for cell in plan.cells if cell.model == name)
        self._prompt = some_prompt(self.adapter.vocab_size, most, plan.chunk, 0, PREFIX, SUFFIX)
        self._bytes = len(self._prompt) * self.adapter.kv_bytes_per_token
        with self._store(STORE) as store:
            clock = Clock(plan.device)
            report = self._blender(store).precompute([chunk.ids for chunk in self._prompt.chunks])
            took = clock.elapsed()
        self.about: Figures = {
            "model": name,
            "attention": self.adapter.attention_backends,
            "precomputed_tokens_per_second": report.tokens / took,
            "stored_bytes": report.bytes,
        }

    def close(self) -> None:
        self._scratch.__exit__(None, None, None)

    def measure(self, cell: Cell, rates: Rates, link: float) -> Figures:
        """One prompt by every method; `link`: bytes a second to the device from where the KV is."""
        prompt = self._first(cell.chunks)
        found = parse_methods((TRANSFORMERS, *self.plan.methods), self.plan.ratios)
        with self._store(cell.source) as store:
            blender = self._blender(store)
            calls: dict[str, Callable[[], Run]] = {
                v.name: partial(self._run, blender, v, prompt) for v in found
            }
            took = interleaved(calls, self.plan.repeats)
        near = rates.bytes if cell.source == DEVICE else link
        methods = {v.name: self._figures(v, took, Rates(rates.flops, near)) for v in found}
        return {
            "model": self.name,
            "source": cell.source,
            "context": cell.chunks * self.plan.chunk,
            "prompt_tokens": len(prompt),
            "methods": methods,
        }

    def waits(self, cell: Cell) -> dict[str, dict[str, int]]:
        """Where the host waited for the device within a prefill, by method: file and line -> how often."""
        prompt, found = self._first(cell.chunks), {}
        with self._store(cell.source) as store:
            blender = self._blender(store)
            for variant in parse_methods(self.plan.methods, self.plan.ratios[:1]):
                self._run(blender, variant, prompt)  # what is done once is not what is looked for
                with told_of_waits(self.plan.device) as told:
                    blender.run(prompt, variant.blend)
                found[variant.name] = dict(Counter(told))
        return found

    def _first(self, chunks: int) -> Prompt:
        whole = self._prompt
        return Prompt(whole.prefix, whole.chunks[:chunks], whole.suffix)

    def _store(self, source: str) -> KVStore:
        size = round(SPARE * self._bytes) + SPARE_BYTES
        tiers = TiersConfig(
            device_bytes=size if source == DEVICE else 0, host_bytes=2 * size if source == PINNED else 0
        )
        config = StoreConfig(path=self._folder, cap_gb=size / 1e9, tiers=tiers.model_dump())
        return open_store(config, self._folder, device=self.plan.device)

    def _blender(self, store: KVStore) -> Blender:
        prefix = self._prompt.prefix
        blender = Blender(self.adapter, f"bench, {self.name}", store, prefix, prefix)
        blender.priors.use(Priors.of_nothing(self.adapter))
        return blender

    def _run(self, blender: Blender, variant: MethodSpec, prompt: Prompt) -> Run:
        clock, host = Clock(self.plan.device), Clock()
        if variant.kind == TRANSFORMERS:
            with sdpa_kernel(BACKENDS):
                logits = forward(self.adapter, prompt.ids)
            queued = host.elapsed()
            int(logits.argmax())
            return Run(clock.elapsed(), queued, {}, None)
        done = blender.run(prompt, variant.blend, clock=clock)
        queued = host.elapsed()
        int(done.result.logits.argmax())
        seconds = clock.elapsed()
        if done.missing:
            raise StoreError(f"{len(done.missing)} of the bench's own chunks are not in its store")
        return Run(seconds, queued, {stage: clock.seconds[stage] for stage in STAGES}, done)

    def _figures(self, variant: MethodSpec, took: dict[str, list[Run]], rates: Rates) -> Figures:
        runs, full = took[variant.name], took["full"]
        seconds = [t.seconds for t in runs]
        figures: Figures = {
            "seconds": spread(seconds),
            "queued": median(t.queued for t in runs),
            "faster_than_full": ratios([t.seconds for t in full], seconds),
        }
        done = runs[-1].done
        if done is None:
            return figures
        work = prefill_work(Counts.of(self.adapter), done.report, done.result.recomputed, variant.blend)
        bound = limit(work, rates)
        return {
            **figures,
            "stages": {stage: median(t.stages[stage] for t in runs) for stage in STAGES},
            "tokens_recomputed": done.report.tokens_recomputed,
            "bytes_loaded": done.report.bytes_loaded,
            "limit": bound.total,
            "share_of_limit": bound.total / median(seconds),
        }


@contextmanager
def told_of_waits(device: torch.device) -> Iterator[list[str]]:
    """Fills the list with the places where torch makes the host wait for a GPU."""
    told: list[str] = []
    if device.type != "cuda":
        yield told
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield told
        finally:
            torch.cuda.set_sync_debug_mode("default")
    told += [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]


def forget(device: torch.device) -> None:
    """Give back what the last reader held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def on_cpu(name: str) -> Any:
    """A reader's model for comparing devices: the toy, or the bundled one. Raises ModelError."""
    if name == "toy":
        return toy_llama(97, 1024)
    return load_reader(ReaderConfig(model=name, dtype="float32", device="cpu")).adapter.model
