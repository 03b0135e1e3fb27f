"""The main job on bundled models and real text, in numbered steps: load, index, ask, precompute, ask again, compare."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from rich.progress_bar import ProgressBar
from rich.table import Table

from blendserve import console
from blendserve.answer import Answer
from blendserve.config import Config
from blendserve.core import BlendReport
from blendserve.engine.documents import Collections
from blendserve.engine.engine import Engine
from blendserve.errors import IndexMismatch, IndexMissing
from blendserve.models.loader import LoadedModel, load_model
from blendserve.models.reference import OwnDecoding
from blendserve.retrieve import language_reference

INDEX = Path("indexes") / "demo"
BEGAN = "BLENDSERVE_DEMO_BEGAN"  # when `make demo` began: seconds since the epoch
QUESTIONS = (  # chosen by trying many: the bundled model answers them right by full prefill
    "What does the finally clause do?",
    "What does the break statement do?",
    "What does a decorator do?",
)
CHUNKS = 6
METHODS = {
    "full": "full prefill, blendserve",
    "prefix": "prefix caching",
    "reuse": "full reuse, nothing recomputed",
    "blend": "blending, the default",
}
SHOWN = {"full": "full prefill", "blend": "blended"}  # the two methods of a question
NAME_WIDTH, BAR_WIDTH = 12, 30
CHARACTERS = 46_000  # of the corpus, about 11,000 tokens, which take 0.3 GB of KV
# A CPU without fast bf16 products computes a third as many tokens a second: the demo is shorter there.
SLOW_CPU_CHARACTERS = 18_000
SLOW_CPU_QUESTIONS, SLOW_CPU_CHUNKS = 2, 4
CONFIG = Config(
    retrieve={"top_k": CHUNKS},
    store={"cap_gb": 1.0},
    blend={"method": "blend"},
    decode={"max_new_tokens": 48},
)
TINY_MODEL = """
The bundled model has 135 million parameters, so that the demo runs on two CPU cores. It is often vague or
wrong, by full prefill too: compare the answers of the two methods, not the answers with a larger model's.
For better answers: blendserve demo --model Qwen/Qwen2.5-0.5B-Instruct (downloads the model)."""


class DemoRow(NamedTuple):
    """One method on the comparison's prompt."""

    name: str
    ttft_s: float
    tokens_run: int  # tokens that ran through the model's layers
    recomputed: int  # cached tokens among them


def run(index: Path = INDEX, model: str = CONFIG.model.name) -> list[DemoRow]:
    """Print the whole demo; returns the comparison's rows.

    Raises ModelError for a model that cannot be loaded, StoreError for an index folder that cannot be written.
    """
    began = float(os.environ.get(BEGAN) or time.time())
    config = CONFIG.replace("model.name", model)
    if BEGAN in os.environ:
        _say(f"{time.time() - began:.0f} s: installation")
    with _step(1, f"Load the model {model}"):
        loaded = load_model(config.model)
        _say(f"{loaded.decoder.n_layers} layers, {str(loaded.decoder.dtype).removeprefix('torch.')}")
    with _step(2, "Index Python's language reference"):
        engine = _open(index, config, loaded)
        if _is_slow(loaded):
            _say("a shorter part of it, as this CPU has no fast bf16 products")
        _say(f"{len(engine.index or ())} chunks of up to {config.retrieve.chunk_tokens} tokens in {index}")
    with engine:
        if model == CONFIG.model.name:
            console.out.print(TINY_MODEL, style="yellow")
        with _step(3, "Ask without a cache: full prefill computes every token of the prompt"):
            before = _ask(engine, QUESTIONS[0], "full")
        with _step(4, "Precompute the KV cache of every chunk, once"):
            _precompute(engine)
        with _step(5, "Ask the same question again, over the cache"):
            _ask(engine, QUESTIONS[0], "blend", before)
        console.out.print(
            f"\nFirst blended answer: {time.time() - began:.0f} s after the start", style="bold"
        )
        is_slow = _is_slow(loaded)
        for question in QUESTIONS[1 : SLOW_CPU_QUESTIONS if is_slow else None]:
            console.out.print()
            _ask(engine, question, "blend", _ask(engine, question, "full"))
        rows = compare(engine, QUESTIONS[0], SLOW_CPU_CHUNKS if is_slow else CHUNKS)
    _print_next_steps(index)
    console.out.print(f"\nThe demo ended after {time.time() - began:.0f} s.", style="bold")
    return rows


def serve_page(index: Path, model: str, host: str, port: int) -> None:
    """Serve the demo's index over HTTP until the process is told to stop.

    Where other machines can reach the address, a key is needed: BLENDSERVE_API_KEY, or a new one in the printed URL.
    Raises ConfigError for an address that cannot be used.
    """
    from blendserve.serve.server import check_http  # start-up: the server's packages
    from blendserve.serve.server import run as serve

    http = Config().with_environment_key().serve.with_values(host=host, port=port)
    key = "" if http.is_local or http.has_keys else secrets.token_urlsafe(32)
    if key:
        http = http.with_values(api_key=key)
    check_http(http)
    with open_demo(index, model) as engine:
        assert engine.index is not None
        serve(engine, Collections({index.name: engine.index}), http, key)


def open_demo(index: Path = INDEX, model: str = CONFIG.model.name, characters: int | None = None) -> Engine:
    """The demo's engine; its index is built and its KV precomputed where that is missing.

    characters: of the corpus, at most; by default what suits this CPU.
    """
    config = CONFIG.replace("model.name", model)
    engine = _open(index, config, load_model(config.model), characters)
    _precompute(engine)
    return engine


def print_answer_details(answer: Answer) -> None:
    """Print an answer's sources, what was recomputed, and the time to the first token."""
    sources = [f"{p.title or p.id}{'' if p.score is None else f' {p.score:.2f}'}" for p in answer.passages]
    timings = answer.timings
    speed = f"first token after {timings.ttft * 1e3:.0f} ms, then {timings.tokens_per_second:.0f} tokens/s"
    console.out.print()
    _say(f"from {', '.join(sources)}\n  {_work(answer)}; {speed}")
    if quality := answer.report.quality:
        _say(quality.summary)


def compare(engine: Engine, question: str, n_chunks: int) -> list[DemoRow]:
    """Time every method once on one prompt of long chunks, after a warm-up of each, and print the table.

    The paper's setting is six chunks of 512 tokens: these are the `n_chunks` nearest passages that nearly fill a chunk.
    """
    assert engine.index is not None
    filled = 0.85 * engine.config.retrieve.chunk_tokens
    nearest = engine.index.search(question, len(engine.index))
    passages = [p for p in nearest if len(engine.prompts.chunk(p)) >= filled][:n_chunks]
    short = engine.prompts.build(question, ()).ids
    OwnDecoding(engine.model.decoder).feed(short)  # imports transformers' model
    start = time.perf_counter()
    ids = engine.prompts.build(question, passages).ids
    int(OwnDecoding(engine.model.decoder).feed(ids).argmax())
    rows = [base := DemoRow("full prefill, transformers", time.perf_counter() - start, len(ids), 0)]
    for method, name in METHODS.items():
        for _ in range(2 if method != "full" else 1):  # full prefill was warmed up by the questions before
            answer = engine.answer(question, passages, method=method, max_new_tokens=1)
        report = answer.report
        rows.append(DemoRow(name, answer.timings.ttft, _tokens_run(report), report.tokens_recomputed))
    columns = ("method", "TTFT ms", "sooner", "tokens run", "recomputed")
    shown = [(n, f"{s * 1e3:,.0f}", f"{base.ttft_s / s:.1f}x", f"{run:,}", f"{k:,}") for n, s, run, k in rows]
    console.out.print()
    console.table(f"{len(passages)} long chunks, a prompt of {len(ids):,} tokens, one round", columns, shown)
    _say("Medians and spread: blendserve bench ttft")
    return rows


def _open(index: Path, config: Config, model: LoadedModel, characters: int | None = None) -> Engine:
    """The index in this folder, built anew where there is none of this model."""
    try:
        return Engine.open(index, config, model)
    except (IndexMissing, IndexMismatch):
        limit = characters or min(CHARACTERS, SLOW_CPU_CHARACTERS if _is_slow(model) else CHARACTERS)
        with console.progress("Embedding", "characters") as update:
            return Engine.build(index, language_reference(limit=limit), config, update, model)


def _is_slow(model: LoadedModel) -> bool:
    return bool(model.decoder.device.type == "cpu" and model.decoder.dtype == torch.float32)


def _precompute(engine: Engine) -> None:
    """Compute and store the KV of the index's chunks, and fit the correction prior."""
    per_token = engine.model.decoder.kv_bytes_per_token
    computing = console.progress("Computing KV", "tokens", per_token)
    with computing as computed, console.progress("Fitting the correction prior", "tokens") as fitted:
        report = engine.precompute(None, (0, 1), computed, fitted)
    stats = engine.store.stats()
    _say(
        f"{report.computed} of {report.chunks} computed (chunks and the prompt's prefix), {report.skipped} cached "
        f"before; {stats.bytes / 1e6:.0f} MB in {stats.path}"
    )


@contextmanager
def _step(number: int, title: str) -> Iterator[None]:
    """Print a step's title, and its seconds when it ends."""
    console.out.print(f"\n[bold]{number}/5  {title}[/bold]")
    start = time.perf_counter()
    yield
    _say(f"{time.perf_counter() - start:.1f} s")


def _say(text: str) -> None:
    console.out.print(f"  {text}", style="dim", markup=False)


def _ask(engine: Engine, question: str, method: str, before: Answer | None = None) -> Answer:
    """Ask and print; `before`: the answer of full prefill to the same question, which is shown beside it."""
    answer = engine.answer(question, method=method)
    if before is None:
        console.out.print(f"  Question: {question}", markup=False)
    console.out.print(f"  {SHOWN[method]:<{NAME_WIDTH}} ", end="", style="bold")
    first, *_ = re.split(r"(?<=[.!?])\s", answer.text.strip(), maxsplit=1)  # then the model repeats itself
    console.out.print(textwrap.shorten(first, 140, placeholder=" ..."), markup=False)
    if before is None:
        _say(f"{'':{NAME_WIDTH}} first token after {answer.timings.ttft * 1e3:,.0f} ms")
    else:
        _print_bars(before, answer)
    return answer


def _print_bars(full: Answer, blended: Answer) -> None:
    """A bar for each answer, as long as its time to the first token, with the work behind it."""
    times = full.timings.ttft, blended.timings.ttft
    bars = Table.grid(padding=(0, 1))
    for answer, ttft in zip((full, blended), times, strict=True):
        bar = ProgressBar(max(times), ttft, BAR_WIDTH)
        name = f"  {SHOWN[answer.report.method]:<{NAME_WIDTH}}"
        bars.add_row(name, bar, f"{ttft * 1e3:,.0f} ms", f"{_tokens_run(answer.report):,} tokens computed")
    console.out.print(bars)
    _say(f"{'':{NAME_WIDTH}} first token {times[0] / times[1]:.1f} times sooner; {_work(blended)}")
    if quality := blended.report.quality:
        _say(f"{'':{NAME_WIDTH}} {quality.summary}")


def _tokens_run(report: BlendReport) -> int:
    """Tokens that ran through the model's layers."""
    return report.tokens_computed + report.tokens_recomputed + report.tokens_suffix


def _work(answer: Answer) -> str:
    """The numbers of reused and recomputed tokens, or why the answer is not blended."""
    report = answer.report
    if not report.blended:
        return f"not blended: {report.reason}"
    work = f"blended: {report.tokens_reused:,} tokens reused, {report.tokens_recomputed:,} recomputed"
    n = report.chunks_corrupt
    return f"{work}; {n} damaged chunks were computed again" if n else work


def _print_next_steps(index: Path) -> None:
    """Three commands to go on with, as they can be typed in this shell."""
    command = "blendserve"
    if shutil.which(command) != shutil.which(sys.argv[0]):
        command = min(os.path.relpath(sys.argv[0]), sys.argv[0], key=len)
    console.out.print(
        f"\n[bold]Next[/bold]\n"
        f"  serve it to any OpenAI client   {command} serve -i {index}\n"
        f"  index your own documents        {command} index build FOLDER docs && {command} precompute docs\n"
        f"  use it from your chain          docs/tutorial/3-your-rag-chain.md"
    )
