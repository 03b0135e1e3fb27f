"""The dashboard asks for figures that there are, and every figure is on it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from blendserve.serve.config import ServeConfig
from tests.engine.helpers import PASSAGES, QUESTIONS
from tests.serve.helpers import Server

DASHBOARD = Path(__file__).parents[2] / "configs" / "grafana.json"
ASKED_FOR = re.compile(r"blendserve_\w+")
BY_LABEL = re.compile(r"by \(([^)]*)\)|(\w+)=~?\"")
SAMPLES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """What /metrics says after a request."""
    server = Server(tmp_path_factory.mktemp("dashboard"), ServeConfig())
    passages = [{"text": p.text} for p in PASSAGES]
    server.post("/v1/rag/query", {"question": QUESTIONS[0], "passages": passages}).raise_for_status()
    found = text_string_to_metric_families(server.get("/metrics").text)
    yield [family for family in found if not family.name.endswith("_created")]
    server.close()


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_every_expression_is_about_figures_and_labels_that_there_are(families: list[Any]) -> None:
    names = {f.name + end for f in families for end in SAMPLES[f.type]}
    labels = {label for f in families for sample in f.samples for label in sample.labels}
    for expression in expressions():
        assert set(ASKED_FOR.findall(expression)) <= names, expression
        for grouped, chosen in BY_LABEL.findall(expression):
            assert {part.strip() for part in (grouped or chosen).split(",")} <= labels, expression


def test_every_figure_is_on_it(families: list[Any]) -> None:
    shown = set(ASKED_FOR.findall(" ".join(expressions())))
    assert {f.name for f in families if not any(f.name + end in shown for end in SAMPLES[f.type])} == set()
