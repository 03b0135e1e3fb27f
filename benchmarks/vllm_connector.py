"""`python -m benchmarks vllm_connector`: `vllm serve` with BlendConnector, against the same vLLM without it.

    make test-vllm && python -m benchmarks vllm_connector      # with the vLLM of the tests

Clients are LangChain's chain, as its documentation has it, and a chat with pasted passages. The connector's server has
computed and stored all passages (`blendserve warm`). Each question brings some of them in a new order. Both servers cache
prefixes. Questions run in turns, and ratios are of one round.

Then prompts without stored text, in turns A B B A: what matching costs. At last the gaps between the tokens of an answer
while another request's job runs in slices.
"""

from __future__ import annotations

import importlib.util
import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count as counter
from pathlib import Path

import numpy as np
from pydantic import Field

from benchmarks.support.clients import CLIENTS, QUESTION, Ask, Body, Wire, chat, user
from benchmarks.support.vllm_server import VllmServer
from blendserve.bench.fixture import scratch
from blendserve.bench.harness import Case, Column, Group, Metrics, SampleLog, ms, speedup, table
from blendserve.bench.harness import ratio as ratio_of
from blendserve.bench.runner import Bench, BenchConfig, open_model
from blendserve.bench.workload import Workload, make_workload
from blendserve.cli.app import main
from blendserve.config import Positive
from blendserve.errors import InputError
from blendserve.models.sources import source_of
from blendserve.timing import Clock

PLAIN, BLENDED = "vLLM", "vLLM with the connector"
LAYOUT, LANGCHAIN = "chat with passages", "LangChain"


class VllmConfig(BenchConfig):
    """Time to first token and decoding of `vllm serve`."""

    clients: tuple[str, ...] = Field((LAYOUT, LANGCHAIN), description="Clients.")
    vllm: Path = Field(Path("build/vllm/bin/python"), description="Python of an environment that has vLLM.")
    chunks: Positive = Field(6, description="Number of passages in a prompt.")
    passages: Positive = Field(18, description="Number of stored passages.")
    chunk_tokens: Positive = Field(512, description="Length of a passage, in tokens.")
    repeats: Positive = Field(20, description="Number of questions.")
    unrelated: Positive = Field(10, description="Number of prompts without stored text.")
    beside: Positive = Field(5, description="Number of answers that decode beside a job.")
    decoded: Positive = Field(96, description="Length of the answer that decodes beside a job, in tokens.")
    slice_tokens: int = Field(256, ge=0, description="Work of a job in one step, in tokens of a prefill.")
    eager: bool = Field(False, description="Run vLLM without compilation.")
    new_tokens: Positive = Field(8, description="Length of an answer, in tokens.")


def groups(config: VllmConfig, log: SampleLog) -> Iterator[Group]:
    if not config.vllm.is_file():
        raise InputError(
            f"there is no vLLM at {config.vllm}: run make test-vllm, or give --vllm", setting="vllm"
        )
    model, n_threads = open_model(config, log), config.threads or 1
    work = make_workload(model, config.passages, config.chunk_tokens, None, config.seed)
    folder_of_model = source_of(config.model)
    dtype = str(model.decoder.dtype).removeprefix("torch.")
    options = [
        "--dtype",
        dtype,
        "--max-model-len",
        "4096",
        "--max-num-seqs",
        "4",
        "--served-model-name",
        config.model,
    ]
    options += ["--enforce-eager"] * config.eager
    with scratch(config.folder) as folder, ExitStack() as stack:
        settings = {"store": str(folder / "kv"), "slice_tokens": config.slice_tokens}
        serve = partial(VllmServer, config.vllm, folder_of_model, options=options, threads=n_threads)
        servers = {
            PLAIN: stack.enter_context(serve(folder / "plain.log")),
            BLENDED: stack.enter_context(serve(folder / "blended.log", settings)),
        }
        _warm(config, servers[BLENDED].url, work, folder)
        wires = {name: Wire(server.url, config.model, config.new_tokens) for name, server in servers.items()}
        asks: dict[str, dict[str, Ask]] = {LAYOUT: {name: _paste(wire) for name, wire in wires.items()}}
        if importlib.util.find_spec("langchain_openai"):
            asks[LANGCHAIN] = {name: CLIENTS["langchain"].connect(wire) for name, wire in wires.items()}
        asks = {client: by_server for client, by_server in asks.items() if client in config.clients}
        for client, by_server in asks.items():
            numbers = {name: counter() for name in by_server}
            cases = [
                Case({"server": name}, partial(_question, config, work, numbers[name], ask))
                for name, ask in by_server.items()
            ]
            yield Group({"client": client}, cases)
        yield _unrelated(config, work, wires)
        yield _decoding(config, work, wires)


def _warm(config: VllmConfig, url: str, work: Workload, folder: Path) -> None:
    """Store all passages by the command that a user would run."""
    corpus = folder / "docs.jsonl"
    corpus.write_text("".join(json.dumps({"text": passage.text}) + "\n" for passage in work.passages))
    tokens = ["--model", config.model, "--chunk-tokens", str(config.chunk_tokens + 8)]
    if main(["--quiet", "warm", url, str(corpus), *tokens, "--json"]):
        raise InputError("some passages were not stored")


def _paste(wire: Wire) -> Ask:
    def ask(texts: Sequence[str], more: Mapping[str, object], on_text: Callable[[str], object]) -> None:
        wire.stream(chat(user("\n\n".join([*texts, QUESTION]))), on_text)

    return ask


def _question(config: VllmConfig, work: Workload, numbers: Iterator[int], ask: Ask) -> Metrics:
    """The next question: passages and order follow from its number, so all servers get the same."""
    drawn = random.Random(next(numbers))
    texts = [passage.text for passage in drawn.sample(work.passages, config.chunks)]
    return _timed(partial(ask, texts, {}))


def _timed(ask: Callable[[Callable[[str], object]], object]) -> Metrics:
    """Seconds to the first text, and between texts."""
    at = list[float]()
    clock = Clock()
    ask(lambda text: at.append(clock.elapsed()) if text else None)
    gaps = np.diff(at)
    return {"ttft_s": at[0], **({"token_s": float(np.median(gaps))} if len(gaps) else {})}


def _unrelated(config: VllmConfig, work: Workload, wires: Mapping[str, Wire]) -> Group:
    """Prompts as long as the others, of the passages' words in a random order. Rounds begin with A and B in turns."""
    text = " ".join(passage.text for passage in work.passages[: config.chunks]).split()
    numbers = counter(10**6)

    def run(name: str) -> Metrics:
        words = random.Random(next(numbers)).sample(text, len(text))
        return _timed(partial(wires[name].stream, chat(user(" ".join(words)))))

    cases = [Case({"server": name}, partial(run, name)) for name in wires]
    return Group({"client": "other text"}, cases, repeats=config.unrelated, warm_up=False)


def _decoding(config: VllmConfig, work: Workload, wires: Mapping[str, Wire]) -> Group:
    """Gaps between the tokens of one answer, alone and while another request of stored passages comes."""
    wire, numbers = wires[BLENDED], counter(2 * 10**6)

    def run(beside: str) -> Metrics:
        at, clock = list[float](), Clock()
        drawn = random.Random(next(numbers))
        texts = [passage.text for passage in drawn.sample(work.passages, config.chunks)]
        other = Wire(wire.url[: -len("/v1")], config.model, 1)
        body: Body = {"messages": [user("\n\n".join([*texts, QUESTION]))]}
        if beside == "a full prefill":
            body["kv_transfer_params"] = {"blendserve": "exact"}
        job = threading.Thread(target=other.stream, args=(chat()._replace(body=body), lambda text: None))

        def see(text: str) -> None:
            at.append(clock.elapsed())
            if len(at) == config.decoded // 4 and beside != "nothing":
                job.start()

        long = Wire(wire.url[: -len("/v1")], config.model, config.decoded)
        long.stream(chat()._replace(body={"messages": [user("Count.")], "ignore_eos": True}), see)
        if job.ident:
            job.join()
        gaps = np.diff(at)
        return {
            "token_s": float(gaps.mean()),
            "gap_p99_s": float(np.percentile(gaps, 99)),
            "gap_max_s": float(gaps.max()),
        }

    cases = [Case({"beside": what}, partial(run, what)) for what in ("nothing", "a job", "a full prefill")]
    return Group({"client": "decoding"}, cases, repeats=config.beside, warm_up=False)


TABLES = (
    table(
        "First token",
        ms("TTFT, ms", "ttft_s"),
        speedup("times sooner", "ttft_s", server=PLAIN),
        ratio_of("TTFT / plain", "ttft_s", server=PLAIN),
        ms("ms per token", "token_s"),
    ),
    table(
        "Beside a job",
        ms("ms per token", "token_s"),
        Column("99th percentile of gaps, ms", "gap_p99_s", 1e3, 1),
        ratio_of("/ alone", "gap_p99_s", beside="nothing"),
        Column("longest gap, ms", "gap_max_s", 1e3, 1),
        client="decoding",
    ),
)
TINY = {"passages": 4, "chunks": 2, "repeats": 1, "unrelated": 1, "decoded": 16, "eager": True}
BENCH = Bench(VllmConfig, groups, TABLES, tiny=TINY)
