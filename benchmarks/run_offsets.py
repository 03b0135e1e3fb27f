"""`python -m benchmarks run_offsets`: how near runs from inside of a stored chunk are to full prefill.

A prompt has the ends of some chunks, each from the same offset on. They start from the KV of the whole chunks, or from
that of the ends alone, as if these had been stored as chunks. Full prefill answers, and the KL along its answer is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count as counter

from pydantic import Field

from blendserve.bench.fixture import make_blender
from blendserve.bench.harness import Case, Column, Group, Metrics, SampleLog, count, table
from blendserve.bench.runner import Bench, BenchConfig, open_model
from blendserve.bench.workload import make_workload
from blendserve.blend.runs import MARGIN
from blendserve.config import BlendConfig, DecodeConfig, Positive
from blendserve.core import Prompt, Run, Span, run
from blendserve.models.loader import LoadedModel
from blendserve.quality.fidelity import Verifier
from blendserve.store import MemoryStore

WHOLE, ALONE = "whole chunks", "the ends alone"


class OffsetConfig(BenchConfig):
    """Prompts of the ends of chunks."""

    chunk_tokens: Positive = Field(512, description="Length of a stored chunk, in tokens.")
    asked: Positive = Field(4, description="Number of chunks in a prompt.")
    offsets: tuple[int, ...] = Field((16, 64, 128, 256, 384), description="Where the ends start in a chunk.")
    margins: tuple[int, ...] = Field((0, MARGIN, 32), description="Computed tokens at a run's beginning.")
    ratio: float = Field(0.05, ge=0, le=1, description="Share of tokens to recompute.")
    repeats: Positive = Field(12, description="Number of prompts.")
    new_tokens: Positive = Field(12, description="Length of an answer, in tokens.")


def groups(config: OffsetConfig, log: SampleLog) -> Iterator[Group]:
    model = open_model(config, log)
    for offset in config.offsets:
        sources = [(WHOLE, margin) for margin in config.margins] + [(ALONE, 0)]
        cases = [
            Case(
                {"KV of": kv, "computed": margin},
                partial(_loss, config, model, offset, kv, margin, counter()),
            )
            for kv, margin in sources
        ]
        yield Group({"offset": offset}, cases, warm_up=False)


def _loss(
    config: OffsetConfig, model: LoadedModel, offset: int, kv: str, margin: int, numbers: Iterator[int]
) -> Metrics:
    """The KL of the next prompt."""
    seed = config.seed + next(numbers)
    made = make_workload(model, config.asked, config.chunk_tokens, 32, seed)
    blender = make_blender(model, made.prompts, MemoryStore(1 << 34))
    ends = [chunk[offset:] for chunk in made.chunks]
    blender.writer.precompute(made.chunks if kv == WHOLE else ends)
    ids, runs = list(made.prompt.prefix), list[Run]()
    for chunk, end in zip(made.chunks, ends, strict=True):
        at = Span(len(ids) + margin, len(ids) + len(end))
        runs.append(
            Run(at, blender.key(chunk), offset + margin, 0)
            if kv == WHOLE
            else Run(at, blender.key(end), margin, 0)
        )
        ids += end
    ids += made.prompt.suffix
    decode = DecodeConfig(max_new_tokens=config.new_tokens, temperature=0.0)
    verifier = Verifier(model, blender, Prompt.plain(tuple(ids), tuple(runs)), decode)
    blend = BlendConfig(method="blend", policy="query", ratio=config.ratio, correction="none")
    loss = run(verifier.along_full(run(verifier.prefill(blend))))
    return {"kl": loss.kl, "agreement": loss.agreement}


TABLES = (
    table(
        "Runs from inside of a chunk, against full prefill",
        Column("KL, nats", "kl", digits=3),
        count("agreement", "agreement", digits=2),
    ),
)
TINY = {"chunk_tokens": 80, "asked": 2, "offsets": (16,), "margins": (8,), "repeats": 1, "new_tokens": 2}
BENCH = Bench(OffsetConfig, groups, TABLES, tiny=TINY)
