"""Who runs a prompt: transformers' own forward, or a blender over a real LMDB store.

A contest can be closed and opened again, which is what a cold start needs.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from blendserve.bench.throttle import throttled
from blendserve.bench.workload import Workload
from blendserve.blend.blender import Blender
from blendserve.blend.priors import Priors
from blendserve.config import BlendConfig, KVContext, PromptConfig
from blendserve.core import BlendReport, TokenIds
from blendserve.engine.prompt import PromptBuilder
from blendserve.errors import InputError, StoreError
from blendserve.evaluate.methods import FULL, TRANSFORMERS, MethodSpec
from blendserve.models.adapter import Adapter
from blendserve.models.loader import Reader
from blendserve.store import KVStore, LMDBStore
from blendserve.timing import Clock

SPARE_BYTES = 1 << 24  # of a store's cap, beside its chunks
STAGES = ("load", "select", "correct")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one prompt."""

    prefill: float  # seconds from token ids to first-token logits
    ttft: float  # seconds from text to first token
    kv_bytes: int  # of the request's cache
    seconds: dict[str, float] = field(default_factory=dict)  # stages within prefill
    report: BlendReport | None = None  # None for transformers
    recomputed: Tensor | None = None  # positions that the policy chose
    reading: float = 0.0  # seconds that the store took, most of them while layers ran


class Harness:
    """A reader, a workload and a store in `folder` for its chunks. A context manager."""

    def __init__(
        self,
        reader: Reader,
        workload: Workload,
        variants: tuple[MethodSpec, ...],
        folder: Path,
        adapter: Adapter | None = None,
    ) -> None:
        """adapter: in place of the reader's own, for the blenders alone. Raises StoreError."""
        self.reader, self.workload, self.variants, self.folder = reader, workload, variants, folder
        self._adapter = adapter or reader.adapter
        self._contexts = list(dict.fromkeys(map(_kv_context, variants)))
        self.reopen()

    def reopen(self, bytes_per_second: float | None = None) -> None:
        """Open the store, and blenders over it; with a rate, no more is read in a second."""
        tokens = len(self._contexts) * len(self.workload.prompt)
        store: KVStore = LMDBStore(self.folder, tokens * self._adapter.kv_bytes_per_token + SPARE_BYTES)
        self.store = throttled(store, bytes_per_second) if bytes_per_second else store
        self._blenders = {context: self._blender(context) for context in self._contexts}

    def precompute(self) -> None:
        """Store what every variant reads. Raises StoreError."""
        for blender in self._blenders.values():
            blender.precompute(self.workload.chunks)

    def calibrate(self) -> None:
        """Measure the machine, where ratio "auto" would do it in the middle of a run."""
        for blender in self._blenders.values():
            blender.calibrate()

    def run(self, variant: MethodSpec) -> Run:
        """From text to first token. Raises StoreError when KV that should be there is not."""
        if variant.kind == TRANSFORMERS:
            return run_transformers(self.reader, self.workload)
        return run_blender(self._blenders[_kv_context(variant)], self.workload, variant.blend)

    def logits(self, variant: MethodSpec) -> Tensor:
        """Of the first token, [V]: by one of our methods, not timed."""
        done = self._blenders[_kv_context(variant)].run(self.workload.draw(), variant.blend)
        return done.result.logits

    def close(self) -> None:
        """Close the store; its files stay."""
        self.store.close()

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _blender(self, context: KVContext) -> Blender:
        prompts = PromptBuilder(self.reader.tokenizer, PromptConfig(kv_context=context))
        blender = Blender(
            self._adapter, self.reader.fingerprint, self.store, prompts.prefix, prompts.kv_context
        )
        blender.priors.use(Priors.of_nothing(self._adapter))  # a method that uses them takes its time
        return blender


def loads(variant: MethodSpec) -> bool:
    """Whether a method reads stored KV."""
    return variant.kind not in (TRANSFORMERS, FULL)


@contextmanager
def scratch(parent: Path | None) -> Iterator[Path]:
    """A new folder in `parent`, which is made if need be; it goes at the end. Raises InputError."""
    try:
        if parent:
            parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="blendserve-bench-", dir=parent))
    except OSError as error:
        raise InputError(
            f"no folder can be made in {parent}: {error.strerror}; give another --folder"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_blender(blender: Blender, workload: Workload, blend: BlendConfig, all_stored: bool = True) -> Run:
    """Our way. all_stored: raise StoreError where chunks are missing."""
    clock = Clock(blender.adapter.device)
    prompt = workload.draw()
    with clock.stage("prefill"):
        done = blender.run(prompt, blend, clock=clock)
    int(done.result.logits.argmax())
    ttft = clock.elapsed()
    if done.missing and all_stored:
        raise StoreError(
            f"{len(done.missing)} of the bench's own chunks are not in its store: was its folder touched?"
        )
    seconds = {stage: clock.seconds[stage] for stage in STAGES}
    kv_bytes, recomputed = done.result.cache.n_bytes, done.result.recomputed
    reading = done.result.read_s
    return Run(clock.seconds["prefill"], ttft, kv_bytes, seconds, done.report, recomputed, reading)


def run_transformers(reader: Reader, workload: Workload) -> Run:
    """The model's own forward as its user calls it: a dynamic cache, SDPA, logits of the last token alone."""
    clock = Clock(reader.adapter.device)
    ids = workload.draw().ids
    with clock.stage("prefill"):
        logits = forward(reader.adapter, ids)
    int(logits.argmax())
    return Run(clock.seconds["prefill"], clock.elapsed(), len(ids) * reader.adapter.kv_bytes_per_token)


@torch.inference_mode()
def forward(adapter: Adapter, ids: TokenIds) -> Tensor:
    """The model's own forward over these tokens, with a cache -> logits [V] after the last."""
    from transformers import DynamicCache

    model = cast(Any, adapter.model)
    inputs = torch.tensor([ids], device=adapter.device)
    cache = DynamicCache(config=model.config)
    output = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cast(Tensor, output.logits[0, -1])


def _kv_context(variant: MethodSpec) -> KVContext:
    return variant.kv_context or PromptConfig().kv_context
