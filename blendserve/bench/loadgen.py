"""Load on a server: closed loop (clients that ask again at once) and open loop (Poisson arrivals).

Closed loop gives the throughput at saturation. In an open loop arrivals do not wait for answers: a server that cannot
keep up shows it, as its queue grows, and TTFT with it.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from blendserve.retrieve.database import Database
from blendserve.retrieve.tables import select_passages

LEAST = 8  # requests of an open loop
Body = Callable[[random.Random], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Response:
    """One request, in seconds. `ttft_s` is None when it was refused, broke off, or timed out."""

    ttft_s: float | None
    itl_s: tuple[float, ...] = ()  # inter-token latencies
    prompt_tokens: int = 0


async def send(http: httpx.AsyncClient, body: dict[str, Any]) -> Response:
    """Stream one answer of /v1/rag/query."""
    start = time.perf_counter()
    at: list[float] = []
    with suppress(httpx.HTTPError):
        async with http.stream("POST", "/v1/rag/query", json={**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {}
                if event.get("event") in ("text", "done"):
                    at.append(time.perf_counter())
                if event.get("event") == "done":
                    itl = [later - earlier for earlier, later in pairwise(at[:-1])]
                    return Response(at[0] - start, tuple(itl), event["report"]["tokens_prompt"])
    return Response(None)


async def closed_loop(
    clients: Sequence[httpx.AsyncClient], body: Body, seconds: float, think_s: float = 0.0, seed: str = ""
) -> dict[str, float]:
    """Metrics of clients that ask, wait for the answer and think; each asks at least once.

    think_s: mean time from answer to next question; with 0 the clients saturate the server. Questions follow from `seed`.
    """
    responses: list[Response] = []
    start = time.perf_counter()

    async def ask(number: int, http: httpx.AsyncClient) -> None:
        rng = random.Random(f"{seed}{number}")
        pauses = random.Random(f"pauses {seed}{number}")
        left_s = seconds
        pause_s = pauses.uniform(0, think_s)
        while left_s > 0:
            await asyncio.sleep(min(pause_s, left_s))
            responses.append(await send(http, body(rng)))
            pause_s = pauses.expovariate(1 / think_s) if think_s else 0.0
            left_s = start + seconds - pause_s - time.perf_counter()

    await asyncio.gather(*(ask(n, http) for n, http in enumerate(clients)))
    return metrics_of(responses, time.perf_counter() - start)


async def open_loop(http: httpx.AsyncClient, body: Body, rate: float, seconds: float) -> dict[str, float]:
    """Arrivals at random times, `rate` a second on average; requests and times are the same in each call."""
    rng = random.Random(f"{rate}")
    arrivals = random.Random(f"at {rate}")
    tasks: list[asyncio.Task[Response]] = []
    start = at = time.perf_counter()
    for _ in range(max(LEAST, round(rate * seconds))):
        at += arrivals.expovariate(rate)
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        tasks.append(asyncio.create_task(send(http, body(rng))))
    responses = await asyncio.gather(*tasks)
    return {**metrics_of(responses, time.perf_counter() - start), "offered_per_s": rate}


def metrics_of(responses: Sequence[Response], seconds: float) -> dict[str, float]:
    """Percentiles over the answered requests; failures are counted."""
    ttft = [r.ttft_s for r in responses if r.ttft_s is not None]
    found: dict[str, float] = {
        "requests": len(responses),
        "failed": len(responses) - len(ttft),
        "answered_per_s": len(ttft) / seconds,
        "prompt_tokens": max((r.prompt_tokens for r in responses), default=0),
    }
    for name, times in {"ttft": ttft, "itl": [gap for r in responses for gap in r.itl_s]}.items():
        if times:
            found |= {f"{name}_p{q}_s": float(np.percentile(times, q)) for q in (50, 95, 99, 100)}
    return found


def longest_passages(index: Path, n: int) -> list[dict[str, str]]:
    """Return the n passages with the longest texts of an index folder.

    Raises IndexMissing, or VectorIndexError for a file that is no index.
    """
    database = Database(index)
    with closing(database), database.read() as rows:
        passages = sorted(select_passages(rows), key=lambda passage: -len(passage.text))
    return [{"text": passage.text, "title": passage.title} for passage in passages[:n]]
