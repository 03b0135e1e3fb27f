"""metrics.json as tables on the terminal, and with the predictions as one page: tables, plots, every prompt's tokens."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from blendserve import console
from blendserve.evaluate.methods import FULL, TRANSFORMERS
from blendserve.evaluate.run_dir import RunDir
from blendserve.evaluate.tasks import PERPLEXITY

Metrics = Mapping[str, Any]
Columns = dict[str, tuple[str, str]]  # title -> dotted path in a method's metrics, and format

TEMPLATE = Path(__file__).with_name("report.html")
QUALITY, TIME = "Quality", "Time and work"
TIME_NOTE = (
    "Medians over the questions; TTFT runs from the passages' text to the first token, the second token's time from "
    "there on, refining included. Cost: row-layers run through the model, selection and refining included, as a share "
    "of full prefill's."
)
TIME_COLUMNS: Columns = {
    "TTFT ms": ("seconds.ttft.median", "ms"),
    "TTFT p95": ("seconds.ttft.p95", "ms"),
    "times faster than full": ("times_faster", ".2f"),
    **{s: (f"seconds.{s}.median", "ms") for s in ("prefill", "load", "select", "correct", "decode")},
    "refine": ("seconds.refine.median", "ms"),
    "second token": ("seconds.gap.median", "ms"),
    "tokens recomputed": ("tokens_recomputed", ".0f"),
    "computed": ("tokens_computed", ".0f"),
    "exact": ("tokens_exact", ".0f"),
    "MB loaded": ("bytes_loaded", "MB"),
    "cost": ("cost", ".3f"),
}
EDITED_NOTE = "The store holds earlier revisions. Exact hits: the same method over the passages themselves."
EDITED_COLUMNS: Columns = {
    "mean KL / reuse's": ("mean_kl_share", ".3f"),
    "/ exact hits'": ("edited.mean_kl_times", ".2f"),
    "TTFT / exact hits'": ("edited.ttft_times", ".2f"),
    "times faster than full": ("times_faster", ".2f"),
    "fresh tokens": ("tokens_computed", ".0f"),
}
FACT_COLUMNS: Columns = {
    "stale answers": ("facts.says_rival", "d"),
    "current answers": ("facts.says_gold", "d"),
    "questions": ("facts.questions", "d"),
    "stale answers to all questions": ("facts.says_rival_of_all", "d"),
}
SCALES = {"ms": (1e3, ".0f"), "MB": (1e-6, ".1f")}  # formats with a unit


class ReportTable(NamedTuple):
    """The first column names methods."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def show(metrics: Metrics, report: Path) -> None:
    """Print the main figures of every method, and the tables of single prompts and of edits."""
    columns = {
        "KL / reuse's": ("mean_kl_share", ".3f"),
        "agree": ("agreement.mean", ".2f"),
        "same": ("identical.mean", ".2f"),
        metrics["metric"]: ("score.mean", ".3f"),
        "TTFT ms": ("seconds.ttft.median", "ms"),
        "times faster": ("times_faster.mean", ".1f"),
        "recomputed": ("share_recomputed", ".0%"),
    }
    overview = _table(_size(metrics), "", metrics["methods"], columns | _kv_smaller(metrics["methods"]))
    for table in (overview, *(table for table in tables(metrics) if table.title not in (QUALITY, TIME))):
        title = f"{table.title}. {table.note}" if table.note else table.title
        console.table(title, table.columns, table.rows)
    console.out.print(f"More in {report}", markup=False)


def show_all(runs: Mapping[str, Metrics | str]) -> None:
    """Print one table: data set -> its metrics, or why there are none."""
    finished = [metrics for metrics in runs.values() if not isinstance(metrics, str)]
    methods = list(finished[0]["methods"]) if finished else []
    rows = []
    for name, metrics in runs.items():
        if isinstance(metrics, str):
            cells = [metrics, *[""] * (len(methods) + 2)]
        else:
            cells = [metrics["metric"], str(metrics["questions"]), str(len(metrics["left_out"]))]
            cells += [_score_and_kl(metrics["methods"][method]) for method in methods]
        rows.append([Path(name).name, *cells])
    columns = ("data", "metric", "questions", "skipped", *methods)
    console.table("Score (mean KL / full reuse's)", columns, rows)


def facts(metrics: Metrics) -> list[str]:
    """What was measured, and where."""
    where = metrics["environment"]
    model = metrics["reader"]
    recall = metrics["recall"]
    return [
        f"{_size(metrics)} of {Path(metrics['dataset']).name}, {metrics['setting']}, {metrics['layout']} layout",
        *([f"recall of needed titles {cell(recall, '.2f')}"] if recall else []),
        f"{model['model']} in {model['dtype']} on {model['device']}",
        f"{where['machine']}, {model['threads']} threads",
        f"torch {where['torch']}, transformers {where['transformers']}",
        f"blendserve {where['blendserve']} {where['commit']}".strip(),
    ]


def tables(metrics: Metrics) -> list[ReportTable]:
    """All tables of the page; those without a row are left out."""
    methods = metrics["methods"]
    found = [_quality(metrics), _tails(metrics)]
    for title, part, note, columns in (
        (TIME, "kind", TIME_NOTE, TIME_COLUMNS),
        ("Edited passages", "edited", EDITED_NOTE, EDITED_COLUMNS),
        ("Edited facts", "facts", "Questions to which full prefill gives the current answer.", FACT_COLUMNS),
    ):
        found.append(_table(title, note, {n: m for n, m in methods.items() if part in m}, columns))
    return [table for table in found if table.rows]


def _quality(metrics: Metrics) -> ReportTable:
    metric = metrics["metric"]
    methods = metrics["methods"]
    columns = {
        "mean KL / reuse's": ("mean_kl_share", ".3f"),
        "first-token KL / reuse's": ("first_kl_share", ".3f"),
        "mean KL, nats": ("mean_kl", ".4f"),
        "agreement F1": ("agreement", ".3f"),
        "identical answers": ("identical", ".3f"),
        metric: ("score", ".3f"),
    }
    if metric == PERPLEXITY:
        columns[f"{metric} / full's"] = ("score_against_full", ".4f")
    else:
        columns[f"{metric} - full's"] = ("score_against_full", "+.3f")
        columns |= {"F1": ("f1", ".3f"), "exact match": ("em", ".3f"), "Rouge-L": ("rouge_l", ".3f")}
    note = (
        "Fidelity to full prefill, then scores against the golds, with 95% bootstrap intervals over questions. "
        "Differences are paired."
    )
    return _table(QUALITY, note, methods, columns | _kv_smaller(methods))


def _tails(metrics: Metrics) -> ReportTable:
    """Regressions on single prompts: a row per comparison."""
    note = (
        f"Mean KL of a prompt / another method's on it; KLs below {metrics['kl_floor']:g} nats count as that."
    )
    if (rounding := metrics["kl_rounding"]) is not None:
        note += f" Rounding alone makes up to {rounding:.2g} (95% of prompts)."
    forms = {"worse": ".3f", "p95": ".2f", "worst": ".2f"}
    rows = [
        [name, tail["against"], *(cell(tail[part], form) for part, form in forms.items()), tail["prompt"]]
        for name, method in metrics["methods"].items()
        for tail in method["tails"]
    ]
    columns = ("method", "against", "fraction made worse", "ratio, p95", "worst", "on prompt")
    return ReportTable("Single prompts", note, columns, rows)


def _kv_smaller(methods: Metrics) -> Columns:
    """Every byte of the chunks' records against uncoded KV, without shared tables; no column without codecs."""
    return {"KV smaller": ("kv_smaller", ".2f")} if any(m["codec"] for m in methods.values()) else {}


def _table(title: str, note: str, methods: Metrics, columns: Columns) -> ReportTable:
    rows = [
        [name, *(cell(_at(m, path), form) for path, form in columns.values())] for name, m in methods.items()
    ]
    return ReportTable(title, note, ("method", *columns), rows)


def _at(found: Any, path: str) -> Any:
    """The value at a dotted path; None where a part is None. Full prefill has no difference to itself."""
    if path == "score_against_full" and found["kind"] == FULL:
        return None
    for part in path.split("."):
        found = found and found[part]
    return found


def cell(value: Any, form: str) -> str:
    """A number, or a mean with its interval; empty for None."""
    if value is None:
        return ""
    scale, form = SCALES.get(form, (1, form))
    if not isinstance(value, Mapping):
        return format(value * scale, form)
    mean, low, high = (format(value[part] * scale, form) for part in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def _score_and_kl(m: Metrics) -> str:
    share = None if m["kind"] in (FULL, TRANSFORMERS) else m["mean_kl_share"]
    return f"{m['score']['mean']:.3f}" + (f" ({share['mean']:.2f})" if share else "")


def _size(metrics: Metrics) -> str:
    questions = metrics["questions"]
    prompts = metrics["prompts"]
    return f"{questions} questions" + (f" in {prompts} prompts" if prompts > questions else "")


def render(run: RunDir, metrics: Metrics, plots: Mapping[str, bytes]) -> str:
    """The page. plots: SVG by file name."""
    from jinja2 import Environment, StrictUndefined  # start-up
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    data = json.dumps(_viewer(metrics["methods"], run), ensure_ascii=False)
    return template.render(
        title=f"blendserve: {run.path.name}",
        facts=facts(metrics),
        plots={file: base64.b64encode(plot).decode() for file, plot in plots.items()},
        tables=tables(metrics),
        left_out=metrics["left_out"],
        data=Markup(data.replace("<", "\\u003c")),  # cannot end its script element
    )


def _viewer(methods: Mapping[str, Metrics], run: RunDir) -> Metrics:
    """Data of the page's script: every prompt that all methods answered."""
    prompts = run.prompts
    predictions = run.predictions
    ids = [i for i in prompts if all((i, m) in predictions for m in methods)]
    shown = [{**prompts[i], "titled": len(prompts[i]["titles"]) == len(prompts[i]["parts"]) - 2} for i in ids]

    def line(record: Metrics) -> Metrics:
        return {
            **{name: record[name] for name in ("answer", "f1", "agreement", "mean_kl", "recomputed")},
            "blends": methods[record["method"]]["kind"] in ("reuse", "blend"),
            "exact": record["tokens_exact"],
            "count": record["tokens_recomputed"],
            "ttft": record["seconds"]["ttft"],
        }

    return {
        "methods": list(methods),
        "first": next((name for name, m in methods.items() if m["ratio"] is not None), FULL),
        "prompts": shown,
        "lines": {i: {m: line(predictions[i, m]) for m in methods} for i in ids},
    }
