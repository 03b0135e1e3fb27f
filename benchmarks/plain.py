"""`python -m benchmarks plain`: unchanged clients against `blendserve serve --no-index`, by what they paste into prompts.

LangChain's own chain (`create_stuff_documents_chain` with `ChatOpenAI`) asks about passages in a new order each time, and
reads the stream to its first text. The KV of all passages is stored; the server finds them in the prompt. The same
requests are answered by full prefill, and by our own API, whose prompts name their passages.

Every span that the server reuses is compared with the text of the passages: one that is in none of them is a false match.
Then the search alone, in prompts of other text: among the passages, and among a million chunks.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count as counter
from typing import Any

import httpx
import numpy as np
from pydantic import Field

from blendserve.bench.fixture import scratch
from blendserve.bench.harness import Case, Group, Metrics, SampleLog, count, ms, ratio, table
from blendserve.bench.runner import Bench, BenchConfig, open_model
from blendserve.bench.server_process import ServerProcess, serve_command
from blendserve.bench.workload import Workload, make_workload
from blendserve.blend.match import find_chunks
from blendserve.config import Positive
from blendserve.engine.chat import Chat
from blendserve.engine.prompt import PromptBuilder
from blendserve.errors import InputError
from blendserve.store.spans import SpanIndex
from blendserve.timing import Clock

SYSTEM = "Use the following pieces of context to answer the question at the end.\n\n{context}"
QUESTION = "What is said about this, and where?"
ROOM = ("--slots", "2", "--slot-tokens", "8192")
TIMEOUT_S = 600.0
PLAIN, OWN, FULL = "plain prompt", "own API", "full prefill"
MILLION = 1_000_000


class PlainConfig(BenchConfig):
    """Plain prompts of unchanged clients."""

    passages: Positive = Field(200, description="Number of stored passages.")
    chunk_tokens: Positive = Field(512, description="Length of a passage, in tokens.")
    asked: Positive = Field(6, description="Number of passages in a prompt.")
    repeats: Positive = Field(10, description="Number of questions.")
    new_tokens: Positive = Field(4, description="Length of an answer, in tokens.")


class LangChainClient:
    """LangChain's chain as its documentation has it. Raises InputError where the packages are missing."""

    def __init__(self, config: PlainConfig, url: str, workload: Workload) -> None:
        try:
            from langchain_classic.chains.combine_documents import create_stuff_documents_chain
            from langchain_core.documents import Document
            from langchain_core.prompts import ChatPromptTemplate
            from langchain_openai import ChatOpenAI
        except ImportError as error:
            raise InputError(f"this bench runs LangChain: pip install langchain-openai ({error})") from None
        self._config, self._url = config, f"{url}/v1"
        self._prompt = ChatPromptTemplate.from_messages([("system", SYSTEM), ("human", "{input}")])
        self._chain, self._model, self._document = create_stuff_documents_chain, ChatOpenAI, Document
        self._texts = [passage.text for passage in workload.passages]

    def ask(self, numbers: Iterator[int], extras: Callable[[list[str]], dict[str, Any]]) -> Metrics:
        """The next question. extras: fields of ours, by the passages."""
        texts = self.drawn(next(numbers))
        extra = extras(texts)
        model = self._model(
            base_url=self._url,
            api_key="none",
            model=self._config.model,
            max_tokens=self._config.new_tokens,
            max_retries=0,
            extra_body=extra or None,
        )
        shown = [] if "documents" in extra else texts
        chain = self._chain(model, self._prompt)
        clock = Clock()
        stream = chain.stream({"input": QUESTION, "context": [self._document(text) for text in shown]})
        next(piece for piece in stream if piece)
        ttft_s = clock.elapsed()
        for _ in stream:
            pass
        return {"ttft_s": ttft_s}

    def body(self, n: int) -> dict[str, Any]:
        """What the chain sends for question n, for an answer of one token."""
        asked = self._prompt.format_messages(input=QUESTION, context="\n\n".join(self.drawn(n)))
        roles = {"system": "system", "human": "user"}
        messages = [{"role": roles[message.type], "content": message.content} for message in asked]
        return {"model": self._config.model, "messages": messages, "max_tokens": 1}

    def drawn(self, n: int) -> list[str]:
        """The passages of question n, in its order."""
        return random.Random(n).sample(self._texts, min(self._config.asked, len(self._texts)))


def groups(config: PlainConfig, log: SampleLog) -> Iterator[Group]:
    model = open_model(config, log)
    # as many again, which are not stored, for prompts of other text
    drawn = make_workload(model, 2 * config.passages, config.chunk_tokens, None, config.seed)
    stored = Workload(drawn.prompts, drawn.passages[: config.passages], QUESTION)
    command = serve_command("--no-index", *ROOM, "--model", config.model, *_runtime(config))
    with (
        scratch(config.folder) as folder,
        ServerProcess(command, folder / "log") as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http,
    ):
        _warm(http, stored)
        client = LangChainClient(config, server.url, stored)
        extras: dict[str, Callable[[list[str]], dict[str, Any]]] = {
            PLAIN: lambda texts: {},
            OWN: lambda texts: {"documents": [{"text": text} for text in texts]},
            FULL: lambda texts: {"x_blendserve": {"method": "full"}},
        }
        cases = [Case({"sent": name}, partial(client.ask, counter(), own)) for name, own in extras.items()]
        facts = partial(_check_spans, http, client, drawn.prompts, model.tokenizer, range(config.repeats))
        yield Group({"client": "LangChain"}, cases, facts)
    yield _search(config, drawn)


def _runtime(config: PlainConfig) -> list[str]:
    """The settings of the model's process that a bench has options for."""
    fields = {f"model.{name}": getattr(config, name) for name in ("dtype", "device", "threads")}
    return [word for name, value in fields.items() if value for word in ("--set", f"{name}={value}")]


def _warm(http: httpx.Client, stored: Workload) -> None:
    """Store the KV of the passages. Raises InputError where that fails."""
    for at in range(0, len(stored.passages), 100):
        passages = [{"text": passage.text} for passage in stored.passages[at : at + 100]]
        job = http.post("/v1/cache/warm", json={"passages": passages}).raise_for_status().json()
        while (state := http.get(f"/v1/jobs/{job['id']}").json())["state"] == "running":
            time.sleep(0.2)
        if state["state"] != "done":
            raise InputError(f"the passages could not be stored: {json.dumps(state)}")


def _check_spans(
    http: httpx.Client, client: LangChainClient, prompts: PromptBuilder, tokenizer: Any, questions: range
) -> dict[str, int]:
    """Asks again without a stream -> spans that were reused, and those whose text no passage has."""
    n_spans = n_false = n_tokens = n_found = 0
    for n in questions:
        body = client.body(n)
        report = http.post("/v1/chat/completions", json=body).json()["x_blendserve"]["report"]
        ids = prompts.plain(Chat(tuple(body["messages"]))).ids
        for span in report["spans"]:
            text = tokenizer.decode(ids[span["start"] : span["stop"]]).strip()
            n_false += not any(text in passage for passage in client.drawn(n))
        n_spans += len(report["spans"])
        n_found += sum(span["stop"] - span["start"] for span in report["spans"])
        n_tokens += sum(len(prompts.text_ids(text)) for text in client.drawn(n))
    found = {"passage_tokens_found": n_found, "passage_tokens": n_tokens}
    return {"spans": n_spans, "false_matches": n_false, **found}


def _search(config: PlainConfig, drawn: Workload) -> Group:
    """The search in prompts of `asked` passages: of text that is not stored, and of stored text."""
    chunks, n = dict(enumerate(drawn.chunks)), config.passages
    keys = {i.to_bytes(32, "big"): ids for i, ids in chunks.items() if i < n}
    index = SpanIndex()
    index.add((key, index.anchors(ids)) for key, ids in keys.items())
    rng = np.random.default_rng(config.seed)
    marks = rng.integers(0, 1 << 64, (MILLION, 1), np.uint64)
    million = SpanIndex()
    million.add(((n + i).to_bytes(32, "big"), marks[i]) for i in range(MILLION))
    million.add((key, million.anchors(ids)) for key, ids in keys.items())

    def search(index: SpanIndex, first: int, numbers: Iterator[int]) -> Metrics:
        some = random.Random(next(numbers)).sample(range(first, first + n), min(config.asked, n))
        ids = np.asarray([i for number in some for i in chunks[number]], np.int64)
        clock = Clock()
        found = find_chunks(ids, index, lambda asked: {key: keys[key] for key in asked if key in keys})
        return {"search_s": clock.elapsed(), "tokens_found": sum(len(run.span) for run in found.runs)}

    cases = [
        Case({"text": text, "among": len(each)}, partial(search, each, first, counter()))
        for each in (index, million)
        for text, first in (("other", n), ("stored", 0))
    ]
    return Group({"client": "search"}, cases, repeats=max(10, config.repeats))


TABLES = (
    table(
        "Time to first token of unchanged clients",
        ms("TTFT ms", "ttft_s"),
        ratio("/ full prefill", "ttft_s", sent=FULL),
        ratio("/ own API", "ttft_s", sent=OWN),
        client="LangChain",
    ),
    table(
        "Search for stored chunks",
        ms("ms", "search_s"),
        count("tokens found", "tokens_found"),
        client="search",
    ),
)
TINY = {"passages": 8, "chunk_tokens": 80, "asked": 3, "repeats": 2}
BENCH = Bench(PlainConfig, groups, TABLES, tiny=TINY)
