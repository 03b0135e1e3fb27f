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
from blendserve.bench.runner import Bench, PromptBenchConfig, open_model
from blendserve.bench.workload import Workload, make_workload
from blendserve.blend.runs import MIN_RUN, choose_runs
from blendserve.config import BlendConfig
from blendserve.evaluate.edits import before
from blendserve.store import LMDBStore
from blendserve.timing import Clock

FULL, EXACT = "full prefill", "exact hits"


class NearConfig(PromptBenchConfig):
    """Prompts with edited passages."""

    edited: Annotated[float, Field(gt=0, le=1)] = Field(
        0.05, description="Fraction of a passage's words to edit."
    )


def groups(config: NearConfig, log: SampleLog) -> Iterator[Group]:
    model, n = open_model(config, log), config.chunks
    drawn = make_workload(model, 2 * n, config.chunk_tokens, None, config.seed)
    question = make_workload(model, 1, config.chunk_tokens, config.suffix_tokens, config.seed).question
    stored, unrelated = Workload(drawn.prompts, drawn.passages[:n], question), drawn.chunks[n:]
    all_edited = tuple(before(f"revised@{config.edited}", [*stored.passages], str(config.seed)))
    one_edited = (*stored.passages[: n // 2], all_edited[n // 2], *stored.passages[n // 2 + 1 :])
    near = BlendConfig(method="blend", near=True, ratio=0.05)
    exact = near.with_values(near=False)
    prompts = {
        FULL: (stored, BlendConfig(method="full")),
        EXACT: (stored, exact),
        "one edited": (replace(stored, passages=one_edited), near),
        "one edited, no search": (replace(stored, passages=one_edited), exact),
        "all edited": (replace(stored, passages=all_edited), near),
    }
    n_bytes = len(stored.prompt) * model.decoder.kv_bytes_per_token + SPARE_BYTES
    with scratch(config.folder) as folder, LMDBStore(folder, n_bytes) as store:
        blender = make_blender(model, stored.prompts, store)
        blender.writer.precompute(stored.chunks)
        blender.finder.refresh()

        def prompt(workload: Workload, blend: BlendConfig) -> Metrics:
            return time_prompt(blender, workload, blend)[0]

        def search() -> Metrics:
            clock = Clock()
            for runs in blender.finder.in_chunks(dict(enumerate(unrelated))).values():
                choose_runs(runs, MIN_RUN)
            return {"search_s": clock.elapsed()}

        cases = [Case({"passages": name}, partial(prompt, *given)) for name, given in prompts.items()]
        found = blender.finder.in_chunks(dict(enumerate(unrelated)))
        facts = {"false_donors": sum(map(bool, found.values()))}
        cases.append(Case({"search": "nothing found"}, search))
        yield Group({"edited": config.edited}, cases, lambda: facts)


TABLE = table(
    "Time to first token with edited passages",
    ms("TTFT ms", "ttft_s"),
    ratio("/ exact hits", "ttft_s", passages=EXACT),
    ratio("/ full prefill", "ttft_s", passages=FULL),
    count("tokens run", "tokens_run"),
    ms("search ms", "search_s"),
)
BENCH = Bench(NearConfig, groups, (TABLE,), tiny={"chunk_tokens": 80, "edited": 0.1})
