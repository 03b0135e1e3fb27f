"""Load on a running server: throughput at saturation, then TTFT and inter-token times against offered load, by method.

    blendserve serve --index indexes/demo &
    python scripts/bench_serving.py http://127.0.0.1:8000 --index indexes/demo

Saturation is measured closed loop: `--clients` that ask again as soon as they have their answer. Then the load is open:
Poisson arrivals that do not wait for answers, at shares of full prefill's saturation, for each method up to a little
above its own. A server that cannot keep up shows it: its queue grows, and TTFT with it. A request that is refused, or
has no event for `--timeout`, has failed and is counted apart.

Prompts are `--passages` passages of the index, among its longest ones, drawn anew for every request; every method gets
the same draws and arrivals. A JSON line a cell goes to stderr as it is measured; the last line of stdout is JSON. Exit
code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

METHODS = ("full", "prefix", "blend")
SHARES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0)  # of full prefill's saturation
THROUGHPUT, TTFT = 4.0, 8.0  # targets: blended to full prefill
QUESTION = "What is said about this, and where?"


@dataclass(frozen=True, slots=True)
class Sent:
    """One request, in seconds; `ttft` is None when it failed."""

    ttft: float | None
    gaps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One method under one load."""

    method: str
    offered: float | None  # requests a second; None = closed loop
    answered: float  # requests a second
    requests: int
    failed: int
    prompt_tokens: int  # of the last answer
    ttft: dict[str, float]
    gap: dict[str, float]


class Load:
    """Sends requests to one server."""

    def __init__(self, args: argparse.Namespace, http: httpx.AsyncClient) -> None:
        self.args, self.http = args, http
        lines = [json.loads(line) for line in (args.index / "passages.jsonl").open()]
        lines.sort(key=lambda p: -len(p["text"]))
        self.pool = [{"text": p["text"], "title": p["title"]} for p in lines[: args.pool]]
        self.prompt_tokens = 0

    def body(self, method: str, rng: random.Random) -> dict[str, Any]:
        passages = rng.sample(self.pool, min(self.args.passages, len(self.pool)))
        new = self.args.new_tokens
        return {
            "question": QUESTION,
            "passages": passages,
            "method": method,
            "max_tokens": new,
            "stream": True,
        }

    async def send(self, body: dict[str, Any]) -> Sent:
        start = last = time.perf_counter()
        ttft, gaps = None, []
        try:
            async with self.http.stream("POST", "/v1/rag/query", json=body) as response:
                if response.status_code != 200:
                    return Sent(None, ())
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
                        self.prompt_tokens = event["report"]["tokens_prompt"]
                        ttft = now - start if ttft is None else ttft
                        return Sent(ttft, tuple(gaps))
        except httpx.HTTPError:
            pass
        return Sent(None, ())

    async def closed(self, method: str) -> Cell:
        """Clients that ask again at once: as much as the server can do."""
        sent: list[Sent] = []
        start = time.perf_counter()

        async def client(number: int) -> None:
            rng = random.Random(f"{number}")
            while time.perf_counter() - start < self.args.seconds:
                sent.append(await self.send(self.body(method, rng)))

        await asyncio.gather(*(client(i) for i in range(self.args.clients)))
        return self._cell(method, None, sent, time.perf_counter() - start)

    async def open(self, method: str, rate: float) -> Cell:
        """Arrivals at random times, `rate` a second on average."""
        rng, arrivals = random.Random(f"{rate}"), random.Random(f"at {rate}")
        n = max(10, round(rate * self.args.seconds))
        start, tasks = time.perf_counter(), []
        at = start
        for _ in range(n):
            at += arrivals.expovariate(rate)
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            tasks.append(asyncio.create_task(self.send(self.body(method, rng))))
        sent = await asyncio.gather(*tasks)
        return self._cell(method, rate, sent, time.perf_counter() - start)

    def _cell(self, method: str, rate: float | None, sent: Sequence[Sent], seconds: float) -> Cell:
        good = [s for s in sent if s.ttft is not None]
        ttft = _percentiles([s.ttft for s in good if s.ttft is not None])
        gap = _percentiles([gap for s in good for gap in s.gaps])
        failed = len(sent) - len(good)
        cell = Cell(method, rate, len(good) / seconds, len(sent), failed, self.prompt_tokens, ttft, gap)
        print(json.dumps(asdict(cell)), file=sys.stderr, flush=True)
        return cell


def main() -> int:
    args = _arguments()
    cells = asyncio.run(_measure(args))
    args.out.mkdir(parents=True, exist_ok=True)
    _plot(cells, args.out / "serving.png")
    summary = _summary(cells)
    (args.out / "serving.json").write_text(
        json.dumps({**summary, "cells": [asdict(c) for c in cells]}, indent=1)
    )
    print(json.dumps(summary))
    return 0 if summary["passed"] else 1


async def _measure(args: argparse.Namespace) -> list[Cell]:
    limits = httpx.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer {args.key}"} if args.key else {}
    timeout = httpx.Timeout(args.timeout, connect=30)
    async with httpx.AsyncClient(base_url=args.url, timeout=timeout, limits=limits, headers=headers) as http:
        load = Load(args, http)
        await _warm(load)
        closed = [await load.closed(method) for method in METHODS]
        full = closed[0].answered
        rates = [
            (c.method, s * full)
            for s in args.shares
            for c in closed
            if s * full <= 1.1 * c.answered or s == 1
        ]
        return closed + [await load.open(method, rate) for method, rate in rates]


async def _warm(load: Load) -> None:
    """Every passage's KV in the store, and every method run once."""
    started = (await load.http.post("/v1/cache/warm", json={"passages": load.pool})).raise_for_status().json()
    state: dict[str, Any] = {"state": "running"}
    while state["state"] == "running":
        await asyncio.sleep(0.5)
        state = (await load.http.get(f"/v1/jobs/{started['id']}")).json()
    if state["state"] != "done":
        raise SystemExit(f"the passages could not be precomputed: {state['error']}")
    for method in METHODS:
        await load.send(load.body(method, random.Random(method)))


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(seconds, q)) if seconds else float("nan") for q in (50, 95, 99)}


def _summary(cells: Sequence[Cell]) -> dict[str, Any]:
    """Against the targets: throughput at saturation, and p95 TTFT at the load that saturates full prefill."""
    most = {c.method: c.answered for c in cells if c.offered is None}
    at_full = {c.method: c.ttft["p95"] for c in cells if c.offered == most["full"]}
    faster, sooner = most["blend"] / most["full"], at_full["full"] / at_full["blend"]
    return {
        "prompt_tokens": max(c.prompt_tokens for c in cells),
        "saturation_rps": most,
        "throughput_ratio": faster,
        "p95_ttft_at_full_saturation": at_full,
        "p95_ttft_ratio": sooner,
        "failed": sum(c.failed for c in cells),
        "passed": faster >= THROUGHPUT and sooner >= TTFT,
    }


def _plot(cells: Sequence[Cell], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    panels: tuple[tuple[Any, str, Callable[[Cell], dict[str, float]]], ...] = (
        (axes[0], "TTFT, s", lambda c: c.ttft),
        (axes[1], "between tokens, s", lambda c: c.gap),
    )
    for axis, label, values in panels:
        for color, method in zip(("C0", "C1", "C2"), METHODS, strict=True):
            line = sorted(
                (c for c in cells if c.method == method and c.offered), key=lambda c: c.offered or 0
            )
            for q, style in (("p50", "-"), ("p95", "--"), ("p99", ":")):
                x, y = [c.offered for c in line], [values(c)[q] for c in line]
                axis.plot(x, y, style, color=color, marker=".", label=f"{method} {q}")
        axis.set(xlabel="offered load, requests/s", ylabel=label, yscale="log")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    figure.savefig(file, dpi=120)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="of the server")
    parser.add_argument("--index", type=Path, required=True, help="folder whose passages are asked about")
    parser.add_argument("--passages", type=int, default=6, help="of a prompt")
    parser.add_argument("--pool", type=int, default=40, help="longest passages of the index to draw from")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--clients", type=int, default=8, help="of the closed loop")
    parser.add_argument("--seconds", type=float, default=60, help="of each cell")
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=SHARES,
        help="of full prefill's saturation; 1 has to be one",
    )
    parser.add_argument("--timeout", type=float, default=120, help="seconds between two events of an answer")
    parser.add_argument("--key", help="API key, where the server has keys")
    parser.add_argument("--out", type=Path, default=Path("runs/serving"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
