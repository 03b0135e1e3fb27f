"""`blendserve bench ...`: tables for people, and one JSON object as the last line of stdout."""

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

app = make_app("Measure how fast it is, against transformers and the machine.")

READER = ("model", "dtype", "device", "threads", "seed")  # for benches that store nothing on disk
JsonOpt = Annotated[bool, typer.Option("--json", help="Print the JSON object without the tables.")]


@app.command()
@with_options(config=Options(TtftConfig(), names={"ratios": "ratio"}))
def ttft(config: TtftConfig, json: JsonOpt = False) -> None:
    """Prefill one prompt by every method.

    Prefill, time to first token, and where it goes:

    \b
        blendserve bench ttft
        blendserve bench ttft --methods deviation,query --ratio 0.1,0.3 --cold --memory
        blendserve bench ttft --model random:Qwen2.5-0.5B --threads 2    # a shape with random weights
    """
    config.variants  # noqa: B018  a wrong word is told before a model is loaded
    from blendserve.bench.tables import ttft as tables
    from blendserve.bench.ttft import measure  # torch and all the rest: seconds

    _run(measure, config, tables, json)


@app.command()
@with_options(config=Options(CrowdedConfig(), names={"ratios": "ratio", "environments": "environment"}))
def crowded(config: CrowdedConfig, json: JsonOpt = False) -> None:
    """Prefill and decode beside busy processes.

    Alone, beside busy processes, and under a quota of one core, with threads that wait in several ways.
    """
    config.variants  # noqa: B018  a wrong word is told before a process is started
    from blendserve.bench.crowded import measure  # torch and all the rest: seconds
    from blendserve.bench.tables import crowded as tables

    _run(measure, config, tables, json)


@app.command()
@with_options(config=Options(DecodeBenchConfig(), "context", "new_tokens", "repeats", *READER))
def decode(config: DecodeBenchConfig, json: JsonOpt = False) -> None:
    """Decode behind a long context, against transformers' generate."""
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
    """Ask about a document that was read before.

    The document's stored KV is exact, as it stands right behind the prefix: time to the first token against full prefill,
    by transformers and by blendserve; the same for one as long as the reader's context allows.
    """
    from blendserve.bench.document import measure, tables  # torch and all the rest: seconds

    _run(measure, config, tables, json)


@app.command()
@with_options(config=Options(PrecomputeConfig()))
def precompute(config: PrecomputeConfig, json: JsonOpt = False) -> None:
    """Fill a store, against transformers' prefill of the same chunks.

    Tokens a second into LMDB, every write included; transformers stores nothing.
    """
    from blendserve.bench.precompute import measure  # torch and all the rest: seconds
    from blendserve.bench.tables import precompute as tables

    _run(measure, config, tables, json)


@app.command()
@with_options(config=Options(StoreBenchConfig()))
def store(config: StoreBenchConfig, json: JsonOpt = False) -> None:
    """Put chunk KV into LMDB and get it back, warm and cold.

    Gigabytes and records a second, checksums verified.
    """
    from blendserve.bench.store import measure  # torch and all the rest: seconds
    from blendserve.bench.tables import store as tables

    _run(measure, config, tables, json)


@app.command()
@with_options(config=Options(CodecBenchConfig()))
def codec(config: CodecBenchConfig, json: JsonOpt = False) -> None:
    """Measure codecs: size, speed, and the first token with each.

    Bytes a token with every byte of a record counted, tables apart; coding and decoding; the time to the first token from
    a local store, against the one that is not coded:

    \b
        blendserve bench codec
        blendserve bench codec --codecs int8,cachegen@1 --chunks 12 --chunk-tokens 256 --text corpus.jsonl
    """
    config.words, config.variant  # noqa: B018  a wrong word is told before a model is loaded
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

    Passages a second of both; over a data set also the recall of both, and of their mixture:

    \b
        blendserve bench embed
        blendserve bench embed --dataset 2wikimqa/questions.json    # with corpus.json beside it
    """
    from blendserve.bench.embed import measure, tables  # torch and all the rest: seconds

    _run(measure, config, tables, json)


@app.command()
@with_options(config=Options(ScalingConfig()))
def scaling(
    config: ScalingConfig,
    runs: Annotated[Path, typer.Option(help="Keep cells in this folder.")] = Path("runs/bench_scaling"),
    plots: Annotated[Path, typer.Option(help="Draw the plots into this folder.")] = Path("docs/pictures"),
    json: JsonOpt = False,
) -> None:
    """Show how cost grows, against the limit of this machine.

    Context, ratio and chunk count are varied. After a stop or a kill, the same command goes on. It draws
    ttft_context.svg and ttft_ratio.svg.
    """
    from blendserve.bench.scaling import run  # torch and all the rest: seconds
    from blendserve.bench.tables import scaling as tables

    try:
        with console.progress("Grid", "cells") as update:
            done = run(config, runs, plots, console.say, update)
    except KeyboardInterrupt:
        console.say("stopped: the cells that were measured are kept; the same command goes on from there")
        raise typer.Exit(130) from None
    _print(done, [] if json else tables(done))


@app.command()
@with_options(config=Options(AutoBenchConfig(), "repeats", "tolerance", *READER))
def auto(config: AutoBenchConfig, json: JsonOpt = False) -> None:
    """Compare method auto with the best fixed method.

    A grid of chunk counts, chunk sizes and hit rates; full reuse is left out: it is always the fastest, and wrong. The
    exit code is 1 if anywhere auto is slower than the best fixed method by more than the tolerance, and the method that
    it chose is so too when run as a fixed one (else it was noise).
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
    """Ask about passages that were edited since they were stored.

    Time to the first token with one of them edited, and with all, against exact hits and full prefill; what looking for
    near-duplicates costs prompts that have none; and looking among a million synthetic chunks: time and memory.
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
    """Ask while a shared store's server fails in every way.

    A real Valkey server is started, killed, stopped, filled, emptied, slowed down, cut off and made to lie. The exit code
    is 1 if an answer was wrong, a request hung, or chunks were never found again:

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
    """Load KV from a server over networks, against computing it.

    A real Valkey server behind a link of each round trip and rate: the time to the first token of a prompt whose chunks
    are all there, by codec, and of the same prompt computed without a server. It waits a minute for chunks:

    \b
        blendserve bench link
        blendserve bench link --round-trips-ms 20 --rates-gbit 0.5,1 --codecs raw,int8,predict@2 --text docs
    """
    config.words, config.variant  # noqa: B018  a wrong word is told before a model is loaded
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
    plot: Annotated[Path | None, typer.Option(help="Draw TTFT by link and contestant, an SVG.")] = None,
    json: JsonOpt = False,
) -> None:
    """Have KV delivered over links that change, by every rule.

    A service in a process of its own behind a link that plays a trace: constant rates, a step down and up, a sawtooth,
    one like a mobile network's, and one that dies. Text, every fixed level, CacheGen's rule, ours, and what would have
    been best in hindsight:

    \b
        blendserve bench delivery --plot delivery.svg
        blendserve bench delivery --rates-gbit 0.5 --traces down,dead --chunks 4
    """
    config.words, config.variant  # noqa: B018  a wrong word is told before a model is loaded
    from blendserve.bench.delivery import measure, tables, traces_of  # torch and all the rest: seconds

    traces_of(config)
    figures = _run(measure, config, tables, json)
    if plot:
        from blendserve.bench.plots import delivery as drawn  # matplotlib: a second

        plot.write_bytes(drawn(figures))


@app.command()
@with_options(config=Options(ServingConfig()))
def serving(config: ServingConfig) -> None:
    """Put load on a server, by method.

    First its throughput at saturation, then TTFT and the time between tokens against the offered load.

    Cells are kept in OUT/cells.jsonl, and the same command measures those that are missing; OUT/serving.json and
    OUT/serving.png show them all. The exit code is 1 if a target is missed, 3 if cells are missing:

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
    plot: Annotated[Path | None, typer.Option(help="Draw what share of TTFTs is how low, an SVG.")] = None,
    json: JsonOpt = False,
) -> None:
    """Compare a cache for each user with one for all.

    Users with overlapping questions ask several engine processes, first with a cache each, then with one for all that has
    as much memory as those together: hit rate, TTFT, bytes stored, and chunks computed more than once:

    \b
        blendserve bench sharing --plot sharing.svg
        blendserve bench sharing --users 8 --overlap 0.3 --store lmdb
    """
    config.variant  # noqa: B018  a wrong word is told before a process is started
    from blendserve.bench.sharing import measure, tables  # torch and all the rest: seconds

    figures = _run(measure, config, tables, json)
    if plot:
        from blendserve.bench.plots import sharing as drawn  # matplotlib: a second

        plot.write_bytes(drawn(figures))


@app.command()
@with_options(config=Options(HostileConfig()))
def hostile(config: HostileConfig, json: JsonOpt = False) -> None:
    """Put one hostile client beside ordinary ones.

    Ordinary clients ask a server at a moderate, steady load, in windows without a hostile client and with one, in turns:
    it sends very long questions, the largest body and a larger one, very many messages and passages, long documents,
    a huge stop list and deep JSON, as fast as it can. The exit code is 1 if the others' p95 TTFT is more than 1.5 times
    that without it, or one of them fails:

    \b
        blendserve bench hostile
        blendserve bench hostile --kinds question,document --seconds 60    # which of them is it?
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

    `blendserve --help` and `blendserve ask`, from start to exit; then the first answer of a process against those after
    it.
    """
    from blendserve.bench.start import measure  # torch and all the rest: seconds
    from blendserve.bench.tables import start as tables

    _run(measure, config, tables, json)


@app.command()
def gpu(
    out: Annotated[Path, typer.Option(help="Write figures to this file, after every step.")] = Path(
        "runs/bench_gpu.json"
    ),
    minutes: Annotated[
        float, typer.Option(help="Leave out the steps that do not fit into so many minutes.")
    ] = 9.0,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Run the same steps on a CPU with a toy, to see that they run.")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option(help="Put stores here meanwhile; the system's temporary folder if none is given."),
    ] = None,
) -> None:
    """Check and measure everything on a CUDA GPU.

    Is it right, how fast, and how far from what the machine can do?

    One run, the most important steps first; what does not fit into the minutes is left out and named. The exit code is 1
    if a step failed or something did not agree, 2 without a GPU.
    """
    import torch  # a second

    from blendserve.bench.gpu.plan import real, rehearsal
    from blendserve.bench.gpu.run import Bench
    from blendserve.bench.gpu.tables import tables

    if not rehearse and not torch.cuda.is_available():
        raise InputError(
            "no CUDA GPU is to be seen here: run this on a machine with one (16-bit readers of 8B need 40 GB), and a "
            "torch built for CUDA; --rehearse tries the steps on a CPU"
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
