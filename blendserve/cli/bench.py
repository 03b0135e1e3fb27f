"""`blendserve bench ...`: prints tables, and one JSON object as the last line of stdout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from blendserve import console
from blendserve.bench.config import (
    AutoBenchConfig,
    CodecBenchConfig,
    CrowdedConfig,
    DecodeBenchConfig,
    DeliveryConfig,
    DocumentConfig,
    EmbedConfig,
    FaultsConfig,
    HostileConfig,
    LinkConfig,
    NearConfig,
    PrecomputeConfig,
    ScalingConfig,
    ServingConfig,
    SharingConfig,
    StartConfig,
    StoreBenchConfig,
    TtftConfig,
)
from blendserve.cli.options import Options, make_app, with_options
from blendserve.config import Section
from blendserve.errors import InputError

app = make_app("Measure speed against transformers and hardware limits.")

READER = ("model", "dtype", "device", "threads", "seed")  # for benches that store nothing on disk
JsonOpt = Annotated[bool, typer.Option("--json", help="Print only the JSON object, without tables.")]


@app.command()
@with_options(config=Options(TtftConfig(), names={"ratios": "ratio"}))
def ttft(config: TtftConfig, json: JsonOpt = False) -> None:
    """Prefill one prompt by every method.

    Prefill time, time to first token, and its stages:

    \b
        blendserve bench ttft
        blendserve bench ttft --methods deviation,query --ratio 0.1,0.3 --cold --memory
        blendserve bench ttft --model random:Qwen2.5-0.5B --threads 2    # a shape with random weights
    """
    config.variants  # noqa: B018  report a wrong word before a model is loaded
    from blendserve.bench.tables import ttft as tables
    from blendserve.bench.ttft import measure  # torch and all the rest: seconds

    _run(measure, config, tables, json)


@app.command()
@with_options(config=Options(CrowdedConfig(), names={"ratios": "ratio", "environments": "environment"}))
def crowded(config: CrowdedConfig, json: JsonOpt = False) -> None:
    """Prefill and decode while other processes use the CPUs.

    Measures an idle machine, busy processes, and a quota of one core, with several wait policies of the threads.
    """
    config.variants  # noqa: B018  report a wrong word before a process starts
    from blendserve.bench.crowded import measure  # torch and all the rest: seconds
    from blendserve.bench.tables import crowded as tables

    _run(measure, config, tables, json)


@app.command()
@with_options(config=Options(DecodeBenchConfig(), "context", "new_tokens", "repeats", *READER))
def decode(config: DecodeBenchConfig, json: JsonOpt = False) -> None:
    """Decode after a long context, against transformers' generate."""
    from blendserve.bench.decode import measure  # torch and all the rest: seconds
    from blendserve.bench.tables import decode as tables

    _run(measure, config, tables, json)


@app.command()
@with_options(
    config=Options(
        DocumentConfig(), "document_tokens", "question_tokens", "manual", "repeats", *READER, "folder"
    )
)
def document(config: DocumentConfig, json: JsonOpt = False) -> None:
    """Ask about a long document that is cached.

    The document is the first chunk after the prefix, so its cached KV is exact. Time to first token against full
    prefill by transformers and by blendserve; also for a document as long as the model's context.
    """
    from blendserve.bench.document import measure, tables  # torch and all the rest: seconds

    _run(measure, config, tables, json)


@app.command()
@with_options(config=Options(PrecomputeConfig()))
def precompute(config: PrecomputeConfig, json: JsonOpt = False) -> None:
    """Precompute chunks, against transformers' prefill of the same.

    Tokens per second into LMDB, including all writes; transformers stores nothing.
    """
    from blendserve.bench.precompute import measure  # torch and all the rest: seconds
    from blendserve.bench.tables import precompute as tables

    _run(measure, config, tables, json)


@app.command()
@with_options(config=Options(StoreBenchConfig()))
def store(config: StoreBenchConfig, json: JsonOpt = False) -> None:
    """Write and read chunk KV in LMDB, warm and cold.

    GB per second and records per second, with checksum verification.
    """
    from blendserve.bench.store import measure  # torch and all the rest: seconds
    from blendserve.bench.tables import store as tables

    _run(measure, config, tables, json)


@app.command()
@with_options(config=Options(CodecBenchConfig()))
def codec(config: CodecBenchConfig, json: JsonOpt = False) -> None:
    """Measure codecs: size, speed, and time to first token.

    Bytes per token of whole records, without tables; coding and decoding rates; time to first token from a local
    store, against uncoded KV:

    \b
        blendserve bench codec
        blendserve bench codec --codecs int8,cachegen@1 --chunks 12 --chunk-tokens 256 --text corpus.jsonl
    """
    config.words, config.variant  # noqa: B018  report a wrong word before a model is loaded
    from blendserve.bench.codec import measure  # torch and all the rest: seconds
    from blendserve.bench.tables import codec as tables

    _run(measure, config, tables, json)


@app.command()
@with_options(
    config=Options(
        EmbedConfig(),
        *("embedder", "passages", "passage_tokens", "dataset", "corpus", "top_k", "threads", "repeats"),
    )
)
def embed(config: EmbedConfig, json: JsonOpt = False) -> None:
    """Embed passages, against sentence-transformers in fp32.

    Passages per second of both; with a data set also the recall of both, and of their queries over our vectors:

    \b
        blendserve bench embed
        blendserve bench embed --dataset 2wikimqa/questions.json    # with corpus.json in the same folder
    """
    from blendserve.bench.embed import measure, tables  # torch and all the rest: seconds

    _run(measure, config, tables, json)


@app.command()
@with_options(config=Options(ScalingConfig()))
def scaling(
    config: ScalingConfig,
    runs: Annotated[Path, typer.Option(help="Folder for measured cells.")] = Path("runs/bench_scaling"),
    plots: Annotated[Path, typer.Option(help="Folder for the plots.")] = Path("docs/pictures"),
    json: JsonOpt = False,
) -> None:
    """Measure how cost scales, against the limit of this machine.

    Varies context length, recompute ratio and number of chunks. A stopped run resumes with the same command. Plots:
    ttft_context.svg and ttft_ratio.svg.
    """
    from blendserve.bench.scaling import run  # torch and all the rest: seconds
    from blendserve.bench.tables import scaling as tables

    try:
        with console.progress("Grid", "cells") as update:
            done = run(config, runs, plots, console.say, update)
    except KeyboardInterrupt:
        console.say("stopped: measured cells are saved; run the same command to resume")
        raise typer.Exit(130) from None
    _print(done, [] if json else tables(done))


@app.command()
@with_options(config=Options(AutoBenchConfig(), "repeats", "tolerance", *READER))
def auto(config: AutoBenchConfig, json: JsonOpt = False) -> None:
    """Compare method auto with the best fixed method.

    A grid of chunk counts, chunk sizes and hit rates, without full reuse, which is always the fastest, and wrong.
    The exit code is 1 if, in any cell, auto and the method that it chose, run as a fixed method, are both slower
    than the best fixed method by more than the tolerance (if only auto is, it was noise).
    """
    from blendserve.bench.auto import measure, tables  # torch and all the rest: seconds

    if _run(measure, config, tables, json)["failed"]:
        raise typer.Exit(1)


@app.command()
@with_options(
    config=Options(
        NearConfig(),
        "chunks",
        "chunk_tokens",
        "suffix_tokens",
        "share",
        "ratio",
        "signatures",
        "repeats",
        *READER,
        "folder",
    )
)
def near(config: NearConfig, json: JsonOpt = False) -> None:
    """Ask about passages that were edited after they were cached.

    Time to first token with one passage edited, and with all, against exact hits and full prefill; the cost of the
    near-duplicate search for prompts without near-duplicates; time and memory of a search over a million synthetic
    chunks.
    """
    from blendserve.bench.near import measure, tables  # torch and all the rest: seconds

    _run(measure, config, tables, json)


@app.command()
@with_options(
    config=Options(
        FaultsConfig(), "requests", "chunks", "chunk_tokens", "pool", "deadline_s", "kinds", *READER
    )
)
def faults(config: FaultsConfig, json: JsonOpt = False) -> None:
    """Send requests while a shared store's server fails.

    A real Valkey server is started, killed, stopped, filled, emptied, slowed down, cut off and made to return wrong
    data. The exit code is 1 if an answer was wrong, a request hung, or chunks were never found again:

    \b
        blendserve bench faults
        blendserve bench faults --kinds hung,slow --requests 20 --deadline-s 0.2
    """
    from blendserve.bench.faults import measure, tables  # torch and all the rest: seconds

    if _run(measure, config, tables, json)["failed"]:
        raise typer.Exit(1)


@app.command()
@with_options(
    config=Options(
        LinkConfig(),
        *("round_trips_ms", "rates_gbit", "codecs", "chunks", "chunk_tokens", "suffix_tokens", "method"),
        *("text", "fit_tokens", "in_flight", "requests", "repeats", *READER),
    )
)
def link(config: LinkConfig, json: JsonOpt = False) -> None:
    """Load KV over networks, against recomputing it.

    A real Valkey server behind a link of each round trip and rate: time to first token of a prompt whose chunks are
    all cached there, by codec, and of the same prompt computed without a server. The deadline for chunks is a
    minute:

    \b
        blendserve bench link
        blendserve bench link --round-trips-ms 20 --rates-gbit 0.5,1 --codecs raw,int8,predict@2 --text docs
    """
    config.words, config.variant  # noqa: B018  report a wrong word before a model is loaded
    from blendserve.bench.remote import measure, tables  # torch and all the rest: seconds

    _run(measure, config, tables, json)


@app.command()
@with_options(
    config=Options(
        DeliveryConfig(),
        *("rates_gbit", "traces", "round_trip_ms", "codecs", "chunks", "chunk_tokens", "suffix_tokens"),
        *("deadline_s", "method", "fit_tokens", "repeats", "folder", *READER),
    )
)
def delivery(
    config: DeliveryConfig,
    plot: Annotated[Path | None, typer.Option(help="SVG file for a plot of TTFT by link and method.")] = None,
    json: JsonOpt = False,
) -> None:
    """Deliver KV over changing links, by every method.

    A service in its own process behind a link that replays a trace: constant rates, a step down and up, a sawtooth,
    a mobile network, and a link that dies. Methods: recompute from text, every fixed level, CacheGen's rule, ours,
    and the best choice in hindsight:

    \b
        blendserve bench delivery --plot delivery.svg
        blendserve bench delivery --rates-gbit 0.5 --traces down,dead --chunks 4
    """
    config.words, config.variant  # noqa: B018  report a wrong word before a model is loaded
    from blendserve.bench.delivery import measure, tables, traces_of  # torch and all the rest: seconds

    traces_of(config)
    figures = _run(measure, config, tables, json)
    if plot:
        from blendserve.bench.plots import delivery as drawn  # matplotlib: a second

        plot.write_bytes(drawn(figures))


@app.command()
@with_options(config=Options(ServingConfig()))
def serving(config: ServingConfig) -> None:
    """Load a server, by method.

    First the throughput at saturation, then TTFT and time between tokens by offered load.

    Measured cells are kept in OUT/cells.jsonl, and the same command measures the missing ones. Results:
    OUT/serving.json and OUT/serving.png. The exit code is 1 if a target is missed, 3 if cells are missing:

    \b
        blendserve bench serving --out runs/serving                  # over indexes/demo, see `blendserve demo`
        blendserve bench serving --out runs/2wiki --dataset 2wikimqa/questions.json --passages 23
    """
    from blendserve.bench.serving_load import run  # torch and all the rest: seconds

    found = run(config)
    if found is None:
        return
    console.print_json(found)
    raise typer.Exit(3 if found["missing"] else int(not found["passed"]))


@app.command()
@with_options(
    config=Options(
        SharingConfig(),
        *("users", "engines", "questions", "passages", "chunk_tokens", "pool", "zipf", "overlap", "memory"),
        *("store", "method", "folder", *READER),
    )
)
def sharing(
    config: SharingConfig,
    plot: Annotated[Path | None, typer.Option(help="SVG file for a plot of the TTFT distribution.")] = None,
    json: JsonOpt = False,
) -> None:
    """Compare a cache per user with one shared cache.

    Users with overlapping questions ask several engine processes, first with a cache per user, then with one shared
    cache of the same total capacity: hit rate, TTFT, stored bytes, and chunks computed more than once:

    \b
        blendserve bench sharing --plot sharing.svg
        blendserve bench sharing --users 8 --overlap 0.3 --store lmdb
    """
    config.variant  # noqa: B018  report a wrong word before a process starts
    from blendserve.bench.sharing import measure, tables  # torch and all the rest: seconds

    figures = _run(measure, config, tables, json)
    if plot:
        from blendserve.bench.plots import sharing as drawn  # matplotlib: a second

        plot.write_bytes(drawn(figures))


@app.command()
@with_options(config=Options(HostileConfig()))
def hostile(config: HostileConfig, json: JsonOpt = False) -> None:
    """Run one hostile client against ordinary ones.

    Ordinary clients send a moderate, steady load, in alternating windows without and with a hostile client. It
    sends very long questions, the largest body and a larger one, very many messages and passages, long documents, a
    huge stop list and deep JSON, as fast as it can. The exit code is 1 if the p95 TTFT of the ordinary clients is
    more than 1.5 times that without it, or one of their requests fails:

    \b
        blendserve bench hostile
        blendserve bench hostile --kinds question,document --seconds 60    # two kinds only
    """
    from blendserve.bench.hostile import measure  # torch and all the rest: seconds
    from blendserve.bench.tables import hostile as tables

    if not _run(measure, config, tables, json)["passed"]:
        raise typer.Exit(1)


@app.command()
@with_options(
    config=Options(
        StartConfig(),
        *(
            "model",
            "dtype",
            "device",
            "threads",
            "passages",
            "chunk_tokens",
            "new_tokens",
            "repeats",
            "folder",
        ),
    )
)
def start(config: StartConfig, json: JsonOpt = False) -> None:
    """Time whole commands, and the first answer of a process.

    `blendserve --help` and `blendserve ask` from start to exit; then the first answer of a process against later ones.
    """
    from blendserve.bench.start import measure  # torch and all the rest: seconds
    from blendserve.bench.tables import start as tables

    _run(measure, config, tables, json)


@app.command()
def gpu(
    out: Annotated[Path, typer.Option(help="File for figures, written after every step.")] = Path(
        "runs/bench_gpu.json"
    ),
    minutes: Annotated[
        float, typer.Option(help="Time limit, in minutes; steps that do not fit are skipped.")
    ] = 9.0,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse", help="Run the same steps on a CPU with a tiny model, as a test of the bench."
        ),
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder for temporary stores; the system's temporary folder if not set."),
    ] = None,
) -> None:
    """Check and measure everything on a CUDA GPU.

    Correctness, speed, and distance from the hardware's limits, in one run, the most important steps first. Steps
    that do not fit into the time limit are skipped and named. The exit code is 1 if a step or a comparison failed,
    2 without a GPU.
    """
    import torch  # a second

    from blendserve.bench.gpu.plan import real, rehearsal
    from blendserve.bench.gpu.run import Bench
    from blendserve.bench.gpu.tables import tables

    if not rehearse and not torch.cuda.is_available():
        raise InputError(
            "no CUDA GPU found: run this on a machine with one (a 16-bit 8B model needs 40 GB) and a torch built for "
            "CUDA; --rehearse runs the steps on a CPU"
        )
    plan = rehearsal() if rehearse else real(torch.device("cuda", torch.cuda.current_device()))
    bench = Bench(plan, minutes, out, folder, console.say)
    good = bench.go()
    for title, columns, rows in tables(bench.figures):
        console.table(title, columns, rows)
    console.out.print(f"figures in {out}", markup=False)
    raise typer.Exit(0 if good else 1)


def _run(measure: Callable[..., Any], config: Section, tables: Callable[..., Any], json: bool) -> Any:
    """Measure with a bar on stderr, then print tables and the JSON line."""
    with console.progress("Measuring", "rounds") as update:
        figures = measure(config, console.say, update)
    _print(figures, [] if json else tables(figures))
    return figures


def _print(figures: Any, tables: Any) -> None:
    for title, columns, rows in tables:
        console.table(title, columns, rows)
    if tables:
        from blendserve.provenance import describe

        console.out.print(f"measured on {describe(figures['machine'])}", markup=False)
    console.print_json(figures)
