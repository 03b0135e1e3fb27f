"""metrics.json and the run's lines -> report.html: one page that needs nothing else, tables, plot and prompts."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from blendserve.evaluate.methods import FULL
from blendserve.evaluate.tables import facts, headline, tables

Figures = Mapping[str, Any]

TEMPLATE = Path(__file__).with_name("report.html")


def render(
    name: str,
    figures: Figures,
    prompts: Mapping[str, Figures],
    lines: Mapping[tuple[str, str], Figures],
    plots: Mapping[str, bytes],
) -> str:
    """The page. `figures` is metrics.json; prompts by question id, predictions by (id, method), plots by file, as in
    the folder."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        title=f"blendserve: {name}",
        facts=facts(figures),
        headline=headline(figures),
        plot=_embedded_svg(plots["pareto.svg"]),
        coded=_embedded_svg(plots.get("codecs.svg", b"")),
        tables=tables(figures),
        left_out=figures["left_out"],
        data=_embedded(_viewer(figures, prompts, lines)),
    )


def _embedded_svg(plot: bytes) -> str:
    """As a page shows it; nothing where there is none."""
    return f"data:image/svg+xml;base64,{base64.b64encode(plot).decode()}" if plot else ""


def _viewer(
    figures: Figures, prompts: Mapping[str, Figures], lines: Mapping[tuple[str, str], Figures]
) -> Figures:
    """What the page's script shows: every question that all methods answered."""
    methods = list(figures["methods"])
    ids = [i for i in prompts if all((i, m) in lines for m in methods)]
    shown = [{**prompts[i], "titled": len(prompts[i]["titles"]) == len(prompts[i]["parts"]) - 2} for i in ids]
    first = next((m for m in methods if figures["methods"][m]["ratio"] is not None), FULL)
    return {
        "methods": methods,
        "first": first,
        "prompts": shown,
        "lines": {i: {m: _shown(lines[i, m], figures["methods"][m]) for m in methods} for i in ids},
    }


def _shown(line: Figures, method: Figures) -> Figures:
    kept = {name: line[name] for name in ("answer", "f1", "agreement", "mean_kl", "recomputed")}
    return {
        **kept,
        "blends": method["kind"] in ("reuse", "blend"),
        "exact": line["tokens_exact"],
        "count": line["tokens_recomputed"],
        "ttft": line["seconds"]["ttft"],
    }


def _embedded(value: Any) -> Markup:
    """JSON that no text within can break out of its script element with."""
    return Markup(json.dumps(value, ensure_ascii=False).replace("<", "\\u003c"))
