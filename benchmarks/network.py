"""`python -m benchmarks network`: is KV from a server behind a network faster than recomputing it?

A Valkey server, and a proxy of each round trip and rate before it. All chunks of a prompt are on the server, by every
codec; the same prompt is prefilled in full without a server. A request waits for its chunks before its prefill begins:
how long is a metric, as are the bytes that came. Method `auto` knows of a link what an engine knows when it opens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Annotated

from pydantic import Field

from benchmarks.support.proxy import Proxy, network
from benchmarks.support.valkey import Server
from blendserve.bench.codec import CodecConfig, CodecTables
from blendserve.bench.fixture import make_blender, time_prompt
from blendserve.bench.harness import Case, Group, Metrics, SampleLog, count, ms, ratio, table
from blendserve.bench.runner import Bench, Plot, open_model
from blendserve.blend.blender import Blender
from blendserve.config import BlendConfig, Positive, ValkeyConfig
from blendserve.errors import InputError
from blendserve.fetch import KVFetcher
from blendserve.fetch.fetcher import Fetch
from blendserve.fetch.incoming import ChunkRequest
from blendserve.fetch.transfer import Compute
from blendserve.registry import SENT_CODECS
from blendserve.store.codecs.base import SLOW
from blendserve.store.valkey import ValkeyStore

DEADLINE_S = 60.0  # of the store: chunks are to arrive, however slow the link
CAP = 1 << 40


class TimedFetcher(KVFetcher):
    """Adds up how long prompts wait for their chunks before the prefill begins."""

    seconds = 0.0

    @contextmanager
    def fetch(self, requests: Sequence[ChunkRequest], compute: Compute | None = None) -> Iterator[Fetch]:
        start = time.perf_counter()
        with super().fetch(requests, compute) as fetch:
            self.seconds += time.perf_counter() - start
            yield fetch


class NetworkConfig(CodecConfig):
    """A prompt whose chunks lie on a server behind a network."""

    round_trips_ms: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (0.0, 5.0, 50.0), description="Round-trip times to measure, in milliseconds."
    )
    rates_gbit: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (0.1, 1.0, 10.0), description="Link rates to measure, in Gbit/s."
    )
    codecs: tuple[str, ...] = Field(
        SENT_CODECS, description="Codecs of the stored chunks: name or name@level."
    )
    chunk_tokens: Positive = Field(256, description="Length of a chunk, in tokens.")


def groups(config: NetworkConfig, log: SampleLog) -> Iterator[Group]:
    model = open_model(config, log)
    workload, blend = config.workload(model), config.blend
    tables = CodecTables(model, workload.prompts, config.fit_tokens)
    with ExitStack() as stack:
        server = stack.enter_context(Server())
        proxy = stack.enter_context(Proxy(server.port, config.seed))
        blenders: dict[str, Blender] = {}
        for word in config.codecs:
            store = ValkeyStore(ValkeyConfig(url=proxy.url, deadline_s=DEADLINE_S), CAP)
            stack.callback(store.close)
            options = {"namespace": word, "codec": tables.codec(word, store), "fetcher": TimedFetcher(store)}
            blenders[word] = make_blender(model, workload.prompts, store, **options)
            blenders[word].writer.precompute(workload.chunks)

        def request(blender: Blender, blend: BlendConfig) -> Metrics:
            fetcher, before = blender.fetcher, proxy.down.n_bytes
            assert isinstance(fetcher, TimedFetcher)
            waited = fetcher.seconds
            metrics, done = time_prompt(blender, workload, blend)
            if late := [missing for missing in done.report.unusable if missing["kind"] != SLOW]:
                problem = f"{len(late)} chunks did not arrive within {DEADLINE_S:g} s: use a higher rate"
                raise InputError(problem)
            moved = {"wait_s": fetcher.seconds - waited, "bytes_received": proxy.down.n_bytes - before}
            return {"ttft_s": metrics["ttft_s"], **moved}

        for trip, rate in product(config.round_trips_ms, config.rates_gbit):
            proxy.conditions = network(trip, rate)
            full = partial(request, blenders[config.codecs[0]], BlendConfig(method="full"))
            cases = [Case({"method": "full"}, full)]
            for word, blender in blenders.items():
                options = {"namespace": word, "fetcher": TimedFetcher(blender.store)}
                auto = make_blender(model, workload.prompts, blender.store, **options)
                auto.planner.calibrate()
                auto.fetcher.warm_up([auto.key(ids) for ids in workload.chunks])
                methods = {
                    config.method: partial(request, blender, blend),
                    "auto": partial(request, auto, blend.with_values(method="auto")),
                }
                cases += [Case({"method": name, "codec": word}, run) for name, run in methods.items()]
            yield Group({"round_trip_ms": trip, "rate_gbit": rate}, cases)


TABLE = table(
    "Time to first token over a network",
    ms("TTFT ms", "ttft_s"),
    ratio("/ full prefill", "ttft_s", method="full", codec=None),
    ms("waited ms", "wait_s", spread=False),
    count("MB received", "bytes_received", 1e-6, 1),
)
TINY = {
    **{"repeats": 1, "suffix_tokens": 30, "codecs": ("raw", "int8")},
    **{"round_trips_ms": (0.0, 50.0), "rates_gbit": (0.02,)},
}
BENCH = Bench(NetworkConfig, groups, (TABLE,), Plot(x="rate_gbit", y="ttft_s", series="codec"), TINY)
