"""`python -m benchmarks vllm_connector`: `vllm serve` with BlendConnector, against the same vLLM without it.

    make test-vllm && python -m benchmarks vllm_connector      # with the vLLM of the tests

The client is LangChain's chain, as its documentation has it. The connector's server has computed and stored all passages
(`blendserve-warm-vllm`). Each question brings some of them in a new order. Both servers cache prefixes. Questions run in
turns, and ratios are of one round. A chat with pasted passages is asked of both, of our own server, of transformers and,
where llama-cpp-python is installed (see engines.py), of llama.cpp: all run the same weights.

Then prompts without stored text, in turns A B B A: what matching costs. At last the gaps between the tokens of an answer
while another request's job runs in slices.
"""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count as counter
from pathlib import Path

import numpy as np
from pydantic import Field

from benchmarks.engines import LLAMA, TRANSFORMERS, convert, gguf_file, start_generator
from benchmarks.plain import model_settings, warm
from benchmarks.support.clients import CLIENTS, QUESTION, Ask, Body, Sent, Wire, chat, user
from benchmarks.support.vllm_server import VllmServer
from benchmarks.support.worker import WorkerProcess
from blendserve.bench.fixture import scratch
from blendserve.bench.harness import Case, Column, Group, Metrics, SampleLog, ms, speedup, table
from blendserve.bench.harness import ratio as ratio_of
from blendserve.bench.runner import Bench, BenchConfig, open_model
from blendserve.bench.server_process import FIXED, ServerProcess, serve_command
from blendserve.bench.workload import Workload, make_workload
from blendserve.config import Positive
from blendserve.errors import InputError
from blendserve.models.sources import source_of
from blendserve.timing import Clock

PLAIN, BLENDED = "vLLM", "vLLM with the connector"
OURS = "blendserve"
LAYOUT, LANGCHAIN = "chat with passages", "LangChain"
PARTS = "questions", "engines", "other text", "decoding"

Answer = Callable[[Sequence[str]], Metrics]
"""Ask about passages, in their order -> seconds to the first text, and between texts"""


class VllmConfig(BenchConfig):
    """Time to first token and decoding of `vllm serve`."""

    parts: tuple[str, ...] = Field(PARTS, description=f"Parts: {', '.join(PARTS)}.")
    vllm: Path = Field(Path("build/vllm/bin/python"), description="Python of an environment that has vLLM.")
    chunks: Positive = Field(6, description="Number of passages in a prompt.")
    passages: Positive = Field(18, description="Number of stored passages.")
    chunk_tokens: Positive = Field(512, description="Length of a passage, in tokens.")
    repeats: Positive = Field(20, description="Number of questions.")
    rounds: Positive = Field(5, description="Number of questions to all engines.")
    unrelated: Positive = Field(40, description="Number of prompts without stored text.")
    beside: Positive = Field(5, description="Number of answers that decode while a job runs.")
    decoded: Positive = Field(
        96, description="Length of the answer that decodes while a job runs, in tokens."
    )
    slice_tokens: int | None = Field(
        None,
        ge=0,
        description="Prefill tokens per step of a job while requests run; the connector's default if not set.",
    )
    eager: bool = Field(False, description="Run vLLM without compilation.")
    new_tokens: Positive = Field(8, description="Length of an answer, in tokens.")


def groups(config: VllmConfig, log: SampleLog) -> Iterator[Group]:
    if not config.vllm.is_file():
        raise InputError(
            f"there is no vLLM at {config.vllm}: run make test-vllm, or give --vllm", setting="vllm"
        )
    if "questions" in config.parts and importlib.util.find_spec("langchain_openai") is None:
        raise InputError("LangChain is not installed: pip install '.[integrations]'")
    model, n_threads = open_model(config, log), config.threads or 1
    work = make_workload(model, config.passages, config.chunk_tokens, None, config.seed)
    dtype = str(model.decoder.dtype).removeprefix("torch.")
    options = ["--dtype", dtype, "--max-model-len", "4096", "--max-num-seqs", "4"]
    options += ["--served-model-name", config.model, *["--enforce-eager"] * config.eager]
    with scratch(config.folder) as folder, ExitStack() as stack:
        settings: dict[str, object] = {"store": str(folder / "kv"), "blend.ratio": 0.05}
        if config.slice_tokens is not None:
            settings["slice_tokens"] = config.slice_tokens
        source = source_of(config.model)
        serve = partial(VllmServer, config.vllm, source, options=options, threads=n_threads)
        servers = {
            PLAIN: stack.enter_context(serve(folder / "plain.log")),
            BLENDED: stack.enter_context(serve(folder / "blended.log", settings)),
        }
        _warm(config, servers[BLENDED].url, work, folder)
        wires = {name: Wire(server.url, config.model, config.new_tokens) for name, server in servers.items()}
        if "questions" in config.parts:
            answers = {name: _through(CLIENTS["langchain"].connect(wire)) for name, wire in wires.items()}
            yield _questions(work, config.chunks, LANGCHAIN, answers)
        if "engines" in config.parts:
            answers = {name: _through(_paste(wire)) for name, wire in wires.items()}
            answers |= _other_engines(config, n_threads, work, folder, stack)
            yield _questions(work, config.chunks, LAYOUT, answers, config.rounds)
        if "other text" in config.parts:
            yield _unrelated(config, work, wires)
        if "decoding" in config.parts:
            yield _decoding(config, work, wires)


def _other_engines(
    config: VllmConfig, threads: int, work: Workload, folder: Path, stack: ExitStack
) -> dict[str, Answer]:
    """Our server with the same passages stored, transformers, and llama.cpp where it is installed."""
    command = serve_command("--no-index", "--model", config.model, *model_settings(config), *FIXED)
    server = stack.enter_context(ServerProcess(command, folder / "own.log"))
    wire = Wire(server.url, config.model, config.new_tokens)
    warm(wire.http, [passage.text for passage in work.passages])
    answers = {OURS: _through(_paste(wire))}
    files: dict[str, Path | None] = {TRANSFORMERS: None}
    if importlib.util.find_spec("llama_cpp"):
        for name, kind in LLAMA.items():
            files[name] = folder / f"{kind}.gguf"
            convert(gguf_file(config.model, folder), folder / f"{kind}.gguf", kind)
    for name, file in files.items():
        task = config.model_settings.model_copy(update={"threads": threads}), file
        worker = stack.enter_context(WorkerProcess(start_generator, task))
        answers[name] = partial(_generate, config, work, worker)
    return answers


def _generate(config: VllmConfig, work: Workload, worker: WorkerProcess, texts: Sequence[str]) -> Metrics:
    """By an engine that is given the token ids that servers see."""
    sent = _pasted(texts)
    asked = sent._replace(body={**sent.body, "model": config.model}).chat
    seconds = worker.call((work.prompts.plain(asked).ids, config.new_tokens))
    return {"ttft_s": seconds[0], "token_s": float(np.median(np.diff(seconds)))}


def _questions(
    work: Workload, chunks: int, client: str, answers: Mapping[str, Answer], repeats: int | None = None
) -> Group:
    """Passages and order follow from a question's number, so all engines get the same."""

    def run(numbers: Iterator[int], answer: Answer) -> Metrics:
        return answer(_draw(work, chunks, next(numbers)))

    cases = [Case({"server": name}, partial(run, counter(), answer)) for name, answer in answers.items()]
    return Group({"client": client}, cases, repeats=repeats)


def _draw(work: Workload, chunks: int, number: int) -> list[str]:
    """Texts of a question's passages."""
    return [passage.text for passage in random.Random(number).sample(work.passages, chunks)]


def _pasted(texts: Sequence[str]) -> Sent:
    return chat(user("\n\n".join([*texts, QUESTION])))


def _through(ask: Ask) -> Answer:
    return lambda texts: _timed(partial(ask, texts, {}))


def _warm(config: VllmConfig, url: str, work: Workload, folder: Path) -> None:
    """Store all passages by the command that a user would run."""
    corpus = folder / "docs.jsonl"
    corpus.write_text("".join(json.dumps({"text": passage.text}) + "\n" for passage in work.passages))
    tokens = ["--model", config.model, "--chunk-tokens", str(config.chunk_tokens + 8)]
    warm = [str(config.vllm), "-m", "blendserve_vllm.warm", url, str(corpus), *tokens, "--json"]
    if subprocess.run(warm, stdout=subprocess.DEVNULL, check=False).returncode:
        raise InputError("some passages were not stored")


def _paste(wire: Wire) -> Ask:
    return lambda texts, more, on_text: wire.stream(_pasted(texts), on_text)


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
    url, numbers = wires[BLENDED].url.removesuffix("/v1"), counter(2 * 10**6)
    others: Mapping[str, Body] = {
        "nothing": {},
        "a job": {},
        "a full prefill": {"kv_transfer_params": {"blendserve": "exact"}},
    }

    def run(beside: str) -> Metrics:
        at, first, clock = list[float](), dict[str, float](), Clock()
        sent = _pasted(_draw(work, config.chunks, next(numbers)))
        other = sent._replace(body={**sent.body, **others[beside]})

        def ask() -> None:
            first.update(_timed(partial(Wire(url, config.model, 1).stream, other)))

        job = threading.Thread(target=ask)

        def see(text: str) -> None:
            at.append(clock.elapsed())
            if len(at) == config.decoded // 4 and beside != "nothing":
                job.start()

        long = chat(user("Count."))
        Wire(url, config.model, config.decoded).stream(
            long._replace(body={**long.body, "ignore_eos": True}), see
        )
        if job.ident:
            job.join()
        gaps = np.diff(at)
        return {
            "token_s": float(gaps.mean()),
            "gap_p99_s": float(np.percentile(gaps, 99)),
            "gap_max_s": float(gaps.max()),
            **({"other_s": first["ttft_s"]} if first else {}),
        }

    cases = [Case({"beside": what}, partial(run, what)) for what in others]
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
        ms("TTFT of the other, ms", "other_s"),
        client="decoding",
    ),
)
TINY = {"passages": 4, "chunks": 2, "repeats": 1, "unrelated": 1, "decoded": 16, "eager": True, "beside": 1}
BENCH = Bench(VllmConfig, groups, TABLES, tiny=TINY)
