"""`python -m benchmarks near_duplicates`: the cost of an edited page, and of looking for near-duplicates at all.

An edit takes a share of a passage's words, in stretches of 3 to 10, for another passage's words. All prompts have nearly
the same length, and run interleaved over one store, which holds the passages before the edit. The search is timed for
prompts of other text, in an index of a million synthetic chunks, and among chunks that begin alike (the worst case).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Annotated

import numpy as np
from pydantic import Field

from blendserve.bench.fixture import SPARE_BYTES, make_blender, scratch, time_prompt
from blendserve.bench.harness import Case, Group, Metrics, SampleLog, count, ms, ratio, table
from blendserve.bench.memory import status_bytes
from blendserve.bench.runner import Bench, PromptBenchConfig, open_reader
from blendserve.bench.workload import Workload, make_workload
from blendserve.blend.blender import Blender
from blendserve.blend.near import MAX_DONORS
from blendserve.config import BlendConfig, Positive, Ratio, changed
from blendserve.core import TokenIds
from blendserve.evaluate.edits import before
from blendserve.models.loader import LoadedModel
from blendserve.store import LMDBStore
from blendserve.store.key import KEY_BYTES
from blendserve.store.shingles import NearIndex, fingerprints

UNRELATED = 2  # times the prompt's chunks: text that has nothing in common with what is stored
BATCH = 4096  # chunks that are added at a time
LOOKUPS = 200
ALIKE, HEADER = 10_000, 100  # chunks that begin alike, and for how many tokens
FULL, EXACT = "full prefill", "exact hits"


class NearConfig(PromptBenchConfig):
    """Prompts with edited passages."""

    edited: Annotated[float, Field(gt=0, le=1)] = Field(
        0.05, description="Fraction of a passage's words to edit."
    )
    ratio: Ratio = Field(
        BlendConfig().min_ratio, description="Fraction of the cached context tokens to recompute."
    )
    signatures: Positive = Field(1_000_000, description="Number of synthetic chunks to search.")


def groups(config: NearConfig, log: SampleLog) -> Iterator[Group]:
    labels = {"edited": config.edited}
    reader = open_reader(config, log)
    stored, edited, unrelated = workloads(config, reader)
    if not log.done(labels):
        n_bytes = len(stored.prompt) * reader.adapter.kv_bytes_per_token + SPARE_BYTES
        with scratch(config.folder) as folder, LMDBStore(folder, n_bytes) as store:
            blender = make_blender(reader, stored.prompts, store)
            blender.writer.precompute(stored.chunks)
            blender.near.refresh()
            facts = search_cost(blender, unrelated)
            yield Group(labels, list(_cases(config, blender, stored, edited)), facts)
    if not log.done({"index": config.signatures}):
        index, keys = _filled_index(config, stored.chunks)
        case = Case({"chunks": len(index)}, partial(_lookups, index, (*unrelated[0].chunks, *edited.chunks)))
        found = _found(index, keys, edited.chunks, unrelated[0].chunks)
        yield Group({"index": config.signatures}, [case], {**found, "index_bytes": index.n_bytes}, repeats=1)
    if not log.done({"index": "alike"}):
        index = _alike_index(config.seed, stored.chunks[0])
        ids_edited = edited.chunks[0]
        case = Case({"chunks": len(index)}, partial(_lookups, index, (ids_edited,)))
        donors = len(index.find(fingerprints(ids_edited), MAX_DONORS))
        yield Group({"index": "alike"}, [case], {"donors_read": donors}, repeats=1)


def workloads(config: NearConfig, reader: LoadedModel) -> tuple[Workload, Workload, list[Workload]]:
    """What is stored, the same with every passage edited, and prompts of other text."""
    n = config.chunks
    drawn = make_workload(reader, (1 + UNRELATED) * n, config.chunk_tokens, None, config.seed)
    question = make_workload(reader, 1, config.chunk_tokens, config.suffix_tokens, config.seed).question
    parts = [drawn.passages[at : at + n] for at in range(0, len(drawn.passages), n)]
    stored, *unrelated = (Workload(drawn.prompts, part, question) for part in parts)
    edited = before(f"revised@{config.edited}", [*parts[0]], str(config.seed))
    return stored, Workload(drawn.prompts, tuple(edited), question), unrelated


def _cases(config: NearConfig, blender: Blender, stored: Workload, edited: Workload) -> Iterator[Case]:
    """TTFT of the passages as they are stored, with one edited, and with all of them."""
    near = BlendConfig(method="blend", ratio=config.ratio, near=True)
    exact = changed(near, near=False)
    middle = len(stored.passages) // 2
    passages = list(stored.passages)
    passages[middle] = edited.passages[middle]
    one = replace(stored, passages=tuple(passages))
    prompts = {
        FULL: (stored, BlendConfig(method="full")),
        EXACT: (stored, exact),
        "one edited": (one, near),
        "one edited, no search": (one, exact),
        "all edited": (edited, near),
    }
    for name, (workload, blend) in prompts.items():
        yield Case({"passages": name}, partial(_prompt, blender, workload, blend))


def _prompt(blender: Blender, workload: Workload, blend: BlendConfig) -> Metrics:
    return time_prompt(blender, workload, blend)[0]


def search_cost(blender: Blender, unrelated: Sequence[Workload]) -> dict[str, float]:
    """Of a prompt that finds nothing: seconds of the search, and how often something was found."""
    seconds, false_donors = list[float](), 0
    for workload in unrelated:
        start = time.perf_counter()
        blender.near.find(dict(enumerate(workload.chunks)), lambda donors: {})
        seconds.append(time.perf_counter() - start)
        false_donors += sum(
            bool(blender.near.index.find(fingerprints(ids), MAX_DONORS)) for ids in workload.chunks
        )
    return {"search_s": median(seconds), "false_donors": false_donors}


def _filled_index(config: NearConfig, stored: Sequence[TokenIds]) -> tuple[NearIndex, list[bytes]]:
    """Synthetic fingerprints, as many a chunk as real ones have, and the stored chunks with their keys."""
    per_chunk = round(median(len(fingerprints(ids)) for ids in stored))
    rng, index = np.random.default_rng(config.seed), NearIndex()
    for at in range(0, config.signatures, BATCH):
        n = min(BATCH, config.signatures - at)
        marks = rng.integers(1 << 38, size=(n, per_chunk), dtype=np.uint64)
        index.add((rng.bytes(KEY_BYTES), row) for row in marks)
    keys = [rng.bytes(KEY_BYTES) for _ in stored]
    index.add((key, fingerprints(ids)) for key, ids in zip(keys, stored, strict=True))
    return index, keys


def _found(
    index: NearIndex, keys: Sequence[bytes], edited: Sequence[TokenIds], unrelated: Sequence[TokenIds]
) -> dict[str, float]:
    right = sum(index.find(fingerprints(ids), 1) == [key] for key, ids in zip(keys, edited, strict=True))
    false = sum(bool(index.find(fingerprints(ids), MAX_DONORS)) for ids in unrelated)
    return {"donors_found": right, "donors_wanted": len(keys), "false_donors": false}


def _alike_index(seed: int, stored: TokenIds) -> NearIndex:
    """Chunks that begin with HEADER tokens of a stored one, and that one."""
    rng, index = np.random.default_rng(seed), NearIndex()
    texts = [(*stored[:HEADER], *rng.integers(1 << 20, size=HEADER).tolist()) for _ in range(ALIKE)]
    index.add((rng.bytes(KEY_BYTES), fingerprints(ids)) for ids in texts)
    index.add([(rng.bytes(KEY_BYTES), fingerprints(stored))])
    return index


def _lookups(index: NearIndex, texts: Sequence[TokenIds]) -> Metrics:
    seconds = []
    for n in range(LOOKUPS):
        start = time.perf_counter()
        index.find(fingerprints(texts[n % len(texts)]), MAX_DONORS)
        seconds.append(time.perf_counter() - start)
    return {
        "lookup_s": median(seconds),
        "lookup_max_s": max(seconds),
        "resident_bytes": status_bytes("VmRSS"),
    }


TABLES = (
    table(
        "Time to first token with edited passages",
        ms("TTFT ms", "ttft_s"),
        ratio("/ exact hits", "ttft_s", passages=EXACT),
        ratio("/ full prefill", "ttft_s", passages=FULL),
        count("tokens run", "tokens_run"),
    ),
    table("Search", ms("median ms", "lookup_s"), ms("longest", "lookup_max_s")),
)
TINY = {"chunk_tokens": 80, "signatures": 5000, "edited": 0.1}
BENCH = Bench(NearConfig, groups, TABLES, tiny=TINY)
