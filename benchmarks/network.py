"""`python -m benchmarks network`: is KV from a server behind a network faster than recomputing it?

A Valkey server, and a proxy of each round trip and rate before it. All chunks of a prompt are on the server, by every
codec; the same prompt is prefilled in full without a server. A request waits for its chunks before its prefill begins:
how long is a metric, as are the bytes that came. Method `auto` knows of a link what an engine knows when it opens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Annotated

from pydantic import Field

from benchmarks.support.proxy import Proxy, network
from benchmarks.support.valkey import Server
from blendserve.bench.codec import CodecConfig
from blendserve.bench.fixture import make_blender, time_prompt
from blendserve.bench.harness import Case, Group, Metrics, SampleLog, count, ms, ratio, table
from blendserve.bench.plots import Plot
from blendserve.bench.runner import Bench, open_reader
from blendserve.bench.stores import CodecTables, TimedFetcher
from blendserve.bench.workload import Workload
from blendserve.blend.blender import Blender
from blendserve.config import BlendConfig, Positive, ValkeyConfig, changed
from blendserve.errors import InputError
from blendserve.models.loader import LoadedModel
from blendserve.registry import SENT_CODECS
from blendserve.store.codecs.base import SLOW
from blendserve.store.valkey import ValkeyStore

DEADLINE_S = 60.0  # of the store: chunks are to arrive, however slow the link
CAP = 1 << 40


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
    repeats: Positive = Field(3, description="Number of measured rounds.")


class Fixture:
    """The chunks of a prompt on the server by every codec, each in a namespace of its own."""

    def __init__(self, reader: LoadedModel, config: NetworkConfig, proxy: Proxy, stack: ExitStack) -> None:
        self._reader, self._config, self._proxy = reader, config, proxy
        self._workload: Workload = config.workload(reader)
        settings = ValkeyConfig(url=proxy.url, deadline_s=DEADLINE_S)
        tables = CodecTables(reader, self._workload.prompts, config.fit_tokens, config.text)
        self.stores: dict[str, ValkeyStore] = {}
        self.blenders: dict[str, Blender] = {}
        for word in config.codecs:
            store = ValkeyStore(settings, CAP)
            stack.callback(store.close)
            codec = tables.write_with(word, store)
            self.stores[word] = store
            own = {"namespace": word, "codec": codec, "fetcher": TimedFetcher(store)}
            self.blenders[word] = make_blender(reader, self._workload.prompts, store, **own)
            self.blenders[word].writer.precompute(self._workload.chunks)

    def cases(self) -> list[Case]:
        """Full prefill, loading by each codec, and what `auto` chooses, which gets to know the link anew."""
        blend, found = self._config.blend, []
        first = self._config.codecs[0]
        full = partial(self._request, self.blenders[first], BlendConfig(method="full"))
        found.append(Case({"method": "full"}, full))
        for word, store in self.stores.items():
            auto = make_blender(
                self._reader, self._workload.prompts, store, namespace=word, fetcher=TimedFetcher(store)
            )
            auto.planner.calibrate()
            auto.fetcher.warm_up([auto.key(ids) for ids in self._workload.chunks])
            run = partial(self._request, self.blenders[word], blend)
            found.append(Case({"method": self._config.method, "codec": word}, run))
            run = partial(self._request, auto, changed(blend, method="auto"))
            found.append(Case({"method": "auto", "codec": word}, run))
        return found

    def _request(self, blender: Blender, blend: BlendConfig) -> Metrics:
        fetcher = blender.fetcher
        assert isinstance(fetcher, TimedFetcher)
        waited, moved = fetcher.seconds, self._proxy.down.n_bytes
        metrics, done = time_prompt(blender, self._workload, blend)
        if late := [missing for missing in done.report.unusable if missing.kind != SLOW]:
            raise InputError(f"{len(late)} chunks did not arrive within {DEADLINE_S:g} s: use a higher rate")
        n_bytes = self._proxy.down.n_bytes - moved
        return {"ttft_s": metrics["ttft_s"], "wait_s": fetcher.seconds - waited, "bytes_received": n_bytes}


def groups(config: NetworkConfig, log: SampleLog) -> Iterator[Group]:
    reader = open_reader(config, log)
    with ExitStack() as stack:
        server = stack.enter_context(Server())
        proxy = stack.enter_context(Proxy(server.port, config.seed))
        fixture = Fixture(reader, config, proxy, stack)
        for trip, rate in product(config.round_trips_ms, config.rates_gbit):
            labels = {"round_trip_ms": trip, "rate_gbit": rate}
            if not log.done(labels):
                proxy.conditions = network(trip, rate)
                yield Group(labels, fixture.cases())


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
