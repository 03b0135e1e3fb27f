"""metrics.json and predictions -> report.html: one page with tables, plots and every prompt's tokens."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from blendserve.evaluate.methods import FULL
from blendserve.evaluate.tables import facts, tables

Record = Mapping[str, Any]

TEMPLATE = Path(__file__).with_name("report.html")


def render(
    name: str,
    metrics: Record,
    prompts: Mapping[str, Record],
    predictions: Mapping[tuple[str, str], Record],
    plots: Mapping[str, bytes],
) -> str:
    """The page. prompts: by question id; predictions: by (id, method); plots: SVG by file name."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    data = json.dumps(_viewer(metrics["methods"], prompts, predictions), ensure_ascii=False)
    return template.render(
        title=f"blendserve: {name}",
        facts=facts(metrics),
        plots={file: base64.b64encode(plot).decode() for file, plot in plots.items()},
        tables=tables(metrics),
        left_out=metrics["left_out"],
        data=Markup(data.replace("<", "\\u003c")),  # cannot end its script element
    )


def _viewer(
    methods: Mapping[str, Record],
    prompts: Mapping[str, Record],
    predictions: Mapping[tuple[str, str], Record],
) -> Record:
    """Data of the page's script: every prompt that all methods answered."""
    ids = [i for i in prompts if all((i, m) in predictions for m in methods)]
    shown = [{**prompts[i], "titled": len(prompts[i]["titles"]) == len(prompts[i]["parts"]) - 2} for i in ids]
    return {
        "methods": list(methods),
        "first": next((name for name, m in methods.items() if m["ratio"] is not None), FULL),
        "prompts": shown,
        "lines": {i: {m: _line(predictions[i, m], methods[m]) for m in methods} for i in ids},
    }


def _line(record: Record, method: Record) -> Record:
    return {
        **{name: record[name] for name in ("answer", "f1", "agreement", "mean_kl", "recomputed")},
        "blends": method["kind"] in ("reuse", "blend"),
        "exact": record["tokens_exact"],
        "count": record["tokens_recomputed"],
        "ttft": record["seconds"]["ttft"],
    }
