"""Time to the first token of LangChain, LlamaIndex and Haystack applications: blended against full prefill.

    python integrations/measure_ttft.py                          # starts its own server on Python's language reference
    python integrations/measure_ttft.py --url http://HOST:8000   # measures over a collection of a server that runs

Each application retrieves the same chunks in the same shuffled order. It asks the same server twice: as it is, and with
`x_blendserve: {"method": "full"}`. Applications, methods and the server's own API (POST /v1/rag/query) take turns, so
that a busy machine slows all of them. Exit code: 1 if an answer is not the own API's, or the speedup of an application
is lower than --at-least.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from blendserve import console, provenance
from blendserve.bench.server_process import ServerProcess, serve_command
from blendserve.errors import BlendserveError
from blendserve.retrieve import language_reference

HERE = Path(__file__).parent
OWN = "own API"
BLENDED: Mapping[str, Any] = {}  # nothing is sent: the server's own method
FULL: Mapping[str, Any] = {"method": "full"}
FILLED = 0.85  # of --chunk-tokens that a chosen chunk has at least
PAGE = 200  # entries of a listing
TIMEOUT_S = 600.0
QUESTIONS = (
    "What does the with statement do?",
    "What happens in a try statement when no exception is raised?",
    "When is the else clause of a for loop executed?",
    "How does the while statement work?",
    "Which suite of an if statement is executed?",
    "When are default parameter values evaluated?",
    "What does a class definition execute?",
    "How does the import statement find a module?",
    "What does raise do with a from clause?",
    "When does an assert statement raise an exception?",
    "What is a lambda expression?",
    "What does the global statement declare?",
    "What does the nonlocal statement do?",
    "What does the del statement delete?",
    "What is a yield expression used for?",
    "What does return do in a function with a finally clause?",
    "Which loop does a break statement end?",
    "What does continue do in a loop?",
    "Which objects are considered false?",
    "How are comparisons chained?",
)

Passage = dict[str, Any]  # of the server's JSON: text, title, id
Ask = Callable[
    [str, Callable[[str], None]], None
]  # a question, and what is called with each piece of its answer
Make = Callable[["Target", Mapping[str, Any]], Ask]  # further fields of x_blendserve


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the passages that each question is answered from."""

    url: str
    model: str
    passages: Mapping[str, Sequence[Passage]]
    max_tokens: int = 24  # of an answer

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer."""

    application: str
    method: str  # blended or full
    question: str
    ttft_s: float
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """One application over all questions. Seconds."""

    application: str
    blended: tuple[float, float, float]  # median, least, most
    full: tuple[float, float, float]
    speedup: float  # full over blended, of medians
    least_speedup: float  # of one question
    equal: int  # answers, blended ones and full ones, that are the own API's
    answers: int


def own_api(target: Target, extra: Mapping[str, Any]) -> Ask:
    """POST /v1/rag/query, streamed."""
    client = httpx.Client(base_url=target.base_url, timeout=TIMEOUT_S, headers=_headers())

    def ask(question: str, on_text: Callable[[str], None]) -> None:
        documents = [{"text": p["text"], "title": p["title"]} for p in target.passages[question]]
        limits = {"max_tokens": target.max_tokens, "temperature": 0, "stream": True}
        body = {"question": question, "documents": documents, **limits, **extra}
        with client.stream("POST", "/rag/query", json=body) as response:
            for event in _events(response):
                if event.get("event") == "text":
                    on_text(event["text"])

    return ask


def langchain(target: Target, extra: Mapping[str, Any]) -> Ask:
    """A chain. Before: create_retrieval_chain(retriever, create_stuff_documents_chain(ChatOpenAI(), prompt))."""
    from langchain_blendserve import ChatBlendserve, create_blend_chain
    from langchain_core.documents import Document
    from langchain_core.runnables import RunnableLambda

    def retrieve(inputs: dict[str, Any]) -> list[Document]:
        found = target.passages[inputs["input"]]
        return [Document(p["text"], metadata={"title": p["title"]}) for p in found]

    llm = ChatBlendserve(
        model=target.model,
        base_url=target.base_url,
        temperature=0,
        max_tokens=target.max_tokens,
        extra_body={"x_blendserve": extra},
        timeout=TIMEOUT_S,
    )
    chain = create_blend_chain(llm, RunnableLambda(retrieve))

    def ask(question: str, on_text: Callable[[str], None]) -> None:
        for piece in chain.stream({"input": question}):
            on_text(piece.get("answer", ""))

    return ask


def llama_index(target: Target, extra: Mapping[str, Any]) -> Ask:
    """A query engine. Before: RetrieverQueryEngine.from_args(retriever, llm=OpenAI(), streaming=True)."""
    from llama_index.core.query_engine import RetrieverQueryEngine
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
    from llama_index.response_synthesizers.blendserve import BlendserveSynthesizer

    class Retriever(BaseRetriever):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            found = target.passages[query_bundle.query_str]
            # As the server shows a passage: a node has no title.
            texts = ["\n".join(filter(None, (p["title"].strip(), p["text"].strip()))) for p in found]
            return [NodeWithScore(node=TextNode(text=text)) for text in texts]

    synthesizer = BlendserveSynthesizer(
        model=target.model,
        api_base=target.base_url,
        streaming=True,
        timeout=TIMEOUT_S,
        additional_kwargs={
            "temperature": 0,
            "max_tokens": target.max_tokens,
            "extra_body": {"x_blendserve": extra},
        },
    )
    engine = RetrieverQueryEngine(Retriever(), synthesizer)

    def ask(question: str, on_text: Callable[[str], None]) -> None:
        for piece in engine.query(question).response_gen:  # type: ignore[union-attr]  # it is streamed
            on_text(piece)

    return ask


def haystack(target: Target, extra: Mapping[str, Any]) -> Ask:
    """A pipeline. Before: retriever, ChatPromptBuilder, OpenAIChatGenerator."""
    os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")
    from haystack import Document, Pipeline, component
    from haystack_integrations.components.generators.blendserve import BlendserveGenerator

    @component
    class Retriever:
        @component.output_types(documents=list[Document])
        def run(self, query: str) -> dict[str, Any]:
            found = target.passages[query]
            return {"documents": [Document(content=p["text"], meta={"title": p["title"]}) for p in found]}

    generator = BlendserveGenerator(
        model=target.model,
        api_base_url=target.base_url,
        timeout=TIMEOUT_S,
        generation_kwargs={
            "temperature": 0,
            "max_tokens": target.max_tokens,
            "extra_body": {"x_blendserve": dict(extra)},
        },
    )
    pipeline = Pipeline()
    pipeline.add_component("retriever", Retriever())
    pipeline.add_component("generator", generator)
    pipeline.connect("retriever.documents", "generator.documents")

    def ask(question: str, on_text: Callable[[str], None]) -> None:
        streamed = {"query": question, "streaming_callback": lambda chunk: on_text(chunk.content)}
        pipeline.run({"retriever": {"query": question}, "generator": streamed})

    return ask


FRAMEWORKS: dict[str, tuple[Make, str]] = {
    "LangChain": (langchain, "langchain"),  # its folder in integrations/
    "LlamaIndex": (llama_index, "llama_index"),
    "Haystack": (haystack, "haystack"),
}


def applications(target: Target) -> dict[str, dict[str, Ask]]:
    """By name, then by method. A framework that is not installed is left out and named."""
    for folder in ("langchain", "llama_index", "haystack/src"):
        sys.path.append(str(HERE / folder))  # an installed integration comes first
    makers: dict[str, Make] = {OWN: own_api}
    for name, (make, folder) in FRAMEWORKS.items():
        try:
            make(target, BLENDED)
        except ImportError as error:
            console.note(f"{name} is skipped ({error}): pip install ./integrations/{folder}")
        else:
            makers[name] = make
    if len(makers) == 1:
        raise SystemExit("no framework is installed: nothing to measure")
    methods = {"blended": BLENDED, "full": FULL}
    return {
        name: {method: make(target, extra) for method, extra in methods.items()}
        for name, make in makers.items()
    }


def measure(target: Target) -> list[Sample]:
    """Every question by every application and method, interleaved; the first question once more before, to warm up."""
    asked = applications(target)
    first, *_ = questions = list(target.passages)
    total = (len(questions) + 1) * sum(map(len, asked.values()))
    samples = list[Sample]()
    with console.progress("Asking", "answers") as update:
        for turn, question in enumerate([first, *questions]):
            pairs = [(name, method) for name, methods in asked.items() for method in methods]
            at = turn % len(pairs)
            for name, method in pairs[at:] + pairs[:at]:
                samples.append(_sample(name, method, question, asked[name][method]))
                update(len(samples), total)
    return samples[total // (len(questions) + 1) :]


def _sample(name: str, method: str, question: str, ask: Ask) -> Sample:
    pieces, times = list[str](), list[float]()

    def on_text(text: str) -> None:
        if text:
            times.append(time.perf_counter())
            pieces.append(text)

    start = time.perf_counter()
    ask(question, on_text)
    if not times:
        raise SystemExit(f"{name}, {method}: no token came for {question!r}")
    return Sample(name, method, question, times[0] - start, "".join(pieces))


def rows(samples: Sequence[Sample]) -> list[Row]:
    """What the samples of each application come to."""
    names = list(dict.fromkeys(s.application for s in samples))
    own = {(s.method, s.question): s.text for s in samples if s.application == OWN}
    return [_row(name, [s for s in samples if s.application == name], own) for name in names]


def _row(name: str, samples: Sequence[Sample], own: Mapping[tuple[str, str], str]) -> Row:
    seconds = {
        method: {s.question: s.ttft_s for s in samples if s.method == method}
        for method in ("blended", "full")
    }
    blended, full = seconds["blended"], seconds["full"]
    return Row(
        application=name,
        blended=_spread(blended.values()),
        full=_spread(full.values()),
        speedup=statistics.median(full.values()) / statistics.median(blended.values()),
        least_speedup=min(full[question] / blended[question] for question in blended),
        equal=sum(s.text == own[s.method, s.question] for s in samples),
        answers=len(samples),
    )


def _spread(values: Iterator[float] | Any) -> tuple[float, float, float]:
    listed = list(values)
    return statistics.median(listed), min(listed), max(listed)


def choose(
    url: str, questions: Sequence[str], chunks: int, chunk_tokens: int, collection: str, seed: int
) -> Target:
    """For each question, the nearest passages that nearly fill a chunk, shuffled; their KV is stored.

    Where the nearest ones that fit a prompt are too few, those of other questions follow. Raises SystemExit.
    """
    only = {"collection": collection} if collection else {}
    with httpx.Client(base_url=f"{url}/v1", timeout=TIMEOUT_S, headers=_headers()) as client:
        served = _json(client.get("/models"))["data"][0]
        top_k = max(chunks, served["x_blendserve"]["slot_tokens"] // chunk_tokens - 1)
        found = {question: _nearest(client, question, top_k, collection) for question in questions}
        long = _long(client, int(FILLED * chunk_tokens), only)
        known = {p["id"]: p for near in found.values() for p in near if p["id"] in long}
        if len(known) < chunks:
            raise SystemExit(
                f"only {len(known)} passages have {FILLED:.0%} of {chunk_tokens} tokens: lower --chunk-tokens or --chunks"
            )
        chosen = dict[str, list[Passage]]()
        for n, (question, near) in enumerate(found.items()):
            first = {p["id"]: p for p in near if p["id"] in long}
            chosen[question] = list({**first, **{i: p for i, p in known.items() if i not in first}}.values())[
                :chunks
            ]
            random.Random(seed + n).shuffle(chosen[question])
        ids = sorted({p["id"] for passages in chosen.values() for p in passages})
        _wait_for_job(client, _json(client.post("/cache/warm", json={**only, "ids": ids})))
    return Target(url, served["id"], chosen)


def _long(client: httpx.Client, n_tokens: int, only: Mapping[str, str]) -> set[str]:
    """Ids of the passages with at least `n_tokens` tokens."""
    long, seen = set[str](), 0
    while True:
        page = _json(client.get("/cache/chunks", params={**only, "offset": seen, "limit": PAGE}))
        long |= {c["id"] for c in page["data"] if c["tokens"] >= n_tokens}
        seen += len(page["data"])
        if not page["data"] or seen >= page["total"]:
            return long


def _nearest(client: httpx.Client, question: str, n: int, collection: str) -> list[Passage]:
    """A collection's passages, the nearest first: the first event of a stream, which is closed then."""
    body: dict[str, Any] = {"question": question, "top_k": n, "stream": True, "max_tokens": 1}
    if collection:
        body["collections"] = [collection]
    with client.stream("POST", "/rag/query", json=body) as response:
        passages: list[Passage] = next(_events(response))["passages"]
    return passages


def _wait_for_job(client: httpx.Client, job: dict[str, Any]) -> None:
    while job["state"] == "running":
        time.sleep(0.2)
        job = _json(client.get(f"/jobs/{job['id']}"))
    if job.get("error"):
        raise SystemExit(f"the KV of the passages was not stored: {job['error']}")


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    if response.is_error:
        response.read()
    _json_or_exit(response)
    for line in response.iter_lines():
        if line.startswith("data: {"):
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise SystemExit(f"the server's error: {event['error']}")
            yield event


def _json(response: httpx.Response) -> dict[str, Any]:
    _json_or_exit(response)
    value: dict[str, Any] = response.json()
    return value


def _json_or_exit(response: httpx.Response) -> None:
    if response.is_error:
        raise SystemExit(f"{response.request.method} {response.url}: {response.status_code} {response.text}")


def _headers() -> dict[str, str]:
    return {"Authorization": f"Bearer {os.environ.get('BLENDSERVE_API_KEY', 'none')}"}


@contextmanager
def served(model: str, index: Path, chunk_tokens: int, method: str) -> Iterator[str]:
    """A server of Python's language reference -> its URL. The index and its KV are made where they are missing."""
    index.mkdir(parents=True, exist_ok=True)
    reader, log = ("--model", model), index / "server.log"
    corpus, built = index / "corpus.jsonl", index / "index"
    if not built.exists():
        lines = [json.dumps({"id": d.id, "title": d.title, "text": d.text}) for d in language_reference()]
        corpus.write_text("\n".join(lines), encoding="utf-8")
        _blendserve("index", "build", str(corpus), str(built), *reader, "--chunk-tokens", str(chunk_tokens))
    _blendserve("precompute", str(built), *reader)
    console.note(f"Starting a server; it logs to {log}")
    with ServerProcess(serve_command("--index", str(built), *reader, "--method", method), log) as server:
        yield server.url


def _blendserve(*arguments: str) -> None:
    """Run a command; what it prints goes to stderr. Raises SystemExit where it fails, which it has explained."""
    command = [sys.executable, "-m", "blendserve", *arguments]
    if code := subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise SystemExit(f"blendserve {' '.join(arguments)} failed with {code}")


@contextmanager
def running(url: str) -> Iterator[str]:
    """A server that runs already -> its URL."""
    yield url.rstrip("/").removesuffix("/v1")


def main(
    url: Annotated[str, typer.Option(help="Server to measure. [default: one of its own]")] = "",
    collection: Annotated[str, typer.Option(help="Collection of that server. [default: its only one]")] = "",
    model: Annotated[str, typer.Option(help="Model of the own server.")] = "smollm2-135m",
    method: Annotated[str, typer.Option(help="Method of the own server.")] = "blend",
    index: Annotated[Path, typer.Option(help="Folder of the own server's index.")] = Path("indexes/ttft"),
    questions: Annotated[int, typer.Option(min=1, max=len(QUESTIONS), help="Number of questions.")] = len(
        QUESTIONS
    ),
    chunks: Annotated[int, typer.Option(min=1, help="Number of chunks in a prompt.")] = 6,
    chunk_tokens: Annotated[int, typer.Option(min=16, help="Tokens of a chunk.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 24,
    at_least: Annotated[
        float, typer.Option(min=0, help="Lowest accepted speedup of each application.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the order of chunks.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object without the table.")] = False,
) -> None:
    """Measure the time to the first token of LangChain, LlamaIndex and Haystack applications."""
    try:
        with running(url) if url else served(model, index, chunk_tokens, method) as base:
            target = choose(base, QUESTIONS[:questions], chunks, chunk_tokens, collection, seed)
            samples = measure(replace(target, max_tokens=max_tokens))
    except (BlendserveError, httpx.TransportError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    found = rows(samples)
    if not as_json:
        _print(found, questions, chunks, target.model)
    settings = {
        "model": target.model,
        "chunks": chunks,
        "chunk_tokens": chunk_tokens,
        "max_tokens": max_tokens,
        "seed": seed,
    }
    made = {"rows": [asdict(row) for row in found], "samples": [asdict(sample) for sample in samples]}
    console.print_json({"settings": settings, "environment": provenance.environment(), **made})
    if any(row.equal < row.answers for row in found) or any(row.speedup < at_least for row in found):
        raise typer.Exit(1)


def _print(found: Sequence[Row], questions: int, chunks: int, model: str) -> None:
    shown = [
        (
            row.application,
            *_milliseconds(row.blended),
            *_milliseconds(row.full),
            f"{row.speedup:.1f}x",
            f"{row.least_speedup:.1f}x",
            f"{row.equal}/{row.answers}",
        )
        for row in found
    ]
    columns = ("application", "blended ms", "spread", "full ms", "spread", "faster", "least", "equal answers")
    title = (
        f"Time to the first token, {model}: {questions} questions, {chunks} chunks in shuffled order; medians"
    )
    console.table(title, columns, shown)


def _milliseconds(spread: tuple[float, float, float]) -> tuple[str, str]:
    median, least, most = (round(value * 1e3) for value in spread)
    return str(median), f"{least}-{most}"


if __name__ == "__main__":
    typer.run(main)
