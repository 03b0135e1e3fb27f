"""`python -m benchmarks near_duplicates`: the cost of an edited page.

An edit takes a share of a passage's words, in stretches of 3 to 10, for another passage's words. All prompts have nearly
the same length, and run interleaved over one store, which holds the passages before the edit. The search is also timed
for a prompt of other text, which finds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated

from pydantic import Field

from blendserve.bench.fixture import SPARE_BYTES, make_blender, scratch, time_prompt
from blendserve.bench.harness import Case, Group, Metrics, SampleLog, count, ms, ratio, table
from blendserve.bench.runner import Bench, PromptBenchConfig, open_reader
from blendserve.bench.workload import Workload, make_workload
from blendserve.blend.blender import Blender
from blendserve.blend.near import MAX_DONORS, find_runs
from blendserve.config import BlendConfig, Ratio, changed
from blendserve.core import TokenIds
from blendserve.evaluate.edits import before
from blendserve.models.loader import LoadedModel
from blendserve.store import LMDBStore
from blendserve.store.shingles import fingerprints
from blendserve.timing import Clock

FULL, EXACT = "full prefill", "exact hits"


class NearConfig(PromptBenchConfig):
    """Prompts with edited passages."""

    edited: Annotated[float, Field(gt=0, le=1)] = Field(
        0.05, description="Fraction of a passage's words to edit."
    )
    ratio: Ratio = Field(
        BlendConfig().min_ratio, description="Fraction of the cached context tokens to recompute."
    )


def groups(config: NearConfig, log: SampleLog) -> Iterator[Group]:
    labels = {"edited": config.edited}
    if log.done(labels):
        return
    reader = open_reader(config, log)
    stored, edited, unrelated = workloads(config, reader)
    n_bytes = len(stored.prompt) * reader.adapter.kv_bytes_per_token + SPARE_BYTES
    with scratch(config.folder) as folder, LMDBStore(folder, n_bytes) as store:
        blender = make_blender(reader, stored.prompts, store)
        blender.writer.precompute(stored.chunks)
        blender.near.refresh()
        found = [bool(blender.near.index.find(fingerprints(ids), MAX_DONORS)) for ids in unrelated]
        search = Case({"search": "nothing found"}, partial(_search, blender, dict(enumerate(unrelated))))
        yield Group(labels, [*_cases(config, blender, stored, edited), search], {"false_donors": sum(found)})


def workloads(config: NearConfig, reader: LoadedModel) -> tuple[Workload, Workload, list[TokenIds]]:
    """What is stored, the same with every passage edited, and as many chunks of other text."""
    n = config.chunks
    drawn = make_workload(reader, 2 * n, config.chunk_tokens, None, config.seed)
    question = make_workload(reader, 1, config.chunk_tokens, config.suffix_tokens, config.seed).question
    stored = Workload(drawn.prompts, drawn.passages[:n], question)
    edited = before(f"revised@{config.edited}", [*stored.passages], str(config.seed))
    return stored, replace(stored, passages=tuple(edited)), drawn.chunks[n:]


def _cases(config: NearConfig, blender: Blender, stored: Workload, edited: Workload) -> Iterator[Case]:
    """TTFT of the passages as they are stored, with one edited, and with all of them."""
    near = BlendConfig(method="blend", ratio=config.ratio, near=True)
    exact, middle = changed(near, near=False), len(stored.passages) // 2
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


def _search(blender: Blender, chunks: dict[int, TokenIds]) -> Metrics:
    clock = Clock()
    for i, donors in blender.near.donors(chunks).items():
        find_runs(chunks[i], donors)
    return {"search_s": clock.elapsed()}


TABLE = table(
    "Time to first token with edited passages",
    ms("TTFT ms", "ttft_s"),
    ratio("/ exact hits", "ttft_s", passages=EXACT),
    ratio("/ full prefill", "ttft_s", passages=FULL),
    count("tokens run", "tokens_run"),
    ms("search ms", "search_s"),
)
BENCH = Bench(NearConfig, groups, (TABLE,), tiny={"chunk_tokens": 80, "edited": 0.1})
