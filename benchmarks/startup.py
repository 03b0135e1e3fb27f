"""`python -m benchmarks startup`: whole commands from start to exit, and the first answer of a process.

Everything runs in a process of its own, over one small index of bundled text that is precomputed before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import yaml
from pydantic import Field

from blendserve.bench.fixture import scratch
from blendserve.bench.harness import Case, Group, Metrics, SampleLog, ms, table
from blendserve.bench.runner import Bench, BenchConfig
from blendserve.config import BlendConfig, Config, DecodeConfig, Positive, RetrieveConfig
from blendserve.engine.engine import Engine
from blendserve.errors import InputError
from blendserve.retrieve import language_reference
from blendserve.threads import SETTLED
from blendserve.timing import Clock

CHARACTERS = 16_000  # of the index's text: about 4,000 tokens
QUESTION = "What does the with statement do?"


class StartupConfig(BenchConfig):
    """Whole processes, from start to exit."""

    passages: Positive = Field(3, description="Number of passages to retrieve for the question.")
    chunk_tokens: Positive = Field(512, description="Maximum length of a chunk, in tokens.")
    new_tokens: Positive = Field(16, description="Maximum length of an answer, in tokens.")


def groups(config: StartupConfig, log: SampleLog) -> Iterator[Group]:
    settings = Config(
        model=config.model_settings,
        retrieve=RetrieveConfig(top_k=config.passages, chunk_tokens=config.chunk_tokens),
        blend=BlendConfig(method="blend", ratio=0.05),
        decode=DecodeConfig(max_new_tokens=config.new_tokens),
    )
    with scratch(config.folder) as folder:
        index, file = str(folder / "index"), folder / "settings.yaml"
        file.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
        with Engine.build(index, language_reference(limit=CHARACTERS), settings) as engine:
            engine.precompute()
        python = [sys.executable, "-m", "blendserve"]
        ask = [*python, "ask", QUESTION, "--index", index, "--config", str(file), "--json"]
        commands: dict[str, tuple[Sequence[str], Callable[[str], Metrics]]] = {
            "blendserve --help": ([*python, "--help"], lambda out: {}),
            "blendserve ask": (ask, lambda out: {"ttft_s": json.loads(out)["timings"]["ttft"]}),
        }
        yield Group({}, [Case({"process": n}, partial(run_process, *run)) for n, run in commands.items()])


def run_process(command: Sequence[str], metrics: Callable[[str], Metrics]) -> Metrics:
    """Seconds from start to exit, and what its output tells. Raises InputError when it fails."""
    environment = {name: value for name, value in os.environ.items() if name not in SETTLED.ours}
    clock = Clock()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    seconds = clock.elapsed()
    if done.returncode:
        why = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise InputError(f"a measured process failed: {why}")
    return {"time_s": seconds, **metrics(done.stdout)}


TABLE = table("Start to exit, and the first answer", ms("ms", "time_s"), ms("TTFT ms", "ttft_s"))
TINY = {"passages": 2, "chunk_tokens": 64, "new_tokens": 3, "repeats": 1}
BENCH = Bench(StartupConfig, groups, (TABLE,), tiny=TINY)
