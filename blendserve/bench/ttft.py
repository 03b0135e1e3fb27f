"""`blendserve bench ttft`: one prompt by every method, to its first logits and to its first token.

A grid of contexts and chunk lengths. A chunk as long as the context is a document read before: the first chunk's KV is
exact, and method `prefix` gives full prefill's first token (KL, same token). Optional: from a cold page cache, and the
peak memory of a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from pydantic import Field

from blendserve.bench.fixture import STAGES, PromptFixture, Tier, reads_store, scratch
from blendserve.bench.harness import Case, Group, SampleLog, count, ms, ratio, speedup, table
from blendserve.bench.memory import peak_memory
from blendserve.bench.plots import Plot
from blendserve.bench.roofline import measure_rates
from blendserve.bench.runner import Bench, BenchConfig, open_reader
from blendserve.bench.workload import check_room, make_workload
from blendserve.config import Positive, Ratio
from blendserve.errors import ConfigError
from blendserve.evaluate.methods import FULL, TRANSFORMERS, MethodSpec, parse_methods
from blendserve.models.loader import LoadedModel
from blendserve.registry import BENCHED

WARM, COLD, FRESH = "warm", "cold", "fresh process"


class TtftConfig(BenchConfig):
    """One prompt, from text to first token."""

    contexts: tuple[Positive, ...] = Field((3072,), description="Lengths of all chunks together, in tokens.")
    chunk_tokens: tuple[Positive, ...] = Field(
        (512,), description="Lengths of a chunk, in tokens; at most the context."
    )
    suffix_tokens: Positive = Field(40, description="Length of the prompt after the chunks, in tokens.")
    methods: tuple[str, ...] = Field(
        BENCHED,
        description="Methods to compare with transformers, full, prefix and reuse, as for `evaluate`.",
    )
    ratios: tuple[Ratio, ...] = Field((0.05, 0.15), description="Recompute ratios of methods that name none.")
    tier: Tier = Field("disk", description="Memory that holds stored KV when a request comes.")
    cold: bool = Field(False, description="Measure from a cold page cache, too.")
    memory: bool = Field(False, description="Measure the peak memory of a request, too.")

    @property
    def compared(self) -> tuple[MethodSpec, ...]:
        """Every method, transformers first. Raises ConfigError."""
        found = parse_methods((TRANSFORMERS, FULL, "prefix", "reuse", *self.methods), self.ratios)
        return tuple(sorted(found, key=lambda method: method.kind != TRANSFORMERS))


def groups(config: TtftConfig, log: SampleLog) -> Iterator[Group]:
    methods = config.compared  # a wrong word is an error before a model is loaded
    grid = [
        (context, min(chunk, context)) for context, chunk in product(config.contexts, config.chunk_tokens)
    ]
    for context, chunk in grid:
        if context % chunk:
            raise ConfigError(f"a context of {context:,} tokens is no multiple of chunks of {chunk:,}")
    reader = open_reader(config, log)
    check_room(reader, max(config.contexts) + config.suffix_tokens, "the longest prompt")
    for context, chunk in dict.fromkeys(grid):
        yield from _point(config, methods, reader, log, context, chunk)


def _point(
    config: TtftConfig,
    methods: Sequence[MethodSpec],
    reader: LoadedModel,
    log: SampleLog,
    context: int,
    chunk: int,
) -> Iterator[Group]:
    """The groups of one prompt, which share a store."""
    labels = {"context": context, "chunk": chunk}
    todo = [
        source for source in (WARM, COLD)[: 1 + config.cold] if not log.done({**labels, "source": source})
    ]
    wants_memory = config.memory and not log.done({**labels, "source": FRESH})
    if not todo and not wants_memory:
        return
    workload = make_workload(reader, context // chunk, chunk, config.suffix_tokens, config.seed)
    with (
        scratch(config.folder) as folder,
        PromptFixture(reader, workload, methods, folder, config.tier) as fixture,
    ):
        fixture.precompute()
        rates = measure_rates(reader.adapter.dtype, reader.adapter.device)
        fixture.compare_with(rates)
        facts = {"prompt_tokens": len(workload.prompt), "flops": rates.flops, "copied_bytes_s": rates.bytes}
        stored = [method for method in methods if reads_store(method)]
        warm = [_case(fixture, method) for method in stored]
        for source in todo:
            if source == WARM:
                cases = [_case(fixture, method) for method in methods]
            else:
                cold = [_case(fixture, method, cache=COLD) for method in stored]
                cases = [*(replace(case, prepare=fixture.drop_page_cache) for case in cold), *warm]
            yield Group({**labels, "source": source}, cases, facts if source == WARM else {})
        if wants_memory:
            cases = [_memory_case(config, method, context, chunk, str(folder)) for method in methods]
            yield Group({**labels, "source": FRESH}, cases, repeats=1, warm_up=False)


def _case(fixture: PromptFixture, method: MethodSpec, **labels: str) -> Case:
    return Case({"method": method.name, **labels}, partial(fixture.run, method))


def _memory_case(config: TtftConfig, method: MethodSpec, context: int, chunk: int, folder: str) -> Case:
    shape, model = (context // chunk, chunk, config.suffix_tokens), config.reader.model_dump(mode="json")
    run = partial(peak_memory, model, shape, config.seed, method.name, folder)
    return Case({"method": method.name}, run)


TABLES = (
    table(
        "Time to first token",
        ms("TTFT ms", "ttft_s"),
        speedup("x transformers", "ttft_s", method=TRANSFORMERS),
        speedup("x full", "ttft_s", method=FULL),
        count("tokens run", "tokens_run"),
        count("KL", "kl_first_token", digits=4),
        count("same token", "same_first_token"),
        source=WARM,
    ),
    table(
        "Prefill",
        ms("prefill ms", "prefill_s"),
        *(ms(stage, f"{stage}_s", spread=False) for stage in STAGES),
        count("MB loaded", "bytes_loaded", 1e-6),
        count("of roofline", "roofline_fraction", digits=2),
        source=WARM,
    ),
    table(
        "Cold page cache",
        ms("TTFT ms", "ttft_s"),
        ratio("cold / warm", "ttft_s", cache=None),
        cache=COLD,
    ),
    table(
        "Peak memory of a request",
        count("MB above model", "peak_bytes", 1e-6),
        count("KV MB", "kv_bytes", 1e-6),
        count("above KV / KV", "above_kv_ratio", digits=2),
        source=FRESH,
    ),
)
TINY = {
    "contexts": (120,),
    "chunk_tokens": (40,),
    "methods": ("query+shift", "deviation@0.3", "query/bos"),
    "ratios": (0.1, 0.2),
    "cold": True,
}
BENCH = Bench(TtftConfig, groups, TABLES, Plot(x="context", y="ttft_s", series="method"), TINY)
