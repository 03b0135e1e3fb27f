"""`blendserve bench precompute`: chunk KV into LMDB, writes included, against plain prefill of the same chunks.

transformers runs each chunk alone, as a user's loop would, and stores nothing. We compute it behind the prefix, write it
and wait for the disk; the prefix's own KV is on our bill and not among our tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from blendserve.bench.config import PrecomputeConfig
from blendserve.bench.figures import Figures, Update, interleaved, ratios, spread
from blendserve.bench.harness import SPARE_BYTES, forward, scratch
from blendserve.bench.machine import where
from blendserve.bench.workload import make_workload
from blendserve.blend.blender import Blender
from blendserve.core import TokenIds
from blendserve.engine.prompt import PromptBuilder
from blendserve.models.adapter import Adapter
from blendserve.models.loader import Reader, load_reader
from blendserve.store import LMDBStore
from blendserve.timing import Clock

Say = Callable[[str], None]
OURS, THEIRS = "blendserve", "transformers"


def measure(
    config: PrecomputeConfig, say: Say = lambda text: None, update: Update = lambda done, total: None
) -> Figures:
    """Everything that the bench prints. Raises InputError, ModelError, StoreError."""
    reader = load_reader(config.reader, say)
    workload = make_workload(reader, config.chunks, config.chunk_tokens, None, config.seed)
    chunks = workload.chunks
    tokens = sum(map(len, chunks))
    calls = {
        THEIRS: lambda: run_plain(reader.adapter, chunks),
        OURS: lambda: run_precompute(reader, workload.prompts, chunks, config.folder),
    }
    seconds = interleaved(calls, config.repeats, update)
    return {
        "bench": "precompute",
        **where(config, reader),
        "tokens": tokens,
        "bytes_stored": tokens * reader.adapter.kv_bytes_per_token,
        "tokens_per_second": {name: spread([tokens / s for s in seconds[name]]) for name in seconds},
        "faster_than_transformers": ratios(seconds[THEIRS], seconds[OURS]),
    }


def run_precompute(
    reader: Reader, prompts: PromptBuilder, chunks: Sequence[TokenIds], parent: Path | None
) -> float:
    """Into a new store -> seconds, from the first token to the last commit."""
    payload = (sum(map(len, chunks)) + len(prompts.prefix)) * reader.adapter.kv_bytes_per_token
    with scratch(parent) as folder, LMDBStore(folder, payload + SPARE_BYTES) as store:
        blender = Blender(reader.adapter, reader.fingerprint, store, prompts.prefix, prompts.kv_context)
        clock = Clock(reader.adapter.device)
        blender.precompute(chunks)
        return clock.elapsed()


def run_plain(adapter: Adapter, chunks: Sequence[TokenIds]) -> float:
    """The model's own forward over one chunk after another -> seconds."""
    clock = Clock(adapter.device)
    for ids in chunks:
        forward(adapter, ids)
    return clock.elapsed()
