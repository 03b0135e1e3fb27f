"""The command line, in pipeline order: parses, calls, prints. All logic is in the package."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from blendserve import console
from blendserve.bench.cli import bench_app
from blendserve.config import (
    BlendConfig,
    Config,
    DecodeConfig,
    ReaderConfig,
    RetrieveConfig,
    changed,
)
from blendserve.errors import BlendserveError, InputError
from blendserve.serve.cli import keys_app, serve

app = typer.Typer(
    help="Retrieval-augmented generation that reads nothing twice.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
index_app = typer.Typer(help="Documents to passages to vectors.", no_args_is_help=True)
store_app = typer.Typer(help="The KV store of an index.", no_args_is_help=True)
app.add_typer(index_app, name="index")
app.add_typer(store_app, name="store")
app.add_typer(bench_app, name="bench")
app.add_typer(keys_app, name="keys")

IndexArg = Annotated[str, typer.Argument(help="Index: a folder, or a name in indexes/.")]
IndexOpt = Annotated[str, typer.Option("--index", "-i", help="Index: a folder, or a name in indexes/.")]
ConfigOpt = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file with settings.")]
ModelOpt = Annotated[
    str | None,
    typer.Option(help=f"Reader: bundled name, folder or hub id. [default: {ReaderConfig().model}]"),
]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _default(value: object) -> str:
    return f"[default: {value}]"


def main(command: Sequence[str] = ()) -> None:
    """Entry point, of one command for a script: an error of ours is one line and exit code 2; Ctrl-C is 130."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        app([*command, *sys.argv[1:]])
    except BlendserveError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)


@app.command()
def demo(index: IndexOpt = "indexes/demo") -> None:
    """Build a small index, precompute its KV, answer three questions and compare the methods."""
    from blendserve import demo as job

    job.run(Path(index))


@app.command()
def doctor(config: ConfigOpt = None, model: ModelOpt = None, json: JsonOpt = False) -> None:
    """Check on a reader's real weights that blending is right, and measure the machine anew. Exit code 1 if it is not."""
    from blendserve.blend.cost import calibrated
    from blendserve.kernels.cpu.isa import LEVELS
    from blendserve.kernels.verify import cpu_status
    from blendserve.models.gate import check
    from blendserve.models.loader import load_reader
    from blendserve.paths import cache_folder

    reader = load_reader(_settings(config, model).reader, console.say)
    report = check(reader)
    costs = calibrated(reader.adapter, reader.fingerprint, cache_folder() / "profit", console.say, fresh=True)
    together, anywhere = reader.adapter.attention_backends
    if json:
        kernels = {**_as_dict(cpu_status(LEVELS["avx512_bf16"])), "attention": [together, anywhere]}
        console.print_json({**report.to_dict(), "seconds": _as_dict(costs), "kernels": kernels})
    else:
        rows = [
            (
                row.check,
                f"{row.value:.2g}",
                f"{'>=' if row.above else '<='} {row.bound:.2g}",
                "ok" if row.passed else "FAILED",
            )
            for row in report.rows
        ]
        where = f"{reader.adapter.device}, {str(reader.adapter.dtype).removeprefix('torch.')}"
        console.table(f"{reader.name} on {where}", ("check", "measured", "wanted", ""), rows)
        console.out.print(
            "blending is right on this reader" if report.passed else f"cannot blend: {report.failure}"
        )
        console.out.print(
            f"method auto reckons with {costs.per_row * 1e3:.3g} ms a computed token, {costs.per_loaded * 1e6:.3g} us a "
            f"loaded one, {costs.per_pair * 1e9:.3g} ns a pair attended and {costs.per_pass * 1e3:.3g} ms a pass"
        )
        console.out.print(f"on the CPU in bf16: {cpu_status(LEVELS['avx512_bf16']).reason}")
        console.out.print(f"attention: rows side by side by {together}, others by {anywhere}")
    if not report.passed:
        raise typer.Exit(1)


@index_app.command("build")
def index_build(
    corpus: Annotated[Path, typer.Argument(help="JSONL file, folder of .txt/.md, or one such file.")],
    index: IndexArg,
    config: ConfigOpt = None,
    model: ModelOpt = None,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(help=f"Reader tokens a chunk, at most. {_default(RetrieveConfig().chunk_tokens)}"),
    ] = None,
    embedder: Annotated[
        str | None,
        typer.Option(help=f"Bundled name, folder or hub id. {_default(RetrieveConfig().embedder)}"),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help=f"flat or hnsw. {_default(RetrieveConfig().index)}")
    ] = None,
    json: JsonOpt = False,
) -> None:
    """Build an index from a corpus, in place of any that is there."""
    from blendserve.engine import Engine
    from blendserve.retrieve import read_documents

    settings = _settings(config, model)
    retrieve = changed(settings.retrieve, chunk_tokens=chunk_tokens, embedder=embedder, index=kind)
    settings = changed(settings, retrieve=retrieve.model_dump())
    documents = list(read_documents(corpus))
    with console.progress("Embedding", "windows") as update:
        engine = Engine.build(index, documents, settings, console.say, update)
    with engine:
        _print_index(engine, json)


@index_app.command("add")
def index_add(
    corpus: Annotated[Path, typer.Argument(help="JSONL file, folder of .txt/.md, or one such file.")],
    index: IndexArg,
    config: ConfigOpt = None,
    model: ModelOpt = None,
    json: JsonOpt = False,
) -> None:
    """Add documents to an index; those that it holds already add nothing."""
    from blendserve.retrieve import read_documents

    documents = list(read_documents(corpus))
    with _open(index, _settings(config, model)) as engine:
        with console.progress("Embedding", "windows") as update:
            added = engine.add(documents, update)
        _print_index(engine, json, added=added)


@index_app.command("delete")
def index_delete(
    index: IndexArg,
    doc_ids: Annotated[list[str], typer.Argument(help="Documents, by id.")],
    config: ConfigOpt = None,
    model: ModelOpt = None,
    json: JsonOpt = False,
) -> None:
    """Remove documents with their passages, vectors and KV. Exit code 1 if none of them was there."""
    with _open(index, _settings(config, model)) as engine:
        deleted = engine.delete(*doc_ids)
        _print_index(engine, json, deleted=deleted)
    if not deleted:
        raise typer.Exit(1)


@app.command()
def precompute(
    index: IndexArg,
    config: ConfigOpt = None,
    model: ModelOpt = None,
    shard: Annotated[
        str,
        typer.Option(help="i/n: this GPU's or machine's share of the work, i from 0; a store may be shared."),
    ] = "0/1",
    store: Annotated[
        Path | None, typer.Option(help="Folder of the KV store. [default: the index's kv/]")
    ] = None,
    json: JsonOpt = False,
) -> None:
    """Compute and store the KV of every chunk that is not there yet. Stop it and start it again at any time."""
    settings = _settings(config, model, store)
    with _open(index, settings) as engine:
        part = _shard(shard)
        per_token = engine.reader.adapter.kv_bytes_per_token
        try:
            with console.progress("Precomputing", "tokens", per_token) as update:
                report = engine.precompute(shard=part, progress=update)
        except KeyboardInterrupt:
            console.say("stopped: what was computed is stored; the same command goes on from there")
            raise typer.Exit(130) from None
        missing = engine.missing(shard=part)
        rate = report.tokens / report.seconds if report.seconds else 0.0
        result = {**_as_dict(report), "tokens_per_second": round(rate, 1), "missing": missing}
        if json:
            console.print_json(result)
        else:
            console.out.print(
                f"{report.chunks} chunks: {report.computed} computed ({report.tokens:,} tokens, {rate:,.0f} tokens/s, "
                f"{report.bytes / 1e6:,.0f} MB), {report.skipped} there already, {missing} missing"
            )
        if missing:
            raise typer.Exit(1)


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    index: IndexOpt = "indexes/demo",
    config: ConfigOpt = None,
    model: ModelOpt = None,
    top_k: Annotated[int | None, typer.Option(help=f"Passages. {_default(RetrieveConfig().top_k)}")] = None,
    method: Annotated[
        str | None, typer.Option(help=f"auto, blend, full, prefix or reuse. {_default(BlendConfig().method)}")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help=f"query, deviation, chunk_head, random, none or all. {_default(BlendConfig().policy)}"
        ),
    ] = None,
    ratio: Annotated[
        str | None,
        typer.Option(
            help=f"Share of the context tokens recomputed, or auto. {_default(BlendConfig().ratio)}"
        ),
    ] = None,
    correction: Annotated[
        str | None, typer.Option(help=f"ridge, shift or none. {_default(BlendConfig().correction)}")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help=f"Length of the answer. {_default(DecodeConfig().max_new_tokens)}")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 = greedy. [default: 0]")] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus. [default: 1]")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of sampling and of the random policy. [default: 0]")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given again.")] = None,
    json: JsonOpt = False,
) -> None:
    """Answer a question from an index, streamed."""
    from blendserve.demo import print_sources

    blend = {"method": method, "policy": policy, "ratio": ratio, "correction": correction}
    decode = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "stop": stop or None,
    }
    settings = _settings(config, model)
    settings = changed(
        settings,
        blend=changed(settings.blend, **blend, seed=seed).model_dump(),
        decode=changed(settings.decode, **decode, seed=seed).model_dump(),
    )
    if not question.strip():
        raise InputError("the question is empty: ask something")
    with _open(index, settings) as engine:
        stream = engine.stream(question, top_k=top_k)
        if json:
            console.print_json(stream.answer().to_dict())
            return
        for piece in stream:
            console.out.print(piece, end="", markup=False)
        print_sources(stream.answer())


@app.command()
def evaluate(
    dataset: Annotated[
        str, typer.Option(help="generated, 2wikimqa, 2wikimultihopqa, or a file of any of their forms.")
    ] = "generated",
    corpus: Annotated[
        Path | None, typer.Option(help="Passages of the questions, if not beside them as corpus.json.")
    ] = None,
    setting: Annotated[
        str | None,
        typer.Option(help="closed (each question's own passages) or open (retrieved). [default: closed]"),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Passages retrieved, in the open setting. [default: 10]")
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Tokens of a chunk. [default: a chunk is a passage]")
    ] = None,
    chunks: Annotated[int | None, typer.Option(help="Chunks of a prompt, at most. [default: all]")] = None,
    limit: Annotated[int | None, typer.Option(help="Questions, the first ones. [default: all]")] = None,
    half: Annotated[
        str | None,
        typer.Option(
            help="first or second: every other question, to choose on one and confirm on the other. [default: both]"
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Words with commas: prefix, transformers, query+shift, deviation[1,2]@0.15, query/bos."
        ),
    ] = None,
    ratios: Annotated[
        str | None, typer.Option(help="Of the methods that name none. [default: 0.05,0.15]")
    ] = None,
    behind: Annotated[
        str | None,
        typer.Option(help="What chunk KV is computed behind: prefix, primer, bos or none. [default: prefix]"),
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Length of an answer. [default: 32]")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of distractors and the random policy. [default: 0]")
    ] = None,
    config: ConfigOpt = None,
    model: ModelOpt = None,
    store: Annotated[
        Path | None, typer.Option(help="Folder of the KV store. [default: one for all runs]")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the run. [default: by data set and setting]")] = None,
    runs: Annotated[Path, typer.Option(help="Folder of runs.")] = Path("runs"),
    json: JsonOpt = False,
) -> None:
    """Compare methods over a data set: fidelity to full prefill, scores, times. The same command again goes on."""
    from blendserve.evaluate.job import evaluate as job
    from blendserve.evaluate.plan import EvaluateConfig, settings_from
    from blendserve.evaluate.tables import brief, headline
    from blendserve.evaluate.variants import split_list

    plan = changed(
        EvaluateConfig(dataset=dataset, corpus=corpus, window=window, chunks=chunks, limit=limit),
        setting=setting,
        top_k=top_k,
        half=half,
        methods=split_list(methods) if methods else None,
        ratios=split_list(ratios) if ratios else None,
        seed=seed,
    )
    settings = settings_from(config)
    settings = changed(
        settings,
        reader=changed(settings.reader, model=model).model_dump(),
        prompt=changed(settings.prompt, behind=behind).model_dump(),
        store=changed(settings.store, path=store).model_dump(),
        decode=changed(settings.decode, max_new_tokens=max_new_tokens).model_dump(),
    )
    try:
        done = job(plan, settings, name, runs, console.say)
    except KeyboardInterrupt:
        console.say("stopped: what was predicted is kept; the same command goes on from there")
        raise typer.Exit(130) from None
    if json:
        console.print_json({"folder": str(done.folder), **done.figures})
        return
    console.table(f"{done.figures['questions']} questions", *brief(done.figures))
    for line in headline(done.figures):
        console.out.print(line, markup=False)
    console.out.print(f"More in {done.folder / 'report.html'}", markup=False)


app.command()(serve)


@store_app.command("stats")
def store_stats(index: IndexArg, config: ConfigOpt = None, json: JsonOpt = False) -> None:
    """What the store holds."""
    with _open_store(index, config) as store:
        _print_dict(store.stats().to_dict(), json)


@store_app.command("verify")
def store_verify(
    index: IndexArg,
    config: ConfigOpt = None,
    repair: Annotated[bool, typer.Option(help="Delete bad chunks; precompute brings them back.")] = False,
    json: JsonOpt = False,
) -> None:
    """Read and check every chunk. Exit code 1 if any is bad and stays."""
    with _open_store(index, config, read_only=not repair) as store:
        with console.progress("Verifying", "chunks") as update:
            report = store.verify(update)
        if repair:
            for key, _ in report.bad:
                store.delete(bytes.fromhex(key))
        if json:
            console.print_json({**report.to_dict(), "repaired": repair})
        else:
            console.out.print(
                f"{report.good} chunks good, {len(report.bad)} bad{', deleted' if repair else ''}"
            )
            for key, problem in report.bad:
                console.out.print(f"  {key}  {problem}", markup=False)
        if report.bad and not repair:
            raise typer.Exit(1)


@store_app.command("merge")
def store_merge(
    index: IndexArg,
    sources: Annotated[list[Path], typer.Argument(help="Folders of other stores.")],
    config: ConfigOpt = None,
    json: JsonOpt = False,
) -> None:
    """Copy chunks from other stores into an index's own. Exit code 1 if any was damaged."""
    from blendserve.store import LMDBStore
    from blendserve.store.merge import merge

    copied = damaged = 0
    with _open_store(index, config, read_only=False) as into:
        for folder in sources:
            with (
                LMDBStore(folder, into.stats().cap_bytes, read_only=True) as source,
                console.progress(str(folder), "chunks") as update,
            ):
                new, bad = merge(source, into, update)
                copied, damaged = copied + new, damaged + bad
    _print_dict({"copied": copied, "damaged": damaged}, json)
    if damaged:
        raise typer.Exit(1)


def _settings(config: Path | None, model: str | None, store: Path | None = None) -> Config:
    settings = Config.load(config) if config else Config()
    reader = changed(settings.reader, model=model)
    kept = changed(settings.store, path=store)
    return changed(settings, reader=reader.model_dump(), store=kept.model_dump())


def _open(index: str, settings: Config) -> Any:
    from blendserve.engine import Engine

    return Engine.open(index, settings, console.say)


def _open_store(index: str, config: Path | None, read_only: bool = True) -> Any:
    from blendserve.paths import index_folder
    from blendserve.store import open_store

    settings = Config.load(config) if config else Config()
    return open_store(changed(settings.store, kind="lmdb"), index_folder(index) / "kv", read_only)


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit()):
        raise InputError(f"shard {text!r} is not i/n: give for example 0/2 on one machine and 1/2 on another")
    return int(part), int(parts)


def _as_dict(report: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(report)


def _print_index(engine: Any, json: bool, **more: Any) -> None:
    index = engine.index
    facts = {"index": str(index.path), **_as_dict(index.manifest), **more}
    if json:
        console.print_json(facts)
        return
    change = "".join(f" ({count} {what})" for what, count in more.items())
    console.out.print(
        f"{index.path}: {facts['documents']} documents{change}, {facts['passages']} passages, "
        f"{facts['vectors']} vectors; next: blendserve precompute {index.path}"
    )


def _print_dict(values: dict[str, Any], json: bool) -> None:
    if json:
        console.print_json(values)
        return
    width = max(map(len, values))
    for name, value in values.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        console.out.print(f"{name:<{width}}  {shown}", markup=False)
