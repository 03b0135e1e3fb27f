"""`blendserve bench ...`: parses, calls, prints; the last line of stdout is always one JSON object."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from blendserve import console
from blendserve.bench.settings import (
    BenchConfig,
    CrowdedConfig,
    DecodeBenchConfig,
    PrecomputeConfig,
    ScalingConfig,
    StoreBenchConfig,
    TtftConfig,
)
from blendserve.config import changed
from blendserve.evaluate.variants import split_list

bench_app = typer.Typer(help="How fast, against what: measured interleaved.", no_args_is_help=True)

AnyConfig = TypeVar("AnyConfig", bound=BenchConfig)
TTFT, DECODE, PRECOMPUTE, STORE = TtftConfig(), DecodeBenchConfig(), PrecomputeConfig(), StoreBenchConfig()
SCALING, CROWDED = ScalingConfig(), CrowdedConfig()


def _default(values: Iterable[object]) -> str:
    return f"[default: {','.join(map(str, values))}]"


def _count(default: int, help: str) -> Any:
    return typer.Option(help=f"{help} [default: {default}]")


ModelOpt = Annotated[
    str | None,
    typer.Option(help=f"Bundled name, folder, hub id, or random:SHAPE. [default: {TTFT.model}]"),
]
DtypeOpt = Annotated[
    str | None, typer.Option(help=f"auto, bfloat16, float16 or float32. [default: {TTFT.dtype}]")
]
ThreadsOpt = Annotated[int | None, typer.Option(help="CPU threads. [default: as many as CPUs may be used]")]
SeedOpt = Annotated[int | None, typer.Option(help=f"Of what is drawn by chance. [default: {TTFT.seed}]")]
FolderOpt = Annotated[
    Path | None,
    typer.Option(help="Where the stores are put meanwhile. [default: the system's temporary folder]"),
]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print the JSON object alone.")]


@bench_app.command()
def ttft(
    chunks: Annotated[int | None, _count(TTFT.chunks, "Chunks of the prompt.")] = None,
    chunk_tokens: Annotated[int | None, _count(TTFT.chunk_tokens, "Tokens of each.")] = None,
    suffix_tokens: Annotated[int | None, _count(TTFT.suffix_tokens, "Tokens behind them.")] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="Beside transformers, full, prefix and reuse; words as in evaluate, with commas or given again. "
            f"{_default(TTFT.methods)}"
        ),
    ] = None,
    ratio: Annotated[
        list[str] | None,
        typer.Option(help=f"Of methods that name none; with commas or given again. {_default(TTFT.ratios)}"),
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Also from a cold page cache.")] = False,
    throttle: Annotated[
        list[str] | None, typer.Option(help="Also from a store of so many GB/s; with commas or given again.")
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Also the peak memory of a request.")] = False,
    model: ModelOpt = None,
    dtype: DtypeOpt = None,
    threads: ThreadsOpt = None,
    repeats: Annotated[int | None, _count(TTFT.repeats, "Rounds.")] = None,
    seed: SeedOpt = None,
    folder: FolderOpt = None,
    json: JsonOpt = False,
) -> None:
    """One prompt by every method: prefill, time to first token, and where it goes."""
    config = changed(
        TTFT, chunks=chunks, chunk_tokens=chunk_tokens, suffix_tokens=suffix_tokens, methods=_words(methods),
        ratios=_words(ratio), cold=cold, throttle=_words(throttle), memory=memory, model=model, dtype=dtype,
        threads=threads, repeats=repeats, seed=seed, folder=folder,
    )  # fmt: skip
    config.variants  # noqa: B018  a wrong word is told before a model is loaded
    from blendserve.bench.tables import ttft as tables
    from blendserve.bench.ttft import measure

    _run(measure, config, tables, json)


@bench_app.command()
def decode(
    context: Annotated[int | None, _count(DECODE.context, "Tokens of the prompt.")] = None,
    new_tokens: Annotated[int | None, _count(DECODE.new_tokens, "Tokens of the answer.")] = None,
    model: ModelOpt = None,
    dtype: DtypeOpt = None,
    threads: ThreadsOpt = None,
    repeats: Annotated[int | None, _count(DECODE.repeats, "Rounds.")] = None,
    seed: SeedOpt = None,
    json: JsonOpt = False,
) -> None:
    """Milliseconds a token behind a long context, against transformers' generate."""
    config = changed(
        DECODE, context=context, new_tokens=new_tokens, model=model, dtype=dtype, threads=threads, repeats=repeats,
        seed=seed,
    )  # fmt: skip
    from blendserve.bench.decode import measure
    from blendserve.bench.tables import decode as tables

    _run(measure, config, tables, json)


@bench_app.command()
def precompute(
    chunks: Annotated[int | None, _count(PRECOMPUTE.chunks, "Chunks to store.")] = None,
    chunk_tokens: Annotated[int | None, _count(PRECOMPUTE.chunk_tokens, "Tokens of each.")] = None,
    model: ModelOpt = None,
    dtype: DtypeOpt = None,
    threads: ThreadsOpt = None,
    repeats: Annotated[int | None, _count(PRECOMPUTE.repeats, "Rounds.")] = None,
    seed: SeedOpt = None,
    folder: FolderOpt = None,
    json: JsonOpt = False,
) -> None:
    """Tokens a second into the store, against transformers' prefill of the same chunks, stored nowhere."""
    config = changed(
        PRECOMPUTE, chunks=chunks, chunk_tokens=chunk_tokens, model=model, dtype=dtype, threads=threads,
        repeats=repeats, seed=seed, folder=folder,
    )  # fmt: skip
    from blendserve.bench.precompute import measure
    from blendserve.bench.tables import precompute as tables

    _run(measure, config, tables, json)


@bench_app.command()
def store(
    chunks: Annotated[int | None, _count(STORE.chunks, "Chunks to put and get.")] = None,
    chunk_tokens: Annotated[int | None, _count(STORE.chunk_tokens, "Tokens of each.")] = None,
    model: ModelOpt = None,
    dtype: DtypeOpt = None,
    threads: ThreadsOpt = None,
    repeats: Annotated[int | None, _count(STORE.repeats, "Rounds.")] = None,
    seed: SeedOpt = None,
    folder: FolderOpt = None,
    json: JsonOpt = False,
) -> None:
    """Chunk KV into LMDB and out of it, checksums verified, warm and cold."""
    config = changed(
        STORE, chunks=chunks, chunk_tokens=chunk_tokens, model=model, dtype=dtype, threads=threads, repeats=repeats,
        seed=seed, folder=folder,
    )  # fmt: skip
    from blendserve.bench.store import measure
    from blendserve.bench.tables import store as tables

    _run(measure, config, tables, json)


@bench_app.command()
def scaling(
    contexts: Annotated[
        str | None, typer.Option(help=f"Tokens, where they are varied. {_default(SCALING.contexts)}")
    ] = None,
    ratios: Annotated[
        str | None, typer.Option(help=f"Where the ratio is varied. {_default(SCALING.ratios)}")
    ] = None,
    counts: Annotated[
        str | None, typer.Option(help=f"Chunks, where their number is varied. {_default(SCALING.counts)}")
    ] = None,
    context: Annotated[
        int | None, _count(SCALING.context, "Tokens, where ratio or chunk count is varied.")
    ] = None,
    chunk_tokens: Annotated[
        int | None, _count(SCALING.chunk_tokens, "Tokens of a chunk, where their number is not varied.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help=f"Words as in evaluate. {_default(SCALING.methods)}")
    ] = None,
    model: ModelOpt = None,
    dtype: DtypeOpt = None,
    threads: ThreadsOpt = None,
    repeats: Annotated[int | None, _count(SCALING.repeats, "Rounds a cell.")] = None,
    seed: SeedOpt = None,
    folder: FolderOpt = None,
    runs: Annotated[Path, typer.Option(help="Where cells are kept.")] = Path("runs/bench_scaling"),
    plots: Annotated[Path, typer.Option(help="Where the plots are drawn.")] = Path("docs"),
    json: JsonOpt = False,
) -> None:
    """How cost grows with context, ratio and chunk count, against this machine's limit. Resumable."""
    lists = {"contexts": contexts, "ratios": ratios, "counts": counts, "methods": methods}
    config = changed(
        SCALING, context=context, chunk_tokens=chunk_tokens, model=model, dtype=dtype, threads=threads,
        repeats=repeats, seed=seed, folder=folder,
        **{name: split_list(text) for name, text in lists.items() if text},
    )  # fmt: skip
    from blendserve.bench.scaling import run
    from blendserve.bench.tables import scaling as tables

    try:
        with console.progress("Grid", "cells") as update:
            done = run(config, runs, plots, console.say, update)
    except KeyboardInterrupt:
        console.say("stopped: the cells that were measured are kept; the same command goes on from there")
        raise typer.Exit(130) from None
    _print(done, [] if json else tables(done))


@bench_app.command()
def crowded(
    busy: Annotated[
        str | None, typer.Option(help=f"Busy processes, with commas. {_default(CROWDED.busy)}")
    ] = None,
    environment: Annotated[
        list[str] | None,
        typer.Option(help='Another way to wait, as "OMP_WAIT_POLICY=passive"; may be given again.'),
    ] = None,
    chunks: Annotated[int | None, _count(CROWDED.chunks, "Chunks of the prompt.")] = None,
    chunk_tokens: Annotated[int | None, _count(CROWDED.chunk_tokens, "Tokens of each.")] = None,
    suffix_tokens: Annotated[int | None, _count(CROWDED.suffix_tokens, "Tokens behind them.")] = None,
    new_tokens: Annotated[int | None, _count(CROWDED.new_tokens, "Tokens of the answer.")] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(help=f"Beside transformers and full; words as in evaluate. {_default(CROWDED.methods)}"),
    ] = None,
    ratio: Annotated[
        list[str] | None, typer.Option(help=f"Of methods that name none. {_default(CROWDED.ratios)}")
    ] = None,
    model: ModelOpt = None,
    dtype: DtypeOpt = None,
    threads: ThreadsOpt = None,
    repeats: Annotated[int | None, _count(CROWDED.repeats, "Rounds.")] = None,
    seed: SeedOpt = None,
    folder: FolderOpt = None,
    json: JsonOpt = False,
) -> None:
    """TTFT and decoding beside busy processes and under a quota of one core, with threads that wait in several ways."""
    config = changed(
        CROWDED, busy=split_list(busy) if busy else None, environments=environment, chunks=chunks,
        chunk_tokens=chunk_tokens, suffix_tokens=suffix_tokens, new_tokens=new_tokens, methods=_words(methods),
        ratios=_words(ratio), model=model, dtype=dtype, threads=threads, repeats=repeats, seed=seed, folder=folder,
    )  # fmt: skip
    config.variants  # noqa: B018  a wrong word is told before a process is started
    from blendserve.bench.crowded import measure
    from blendserve.bench.tables import crowded as tables

    _run(measure, config, tables, json)


def _run(measure: Callable[..., Any], config: AnyConfig, tables: Callable[..., Any], json: bool) -> None:
    """Measure with a bar on stderr, then print tables and the JSON line."""
    with console.progress("Measuring", "rounds") as update:
        figures = measure(config, console.say, update)
    _print(figures, [] if json else tables(figures))


def _print(figures: Any, tables: Any) -> None:
    for title, columns, rows in tables:
        console.table(title, columns, rows)
    console.print_json(figures)


def _words(given: list[str] | None) -> list[str] | None:
    return [word for text in given for word in split_list(text)] if given else None
