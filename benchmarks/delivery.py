"""`python -m benchmarks delivery`: a prompt whose chunks a server delivers, over links that are constant, change or die.

The server (nginx if it is installed, else `kdn serve`), and a proxy that replays a trace from the start of each request,
are processes. Compared over one trace: full prefill, each level fixed, CacheGen (SIGCOMM 2024, section 5.3), CacheGen's
rule in our pipeline, and our rule. CacheGen transfers one chunk after the other, decodes each during the next transfer,
and prefills after the last. Our pipeline has two transfers at a time and begins the prefill during the last ones; so do
fixed levels. The oracle is the fastest of full prefill and the fixed levels in the same round.

Each request has a new store. A client keeps its estimates of the link from request to request on one trace. KL is that of
the first token's logits to full prefill's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from benchmarks.support.nginx import Nginx
from benchmarks.support.proxy import GBIT, ProxyProcess, Trace, changing
from blendserve.bench.codec import CodecConfig, CodecTables, codec_words
from blendserve.bench.fixture import scratch, time_prompt
from blendserve.bench.harness import ANY, Case, Group, Metrics, SampleLog, count, ms, ratio, table
from blendserve.bench.runner import Bench, Plot, open_model
from blendserve.bench.server_process import ServerProcess
from blendserve.bench.workload import Workload
from blendserve.blend.blender import Blender
from blendserve.config import BlendConfig, KdnConfig, Positive
from blendserve.fetch import KVFetcher, TieredStore
from blendserve.fetch.fetcher import Fetch
from blendserve.fetch.incoming import ChunkRequest
from blendserve.fetch.kdn.manifest import Collection
from blendserve.fetch.kdn.source import WORKERS, KdnSource
from blendserve.fetch.link import LinkEstimator
from blendserve.fetch.plan import LevelPlanner, LinkState, PendingChunk, Plan, plan
from blendserve.fetch.transfer import Compute
from blendserve.kdn.publish import publish_chunks
from blendserve.kdn.target import PublishTarget
from blendserve.models.loader import LoadedModel
from blendserve.quality.fidelity import kl
from blendserve.registry import DELIVERED_CODECS
from blendserve.store import ChunkKey, KVStore, LMDBStore, MemoryStore

COLLECTION = "bench"
MIN_SAVED_S = 1e-6  # per token
RECOMPUTE, CACHEGEN, PIPELINED, OURS = "recompute", "CacheGen", "CacheGen rule, pipelined", "blendserve"
CAP = 1 << 36
ROUND_TRIP_S = 0.001
DEADLINE_S = 10.0  # of a request to the server
FULL = BlendConfig(method="full")


class DeliveryConfig(CodecConfig):
    """A prompt whose chunks a server delivers, over a link whose rate changes."""

    rates_gbit: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (0.1, 0.3, 1.0, 3.0, 10.0), description="Rates of constant links to replay, in Gbit/s."
    )
    traces: tuple[Literal["down", "up", "sawtooth", "mobile", "dead"], ...] = Field(
        ("down", "up", "sawtooth", "mobile", "dead"), description="Traces of changing links to replay, too."
    )
    codecs: tuple[str, ...] = Field(
        DELIVERED_CODECS, description="Levels that the chunks are published at, written name or name@level."
    )
    fit_tokens: Positive = Field(
        2_048, description="Length of the sampled text that tables are fitted on, in tokens."
    )

    @property
    def levels(self) -> tuple[str, ...]:
        """Uncoded first."""
        return codec_words(self.codecs)


@dataclass(frozen=True, slots=True)
class Client:
    """One way to fetch chunks."""

    blend: BlendConfig
    planner: LevelPlanner
    level: str = "auto"
    workers: int = WORKERS
    early_start: bool = True  # begin the prefill while the last chunks are in transit


def fixed_plan(todo: Sequence[PendingChunk], link: LinkState, current: str | None = None) -> Plan:
    """Every chunk, at the one level that the settings allow."""
    return Plan(next(iter(todo[0].sizes)), len(todo))


def cachegen_plan(todo: Sequence[PendingChunk], link: LinkState, current: str | None = None) -> Plan:
    """CacheGen's level of the next chunk (SIGCOMM 2024, section 5.3): chosen before it is sent, by the last throughput.

    The finest level that arrives in time, else the fastest; the middle one for the first chunk. Decoding does not count.
    """
    sizes, n = todo[0].sizes, len(todo)
    levels = list(sizes)
    if current is not None:
        return Plan(current, n)
    if link.last_rate is None:
        return Plan(levels[len(levels) // 2], n)
    share = todo[0].n_tokens / sum(c.n_tokens for c in todo)
    room, computing = (link.wanted_s - link.spent_s) * share, todo[0].saved_s
    seconds = {level: sizes[level] / link.last_rate for level in levels}
    ways = seconds if computing is None else {"": computing, **seconds}
    in_time = [level for level, needed in ways.items() if needed <= room]
    level = in_time[0] if in_time else min(ways, key=lambda level: ways[level])
    return Plan(level or levels[0], n, n_skipped=not level)


class CostedFetcher(KVFetcher):
    """Gives every chunk the seconds that it saves, for every method: they tell when a link is dead."""

    saved_s: Mapping[ChunkKey, float]

    @contextmanager
    def fetch(self, requests: Sequence[ChunkRequest], compute: Compute | None = None) -> Iterator[Fetch]:
        costed = [replace(r, saved_s=self.saved_s.get(r.key, r.saved_s)) for r in requests]
        with super().fetch(costed, compute) as fetch:
            yield fetch


class Fixture:
    """A published prompt, and a link to the server that delivers it."""

    def __init__(
        self, model: LoadedModel, config: DeliveryConfig, proxy: ProxyProcess, workload: Workload
    ) -> None:
        self._model, self._config, self._proxy, self._workload = model, config, proxy, workload
        self._full = _blender(model, workload, MemoryStore(CAP))
        self._reference: Tensor = time_prompt(self._full, workload, FULL)[1].result.logits.float()

    def cases(self, trace: Trace) -> list[Case]:
        """Every client over this trace, none of which has used it yet."""
        blend = self._config.blend
        clients = {
            **{("fixed", level): Client(blend, fixed_plan, level) for level in self._config.levels},
            ("adaptive", CACHEGEN): Client(blend, cachegen_plan, workers=1, early_start=False),
            ("adaptive", PIPELINED): Client(blend, cachegen_plan),
            ("adaptive", OURS): Client(blend.with_values(method="auto"), plan),
        }
        cases = [Case({"kind": "fixed", "client": RECOMPUTE}, partial(self._request, self._full, FULL))]
        for (kind, name), client in clients.items():
            run = partial(self._delivered, trace, client, LinkEstimator(), list[Blender]())
            cases.append(Case({"kind": kind, "client": name}, run))
        return cases

    def _delivered(self, trace: Trace, client: Client, link: LinkEstimator, last: list[Blender]) -> Metrics:
        """One request. link, last: the client's, from request to request; its blender knows the time of decoding."""
        url, trip_s = f"http://127.0.0.1:{self._proxy.port}", ROUND_TRIP_S
        config = KdnConfig(url=url, collection=COLLECTION, level=client.level, deadline_s=DEADLINE_S)
        source = KdnSource(config, client.workers, link)
        with TieredStore(MemoryStore(0), source) as store:
            source.known()  # connects, and reads the directory
            blender = last[0].over(store, "") if last else _blender(self._model, self._workload, store)
            blender.fetcher = fetcher = CostedFetcher(
                store, planner=client.planner, early_start=client.early_start
            )
            fetcher.saved_s = self._saved(client)
            if not last:
                last.append(blender)
                with self._proxy.replayed(trace[:1], trip_s):
                    fetcher.warm_up([blender.key(self._workload.chunks[0])])
            blender.planner.calibrate()
            with self._proxy.replayed(trace, trip_s):
                metrics = self._request(blender, client.blend)
                fetcher.flush()  # for a probe, which belongs to this link, not to the next client
                return metrics

    def _saved(self, client: Client) -> dict[ChunkKey, float]:
        """Seconds that each stored chunk saves; requests of fixed methods do not tell it."""
        prompt, costs = self._workload.prompt, self._full
        is_exact = costs.key.context == prompt.prefix
        per_token = costs.planner.token_saves_s(prompt, client.blend, range(len(prompt.chunks)), is_exact)
        per_token = max(per_token, MIN_SAVED_S)  # a fixed method fetches chunks that save nothing, too
        return {costs.key(chunk.ids): per_token * len(chunk) for chunk in prompt.chunks}

    def _request(self, blender: Blender, blend: BlendConfig) -> Metrics:
        before = self._proxy.n_bytes
        metrics, done = time_prompt(blender, self._workload, blend)
        return {
            "ttft_s": metrics["ttft_s"],
            "bytes_received": self._proxy.n_bytes - before,
            "kl_first_token": kl(self._reference[None], done.result.logits.float()[None])[0],
            "chunks_computed": done.report.chunks - done.report.tiers.get("remote", 0),
        }


def _blender(model: LoadedModel, workload: Workload, store: KVStore) -> Blender:
    prompts = workload.prompts
    return Blender(model.decoder, model.fingerprint, store, prompts.prefix, prompts.kv_context)


def groups(config: DeliveryConfig, log: SampleLog) -> Iterator[Group]:
    """A server with all chunks at all levels behind a proxy."""
    model = open_model(config, log)
    workload, known = config.workload(model), changing(config.seed)
    traces: dict[str, Trace] = {f"{rate:g} Gbit/s": ((1.0, rate * GBIT),) for rate in config.rates_gbit}
    with ExitStack() as stack:
        folder = stack.enter_context(scratch(config.folder))
        with LMDBStore(folder / "kv", CAP) as store:
            publish(model, config, workload, store, PublishTarget(f"{folder}/www/{COLLECTION}"))
        port = stack.enter_context(served(folder, folder / "www"))
        proxy = stack.enter_context(ProxyProcess(port, config.seed))
        fixture = Fixture(model, config, proxy, workload)
        traces |= {name: known[name] for name in config.traces}
        for name, trace in traces.items():
            yield Group({"link": name}, fixture.cases(trace))


@contextmanager
def served(folder: Path, files: Path) -> Iterator[int]:
    """The port of a server of these files."""
    if nginx := Nginx.program():
        (folder / "nginx").mkdir()
        with Nginx(nginx, folder / "nginx", f"location / {{ root {files}; }}") as server:
            yield server.port
        return
    command = [sys.executable, "-m", "blendserve", "kdn", "serve", str(files), "--port", "0"]
    with ServerProcess(command, folder / "service.log") as service:
        yield int(service.url.rpartition(":")[2])


def publish(
    model: LoadedModel, config: DeliveryConfig, workload: Workload, store: KVStore, target: PublishTarget
) -> Collection:
    """The prompt's chunks at every level, without an index."""
    blender = _blender(model, workload, store)
    blender.writer.precompute(workload.chunks)
    tables = CodecTables(model, workload.prompts, config.fit_tokens)
    codecs = {level: tables.codec(level, store) for level in config.levels[1:]}
    tokens = {blender.key(ids): len(ids) for ids in workload.chunks}
    about = model.name, model.fingerprint
    return publish_chunks(store, target, about, config.levels, codecs, tokens)


TABLE = table(
    "Time to first token by link and by how chunks are delivered",
    ms("TTFT ms", "ttft_s"),
    ratio("/ recompute", "ttft_s", kind="fixed", client=RECOMPUTE),
    ratio("/ CacheGen", "ttft_s", kind="adaptive", client=CACHEGEN),
    ratio("/ pipelined", "ttft_s", kind="adaptive", client=PIPELINED),
    ratio("/ oracle", "ttft_s", kind="fixed", client=ANY),
    count("MB", "bytes_received", 1e-6, 1),
    count("KL", "kl_first_token", digits=3),
    count("computed", "chunks_computed"),
)
TINY = {"rates_gbit": (1.0,), "traces": ("up",), "codecs": ("raw", "int8"), "chunks": 2, "repeats": 1}
BENCH = Bench(DeliveryConfig, groups, (TABLE,), Plot(x="link", y="ttft_s", series="client"), TINY)
