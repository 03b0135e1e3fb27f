"""metrics.json in words and tables, for the page, the terminal and the documents that quote them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from blendserve.evaluate.methods import FULL
from blendserve.evaluate.tasks import PERPLEXITY

Figures = Mapping[str, Any]

QUALITY = {  # column: (field, digits)
    "mean KL / reuse's": ("mean_kl_share", 3),
    "first-token KL / reuse's": ("first_kl_share", 3),
    "mean KL, nats": ("mean_kl", 4),
    "agreement F1": ("agreement", 3),
    "identical answers": ("identical", 3),
}
SCORES = {"F1": "f1", "exact match": "em", "Rouge-L": "rouge_l"}
TAIL = "KL / reuse's on a prompt, p95", "worst"
TAIL_COLUMNS = ("against", "prompts made worse", "ratio, p95", "worst")
STAGES = ("load", "select", "correct", "decode")


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure, what stands below it in small print, whether it is significant, and where a click on it leads."""

    text: str
    below: str = ""
    sure: bool = False
    link: str = ""


@dataclass(frozen=True, slots=True)
class Sheet:
    """One table; its first column names methods."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def facts(figures: Figures) -> list[str]:
    """What was measured, where."""
    where, reader, recall = figures["environment"], figures["reader"], figures["recall"]
    return [
        f"{asked(figures)} of {Path(figures['dataset']).name}, {figures['setting']}",
        *([f"recall of needed titles {interval(recall)}"] if recall else []),
        f"{reader['model']} in {reader['dtype']} on {reader['device']}",
        f"{where['machine']}, {reader['threads']} threads",
        f"torch {where['torch']}, transformers {where['transformers']}",
        f"blendserve {where['blendserve']} {where['commit']}".strip(),
    ]


def asked(figures: Figures) -> str:
    """How many questions, and prompts where there are shuffles."""
    questions, prompts = figures["questions"], figures["prompts"]
    return f"{questions} questions" + (f" in {prompts} prompts" if prompts > questions else "")


def headline(figures: Figures) -> list[str]:
    """The comparison with CacheBlend's rule in words; nothing when it did not run."""
    said = figures["headline"]
    if said is None:
        return []
    fast, near, rule = said["at_its_fidelity"], said["in_its_time"], said["rule"]
    full = f"TTFT {interval(fast['times_faster_than_full'])} times lower than full prefill's"
    faster = (
        f"{fast['method']} is fastest: {full} and {interval(fast['times_faster_than_rule'])} times lower than {rule}'s; "
        f"its mean KL is {interval(fast['mean_kl_share_of_rule'])} of {rule}'s"
    )
    nearer = (
        f"{near['method']} is nearest to full prefill: its mean KL is {interval(near['mean_kl_share_of_rule'])} of "
        f"{rule}'s and {interval(near['mean_kl_share'])} of full reuse's"
    )
    nobody = f"no other method is faster ({full})", "no other method is nearer to full prefill"
    return [
        f"At a fidelity no worse than {rule}, {nobody[0] if fast['method'] == rule else faster}.",
        f"In no more time than {rule}, {nobody[1] if near['method'] == rule else nearer}.",
    ]


def tables(figures: Figures) -> list[Sheet]:
    """All there is to tell."""
    methods = figures["methods"]
    return [
        quality(figures),
        *_tails(figures),
        time(methods),
        *_codecs(methods),
        *edits(methods),
        *_against_full(figures),
        *_by_type(methods),
        *_spending(figures["spending"]),
    ]


def quality(figures: Figures) -> Sheet:
    """Fidelity and scores of each method."""
    methods, metric = figures["methods"], figures["metric"]
    columns = dict(QUALITY)
    if metric == PERPLEXITY:
        columns |= {metric: ("score", 3), f"{metric} / full's": ("score_against_full", 4)}
    else:
        own = {} if metric in SCORES else {metric: ("score", 3)}
        columns |= {**own, **{name: (field, 3) for name, field in SCORES.items()}}
    rows = [
        [Cell(name), *(_cell(m[field], digits) for field, digits in columns.values())]
        for name, m in methods.items()
    ]
    note = (
        "Fidelity to full prefill, then scores against the golds; in small print, 95% bootstrap intervals over the "
        "questions."
    )
    return Sheet("Quality", note, ("method", *columns), rows)


def _tails(figures: Figures) -> list[Sheet]:
    """How far methods fall on single prompts, and on which; nothing where no method reuses anything."""
    found = [(name, tail) for name, m in figures["methods"].items() for tail in m["tails"]]
    if not found:
        return []
    floor, rounding = figures["kl_floor"], figures["kl_rounding"]
    note = (
        "Each prompt's own mean KL beside that of another method on the same prompt: full reuse, and the same method "
        f"without its correction. KLs below {floor:g} nats count as that."
        + (f" Rounding alone makes up to {rounding:.2g} (95% of prompts)." if rounding is not None else "")
    )
    rows = [
        [
            Cell(name),
            Cell(tail["against"]),
            _share(tail["worse"]),
            *(Cell(f"{tail[which]:.2f}") for which in ("p95", "worst")),
            _prompt(tail["prompts"][0]["id"], name),
        ]
        for name, tail in found
    ]
    worst = [
        [
            Cell(name),
            Cell(tail["against"]),
            _prompt(prompt["id"], name),
            Cell(f"{prompt['ratio']:.2f}"),
            *(Cell(f"{prompt[which]:.4f}") for which in ("mean_kl", "other")),
        ]
        for name, tail in found
        for prompt in tail["prompts"]
    ]
    listed = (
        "The prompts with the largest ratios; a click shows their tokens, and what the method recomputed."
    )
    columns = ("method", "against", "prompt", "ratio", "mean KL, nats", "the other's")
    return [
        Sheet("Tail", note, ("method", *TAIL_COLUMNS, "on prompt"), rows),
        Sheet("Worst prompts", listed, columns, worst),
    ]


def _prompt(id: str, method: str) -> Cell:
    """The prompt's name, with a link to its tokens."""
    return Cell(id, link=f"#{urlencode({'prompt': id, 'method': method})}")


def _share(found: Figures) -> Cell:
    return Cell(f"{found['mean']:.1%}", f"{found['low']:.1%} to {found['high']:.1%}")


def _beside_reuse(tails: Sequence[Figures]) -> list[Cell]:
    """The first tail is the one against full reuse."""
    return [Cell(f"{tails[0][which]:.2f}") for which in ("p95", "worst")]


def time(methods: Figures) -> Sheet:
    """Times and work of each method."""
    columns = ("TTFT ms", "p95", "times faster than full", "prefill ms", "p95", *STAGES)
    work = ("tokens recomputed", "computed", "exact", "MB loaded", "cost")
    note = (
        "Medians over the questions; TTFT runs from the passages' text to the first token. Cost: row-layers run through "
        "the model, selection included, as a share of full prefill's."
    )
    rows = [[Cell(name), *_spent(m)] for name, m in methods.items()]
    return Sheet("Time and work", note, ("method", *columns, *work), rows)


def _codecs(methods: Figures) -> list[Sheet]:
    """Size and fidelity of each method with a codec; nothing where there is none."""
    coded = {name: m for name, m in methods.items() if m["codec"]}
    if not coded:
        return []
    rows = [
        [
            Cell(name),
            Cell(f"{m['kv_smaller']:.2f}x"),
            _cell(m["mean_kl_share"], 3),
            *_beside_reuse(m["tails"]),
            _cell(methods[m["uncoded"]]["mean_kl_share"], 3) if m["uncoded"] in methods else Cell(""),
        ]
        for name, m in coded.items()
    ]
    note = (
        "Records of chunks, every byte of them counted, against uncoded KV; tables, which all chunks share, are not in "
        "it. The last column is the same method without a codec, where it ran."
    )
    columns = ("method", "KV smaller", "mean KL / reuse's", *TAIL, "uncoded")
    return [Sheet("Codecs", note, columns, rows)]


def brief(figures: Figures) -> tuple[Sequence[str], list[list[str]]]:
    """Columns and rows for a terminal."""
    columns = (
        "method",
        "KL / reuse's",
        "agree",
        "same",
        figures["metric"],
        "TTFT ms",
        "faster",
        "recomputed",
    )
    methods = figures["methods"]
    rows = [[name, *_brief(m)] for name, m in methods.items()]
    if not any(m["codec"] for m in methods.values()):
        return columns, rows
    smaller = [f"{m['kv_smaller']:.1f}x" if m["codec"] else "" for m in methods.values()]
    return (*columns, "KV smaller"), [[*row, cell] for row, cell in zip(rows, smaller, strict=True)]


def edits(methods: Figures) -> list[Sheet]:
    """What edits cost, and whether what was true before them is ever said; nothing where none were made."""
    costs = [
        [
            Cell(name),
            _cell(m["mean_kl_share"], 3),
            _cell(m["edited"]["mean_kl_times"], 2),
            Cell(f"{m['tails'][-1]['p95']:.2f}" if m["tails"] else ""),
            Cell(f"{m['tails'][-1]['worst']:.1f}" if m["tails"] else ""),
            _cell(m["agreement"], 3),
            _cell(m["edited"]["ttft_times"], 2),
            _cell(m["times_faster"], 2),
            Cell(f"{m['edited']['fresh']:.0f}"),
        ]
        for name, m in methods.items()
        if "edited" in m
    ]
    columns = (
        "method", "mean KL / reuse's", "/ exact hits'", "on a prompt, p95", "worst", "agreement F1",
        "TTFT / exact hits'", "times faster than full", "fresh tokens",
    )  # fmt: skip
    note = "Earlier revisions of the passages are stored. Exact hits: the same method where the passages are."
    parts = ("says_rival", "says_gold", "questions", "says_rival_of_all")
    said = [
        [Cell(name), *(Cell(str(m["facts"][part])) for part in parts)]
        for name, m in methods.items()
        if "facts" in m
    ]
    heads = ("method", "says what was", "says what is", "questions", "says what was, of all questions")
    about = "Questions to which full prefill says what is true since the edit, and what others say to them."
    return [
        *([Sheet("Edited passages", note, columns, costs)] if costs else []),
        *([Sheet("Edited facts", about, heads, said)] if said else []),
    ]


def brief_tail(figures: Figures) -> tuple[Sequence[str], list[list[str]]]:
    """Columns and rows for a terminal; no rows where no method reuses anything."""
    sheets = _tails(figures)
    columns = ("method", *TAIL_COLUMNS, "on prompt")
    return columns, [[cell.text for cell in row] for row in sheets[0].rows] if sheets else []


def _brief(figures: Figures) -> list[str]:
    share, faster = figures["mean_kl_share"], figures["times_faster"]
    return [
        f"{share['mean']:.3f} ({share['low']:.2f}-{share['high']:.2f})" if share else "",
        *(f"{figures[score]['mean']:.2f}" for score in ("agreement", "identical")),
        f"{figures['score']['mean']:.3f}",
        f"{1e3 * figures['seconds']['ttft']['median']:.0f}",
        f"{faster['mean']:.1f}x" if faster else "",
        f"{figures['tokens_recomputed'] / figures['tokens_prompt']:.0%}",
    ]


def _spent(figures: Figures) -> list[Cell]:
    def ms(stage: str, which: str = "median") -> Cell:
        return Cell(f"{1e3 * figures['seconds'][stage][which]:.0f}")

    return [
        ms("ttft"),
        ms("ttft", "p95"),
        _cell(figures["times_faster"], 2),
        ms("prefill"),
        ms("prefill", "p95"),
        *(ms(stage) for stage in STAGES),
        *(Cell(f"{figures[f'tokens_{kind}']:.0f}") for kind in ("recomputed", "computed", "exact")),
        Cell(f"{figures['bytes_loaded'] / 1e6:.1f}"),
        Cell(f"{figures['cost']:.3f}"),
    ]


def _against_full(figures: Figures) -> list[Sheet]:
    """Nothing where there are no golds to score answers by."""
    metric = figures["metric"]
    if metric == PERPLEXITY:
        return []
    own = [] if metric in SCORES else [metric]
    rows = [
        [
            Cell(name),
            *(_difference(m["score_against_full"]) for _ in own),
            *(_difference(m["against_full"][score]) for score in SCORES.values()),
        ]
        for name, m in figures["methods"].items()
        if name != FULL
    ]
    note = "Paired differences to full prefill, prompt by prompt; bold where the interval excludes zero."
    return [Sheet("Scores, minus full prefill's", note, ("method", *own, *SCORES), rows)]


def _by_type(methods: Figures) -> list[Sheet]:
    """F1 by question type, where the data knows any."""
    sizes = {kind: found["n"] for kind, found in methods[FULL].get("f1_by_type", {}).items()}
    if not sizes:
        return []
    rows = [[Cell(name), *(_cell(m["f1_by_type"][kind]) for kind in sizes)] for name, m in methods.items()]
    columns = ("method", *(f"{kind or 'none'} ({n})" for kind, n in sizes.items()))
    return [Sheet("F1 by question type", "", columns, rows)]


def _spending(found: Figures) -> list[Sheet]:
    """What the recomputed tokens were spent on, by method."""
    if not found:
        return []
    rows = [
        [Cell(name), *(_percent(part) for part in (*spent["quarters"], spent["needed"]))]
        for name, spent in found.items()
    ]
    even = next(iter(found.values()))["needed_of_context"]
    columns = ("method", "first quarter", "second", "third", "last", "needed passages")
    note = (
        "Shares of the recomputed tokens, by place in the context; behind the prefix the first chunk is never chosen."
        + (f" The needed passages are {even:.0%} of the context." if even is not None else "")
    )
    return [Sheet("Where the budget goes", note, columns, rows)]


def _percent(part: float | None) -> Cell:
    return Cell("" if part is None else f"{part:.0%}")


def _difference(found: Figures, digits: int = 3) -> Cell:
    low, high = found["low"], found["high"]
    return Cell(
        f"{found['mean']:+.{digits}f}", f"{low:+.{digits}f} to {high:+.{digits}f}", low > 0 or high < 0
    )


def _cell(found: Figures | None, digits: int = 3) -> Cell:
    if found is None:
        return Cell("")
    return Cell(f"{found['mean']:.{digits}f}", f"{found['low']:.{digits}f} to {found['high']:.{digits}f}")


def interval(found: Figures | None, digits: int = 2) -> str:
    """In a sentence."""
    cell = _cell(found, digits)
    return f"{cell.text} ({cell.below})" if cell.text else "?"
