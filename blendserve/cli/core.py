"""`blendserve demo`, `index`, `precompute` and `ask`."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from blendserve import console
from blendserve.cli.options import (
    MANY,
    IndexArg,
    IndexOpt,
    JsonOpt,
    RayOpt,
    make_app,
    option,
    single_command,
    with_settings,
)
from blendserve.config import Config
from blendserve.console import Output
from blendserve.errors import InputError
from blendserve.paths import check_output_folder, index_folder

if TYPE_CHECKING:
    from blendserve.blend.precompute import PrecomputeEstimate, PrecomputeReport
    from blendserve.core import Document, TokenIds
    from blendserve.engine.engine import Engine
    from blendserve.retrieve import ReadReport

LONG_S = 120.0  # of a run whose time is told in minutes, with what makes it shorter

log = logging.getLogger(__name__)
CorpusArg = Annotated[
    Path,
    typer.Argument(
        help="Corpus: a folder of files (text, Markdown, source code, CSV, JSON; with the extra `documents` PDF, "
        "HTML, Word, PowerPoint, Excel, EPUB, e-mail), one such file, or a JSONL file with `text` and optional "
        "`title` and `id` per line."
    ),
]
StrictOpt = Annotated[bool, typer.Option("--strict", help="Stop at the first file that cannot be read.")]
TagOpt = Annotated[
    list[str] | None,
    typer.Option(
        "--tag", help="Tag of these documents, for keys that may read only some. Repeatable.", metavar=MANY
    ),
]
index = make_app("Build and update indexes of documents.")


@single_command
def demo(
    index: IndexOpt = "indexes/demo",
    model: str | None = option(
        None, "Model to answer with: a bundled name, a folder or a Hugging Face id.", metavar="MODEL"
    ),
    page: bool = option(False, "Serve a web page over the index instead. Ctrl-C ends it.", "--page"),
    host: str = option(
        "127.0.0.1",
        "Address of the page's server. Where others can reach it, the printed URL has an API key.",
        envvar="BLENDSERVE_DEMO_HOST",
    ),
    port: int = option(8000, "Port of the page's server; 0 chooses a free one."),
) -> None:
    """Ask about Python without and with a cache, and compare methods.

    The index contains Python's language reference. The command answers questions by full prefill and from precomputed
    KV, and times each method on the same prompt. With --page, you ask in a web page instead. With another model, give
    another index folder, or the index is replaced.
    """
    from blendserve.demo import run, serve_page  # torch and all the rest: seconds

    model = model or Config().model.name
    folder = check_output_folder(index_folder(index))
    if page:
        serve_page(folder, model, host, port)
    else:
        run(folder, model)


@index.command()
@with_settings("model.name", "retrieve.chunk_tokens", "retrieve.embedder")
def build(
    corpus: CorpusArg, index: IndexArg, settings: Config, strict: StrictOpt = False, tag: TagOpt = None
) -> Output:
    """Build an index of a corpus.

    An existing index of the same name is replaced. The command lists the files that it did not read, and why.
    """
    from blendserve.engine.engine import Engine  # torch and all the rest: seconds
    from blendserve.retrieve import ReadReport, read_documents

    check_output_folder(index_folder(index))
    report = ReadReport()
    documents = [_tagged(document, tag) for document in read_documents(corpus, report, strict)]
    with console.progress("Embedding", "characters") as update:
        engine = Engine.build(index, documents, settings, update)
    with engine:
        return _facts(engine, report=report)


@index.command()
@with_settings("model.name")
def add(
    corpus: CorpusArg, index: IndexArg, settings: Config, strict: StrictOpt = False, tag: TagOpt = None
) -> Output:
    """Add the new documents of a corpus to an index.

    A document with a known id and new text replaces the old one. Unchanged documents are skipped. The command lists the
    files that it did not read, and why.
    """
    from blendserve.engine.engine import Engine  # torch and all the rest: seconds
    from blendserve.retrieve import ReadReport, read_documents

    check_output_folder(index_folder(index))
    report = ReadReport()
    documents = [_tagged(document, tag) for document in read_documents(corpus, report, strict)]
    with Engine.open(index, settings) as engine:
        with console.progress("Embedding", "characters") as update:
            added = engine.add(documents, update)
        return _facts(engine, report=report, added=added)


def _tagged(document: Document, tags: list[str] | None) -> Document:
    """The document with these tags in place of its own, if any are given."""
    return replace(document, metadata={**document.metadata, "tags": tags}) if tags else document


@index.command()
@with_settings("model.name")
def delete(
    index: IndexArg,
    doc_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of the documents to remove.")],
    settings: Config,
) -> Output:
    """Remove documents with their passages, vectors and KV.

    The exit code is 1 if the index had none of them.
    """
    from blendserve.engine.engine import Engine  # torch and all the rest: seconds

    check_output_folder(index_folder(index))
    with Engine.open(index, settings) as engine:
        deleted = engine.delete(*doc_ids)
        return _facts(engine, int(not deleted), deleted=deleted)


def _facts(engine: Engine, exit_code: int = 0, report: ReadReport | None = None, **changes: int) -> Output:
    """An index after a command. report: of the corpus. changes: numbers of documents."""
    assert engine.index is not None
    path = engine.index.path
    facts: dict[str, Any] = {"index": str(path), **asdict(engine.index.manifest), **changes}
    if report:
        facts |= asdict(report)
    change = "".join(f" ({count} {what})" for what, count in changes.items())
    text = (
        f"{path}: {facts['documents']} documents{change}, {facts['passages']} passages, "
        f"{facts['vectors']} vectors; next: blendserve precompute {path}"
    )
    lines = report.lines() if report else []
    return Output(facts, "\n".join([*lines, text]), exit_code)


@single_command
@with_settings("model.name", "store.location", "store.codec")
def precompute(
    index: IndexArg,
    settings: Config,
    shard: str = option("0/1", "Part of the work to do, as i/n with i from 0; parts can share a store."),
    workers: int | None = option(None, "Number of Ray workers. [default: compute in this process]", min=1),
    ray: RayOpt = None,
) -> Output:
    """Compute and store the KV of an index's chunks.

    The command first prints how many tokens it will compute, and how much disk they need. It skips stored chunks, so
    you can stop it and run it again at any time. At the end it fits a correction prior on a sample of the chunks, if the
    store has none. The exit code is 1 if a chunk is missing at the end.

    Several processes or machines with one store (a file or a server): run the same command in each. A process leases
    the chunks that it computes. The others skip these and check them again at the end:

    \b
        blendserve precompute docs -c configs/precompute_worker.yaml      # on each machine

    Several machines with a store each, merged afterwards:

    \b
        blendserve precompute docs --shard 0/2 --store kv-0      # first machine
        blendserve precompute docs --shard 1/2 --store kv-1      # second machine
        blendserve store merge docs kv-0 kv-1

    The GPUs of one machine, into one store:

    \b
        CUDA_VISIBLE_DEVICES=0 blendserve precompute docs &
        CUDA_VISIBLE_DEVICES=1 blendserve precompute docs &
        wait

    The machines of a Ray cluster, or the GPUs or cores of this machine. The workers write to one store that all of them
    can reach (docs/how-to/ray-cluster.md). If a worker or machine dies, its stored chunks remain:

    \b
        blendserve precompute docs -c configs/precompute_worker.yaml --workers 4
        blendserve precompute docs -c configs/precompute_worker.yaml --workers 4 --ray auto
    """
    from blendserve.engine.engine import Engine  # torch and all the rest: seconds

    part = _shard(shard)
    if ray and not workers:
        raise InputError("--ray is the cluster for --workers: give --workers, too")
    if workers and part != (0, 1):
        raise InputError("--shard is for independent processes: leave it out with --workers")
    with Engine.open(index, settings) as engine:
        chunks = engine.chunks(shard=part)
        expected = _estimate(engine, chunks)
        try:
            report = _precompute(engine, index, part, workers, ray)
        except KeyboardInterrupt:
            log.info("stopped: the computed chunks are stored; run the same command to resume")
            raise typer.Exit(130) from None
        if engine.blender.priors.current() is None:
            log.info(no_prior(engine.config, sum(map(len, {*chunks}))))
        return _precomputed(report, engine.missing(shard=part), expected)


def _precompute(
    engine: Engine, index: str, part: tuple[int, int], workers: int | None, ray: str | None
) -> PrecomputeReport:
    """Compute one share of an index's chunks, and fit the prior."""
    per_token = engine.model.decoder.kv_bytes_per_token
    computing = console.progress("Precomputing", "tokens", per_token)
    fitting = console.progress("Fitting the correction prior", "tokens")
    with computing as computed, fitting as fitted:
        if workers:
            from blendserve.ray.precompute import precompute_index

            return precompute_index(engine, index_folder(index), workers, ray, computed, fitted)
        return engine.precompute(None, part, computed, fitted)


def _precomputed(report: PrecomputeReport, missing: int, expected: PrecomputeEstimate) -> Output:
    """What `precompute` prints. missing: chunks that are not stored at its end."""
    rate = report.tokens / report.seconds if report.seconds else 0.0
    text = (
        f"{report.chunks} chunks: {report.computed} computed ({report.tokens:,} tokens, {rate:,.0f} tokens/s, "
        f"{report.bytes / 1e6:,.0f} MB decoded), {report.skipped} already stored, {missing} missing"
    )
    values = {**asdict(report), "expected_bytes": expected.bytes}
    values["expected_seconds"] = expected.seconds
    values |= {"tokens_per_second": round(rate, 1), "missing": missing}
    return Output(values, text, int(missing > 0))


def no_prior(config: Config, n_tokens: int) -> str:
    """Say why there is no correction prior. n_tokens: of the distinct chunks that it would be fitted on."""
    from blendserve.blend.priors import MIN_TOKENS  # torch: a second
    from blendserve.registry import CORRECTIONS

    name = config.blend.correction
    if not CORRECTIONS.load(name).uses_prior:
        return f"no correction prior fitted: correction {name!r} uses none"
    return f"no correction prior fitted: it needs {MIN_TOKENS:,} tokens of chunks, and there are {n_tokens:,}"


def _estimate(engine: Engine, chunks: Sequence[TokenIds]) -> PrecomputeEstimate:
    """Log what a run will compute and the room that this needs in the store, and return it."""
    from blendserve.blend.cost import chunk_work  # torch and all the rest: seconds

    costs = engine.blender.planner.calibrate()
    n_before = len(engine.prompts.kv_context)
    found = engine.blender.writer.estimate(chunks, lambda n: costs.seconds(chunk_work(n, n_before)))
    config = engine.config.store
    if found.chunks:
        log.info(
            "%d chunks to compute: %d tokens, about %s as %s and %s of this machine",
            found.chunks,
            found.tokens,
            decimal(found.bytes),
            config.codec,
            _time(found.seconds),
        )
    if found.seconds > LONG_S:
        log.info(
            "compute fewer: `precompute` by --shard on several machines, or leave chunks to their first request"
        )
    stats = engine.store.stats(config.namespace)
    room = max(0, stats.cap_bytes - stats.pinned_bytes)
    if found.bytes > room:
        log.warning(
            "the store has room for %s: raise store.cap_gb, or choose a codec that stores less (--codec)",
            decimal(room),
        )
    return found


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < LONG_S else f"{seconds / 60:.0f} min"


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit()):
        raise InputError(f"shard {text!r} is not i/n: give for example 0/2 on one machine and 1/2 on another")
    return int(part), int(parts)


@single_command
@with_settings(
    *("model.name", "retrieve.top_k", "blend.method", "blend.policy", "blend.ratio", "blend.correction"),
    *("blend.near", "decode.max_new_tokens", "decode.temperature", "decode.top_p", "decode.seed"),
    "decode.stop",
)
def ask(
    question: Annotated[str, typer.Argument(help="Question to answer from the retrieved passages.")],
    settings: Config,
    index: IndexOpt = "indexes/demo",
    json: JsonOpt = False,
) -> None:
    """Answer a question from an index.

    The command streams the answer. Then it prints the sources, the numbers of reused and recomputed tokens, and the
    time to first token.
    """
    if not question.strip():
        raise InputError("the question is empty: ask something")
    gc.disable()  # imports and models create objects that live until exit: scanning them is a seventh of the start
    try:
        from blendserve.demo import print_answer_details  # torch and all the rest: seconds
        from blendserve.engine.engine import Engine
        from blendserve.kdn.pull import resolve

        index, settings = resolve(index, settings)
        opened = Engine.open(index, settings)
    finally:
        gc.freeze()
        gc.enable()
    with opened as engine:
        stream = engine.stream(question)
        if json:
            console.print_json(stream.answer().to_dict())
            return
        for piece in stream:
            console.out.print(piece, end="", markup=False)
        print_answer_details(stream.answer())
