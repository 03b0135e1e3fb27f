"""What Prometheus reads at /metrics. Over all tenants: no label names one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from blendserve.core import BlendReport
from blendserve.errors import StoreUnavailable
from blendserve.fetch import KVFetcher
from blendserve.store import KVStore, RemoteStats, StoreStats

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0)
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


class HttpMetrics:
    """What every server counts, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = self.count("http_requests", "Answered, by route and status", "route", "status")

    def count(self, name: str, about: str, *labels: str) -> Counter:
        """A new counter."""
        return Counter(f"blendserve_{name}", about, labels, registry=self.registry)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)

    def answered(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()


class Metrics(HttpMetrics):
    """All figures of a server of answers. An Observer of the scheduler."""

    def __init__(self) -> None:
        super().__init__()
        registry, count = self.registry, self.count

        def seconds(name: str, about: str) -> Histogram:
            return Histogram(
                f"blendserve_{name}_seconds", about, ["method"], buckets=SECONDS, registry=registry
            )

        self._ttft = seconds("ttft", "From the request's arrival to its first token")
        self._gap = seconds("inter_token", "Between two tokens of an answer")
        self._queue = seconds(
            "queue", "From the prompt to the beginning of its prefill, by the method asked for"
        )
        self._batch = Histogram(
            "blendserve_batch_size", "Requests in a decoding step", buckets=SIZES, registry=registry
        )
        self._tokens = count("prompt_tokens", "By what was done for them", "kind")
        self._new_tokens = count("generated_tokens", "Tokens of answers")
        self._chunks = count("chunks", "Chunks looked for, by what was found", "found")
        self._tiers = count("chunks_hit_by_tier", "Chunks found, by where they were read from", "tier")
        self._unusable = count("chunks_unusable", "Stored chunks that could not be used, by why not", "why")
        self._near = count(
            "near_chunks", "Chunks looked for among near-duplicates, by what was found", "found"
        )
        self._near_requests = count("near_requests", "Requests that started from near-duplicates")
        self._near_tokens = count("near_tokens", "Of chunks with a near-duplicate, by what was done", "kind")
        self._loaded = count("loaded_bytes", "Stored KV put into prompts")
        self._load_s = count("load_seconds", "Time spent on that: the rate is their quotient")

    def watch(self, load: Callable[[], tuple[int, int]], slots: int, store: KVStore | KVFetcher) -> None:
        """Add what is looked up when asked for: the scheduler's load (waiting, slots in use) and the store."""
        for name, about, value in (
            ("queue_length", "Requests that wait for a slot", lambda: load()[0]),
            ("slots_in_use", "Requests that are prefilled or decoded", lambda: load()[1]),
            ("slots", "Slots there are", lambda: slots),
        ):
            Gauge(f"blendserve_{name}", about, registry=self.registry).set_function(value)
        self.registry.register(_StoreCollector(store))

    def dequeued(self, method: str, seconds: float) -> None:
        self._queue.labels(method).observe(seconds)

    def prefilled(self, report: BlendReport, loading: float) -> None:
        for kind, n in (
            ("exact", report.tokens_exact),
            ("reused", report.tokens_reused),
            ("recomputed", report.tokens_recomputed),
            ("missing", report.tokens_computed),
            ("suffix", report.tokens_suffix),
        ):
            self._tokens.labels(kind).inc(n)
        self._chunks.labels("hit").inc(report.chunks_hit)
        self._chunks.labels("miss").inc(report.chunks_missing)
        self._chunks.labels("corrupt").inc(report.chunks_corrupt)
        for tier, n in report.tiers.items():
            self._tiers.labels(tier).inc(n)
        for unusable in report.unusable:
            self._unusable.labels(unusable.kind).inc()
        for chunk in report.near:
            self._near.labels("donor" if chunk.donors else "none").inc()
            if chunk.donors:
                self._near_tokens.labels("stored").inc(chunk.tokens_stored)
                self._near_tokens.labels("fresh").inc(chunk.tokens_fresh)
        self._near_requests.inc(any(chunk.donors for chunk in report.near))
        self._loaded.inc(report.bytes_loaded)
        self._load_s.inc(loading)

    def step(self, batch: int) -> None:
        self._batch.observe(batch)

    def token(self, method: str, seconds: float, first: bool) -> None:
        (self._ttft if first else self._gap).labels(method).observe(seconds)
        self._new_tokens.inc()


class _StoreCollector(Collector):
    """The store's own statistics."""

    def __init__(self, store: KVStore | KVFetcher) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        try:
            stats = self._store.stats()
        except StoreUnavailable:
            yield GaugeMetricFamily("blendserve_store_up", "Whether the KV store answers", 0)
            return
        yield GaugeMetricFamily("blendserve_store_up", "Whether the KV store answers", 1)
        for name, about, value in (
            ("store_bytes", "Payload of the KV store", stats.bytes),
            ("store_raw_bytes", "What its chunks take uncoded", stats.raw_bytes),
            ("store_tables_bytes", "Tables of codecs, beside the cap", stats.tables_bytes or 0),
            ("store_cap_bytes", "Its cap", stats.cap_bytes),
            ("store_chunks", "Chunks in it", stats.chunks),
            ("store_pinned", "Chunks that are never evicted", stats.pins),
        ):
            yield GaugeMetricFamily(f"blendserve_{name}", about, value)
        for name, about, value in (
            ("store_evictions", "Chunks evicted", stats.evictions or 0),
            ("store_admissions_refused", "Chunks not let in", stats.admissions_refused or 0),
            ("store_corrupt", "Damaged records found by look-ups", stats.corrupt),
            ("store_undecodable", "Look-ups of chunks whose codec or tables are not here", stats.undecodable),
        ):
            yield CounterMetricFamily(f"blendserve_{name}", about, value)

        yield from _of_tiers(stats)

    def describe(self) -> Iterator[Metric]:
        """Nothing is asked of the store when this is registered."""
        return iter(())


def _of_tiers(stats: StoreStats) -> Iterator[Metric]:
    size = GaugeMetricFamily("blendserve_store_tier_bytes", "Chunks kept near", labels=["tier"])
    for tier in stats.tiers:
        size.add_metric([tier.name], tier.bytes)
    yield size
    for what, figure in asdict(stats.remote or NOTHING_REMOTE).items():
        name, about = f"blendserve_store_remote_{what}", _OF_REMOTE[what]
        yield (GaugeMetricFamily if what == "waiting_bytes" else CounterMetricFamily)(name, about, figure)


NOTHING_REMOTE = RemoteStats(0, 0, 0, 0, 0, 0)
_OF_REMOTE = {
    "hits": "Chunks that the remote store gave",
    "misses": "Chunks that it did not have, or could not give",
    "failures": "Times that it could not be reached, read or written",
    "written": "Chunks written to it",
    "dropped": "Chunks not written to it, as too much waited",
    "waiting_bytes": "Chunks on their way there, or from there into the local store",
}
