"""What /metrics counts, and the Grafana dashboard that shows it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from blendserve.core import NearChunk, Unusable
from blendserve.serve.metrics import Metrics
from tests.golden.http import FILE as GOLDEN
from tests.support.engines import PASSAGES, QUESTIONS
from tests.support.http import OWN, Client, Server
from tests.support.waiting import eventually

DASHBOARD = Path(__file__).parents[2] / "configs" / "grafana.json"
NAME = re.compile(r"blendserve_\w+")
BY_LABEL = re.compile(r"by \(([^)]*)\)|(\w+)=~?\"")
SAMPLES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def test_requests_are_counted(server: Server, client: Client) -> None:
    names: dict[str, dict[str, str]] = {
        "misses": {"name": "chunks_total", "found": "miss"},
        "hits": {"name": "chunks_total", "found": "hit"},
        "ttft": {"name": "ttft_seconds_count", "method": "blend"},
        "gaps": {"name": "inter_token_seconds_count", "method": "blend"},
        "tokens": {"name": "generated_tokens_total"},
        "requests": {"name": "http_requests_total", "route": "/v1/rag/query", "status": "200"},
    }

    def values() -> dict[str, float]:
        return {what: server.sample(**labels) for what, labels in names.items()}

    before = values()
    for _ in range(2):
        done = client.ask(passages=OWN, max_tokens=5)
        client.warm(OWN[:1])
    counted, n = {what: value - before[what] for what, value in values().items()}, done["tokens"]
    expected = {"misses": len(OWN), "hits": len(OWN), "ttft": 2, "gaps": 2 * (n - 1), "tokens": 2 * n}
    assert counted == {**expected, "requests": 2}
    eventually(lambda: server.is_idle)
    assert server.sample("slots_in_use") == server.sample("queue_length") == 0
    assert server.sample("store_bytes") == server.engine.store.stats().bytes > 0


def test_reports_are_counted(server: Server) -> None:
    report = replace(
        server.engine.answer(QUESTIONS[0], list(PASSAGES), max_new_tokens=1).report,
        chunks_hit=4,
        chunks_corrupt=2,
        tokens_exact=7,
        bytes_loaded=100,
        tiers={"local": 3, "remote": 1},
        unusable=(Unusable(0, "codec", ""),),
        near=(NearChunk(0, ("aa",), 5, 2, ""), NearChunk(1, (), 0, 9, ""), NearChunk(2, (), 0, 9, "")),
    )
    tokens = {"exact": 7, "reused": report.tokens_reused, "recomputed": report.tokens_recomputed}
    tokens |= {"missing": report.tokens_computed, "suffix": report.tokens_suffix}
    metrics = Metrics()
    for _ in range(2):
        metrics.prefilled(report, 0.25)
    for name, label, counts in (
        ("chunks", "found", {"hit": 4, "miss": report.chunks_missing, "corrupt": 2}),
        ("chunks_hit_by_tier", "tier", {"local": 3, "remote": 1}),
        ("chunks_unusable", "why", {"codec": 1}),
        ("near_chunks", "found", {"donor": 1, "none": 2}),
        ("near_tokens", "kind", {"stored": 5, "fresh": 2}),
        ("prompt_tokens", "kind", tokens),
        ("near_requests", "", {"": 1}),
        ("loaded_bytes", "", {"": 100}),
        ("load_seconds", "", {"": 0.25}),
    ):
        for value, n in counts.items():
            labels = {label: value} if label else {}
            found = metrics.registry.get_sample_value(f"blendserve_{name}_total", labels)
            assert found == 2 * n, (name, value)


def test_the_dashboard_has_every_metric_and_no_other_name_or_label() -> None:
    families = json.loads(GOLDEN.read_text("utf-8"))["metrics"]  # name -> type and labels
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    samples = {name: {name + end for end in SAMPLES[kind]} for name, (kind, *_) in families.items()}
    names = {name for possible in samples.values() for name in possible}
    labels = {label for _, *of in families.values() for label in of}
    for expression in expressions:
        assert set(NAME.findall(expression)) <= names, expression
        for grouped, chosen in BY_LABEL.findall(expression):
            assert {part.strip() for part in (grouped or chosen).split(",")} <= labels, expression
    shown = set(NAME.findall(" ".join(expressions)))
    assert [name for name, possible in samples.items() if not possible & shown] == []
