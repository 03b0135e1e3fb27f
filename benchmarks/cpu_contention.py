"""`python -m benchmarks cpu_contention`: TTFT and decoding beside busy processes, and on one core.

One worker process has all cores, another one of them. They run every request in every situation, in turns; ratios to the
idle machine are computed round by round. libgomp's own wait policy: set GOMP_SPINCOUNT=300000 for the whole bench.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from benchmarks.support.worker import WorkerProcess
from blendserve.bench.decode import prefilled, run_generate, run_ours, token_s
from blendserve.bench.fixture import PromptFixture, scratch
from blendserve.bench.harness import Case, Group, Metrics, SampleLog, ms, ratio, table
from blendserve.bench.runner import Bench, PromptBenchConfig
from blendserve.bench.workload import check_room
from blendserve.config import Positive, Ratio
from blendserve.errors import InputError
from blendserve.evaluate.methods import FULL, TRANSFORMERS, MethodSpec, parse_methods
from blendserve.models.loader import load_model
from blendserve.provenance import machine
from blendserve.registry import BENCHED
from blendserve.timing import Clock

IDLE, ONE_CORE = "idle", "one core"
MAX_S = 1800  # lifetime of a busy process
# Ends with the process that started it, or after MAX_S.
BUSY = f"""
import os, time
parent, end = os.getppid(), time.monotonic() + {MAX_S}
print(flush=True)
while os.getppid() == parent and time.monotonic() < end:
    for _ in range(100_000):
        pass
"""


class ContentionConfig(PromptBenchConfig):
    """One prompt and its decoding beside other work."""

    new_tokens: int = Field(32, ge=2, description="Number of tokens to decode.")
    methods: tuple[str, ...] = Field(BENCHED, description="Methods to compare with transformers and full.")
    ratios: tuple[Ratio, ...] = Field((0.15,), description="Recompute ratios of methods that name none.")
    busy: tuple[Positive, ...] = Field(
        (1, 2, 4), description="Numbers of busy processes to run at the same time."
    )

    @property
    def compared(self) -> tuple[MethodSpec, ...]:
        """Raises ConfigError."""
        return parse_methods((TRANSFORMERS, FULL, *self.methods), self.ratios)


def groups(config: ContentionConfig, log: SampleLog) -> Iterator[Group]:
    with scratch(config.folder) as folder, BusyProcesses() as busy, ExitStack() as stack:
        task = config, folder / "kv"
        every = stack.enter_context(WorkerProcess(_start, task))
        with one_core():
            one = stack.enter_context(WorkerProcess(_start, task))
        log.note(model=every.about["model"], machine=every.about["machine"])
        cases = []
        for load, n in {IDLE: 0, **{f"{n} busy": n for n in config.busy}, ONE_CORE: 0}.items():
            for request in every.about["requests"]:
                run = partial((one if load == ONE_CORE else every).call, request)
                cases.append(Case({"load": load, "request": request}, run, partial(busy.set, n)))
        facts = {"load_average": os.getloadavg()[0], "niceness": os.nice(0)}
        yield Group({}, cases, lambda: facts, warm_up=False)


class BusyProcesses:
    """Processes that keep one core each busy, as nice as this one and of its session. A context manager."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def set(self, n: int) -> None:
        """Run n from now on. Raises InputError when one ended too early."""
        if any(process.poll() is not None for process in self.processes):
            raise InputError(f"a busy process ended early; one measurement may last {MAX_S} s: ask for less")
        while len(self.processes) > n:
            process = self.processes.pop()
            process.kill()
            process.communicate()
        while len(self.processes) < n:
            command = [sys.executable, "-S", "-c", BUSY]
            started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            self.processes.append(started)
            assert started.stdout
            started.stdout.readline()

    def __enter__(self) -> BusyProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(InputError):
            self.set(0)


@contextmanager
def one_core() -> Iterator[None]:
    """Processes that start meanwhile run on one core, as does this one."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _start(task: tuple[ContentionConfig, Path]) -> tuple[dict[str, Any], Callable[[str], Metrics]]:
    config, folder = task
    model = load_model(config.model_settings)
    workload, n = config.workload(model), config.new_tokens
    ids = workload.prompt.ids
    check_room(model, len(ids) + n, f"the prompt and {n} new tokens")
    fixture = PromptFixture(model, workload, config.compared, folder)
    fixture.precompute()
    done = prefilled(model.decoder, ids, n)

    def generate() -> Metrics:
        """transformers' generate is one call: text to first token, and the tokens after it."""
        clock = Clock(model.decoder.device)
        prompt = workload.draw().ids
        tokenized_s = clock.elapsed()
        at = run_generate(model.decoder, prompt, n)[1]
        return {"ttft_s": tokenized_s + at[0], "token_s": token_s(at)}

    def decode() -> Metrics:
        return {"token_s": token_s(run_ours(model.decoder, done, len(ids), n)[1])}

    def first_token(method: MethodSpec) -> Metrics:
        return {"ttft_s": fixture.run(method)["ttft_s"]}

    requests: dict[str, Callable[[], Metrics]] = {"decode": decode}
    for method in config.compared:
        requests[method.name] = generate if method.kind == TRANSFORMERS else partial(first_token, method)
    for request in requests.values():  # warm-up
        request()
    about = {"model": {"model": model.name}, "machine": machine(), "requests": list(requests)}
    return about, lambda request: requests[request]()


TABLE = table(
    "Beside other work",
    ms("TTFT ms", "ttft_s"),
    ratio("/ idle", "ttft_s", load=IDLE),
    ms("ms per token", "token_s"),
    ratio("token / idle", "token_s", load=IDLE),
)
BENCH = Bench(ContentionConfig, groups, (TABLE,), tiny={"chunks": 2, "new_tokens": 3, "busy": (1,)})
