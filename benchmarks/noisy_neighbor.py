"""`python -m benchmarks noisy_neighbor`: what one hostile client does to the TTFT of a server's other clients.

Regular clients load the server to a fixed share of its sequential throughput: each waits for its answer, then for its
think time. Windows without and with a hostile client alternate. Each has a new server over a new copy of the index, as
the server indexes the hostile client's documents long after the window. Every client has an API key, the limits are the
server's defaults, and the hostile client has its own collection.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from itertools import count as count_up
from pathlib import Path
from typing import Any

import httpx
from pydantic import Field

from benchmarks.support.hostile import KINDS, attacking
from benchmarks.support.worker import WorkerProcess
from blendserve.bench.fixture import scratch
from blendserve.bench.harness import Case, Group, Metrics, SampleLog, count, ms, ratio, table
from blendserve.bench.loadgen import Body, closed_loop, longest_passages, send
from blendserve.bench.runner import Bench, BenchConfig
from blendserve.bench.server_process import FIXED, ServerProcess, serve_command
from blendserve.bench.serving import ROOM, TIMEOUT_S, model_settings
from blendserve.config import BlendConfig, Config, Positive, ServeConfig
from blendserve.engine.engine import Engine
from blendserve.errors import InputError
from blendserve.retrieve import language_reference
from blendserve.serve.keys import KeyFile, Tenant

METHOD = "blend"
SHARE = 0.4  # of the sequential throughput: the load of the regular clients
CONNECTIONS = 4  # of the hostile client
SEQUENTIAL = 5  # requests one at a time, before a window
POOL = 30  # passages whose titles are asked about
INDEX, UPLOADS = "index", "uploads"  # collections: the regular clients', the hostile one's


class NeighborConfig(BenchConfig):
    """A server's regular clients beside a hostile one."""

    clients: Positive = Field(3, description="Number of regular clients.")
    passages: Positive = Field(3, description="Number of passages to retrieve for a question.")
    new_tokens: Positive = Field(4, description="Length of an answer, in tokens.")
    seconds: float = Field(20.0, gt=0, description="Duration of a window, in seconds.")
    repeats: Positive = Field(
        3, description="Number of pairs of windows, without and with the hostile client."
    )


def groups(config: NeighborConfig, log: SampleLog) -> Iterator[Group]:
    with scratch(config.folder) as folder:
        prepare(config, folder / "made")
        model_settings(config, folder / "model.yaml")
        keys = KeyFile(folder / "keys.json")
        names = [f"client {n}" for n in range(config.clients)]
        regular = [keys.create(Tenant(name, collections=(INDEX,), read_only=True)) for name in names]
        hostile = keys.create(Tenant("hostile", "hostile", collections=(UPLOADS,)))
        facts: dict[str, Any] = {"statuses": {kind: Counter[str]() for kind in KINDS}}
        windows = {"no": count_up(), "yes": count_up()}

        def run(neighbor: str) -> Metrics:
            body, draw = questions(config, folder / "made"), next(windows[neighbor])
            with server(folder) as url, ExitStack() as stack:
                client = None
                if neighbor == "yes":
                    model = httpx.get(f"{url}/v1/models", headers=bearer(hostile)).raise_for_status().json()
                    task = {"url": url, "key": hostile, "model": model["data"][0]["id"]}
                    task |= {"max_body": ServeConfig.max_body, "connections": CONNECTIONS}
                    client = stack.enter_context(WorkerProcess(attacking, task))
                metrics = asyncio.run(window(config, url, regular, body, draw, facts, client))
                for kind, statuses in (client.call("end") if client else {}).items():
                    facts["statuses"][kind].update(statuses)
                return metrics

        cases = [Case({"hostile": name}, partial(run, name)) for name in windows]
        yield Group({"clients": config.clients}, cases, lambda: facts, warm_up=False)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def prepare(config: NeighborConfig, folder: Path) -> None:
    """An index of bundled text with its KV. Raises ModelError, StoreError."""
    settings = Config(model=config.model_settings, blend=BlendConfig(method=METHOD))
    with Engine.build(folder, language_reference(), settings) as engine:
        engine.precompute()


def questions(config: NeighborConfig, index: Path) -> Body:
    """Questions about an index."""
    titles = sorted({passage["title"] for passage in longest_passages(index, POOL)})
    fixed = {"method": METHOD, "max_tokens": config.new_tokens, "top_k": config.passages}
    return lambda rng: {"question": f"What is said about {rng.choice(titles)}, and where?", **fixed}


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """The URL of a new server over a new copy of the index in folder/made. Raises ServeError."""
    with scratch(folder) as served:
        shutil.copytree(folder / "made", served / INDEX)
        shutil.copytree(folder / "made", served / UPLOADS, ignore=shutil.ignore_patterns("kv"))
        indexes = ("--index", str(served / INDEX), "--index", str(served / UPLOADS))
        given = ("--config", str(folder / "model.yaml"), "--keys", str(folder / "keys.json"))
        command = serve_command(*indexes, *given, "--method", METHOD, *FIXED, *ROOM)
        with ServerProcess(command, folder / "server.log") as child:
            yield child.url


async def window(
    config: NeighborConfig,
    url: str,
    keys: Sequence[str],
    body: Body,
    draw: int,
    facts: dict[str, Any],
    hostile: WorkerProcess | None,
) -> Metrics:
    """The regular clients of one server: warm up, then measure; `draw` decides their questions and times.

    facts: the first window sets the think time for all. hostile: begins with the measurement.
    """
    async with AsyncExitStack() as stack:
        opened = (httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, headers=bearer(key)) for key in keys)
        clients = [await stack.enter_async_context(client) for client in opened]
        rng = random.Random("alone")
        warm = [await send(clients[n % len(clients)], body(rng)) for n in range(SEQUENTIAL)]
        seconds = [r.ttft_s + sum(r.itl_s) for r in warm[1:] if r.ttft_s is not None]
        if not seconds:
            raise InputError("the server answers no regular question: ask for fewer passages or tokens")
        service_s = statistics.median(seconds)
        # a client loads the server with service / (service + think)
        think_s = facts.setdefault("think_s", service_s * (config.clients / SHARE - 1))
        if hostile:
            hostile.call("begin")
        metrics = await closed_loop(clients, body, config.seconds, think_s, seed=f"{draw} ")
        return {**metrics, "service_s": service_s}


TABLE = table(
    "Regular clients, without and with a hostile client",
    ms("p50 TTFT ms", "ttft_p50_s"),
    ms("p95", "ttft_p95_s"),
    ratio("p95 / without", "ttft_p95_s", hostile="no"),
    ms("worst", "ttft_p100_s", spread=False),
    count("requests", "requests"),
    count("failed", "failed"),
)
TINY = {"clients": 2, "passages": 2, "new_tokens": 2, "seconds": 0.1}
BENCH = Bench(NeighborConfig, groups, (TABLE,), tiny=TINY)
