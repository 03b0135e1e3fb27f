"""`blendserve bench ttft`: one prompt by every method, to its first logits and to its first token.

A grid of contexts and chunk lengths. A chunk as long as the context is a document read before: the first chunk's KV is
exact, and method `prefix` gives full prefill's first token (KL, same token). Optional: from a cold page cache, and the
peak memory of a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

from pydantic import Field

from blendserve.bench.fixture import STAGES, PromptFixture, Tier, reads_store, scratch
from blendserve.bench.harness import Case, Group, SampleLog, count, ms, ratio, speedup, table
from blendserve.bench.memory import peak_memory
from blendserve.bench.roofline import measure_rates
from blendserve.bench.runner import Bench, BenchConfig, Plot, open_model
from blendserve.bench.workload import check_room, make_workload
from blendserve.config import Positive, Ratio
from blendserve.errors import ConfigError
from blendserve.evaluate.methods import FULL, TRANSFORMERS, MethodSpec, parse_methods
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
    pairs = product(config.contexts, config.chunk_tokens)
    grid = dict.fromkeys((context, min(chunk, context)) for context, chunk in pairs)
    for context, chunk in grid:
        if context % chunk:
            raise ConfigError(f"a context of {context:,} tokens is not a multiple of chunks of {chunk:,}")
    model = open_model(config, log)
    check_room(model, max(config.contexts) + config.suffix_tokens, "the longest prompt")
    rates = measure_rates(model.decoder.dtype, model.decoder.device)
    for context, chunk in grid:
        labels = {"context": context, "chunk": chunk}
        shape = context // chunk, chunk, config.suffix_tokens, config.seed
        workload = make_workload(model, *shape)
        with (
            scratch(config.folder) as folder,
            PromptFixture(model, workload, methods, folder, config.tier, rates) as fixture,
        ):
            fixture.precompute()
            facts = {
                "prompt_tokens": len(workload.prompt),
                "flops": rates.flops,
                "copied_bytes_s": rates.bytes,
            }
            cases = {m: Case({"method": m.name}, partial(fixture.run, m)) for m in methods}
            yield Group({**labels, "source": WARM}, [*cases.values()], partial(dict, facts))
            if config.cold:
                warm = [case for method, case in cases.items() if reads_store(method)]
                cold = [Case({**c.labels, "cache": COLD}, c.run, fixture.drop_page_cache) for c in warm]
                yield Group({**labels, "source": COLD}, [*cold, *warm])
            if config.memory:
                peak = partial(peak_memory, config.model_settings, shape, folder)
                fresh = [Case({"method": m.name}, partial(peak, m)) for m in methods]
                yield Group({**labels, "source": FRESH}, fresh, repeats=1, warm_up=False)


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
    table("Cold page cache", ms("TTFT ms", "ttft_s"), ratio("cold / warm", "ttft_s", cache=None), cache=COLD),
    table(
        "Peak memory of a request",
        count("MB above model", "peak_bytes", 1e-6),
        count("KV MB", "kv_bytes", 1e-6),
        count("above KV / KV", "above_kv_ratio", digits=2),
        source=FRESH,
    ),
)
METHODS = ("query+shift", "deviation@0.3", "query/bos")
TINY = {"contexts": (120,), "chunk_tokens": (40,), "methods": METHODS, "ratios": (0.1, 0.2), "cold": True}
BENCH = Bench(TtftConfig, groups, TABLES, Plot(x="context", y="ttft_s", series="method"), TINY)
