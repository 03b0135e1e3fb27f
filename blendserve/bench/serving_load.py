"""`blendserve bench serving`: throughput at saturation, then TTFT and inter-token times against offered load, by method.

The server is a process of its own. Saturation is measured closed loop: clients that ask again as soon as they have their
answer. Then the load is open: Poisson arrivals that do not wait for answers, at shares of full prefill's saturation, for
each method up to a little above its own; the cell that decides the target, at its whole, takes twice as long as the
others. A server that cannot keep up shows it: its queue grows, and TTFT with it. A request that is refused, or has no
event for too long, has failed and is counted apart. Every method gets the same draws and arrivals, and the KV of all
passages is in the store.

Without a data set, prompts are passages drawn anew from the longest ones of the index, and no two of them alike. With one
(questions with a corpus beside them, as `blendserve evaluate` takes), an index of part of the corpus is built, what the
questions need among it; then the server retrieves for each.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from blendserve import console
from blendserve.bench.config import ServingConfig
from blendserve.config import BlendConfig, Config
from blendserve.core import Document
from blendserve.engine.engine import Engine
from blendserve.errors import IndexMissing, InputError, StoreError
from blendserve.evaluate.datasets import load
from blendserve.extras import install_hint
from blendserve.provenance import machine, versions
from blendserve.serve.child import Child, serve_command

METHODS = ("full", "blend", "prefix")
ABOVE = 1.1  # of its own saturation: where a method's loads end
LEAST = 8  # requests of an open cell
THROUGHPUT, TTFT = 4.0, 8.0  # targets: blended to full prefill
ROOM = ("--slots", "8", "--slot-tokens", "6144")  # of a server that is started here
QUESTION = "What is said about this, and where?"

Body = Callable[[random.Random], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Sent:
    """One request, in seconds; `ttft` is None when it failed."""

    ttft: float | None
    gaps: tuple[float, ...] = ()
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Cell:
    """One method under one load."""

    method: str
    share: float | None  # of full prefill's saturation; None = closed loop
    offered: float | None  # requests a second
    answered: float  # requests a second
    requests: int
    failed: int
    prompt_tokens: float  # mean
    ttft: dict[str, float]
    gap: dict[str, float]

    @property
    def key(self) -> tuple[str, float | None]:
        return self.method, self.share


class Load:
    """Sends requests to one server. `bodies` draws what is asked."""

    def __init__(
        self, http: httpx.AsyncClient, bodies: Body, clients: int, new_tokens: int, ratio: float | None = None
    ) -> None:
        self._http, self._bodies, self._clients, self._new = http, bodies, clients, new_tokens
        self._extra = {"blend": {} if ratio is None else {"ratio": ratio}}

    def body(self, method: str, rng: random.Random) -> dict[str, Any]:
        how = {"method": method, **self._extra.get(method, {})}
        return {**self._bodies(rng), **how, "max_tokens": self._new, "stream": True}

    async def send(self, body: dict[str, Any]) -> Sent:
        start = last = time.perf_counter()
        ttft, gaps = None, list[float]()
        try:
            async with self._http.stream("POST", "/v1/rag/query", json=body) as response:
                if response.status_code != 200:
                    return Sent(None)
                async for line in response.aiter_lines():
                    event = json.loads(line[6:]) if line.startswith("data: ") else {}
                    now = time.perf_counter()
                    if event.get("event") == "text":
                        if ttft is None:
                            ttft = now - start
                        else:
                            gaps.append(now - last)
                        last = now
                    if event.get("event") == "done":
                        tokens = event["report"]["tokens_prompt"]
                        return Sent(now - start if ttft is None else ttft, tuple(gaps), tokens)
        except httpx.HTTPError:
            pass
        return Sent(None)

    async def closed(self, method: str, seconds: float) -> Cell:
        """Clients that ask again at once: as much as the server can do."""
        sent: list[Sent] = []
        start = time.perf_counter()

        async def client(number: int) -> None:
            rng = random.Random(f"{number}")
            while time.perf_counter() - start < seconds:
                sent.append(await self.send(self.body(method, rng)))

        await asyncio.gather(*(client(i) for i in range(self._clients)))
        return _cell(method, None, None, sent, time.perf_counter() - start)

    async def open(self, method: str, share: float, rate: float, seconds: float) -> Cell:
        """Arrivals at random times, `rate` a second on average."""
        rng, arrivals = random.Random(f"{share}"), random.Random(f"at {share}")
        tasks: list[asyncio.Task[Sent]] = []
        start = at = time.perf_counter()
        for _ in range(max(LEAST, round(rate * seconds))):
            at += arrivals.expovariate(rate)
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            tasks.append(asyncio.create_task(self.send(self.body(method, rng))))
        sent = await asyncio.gather(*tasks)
        return _cell(method, share, rate, sent, time.perf_counter() - start)


def _cell(method: str, share: float | None, rate: float | None, sent: Sequence[Sent], seconds: float) -> Cell:
    good = [s for s in sent if s.ttft is not None]
    return Cell(
        method,
        share,
        rate,
        answered=len(good) / seconds,
        requests=len(sent),
        failed=len(sent) - len(good),
        prompt_tokens=float(np.mean([s.prompt_tokens for s in good])) if good else 0.0,
        ttft=percentiles([s.ttft for s in good if s.ttft is not None]),
        gap=percentiles([gap for s in good for gap in s.gaps]),
    )


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """{} of nothing."""
    return {f"p{q}": float(np.percentile(seconds, q)) for q in (50, 95, 99) if seconds}


class Cells:
    """What has been measured, in a file that grows a line at a time."""

    def __init__(self, file: Path, until: float) -> None:
        self._file, self._until = file, until
        lines = file.read_text().splitlines() if file.exists() else []
        self.all = {cell.key: cell for cell in (Cell(**json.loads(line)) for line in lines)}

    def wants(self, key: tuple[str, float | None]) -> bool:
        return key not in self.all and time.monotonic() < self._until

    def add(self, cell: Cell) -> None:
        self.all[cell.key] = cell
        line = json.dumps(asdict(cell))
        with self._file.open("a") as out:
            out.write(line + "\n")
        print(line, file=sys.stderr, flush=True)

    def saturation(self, method: str) -> float | None:
        cell = self.all.get((method, None))
        return cell.answered if cell else None

    def loads(self, shares: Iterable[float]) -> list[tuple[str, float]]:
        """Which open cells there are to be, those of the target first."""
        full = self.saturation("full")
        if not full:  # not measured, or it answered nothing
            return []
        most = {m: self.saturation(m) or 0.0 for m in METHODS}
        wanted = [(m, s) for s in shares for m in METHODS if s == 1 or s * full <= ABOVE * most[m]]
        return sorted(wanted, key=lambda load: load[1] != 1)


async def measure(load: Load, cells: Cells, seconds: float, shares: Sequence[float]) -> None:
    """All cells that are not there yet, in order of importance."""
    for method in METHODS:
        if cells.wants((method, None)):
            cells.add(await load.closed(method, seconds))
    for method, share in cells.loads(shares):
        if cells.wants((method, share)):
            rate = share * (cells.saturation("full") or 0.0)
            cells.add(await load.open(method, share, rate, seconds * (2 if share == 1 else 1)))


async def warm(http: httpx.AsyncClient, load: Load, chosen: dict[str, Any]) -> None:
    """The KV of the chosen passages in the store, and every method run once."""
    started = (await http.post("/v1/cache/warm", json=chosen)).raise_for_status().json()
    state: dict[str, Any] = {"state": "running"}
    while state["state"] == "running":
        await asyncio.sleep(0.5)
        state = (await http.get(f"/v1/jobs/{started['id']}")).json()
    if state["state"] != "done":
        raise StoreError(f"the passages could not be precomputed: {state['error']}")
    for method in METHODS:
        await load.send(load.body(method, random.Random(method)))


def summary(cells: Cells, shares: Sequence[float]) -> dict[str, Any]:
    """Against the targets: throughput at saturation, and p95 TTFT at the load that saturates full prefill."""
    most = {m: cells.saturation(m) for m in METHODS}
    at_full = {m: cells.all[m, 1.0].ttft.get("p95") for m in METHODS if (m, 1.0) in cells.all}
    missing = [m for m in METHODS if most[m] is None]
    missing += [f"{m} at {s:g}" for m, s in cells.loads(shares) if (m, s) not in cells.all]
    faster = _ratio(most.get("blend"), most.get("full"))
    sooner = _ratio(at_full.get("full"), at_full.get("blend"))
    return {
        "prompt_tokens": max((c.prompt_tokens for c in cells.all.values()), default=0.0),
        "requests": sum(c.requests for c in cells.all.values()),
        "saturation_rps": most,
        "throughput_ratio": faster,
        "throughput_target": THROUGHPUT,
        "p95_ttft_at_full_saturation": at_full,
        "p95_ttft_ratio": sooner,
        "p95_ttft_target": TTFT,
        "failed": sum(c.failed for c in cells.all.values()),
        "missing": missing,
        "passed": (faster or 0) >= THROUGHPUT and (sooner or 0) >= TTFT,
    }


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def plot(cells: Sequence[Cell], file: Path) -> None:
    """TTFT and inter-token times against offered load, as soon as an open cell has an answer."""
    if not any(c.offered and c.answered for c in cells):
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    panels: tuple[tuple[Any, str, Callable[[Cell], dict[str, float]]], ...] = (
        (axes[0], "TTFT, s", lambda c: c.ttft),
        (axes[1], "between tokens, s", lambda c: c.gap),
    )
    for axis, label, values in panels:
        for color, method in zip(("C0", "C2", "C1"), METHODS, strict=True):
            line = sorted((c.offered, c) for c in cells if c.method == method and c.offered)
            for q, style in (("p50", "-"), ("p95", "--"), ("p99", ":")):
                x, y = [offered for offered, _ in line], [values(c).get(q, np.nan) for _, c in line]
                axis.plot(x, y, style, color=color, marker=".", label=f"{method} {q}")
            for cell in cells:
                if cell.method == method and cell.offered is None:
                    axis.axvline(cell.answered, color=color, alpha=0.4)
        axis.set(xlabel="offered load, requests/s (upright: saturation)", ylabel=label, yscale="log")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    figure.savefig(file, dpi=120)


def build(index: Path, dataset: Path, questions: int, passages: int) -> None:
    """An index of part of a corpus, with the passages that the first questions need, and its KV; unless it is there."""
    config = Config(blend=BlendConfig(method="blend"))
    try:
        engine = Engine.open(index, config)
    except IndexMissing:
        found = load(dataset, limit=questions)
        needed = {title for example in found.examples for title in example.supporting}
        corpus = list(found.corpus)
        random.Random(0).shuffle(corpus)
        corpus.sort(key=lambda passage: passage.title not in needed)
        with console.progress("Embedding", "windows") as update:
            documents = [Document(p.text, p.title) for p in corpus[:passages]]
            engine = Engine.build(index, documents, config, progress=update)
    with engine, console.progress("Precomputing", "tokens") as update:
        engine.precompute(progress=update)


def bodies_of_questions(dataset: Path, questions: int, passages: int) -> Body:
    asked = [example.question for example in load(dataset, limit=questions).examples]
    return lambda rng: {"question": rng.choice(asked), "top_k": passages}


def bodies_of_passages(pool: Sequence[dict[str, str]], passages: int) -> Body:
    return lambda rng: {"question": QUESTION, "passages": rng.sample(pool, min(passages, len(pool)))}


def longest(index: Path, n: int) -> list[dict[str, str]]:
    lines = [json.loads(line) for line in (index / "passages.jsonl").open()]
    lines.sort(key=lambda p: -len(p["text"]))
    return [{"text": p["text"], "title": p["title"]} for p in lines[:n]]


@contextmanager
def server(config: ServingConfig, index: Path) -> Iterator[str]:
    """The URL of a server: the one that runs, or one for the time being."""
    if config.url:
        yield config.url
        return
    command = serve_command("--index", str(index), "--method", "blend", *ROOM)
    with Child(command, config.out / "server.log") as child:
        yield child.url
        child.stop()


def run(config: ServingConfig) -> dict[str, Any] | None:
    """Measure the cells that are missing -> the summary of all; None when it was only to prepare.

    Raises CorpusError, IndexMissing, StoreError.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(f"the plot needs matplotlib, which is not installed: {install_hint('evaluate')}")
    config.out.mkdir(parents=True, exist_ok=True)
    index = config.index
    if config.dataset:
        index = config.out / "index"
        build(index, config.dataset, config.questions, config.corpus_passages)
    if config.prepare:
        return None
    cells = Cells(config.out / "cells.jsonl", time.monotonic() + 60 * config.minutes)
    with server(config, index) as url:
        asyncio.run(_run(config, url, index, cells))
    found = {**summary(cells, config.shares), "versions": versions(), "machine": machine()}
    whole = {**found, "ratio": config.ratio, "cells": [asdict(c) for c in cells.all.values()]}
    (config.out / "serving.json").write_text(json.dumps(whole, indent=1))
    plot(list(cells.all.values()), config.out / "serving.png")
    return found


async def _run(config: ServingConfig, url: str, index: Path, cells: Cells) -> None:
    if config.dataset:
        bodies = bodies_of_questions(config.dataset, config.questions, config.passages)
        chosen: dict[str, Any] = {"collection": index.name}
    else:
        pool = longest(index, config.pool)
        bodies, chosen = bodies_of_passages(pool, config.passages), {"passages": pool}
    limits = httpx.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer {config.key}"} if config.key else {}
    timeout = httpx.Timeout(config.timeout, connect=30)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits, headers=headers) as http:
        load = Load(http, bodies, config.clients, config.new_tokens, config.ratio)
        await warm(http, load, chosen)
        await measure(load, cells, config.seconds, config.shares)
