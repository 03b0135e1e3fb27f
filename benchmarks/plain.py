"""`python -m benchmarks plain`: unchanged clients against `blendserve serve --no-index`, by what they paste into prompts.

Each client (support/clients.py) asks about passages in a new order each time, and reads the stream to its first text. The
KV of all passages is stored; the server finds them in the prompt. The same requests are answered by full prefill, and by
our own API, whose prompts name their passages. A client whose package is missing is skipped, and the result names it.

Every span that the server reuses is compared with the passages' tokens: one that is in none of them is a false match.
Then prompts without stored text: the search costs them time. At last the search alone, among the passages and among a
million others, in prompts that are made to be slow, too.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count as counter
from typing import Literal

import httpx
import numpy as np
from pydantic import Field, field_validator

from benchmarks.support.clients import CLIENTS, QUESTION, Ask, Body, Client, OnText, Wire, chat, user
from blendserve.bench.fixture import scratch
from blendserve.bench.harness import Case, Group, Metrics, SampleLog, count, ms, ratio, table
from blendserve.bench.runner import Bench, BenchConfig, open_model
from blendserve.bench.server_process import FIXED, ServerProcess, serve_command
from blendserve.bench.workload import Workload, make_workload
from blendserve.blend.runs import MIN_SPAN, choose_runs, find_runs
from blendserve.config import Positive
from blendserve.core import Passage, TokenIds
from blendserve.engine.prompt import PromptBuilder
from blendserve.errors import InputError
from blendserve.store.spans import MOST, STRIDE, SpanIndex, Tokens
from blendserve.timing import Clock

ROOM = ("--slots", "2", "--slot-tokens", "8192")
PLAIN, OWN, FULL, PREFIX = "plain prompt", "own API", "full prefill", "exact prefix"
OTHER = "text that is not stored"

log = logging.getLogger(__name__)


class PlainConfig(BenchConfig):
    """Plain prompts of unchanged clients."""

    clients: tuple[str, ...] = Field(tuple(CLIENTS), description=f"Clients: {', '.join(CLIENTS)}.")
    passages: Positive = Field(60, description="Number of stored passages.")
    chunk_tokens: Positive = Field(512, description="Length of a passage, in tokens.")
    asked: Positive = Field(6, description="Number of passages in a prompt.")
    repeats: Positive = Field(5, description="Number of questions of a client.")
    unrelated: Positive = Field(5, description="Number of prompts without stored text.")
    hostile_tokens: Positive = Field(
        131_072, description="Length of prompts that slow the search, in tokens."
    )
    other_chunks: Positive = Field(1_000_000, description="Number of other chunks to search among.")
    method: Literal["auto", "blend"] = Field("auto", description="The server's method.")
    new_tokens: Positive = Field(4, description="Length of an answer, in tokens.")

    @property
    def n_asked(self) -> int:
        return min(self.asked, self.passages)

    @field_validator("clients")
    @classmethod
    def _has(cls, clients: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [name for name in clients if name not in CLIENTS]:
            raise ValueError(f"unknown client {unknown[0]!r}: choose from {', '.join(CLIENTS)}")
        return clients


def groups(config: PlainConfig, log: SampleLog) -> Iterator[Group]:
    model = open_model(config, log)
    stored = make_workload(model, config.passages, config.chunk_tokens, None, config.seed)
    options = ("--model", config.model, *model_settings(config), "--set", f"blend.method={config.method}")
    command = serve_command("--no-index", *ROOM, *FIXED, *options)
    with scratch(config.folder) as folder, ServerProcess(command, folder / "log") as server:
        wire = Wire(server.url, config.model, config.new_tokens)
        clients, missing = connected(config, wire)
        log.note(clients_missing=missing)
        for client, ask in clients.items():
            texts = [client.chunk(passage.text) for passage in stored.passages]
            warm(wire.http, texts)
            yield Questions(config, stored.prompts, texts, wire, ask).group(client.name)
        yield _unrelated(config, stored, wire)
    yield _search(config, stored)


def connected(config: PlainConfig, wire: Wire) -> tuple[dict[Client, Ask], dict[str, str]]:
    """Clients, and why others are missing. Raises InputError if all are."""
    clients, missing = dict[Client, Ask](), dict[str, str]()
    for client in map(CLIENTS.__getitem__, config.clients):
        try:
            clients[client] = client.connect(wire)
        except ImportError as error:
            missing[client.name] = str(error)
            log.warning("%s is skipped: %s; pip install '.[integrations]'", client.name, error)
    if not clients:
        raise InputError(f"no client is installed: {json.dumps(missing)}")
    return clients, missing


class Questions:
    """The questions of one client: their times, and what the server found in them."""

    def __init__(
        self, config: PlainConfig, prompts: PromptBuilder, texts: Sequence[str], wire: Wire, ask: Ask
    ) -> None:
        """texts: of the stored passages."""
        self._config, self._prompts, self._texts, self._wire, self._ask = config, prompts, texts, wire, ask
        self._found = Counter(spans=0, false_matches=0)

    def group(self, client: str) -> Group:
        own: dict[str, Callable[[list[str]], Body]] = {
            PLAIN: lambda texts: {},
            OWN: lambda texts: {"documents": [{"text": text} for text in texts]},
            FULL: lambda texts: {"x_blendserve": {"method": "full"}},
        }
        cases = [Case({"sent": sent}, partial(self._run, counter(), more)) for sent, more in own.items()]
        return Group({"client": client}, cases, lambda: self._found)

    def _run(self, numbers: Iterator[int], fields: Callable[[list[str]], Body]) -> Metrics:
        """The next question. fields: those of ours, by the passages."""
        drawn = random.Random(next(numbers))
        texts = drawn.sample(self._texts, self._config.n_asked)
        more = fields(texts)
        metrics = _first_text(self._wire, partial(self._ask, texts, more))
        return metrics if more else {**metrics, "found": self._check_spans(texts)}

    def _check_spans(self, texts: list[str]) -> float:
        """Compares the spans of the last request with the passages -> the share of their tokens that was reused."""
        prompts, spans = self._prompts, self._wire.report["spans"]
        ids = prompts.plain(self._wire.sent.chat).ids
        passages = [_words(prompts.chunk(Passage(text)).ids) for text in texts]
        for span in spans:
            found = _words(ids[span["start"] : span["stop"]])
            self._found["false_matches"] += not any(found in passage for passage in passages)
        self._found["spans"] += len(spans)
        n_tokens = sum(len(prompts.text_ids(text)) for text in texts)
        return float(sum(span["stop"] - span["start"] for span in spans) / n_tokens)


def _words(ids: TokenIds) -> str:
    """Token ids as words: a part of them is a part of the text."""
    return "".join(f" {i} " for i in ids)


def _first_text(wire: Wire, ask: Callable[[OnText], object]) -> Metrics:
    """From the client's call to the first text, or to the end of an answer without any; and tokens outside reused KV."""
    seen = list[float]()
    clock = Clock()
    ask(lambda text: seen.append(clock.elapsed()) if text else None)
    ttft_s = seen[0] if seen else clock.elapsed()
    report = wire.report
    not_reused = report["tokens_prompt"] - report["tokens_first"] - report["tokens_reused"]
    return {"ttft_s": ttft_s, "tokens_not_reused": not_reused}


def _unrelated(config: PlainConfig, stored: Workload, wire: Wire) -> Group:
    """Prompts as long as the others, of the passages' words in a random order."""
    words = " ".join(passage.text for passage in stored.passages[: config.n_asked]).split()

    def run(seeds: Iterator[int], more: Body) -> Metrics:
        text = " ".join(random.Random(next(seeds)).sample(words, len(words)))
        sent = chat(user(f"{text}\n\n{QUESTION}"))
        metrics = _first_text(wire, partial(wire.stream, sent._replace(body={**sent.body, **more})))
        return {**metrics, "spans": len(wire.report["spans"])}

    prefix = {"x_blendserve": {"method": "prefix"}}
    own: Mapping[str, tuple[int, Body]] = {PLAIN: (0, {}), PREFIX: (1, prefix)}  # never the same prompt
    cases = [Case({"sent": sent}, partial(run, counter(n, 2), more)) for sent, (n, more) in own.items()]
    return Group({"client": OTHER}, cases, repeats=config.unrelated)


def model_settings(config: BenchConfig) -> list[str]:
    """The settings of the server's model that every bench has options for."""
    fields = {f"model.{name}": getattr(config, name) for name in ("dtype", "device", "threads")}
    return [word for name, value in fields.items() if value for word in ("--set", f"{name}={value}")]


def warm(http: httpx.Client, texts: Sequence[str]) -> None:
    """Store the KV of passages. Raises InputError where that fails."""
    for at in range(0, len(texts), 100):
        passages = [{"text": text} for text in texts[at : at + 100]]
        job = http.post("/v1/cache/warm", json={"passages": passages}).raise_for_status().json()
        while (state := http.get(f"/v1/jobs/{job['id']}").json())["state"] == "running":
            time.sleep(0.2)
        if state["state"] != "done":
            raise InputError(f"the passages could not be stored: {json.dumps(state)}")


def _search(config: PlainConfig, stored: Workload) -> Group:
    """The search in prompts of a few passages and in long ones, among chunks that repeat one or three tokens, too."""
    periodic = [_periodic(period, 64 + n) for period in (1, 3) for n in range(2 * MOST)]
    chunks: list[TokenIds] = [*stored.chunks, *(tuple(ids.tolist()) for ids in periodic)]
    keys = {n.to_bytes(32, "big"): ids for n, ids in enumerate(chunks)}
    rng = np.random.default_rng(config.seed)
    marks = rng.integers(0, 1 << 64, (config.other_chunks, config.chunk_tokens // STRIDE), np.uint64)
    few, many = SpanIndex(), SpanIndex()
    many.add(((len(keys) + n).to_bytes(32, "big"), anchors) for n, anchors in enumerate(marks))
    for index in (few, many):
        index.add((key, index.anchors(ids)) for key, ids in keys.items())

    def shuffled(n: int) -> Tokens:
        order = rng.permutation(config.passages)
        return np.resize(np.concatenate([np.asarray(chunks[i], np.int64) for i in order]), n)

    prompts: Mapping[str, Callable[[int], Tokens]] = {
        OTHER: lambda n: rng.permutation(shuffled(n)),
        "stored text": shuffled,
        "one token": partial(_periodic, 1),
        "three tokens": partial(_periodic, 3),
    }

    def search(index: SpanIndex, draw: Callable[[int], Tokens], n: int) -> Metrics:
        ids = draw(n)
        clock = Clock()
        found = find_runs(ids, index, lambda found: {key: keys[key] for key in found if key in keys})
        runs = choose_runs(found, MIN_SPAN)
        return {"search_s": clock.elapsed(), "tokens_found": sum(len(run.span) for run in runs)}

    lengths = (config.n_asked * config.chunk_tokens, config.hostile_tokens)
    cases = [
        Case({"prompt": text, "tokens": n, "among": len(index)}, partial(search, index, draw, n))
        for n in lengths
        for text, draw in prompts.items()
        for index in (few, many)
    ]
    return Group({"client": "search"}, cases, repeats=max(10, config.repeats))


def _periodic(period: int, n: int) -> Tokens:
    return 100 + np.arange(n) % period


TABLES = (
    table(
        "Time to first token",
        ms("TTFT ms", "ttft_s"),
        ratio("/ full prefill", "ttft_s", sent=FULL),
        ratio("/ own API", "ttft_s", sent=OWN),
        ratio("/ exact prefix", "ttft_s", sent=PREFIX),
        count("not reused", "tokens_not_reused"),
        count("passages found", "found", digits=3),
    ),
    table(
        "Search for stored chunks",
        ms("ms", "search_s"),
        count("tokens found", "tokens_found"),
        client="search",
    ),
)
TINY = {
    **{"passages": 8, "chunk_tokens": 80, "asked": 3, "repeats": 2, "unrelated": 1},
    **{"hostile_tokens": 2048, "other_chunks": 1000, "method": "blend"},
    "clients": ("langchain", "open-webui", "anythingllm", "anthropic", "agent"),
}
BENCH = Bench(PlainConfig, groups, TABLES, tiny=TINY)
