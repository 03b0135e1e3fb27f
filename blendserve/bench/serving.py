"""`blendserve bench serving`: throughput at saturation, then TTFT and inter-token latency by offered load and method.

The server is a process of its own. First the throughput of every method at saturation (closed loop). Then open loops at
load factors: multiples of full prefill's saturation, for each method up to a little above its own. Load factor 1 decides
about p95 TTFT and takes twice as long. Every method gets the same requests at the same times, and the KV of all passages
is in the store.

Prompts are passages drawn from the longest of an index, and no two are alike. To load a server of another kind, use
GuideLLM: `blendserve serve` speaks /v1/chat/completions.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import yaml
from pydantic import Field

from blendserve.bench.fixture import scratch
from blendserve.bench.harness import Case, Column, Group, Metrics, SampleLog, count, ms, ratio, speedup, table
from blendserve.bench.loadgen import Body, closed_loop, longest_passages, open_loop, send
from blendserve.bench.runner import Bench, BenchConfig, Plot
from blendserve.bench.server_process import FIXED, ServerProcess, serve_command
from blendserve.config import Config, Positive
from blendserve.engine.engine import Engine
from blendserve.errors import StoreError
from blendserve.retrieve import language_reference

METHODS = ("full", "blend", "prefix")
ABOVE = 1.1  # times a method's own saturation: where its loads end
ROOM = ("--slots", "8", "--slot-tokens", "6144")  # of a server that is started here
POOL = 20  # of the index's longest passages: prompts are drawn from them
TIMEOUT_S = 120.0  # without an event until a request has failed
QUESTION = "What is said about this, and where?"


class ServingConfig(BenchConfig):
    """Load on a server."""

    url: str | None = Field(None, description="URL of a running server; a server is started if not set.")
    key: str | None = Field(None, description="API key for the server at the URL.")
    index: Path = Field(
        Path("indexes/demo"),
        description="Folder of the index whose passages are asked about; one of bundled text is built if it is missing.",
    )
    passages: Positive = Field(6, description="Number of passages in a prompt.")
    new_tokens: Positive = Field(16, description="Length of an answer, in tokens.")
    clients: Positive = Field(8, description="Number of concurrent clients that saturate the server.")
    seconds: float = Field(60.0, gt=0, description="Duration of one load, in seconds.")
    load_factors: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (1.0, 0.5, 2.0, 4.0), description="Offered loads, as multiples of full prefill's saturation."
    )
    repeats: Positive = Field(1, description="Number of rounds of every load.")


def groups(config: ServingConfig, log: SampleLog) -> Iterator[Group]:
    with scratch(config.folder) as folder, _server(config, folder) as (url, index):
        pool = longest_passages(index, POOL)
        asyncio.run(_warm(config, url, pool))

        def case(method: str, loop: Callable[..., Any], *load: float) -> Case:
            async def run() -> Metrics:
                async with _client(config, url) as http:
                    metrics: Metrics = await loop(http, partial(_body, config, pool, method), *load)
                    return metrics

            return Case({"method": method}, lambda: asyncio.run(run()))

        async def saturate(http: httpx.AsyncClient, body: Body) -> Metrics:
            return await closed_loop([http] * config.clients, body, config.seconds)

        closed = [case(method, saturate) for method in METHODS]
        yield Group({"load": "saturation"}, closed, warm_up=False)
        saturation = {s[0]["method"]: s[2]["answered_per_s"] for s in log.groups[0]["samples"]}
        for factor in config.load_factors:
            rate = factor * saturation["full"]
            seconds = config.seconds * (2 if factor == 1 else 1)
            methods = [m for m in METHODS if rate and (factor == 1 or rate <= ABOVE * saturation[m])]
            if methods:
                cases = [case(method, open_loop, rate, seconds) for method in methods]
                yield Group({"load": factor}, cases, warm_up=False)


def _body(
    config: ServingConfig, pool: list[dict[str, str]], method: str, rng: random.Random
) -> dict[str, Any]:
    passages = rng.sample(pool, min(config.passages, len(pool)))
    return {"question": QUESTION, "passages": passages, "method": method, "max_tokens": config.new_tokens}


def _client(config: ServingConfig, url: str) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {config.key}"} if config.key else {}
    timeout = httpx.Timeout(TIMEOUT_S, connect=30)
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits, headers=headers)


async def _warm(config: ServingConfig, url: str, pool: list[dict[str, str]]) -> None:
    """Precompute the passages, and run every method once. Raises StoreError."""
    async with _client(config, url) as http:
        job = (await http.post("/v1/cache/warm", json={"passages": pool})).raise_for_status().json()
        while job["state"] == "running":
            await asyncio.sleep(0.5)
            job = (await http.get(f"/v1/jobs/{job['id']}")).json()
        if job["state"] != "done":
            raise StoreError(f"the passages could not be precomputed: {job['error']}")
        for n, method in enumerate(METHODS):
            await send(http, _body(config, pool, method, random.Random(n)))


@contextmanager
def _server(config: ServingConfig, folder: Path) -> Iterator[tuple[str, Path]]:
    """URL and index of the running server, or of one that is started; an index of bundled text is built if need be."""
    if config.url:
        yield config.url, config.index
        return
    index = config.index
    if not index.exists():
        index = folder / "index"
        Engine.build(index, language_reference(), Config(model=config.model_settings)).close()
    model = model_settings(config, folder / "model.yaml")
    command = serve_command("--index", str(index), "--config", str(model), "--method", "blend", *FIXED, *ROOM)
    with ServerProcess(command, folder / "server.log") as child:
        yield child.url, index
        child.stop()


def model_settings(config: BenchConfig, file: Path) -> Path:
    """A settings file with the model of a bench, for a server."""
    file.write_text(yaml.safe_dump({"model": config.model_settings.model_dump(mode="json")}))
    return file


TABLE = table(
    "Load",
    Column("answered/s", "answered_per_s"),
    ratio("x full", "answered_per_s", method="full"),
    ms("p50 TTFT ms", "ttft_p50_s"),
    ms("p95", "ttft_p95_s"),
    speedup("p95 x full", "ttft_p95_s", method="full"),
    ms("p95 ITL ms", "itl_p95_s"),
    count("requests", "requests"),
    count("failed", "failed"),
)
TINY = {"clients": 2, "passages": 2, "new_tokens": 2, "seconds": 0.5, "load_factors": (1.0,), "repeats": 1}
BENCH = Bench(ServingConfig, groups, (TABLE,), Plot(x="load", y="ttft_p95_s", series="method"), TINY)
