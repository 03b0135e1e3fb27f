"""`blendserve bench document`: a document that was read before, and a question about it.

One chunk right behind the prefix, so that its stored KV is exact: the first token is that of full prefill, to rounding,
which is measured beside the time. First a document of the length that was asked for, then one as long as the reader's
context allows: the manual.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from blendserve.bench.config import DocumentConfig
from blendserve.bench.figures import Figures, Update, interleaved
from blendserve.bench.harness import Harness, forward, scratch
from blendserve.bench.machine import where
from blendserve.bench.tables import Table, ms, plain
from blendserve.bench.ttft import figures_of
from blendserve.bench.workload import make_workload
from blendserve.evaluate.fidelity import kl
from blendserve.evaluate.methods import FULL, TRANSFORMERS
from blendserve.models.loader import Reader, load_reader

Say = Callable[[str], None]

STORED = "prefix"  # the method that uses the first chunk's KV alone, exactly
SPARE = 16  # tokens of the context that the manual leaves free


def measure(
    config: DocumentConfig, say: Say = lambda text: None, update: Update = lambda done, total: None
) -> Figures:
    """Everything that the bench prints. Raises InputError, ModelError, StoreError."""
    reader = load_reader(config.reader, say)
    lengths = [config.document_tokens]
    if config.manual:
        prefix = len(make_workload(reader, 1, 64, config.question_tokens, config.seed).prompt.prefix)
        lengths.append(reader.adapter.context_limit - prefix - config.question_tokens - SPARE)
    documents = []
    for n, tokens in enumerate(lengths):
        progress = partial(_step, update, n * (config.repeats + 1), len(lengths) * (config.repeats + 1))
        documents.append(_document(config, reader, tokens, say, progress))
    return {"bench": "document", **where(config, reader), "documents": documents}


def tables(figures: Figures) -> list[Table]:
    """Times and ratios; what the time of the stored one is made of; and whether it is right."""
    found: list[Table] = []
    for document in figures["documents"]:
        rows = [
            (
                name,
                ms(method["ttft"]),
                *(plain(method["faster_than"][base]["ttft"]) for base in (TRANSFORMERS, FULL)),
                str(method.get("tokens_run", "")),
            )
            for name, method in document["methods"].items()
        ]
        stored = document["methods"][STORED]
        load = stored["stages"]["load"]
        found.append(
            (
                f"{_title(document)}; ms (least-most), faster than",
                ("method", "TTFT ms", "transformers", "full (ours)", "tokens run"),
                rows,
            )
        )
        found.append(
            (
                "The stored document: what bounds it, and how far its first token is from transformers'",
                ("MB loaded", "load, of TTFT", "the rest: ms", "KL", "same first token"),
                [
                    (
                        f"{stored['bytes_loaded'] / 1e6:,.0f}",
                        plain(load["share_of_ttft"], "{:.1%}"),
                        f"{(stored['ttft']['median'] - load['seconds']['median']) * 1e3:,.0f}",
                        f"{document['kl']:.2g}",
                        "yes" if document["same_first_token"] else "no",
                    )
                ],
            )
        )
    return found


def _document(config: DocumentConfig, reader: Reader, tokens: int, say: Say, update: Update) -> Figures:
    workload = make_workload(reader, 1, tokens, config.question_tokens, config.seed)
    variants = config.variants
    with scratch(config.folder) as folder, Harness(reader, workload, variants, folder) as contest:
        say(f"Storing the KV of {tokens:,} tokens")
        contest.precompute()
        took = interleaved({v.name: partial(contest.run, v) for v in variants}, config.repeats, update)
        stored = contest.logits(next(v for v in variants if v.name == STORED))
        plainly = forward(reader.adapter, workload.prompt.ids)
    return {
        "tokens": tokens,
        "question": config.question_tokens,
        "prompt": len(workload.prompt),
        "methods": {v.name: figures_of(took, v.name) for v in variants},
        "kl": kl(plainly[None].float(), stored[None].float())[0],
        "same_first_token": bool(plainly.argmax() == stored.argmax()),
    }


def _title(document: Figures) -> str:
    return f"A document of {document['tokens']:,} tokens and {document['question']} of question"


def _step(update: Update, before: int, total: int, done: int, _: int) -> None:
    update(before + done, total)
