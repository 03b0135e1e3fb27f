"""`blendserve bench near`: what an edited page costs, what looking for near-duplicates costs everybody else, and what it
is to look among a million chunks.

An edit takes a share of a passage's words, in stretches of 3 to 10, for another passage's words. All prompts are as long
as each other but for that, and run interleaved over one store, which holds the passages before the edit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from blendserve.bench.config import NearConfig
from blendserve.bench.figures import Figures, Update, interleaved, ratios, spread
from blendserve.bench.harness import SPARE_BYTES, Run, run_blender, scratch
from blendserve.bench.machine import where
from blendserve.bench.tables import Table
from blendserve.bench.workload import Workload, make_workload
from blendserve.blend.blender import Blender
from blendserve.blend.near import MAX_DONORS
from blendserve.blend.priors import Priors
from blendserve.config import BlendConfig, changed
from blendserve.core import Passage, TokenIds
from blendserve.evaluate.edits import before
from blendserve.models.loader import Reader, load_reader
from blendserve.store import LMDBStore
from blendserve.store.key import KEY_BYTES
from blendserve.store.near import NearIndex, fingerprints

Say = Callable[[str], None]
OTHERS = 2  # times the prompt's chunks: text that has nothing in common with what is stored
BATCH = 4096  # chunks that are added at a time
LOOKS = 200
ALIKE, HEADER = 10_000, 100  # chunks that begin alike, and for how many tokens


def measure(
    config: NearConfig, say: Say = lambda text: None, update: Update = lambda done, total: None
) -> Figures:
    """Everything that the bench prints. Raises ConfigError, InputError, ModelError, StoreError."""
    reader = load_reader(config.reader, say)
    n = config.chunks
    drawn = make_workload(reader, (1 + OTHERS) * n, config.chunk_tokens, None, config.seed)
    question = make_workload(reader, 1, config.chunk_tokens, config.suffix_tokens, config.seed).question
    parts = [drawn.passages[at : at + n] for at in range(0, len(drawn.passages), n)]
    stored = Workload(drawn.prompts, parts[0], question)
    edited = before(f"revised@{config.share}", [*parts[0]], str(config.seed))
    unrelated = [Workload(drawn.prompts, part, question) for part in parts[1:]]
    with scratch(config.folder) as folder, _store(reader, stored, folder) as store:
        prompt = stored.prompt
        blender = Blender(reader.adapter, reader.fingerprint, store, prompt.prefix, prompt.prefix)
        blender.priors.use(Priors.of_nothing(reader.adapter))
        say(f"Storing the KV of {n} chunks")
        blender.precompute(stored.chunks)
        blender.near.refresh()
        timed = _timed(config, blender, stored, edited, update)
        others = _others(blender, unrelated, timed["methods"]["full prefill"]["ttft"]["median"])
    texts = [stored.chunks, [c.ids for c in replace(stored, passages=tuple(edited)).prompt.chunks]]
    say(f"Searching {config.signatures:,} synthetic chunks")
    return {
        "bench": "near",
        **where(config, reader),
        "share": config.share,
        **timed,
        "unrelated": others,
        "index": _million(config, texts[0], texts[1], unrelated[0].chunks),
        "boilerplate": _boilerplate(config.seed, texts[0][0], texts[1][0]),
    }


def _store(reader: Reader, workload: Workload, folder: Path) -> LMDBStore:
    return LMDBStore(folder, len(workload.prompt) * reader.adapter.kv_bytes_per_token + SPARE_BYTES)


def _timed(
    config: NearConfig,
    blender: Blender,
    stored: Workload,
    edited: Sequence[Passage],
    update: Update,
) -> Figures:
    """TTFT of the passages as they are stored, with one edited, and with all of them."""
    near = BlendConfig(method="blend", ratio=config.ratio, near=True)
    without = changed(near, near=False)
    middle = len(stored.passages) // 2
    one = [
        new if i == middle else old for i, (old, new) in enumerate(zip(stored.passages, edited, strict=True))
    ]
    one_edited, all_edited = (replace(stored, passages=tuple(some)) for some in (one, edited))
    cases = {
        "full prefill": (stored, BlendConfig(method="full")),
        "exact hits": (stored, without),
        "one edited": (one_edited, near),
        "one edited, not looked for": (one_edited, without),
        "all edited": (all_edited, near),
    }
    runs = {name: partial(_run, blender, *case) for name, case in cases.items()}
    took = interleaved(runs, config.repeats, update)
    return {"methods": {name: _figures(took, name) for name in cases}}


def _run(blender: Blender, workload: Workload, blend: BlendConfig) -> Run:
    return run_blender(blender, workload, blend, all_stored=False)


def _figures(took: dict[str, list[Run]], name: str) -> Figures:
    ttft = [run.ttft for run in took[name]]
    report = took[name][-1].report
    assert report is not None
    return {
        "ttft": spread(ttft),
        "times_exact_hits": ratios(ttft, [run.ttft for run in took["exact hits"]]),
        "times_full": ratios(ttft, [run.ttft for run in took["full prefill"]]),
        "tokens_run": report.tokens_computed + report.tokens_recomputed + report.tokens_suffix,
        "near": [[chunk.tokens_stored, chunk.tokens_fresh] for chunk in report.near],
    }


def _others(blender: Blender, unrelated: Sequence[Workload], ttft: float) -> Figures:
    """What looking costs a prompt that finds nothing, as a share of its TTFT, and how often something was found."""
    looked: list[float] = []
    found = 0
    for workload in unrelated:
        start = time.perf_counter()
        blender.near.find(dict(enumerate(workload.chunks)), lambda donors: {})
        looked.append(time.perf_counter() - start)
        found += sum(bool(blender.near.index.find(fingerprints(ids), MAX_DONORS)) for ids in workload.chunks)
    chunks = sum(len(workload.chunks) for workload in unrelated)
    share = median(looked) / ttft
    return {"chunks": chunks, "false_donors": found, "seconds": spread(looked), "share_of_ttft": share}


def _million(
    config: NearConfig, stored: Sequence[TokenIds], edited: Sequence[TokenIds], unrelated: Sequence[TokenIds]
) -> Figures:
    """An index of synthetic fingerprints, as many a chunk as real ones have, and the stored chunks among them."""
    per_chunk = round(median(len(fingerprints(ids)) for ids in stored))
    rng, index, before_bytes = np.random.default_rng(config.seed), NearIndex(), _resident()
    start = time.perf_counter()
    for at in range(0, config.signatures, BATCH):
        n = min(BATCH, config.signatures - at)
        marks = rng.integers(1 << 38, size=(n, per_chunk), dtype=np.uint64)
        index.add((rng.bytes(KEY_BYTES), row) for row in marks)
    seconds = time.perf_counter() - start
    keys = {rng.bytes(KEY_BYTES): ids for ids in stored}
    index.add((key, fingerprints(ids)) for key, ids in keys.items())
    right = [index.find(fingerprints(ids), 1) == [key] for key, ids in zip(keys, edited, strict=True)]
    return {
        "chunks": len(index),
        "fingerprints": per_chunk,
        "built": seconds,
        "array_bytes": index.n_bytes,
        "resident_bytes": _resident() - before_bytes,
        "look": spread([_looked(index, ids) for ids in (*unrelated, *edited) * LOOKS][:LOOKS]),
        "donors_found": f"{sum(right)} of {len(right)}",
        "false_donors": sum(bool(index.find(fingerprints(ids), MAX_DONORS)) for ids in unrelated),
    }


def _boilerplate(seed: int, stored: TokenIds, edited: TokenIds) -> Figures:
    """Chunks that begin with HEADER tokens of a stored one, and look-ups of that one, edited: the worst case."""
    rng, index = np.random.default_rng(seed), NearIndex()
    texts = [(*stored[:HEADER], *rng.integers(1 << 20, size=HEADER).tolist()) for _ in range(ALIKE)]
    index.add((rng.bytes(KEY_BYTES), fingerprints(ids)) for ids in texts)
    index.add([(rng.bytes(KEY_BYTES), fingerprints(stored))])
    found = len(index.find(fingerprints(edited), MAX_DONORS))
    return {
        "chunks": len(index),
        "donors": found,
        "look": spread([_looked(index, edited) for _ in range(LOOKS)]),
    }


def _looked(index: NearIndex, ids: TokenIds) -> float:
    start = time.perf_counter()
    index.find(fingerprints(ids), MAX_DONORS)
    return time.perf_counter() - start


def _resident() -> int:
    """Bytes of this process in memory; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def tables(figures: Figures) -> list[Table]:
    """TTFT of each case, then what looking costs."""
    columns = ("", "TTFT ms", "/ exact hits", "/ full prefill", "tokens run")
    rows = []
    for name, m in figures["methods"].items():
        times = (
            f"{m[base]['median']:.2f} ({m[base]['least']:.2f}-{m[base]['most']:.2f})"
            for base in ("times_exact_hits", "times_full")
        )
        rows.append((name, f"{1e3 * m['ttft']['median']:.1f}", *times, str(m["tokens_run"])))
    about, index = figures["unrelated"], figures["index"]
    look, alike = index["look"], figures["boilerplate"]
    told = [
        ("looking for a prompt of other text, ms", f"{1e3 * about['seconds']['median']:.2f}"),
        ("as a share of its TTFT", f"{about['share_of_ttft']:.2%}"),
        (f"donors of {about['chunks']} chunks of other text", str(about["false_donors"])),
        (f"among {index['chunks']:,} chunks: looking for one, ms", f"{1e3 * look['median']:.2f}"),
        ("longest, ms", f"{1e3 * look['most']:.2f}"),
        ("edited chunks whose donor is found", index["donors_found"]),
        ("donors of other text", str(index["false_donors"])),
        (
            f"among {alike['chunks']:,} chunks that begin alike: looking for one, ms",
            f"{1e3 * alike['look']['median']:.2f}",
        ),
        ("donors of it that are read", str(alike["donors"])),
        ("memory: sorted arrays, MB", f"{index['array_bytes'] / 1e6:.0f}"),
        ("memory: the process's growth, MB", f"{index['resident_bytes'] / 1e6:.0f}"),
        ("made in, s", f"{index['built']:.1f}"),
    ]
    title = f"An edit of {figures['share']:.0%}: time to first token"
    return [(title, columns, rows), ("Looking", ("", ""), told)]
