"""Metrics for Prometheus at /metrics, over all tenants: no label names one."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from blendserve.core import BlendReport
from blendserve.errors import StoreError
from blendserve.fetch import KVFetcher
from blendserve.quality.controller import RatioController
from blendserve.quality.target import Loss
from blendserve.store import KVStore

Controllers = list[tuple[str, RatioController]]  # with the collection's name

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0)
MATCH_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
KLS = (0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)

# name, help, labels
COUNTERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("prompt_tokens", "Prompt tokens, cached or computed", ("kind",)),
    ("generated_tokens", "Generated tokens", ()),
    ("chunks", "Chunk lookups, by result", ("found",)),
    ("chunks_hit_by_tier", "Chunk hits, by the tier they were read from", ("tier",)),
    ("chunks_unusable", "Stored chunks that could not be used, by reason", ("why",)),
    ("near_chunks", "Near-duplicate lookups, by result", ("found",)),
    ("near_requests", "Requests that reused KV of near-duplicates", ()),
    ("near_tokens", "Tokens of chunks with a near-duplicate, cached or computed", ("kind",)),
    ("spans", "Cached passages found in plain prompts, learnt or precomputed", ("kind",)),
    ("loaded_bytes", "Size of loaded KV", ()),
    ("load_seconds", "Time to load KV", ()),
    ("quality_checks", "Checks of answers against full prefill, by result", ("result",)),
    ("quality_check_seconds", "Time spent on checks of answers", ()),
)
HISTOGRAMS: tuple[tuple[str, str, tuple[str, ...], tuple[float, ...]], ...] = (
    ("ttft_seconds", "Time from a request's arrival to its first token", ("method",), SECONDS),
    ("inter_token_seconds", "Time between two tokens of an answer", ("method",), SECONDS),
    ("queue_seconds", "Time that a request waits before its prefill", ("method",), SECONDS),
    ("match_seconds", "Time to search a plain prompt for cached passages", (), MATCH_SECONDS),
    ("batch_size", "Requests in a decoding step", (), BATCH_SIZES),
    ("quality_kl", "Mean KL of checked answers to full prefill, in nats", (), KLS),
)
# kind, name, help, attribute of StoreStats
STORE_METRICS: tuple[tuple[Callable[[str, str, float], Metric], str, str, str], ...] = (
    (GaugeMetricFamily, "bytes", "Size of the stored chunks", "bytes"),
    (GaugeMetricFamily, "raw_bytes", "Size of the stored chunks, decoded", "raw_bytes"),
    (GaugeMetricFamily, "tables_bytes", "Size of codec tables, outside the cap", "tables_bytes"),
    (GaugeMetricFamily, "cap_bytes", "Capacity of the KV store", "cap_bytes"),
    (GaugeMetricFamily, "chunks", "Chunks in the store", "chunks"),
    (GaugeMetricFamily, "pinned", "Chunks protected from eviction", "pins"),
    (CounterMetricFamily, "evictions", "Chunks evicted", "evictions"),
    (
        CounterMetricFamily,
        "admissions_refused",
        "Chunks that a full store did not admit",
        "admissions_refused",
    ),
    (CounterMetricFamily, "corrupt", "Damaged records found by lookups", "corrupt"),
    (CounterMetricFamily, "undecodable", "Chunks that could not be decoded", "undecodable"),
    (CounterMetricFamily, "remote_hits", "Chunks read from the remote store", "remote.hits"),
    (CounterMetricFamily, "remote_misses", "Chunks that the remote store did not return", "remote.misses"),
    (CounterMetricFamily, "remote_failures", "Failed calls of the remote store", "remote.failures"),
    (CounterMetricFamily, "remote_written", "Chunks written to the remote store", "remote.written"),
    (CounterMetricFamily, "remote_dropped", "Writes dropped because the queue was full", "remote.dropped"),
    (GaugeMetricFamily, "remote_waiting_bytes", "Chunks queued for transfer", "remote.waiting_bytes"),
)

# of collections with a target: kind, name, help, value
QUALITY_METRICS: tuple[tuple[Any, str, str, Callable[[RatioController], float | None]], ...] = (
    (GaugeMetricFamily, "limit", "Largest mean loss that the target allows", lambda c: c.target.limit),
    (
        GaugeMetricFamily,
        "ratio",
        "Recompute ratio in use; 1: exact",
        lambda c: 1.0 if c.ratio is None else c.ratio,
    ),
    (GaugeMetricFamily, "loss", "Mean loss of checked answers", lambda c: (c.interval() or [None])[0]),
    (
        GaugeMetricFamily,
        "loss_low",
        "Lower end of the loss interval",
        lambda c: (c.interval() or [None] * 2)[1],
    ),
    (
        GaugeMetricFamily,
        "loss_high",
        "Upper end of the loss interval",
        lambda c: (c.interval() or [None] * 3)[2],
    ),
    (GaugeMetricFamily, "checked_at", "Unix time of the last check; 0: none", lambda c: c.checked_at),
    (CounterMetricFamily, "alarms", "Number of times that checks showed a missed target", lambda c: c.alarms),
    (CounterMetricFamily, "changes", "Ratio changes caused by checks", lambda c: c.changes),
)


class HttpMetrics:
    """The metrics of every server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = self.counter("http_requests", "Responses, by route and status", "route", "status")

    def counter(self, name: str, help: str, *labels: str) -> Counter:
        """A new counter."""
        return Counter(f"blendserve_{name}", help, labels, registry=self.registry)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def answered(self, route: str, status: int) -> None:
        """Count a response."""
        self._requests.labels(route, str(status)).inc()


class Metrics(HttpMetrics):
    """The metrics of a server that answers questions. An Observer of the scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self._counters = {name: self.counter(name, help, *labels) for name, help, labels in COUNTERS}
        self._histograms = {
            name: Histogram(f"blendserve_{name}", help, labels, buckets=buckets, registry=self.registry)
            for name, help, labels, buckets in HISTOGRAMS
        }

    def watch(
        self,
        load: Callable[[], tuple[int, int]],
        slots: int,
        store: KVStore | KVFetcher,
        learnt: Callable[[], int] = lambda: 0,
        controllers: Callable[[], Controllers] = list,
        held: Callable[[], int] = lambda: 0,
        failed: Callable[[], int] = lambda: 0,
    ) -> None:
        """Add metrics that are read on request.

        load: queued and running requests. learnt: bytes of learnt chunks. controllers: of quality targets, by collection.
        held: chunks that are kept for queued requests. failed: failed writes.
        """
        for name, help, value in (
            ("queue_length", "Requests waiting for a slot", lambda: load()[0]),
            ("slots_in_use", "Requests in prefill or decode", lambda: load()[1]),
            ("slots", "Number of slots", lambda: slots),
            ("held_chunks", "Chunks that queued and starting requests keep in memory", held),
            ("learnt_bytes", "Size of stored chunks learnt from plain prompts", learnt),
        ):
            Gauge(f"blendserve_{name}", help, registry=self.registry).set_function(value)
        self.registry.register(StoreCollector(store, failed))
        self.registry.register(QualityCollector(controllers))

    def checked(self, result: str, loss: Loss | None, seconds: float) -> None:
        self._counters["quality_checks"].labels(result).inc()
        self._counters["quality_check_seconds"].inc(seconds)
        if loss:
            self._histograms["quality_kl"].observe(loss.kl)

    def dequeued(self, method: str, seconds: float) -> None:
        self._histograms["queue_seconds"].labels(method).observe(seconds)

    def prefilled(self, report: BlendReport, seconds: Mapping[str, float]) -> None:
        near = [chunk for chunk in report.near if chunk["donors"]]
        kinds = ("exact", "kept", "reused", "recomputed", "suffix")
        tokens = {kind: getattr(report, f"tokens_{kind}") for kind in kinds}
        n_learnt = sum(bool(span["learnt"]) for span in report.spans)
        counts: dict[str, Mapping[str, int]] = {
            "prompt_tokens": {**tokens, "missing": report.tokens_computed},
            "chunks": {
                "hit": report.chunks_hit,
                "miss": report.chunks_missing,
                "corrupt": report.chunks_corrupt,
            },
            "chunks_hit_by_tier": report.tiers,
            "chunks_unusable": Counts(chunk["kind"] for chunk in report.unusable),
            "near_chunks": {"donor": len(near), "none": len(report.near) - len(near)},
            "near_tokens": {
                "stored": sum(chunk["tokens_stored"] for chunk in near),
                "fresh": sum(chunk["tokens_fresh"] for chunk in near),
            },
            "spans": {"learnt": n_learnt, "precomputed": len(report.spans) - n_learnt},
        }
        for name, values in counts.items():
            for label, n in values.items():
                self._counters[name].labels(label).inc(n)
        self._counters["near_requests"].inc(bool(near))
        self._counters["loaded_bytes"].inc(report.bytes_loaded)
        self._counters["load_seconds"].inc(seconds["load"])
        if "match" in seconds:
            self._histograms["match_seconds"].observe(seconds["match"])

    def step(self, batch: int) -> None:
        self._histograms["batch_size"].observe(batch)

    def token(self, method: str, seconds: float, first: bool) -> None:
        name = "ttft_seconds" if first else "inter_token_seconds"
        self._histograms[name].labels(method).observe(seconds)
        self._counters["generated_tokens"].inc()


class QualityCollector(Collector):
    """The ratios of quality targets and the results of checks, by collection."""

    def __init__(self, controllers: Callable[[], Controllers]) -> None:
        self._controllers = controllers

    def collect(self) -> Iterator[Metric]:
        for kind, name, help, value in QUALITY_METRICS:
            metric = kind(f"blendserve_quality_{name}", help, labels=["collection"])
            for collection, controller in self._controllers():
                if (number := value(controller)) is not None:
                    metric.add_metric([collection], number)
            yield metric


class StoreCollector(Collector):
    """The statistics of a store."""

    def __init__(self, store: KVStore | KVFetcher, failed: Callable[[], int]) -> None:
        """failed: number of failed writes."""
        self._store = store
        self._failed = failed

    def collect(self) -> Iterator[Metric]:
        help = "Missing chunks that could not be written to the store"
        yield CounterMetricFamily("blendserve_store_failed_writes", help, self._failed())
        up = GaugeMetricFamily("blendserve_store_up", "Whether the KV store responds")
        try:
            stats = self._store.stats()
        except StoreError:
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up
        for kind, name, help, attribute in STORE_METRICS:
            value: Any = stats
            for part in attribute.split("."):
                value = getattr(value, part, None)  # None: without a remote store
            yield kind(f"blendserve_store_{name}", help, value or 0)
        tiers = GaugeMetricFamily(
            "blendserve_store_tier_bytes", "Size of decoded chunks, by tier", labels=["tier"]
        )
        for tier in stats.tiers:
            tiers.add_metric([tier.name], tier.bytes)
        yield tiers

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering does not read the store."""
        return ()
