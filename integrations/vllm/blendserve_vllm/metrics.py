"""Counters of jobs, for vLLM's log and its Prometheus endpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from blendserve_vllm.plan import Report

COUNTERS = {
    "jobs": "Requests whose KV cache was filled from stored chunks.",
    "failed_jobs": "Requests that vLLM prefilled, as a chunk or a pass failed.",
    "tokens_matched": "Tokens of stored chunks that vLLM had not cached.",
    "tokens_recomputed": "Of these, tokens that the policy chose to recompute.",
    "tokens_approximate": "Of these, tokens whose KV is approximate.",
    "tokens_stored": "Tokens of chunks that were stored.",
}


class BlendStats(KVConnectorStats):
    """Sums since the last step. Ranks do the same jobs: one rank's sums are all."""

    @classmethod
    def of(cls, reports: Mapping[str, Report]) -> BlendStats:
        sums = Counter[str]()
        for report in reports.values():
            sums.update({name: value for name, value in report.to_dict().items() if name in COUNTERS})
            sums["failed_jobs" if report.error else "jobs"] += 1
        return cls(data=dict(sums))

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return BlendStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data


class BlendMetrics(KVConnectorPromMetrics):
    """`vllm:blendserve_*`, by engine."""

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self._counters = {
            name: {engine: made.labels(*labels) for engine, labels in self.per_engine_labelvalues.items()}
            for name, help in COUNTERS.items()
            for made in [self._counter_cls(f"vllm:blendserve_{name}", help, self._labelnames)]
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(value)
