"""`python -m benchmarks cpu_contention`: TTFT and decoding beside busy processes, and with the time of one core.

A worker is a process whose threads wait in one way: as blendserve sets it, or as libgomp does by default. It is a process
of its own, as libgomp reads how to wait when it is loaded. Every worker runs every request in every situation, in turns;
ratios to the idle machine are taken round by round.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from benchmarks.support.worker import WorkerProcess, serve
from blendserve.bench.decode import prefilled, run_generate, run_ours
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
from blendserve.threads import COUNT, SETTLED, SPIN
from blendserve.timing import Clock

OURS, LIBGOMP = "blendserve", "libgomp default"
LIBGOMP_SPINS = "300000"  # its default (libgomp/env.c)
IDLE, ONE_CORE = "idle", "one core"
MAX_S = 1800  # that a busy process lives
PERIOD = 100_000  # microseconds, in which a quota is spent
# Ends with the process that started it (PR_SET_PDEATHSIG, Linux alone), and after MAX_S anywhere.
BUSY = f"""
import ctypes, os, sys, time
os.setpgid(0, 0)  # Ctrl-C in the bench does not interrupt this
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
end = time.monotonic() + {MAX_S}
print(flush=True)
while time.monotonic() < end:
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
    libgomp: bool = Field(
        True, description="Measure libgomp's default wait policy, which takes most of the time."
    )
    repeats: Positive = Field(3, description="Number of measured rounds.")

    @property
    def compared(self) -> tuple[MethodSpec, ...]:
        """Raises ConfigError."""
        return parse_methods((TRANSFORMERS, FULL, *self.methods), self.ratios)


def groups(config: ContentionConfig, log: SampleLog) -> Iterator[Group]:
    if log.done({}):
        return
    with (
        scratch(config.folder) as folder,
        one_core() as limited,
        ExitStack() as stack,
        BusyProcesses() as busy,
    ):
        workers: dict[tuple[str, bool], WorkerProcess] = {}
        for name, environment in environments(config).items():
            for one in (False, True):
                worker = partial(_worker, config, folder, environment, f"{len(workers)}.log")
                workers[name, one] = stack.enter_context(limited(worker) if one else worker(()))
        log.note(model=workers[OURS, False].about["model"], machine=workers[OURS, False].about["machine"])
        situations = [(IDLE, 0, False), *((f"{n} busy", n, False) for n in config.busy), (ONE_CORE, 0, True)]
        cases = [
            Case(
                {"load": load, "request": request, "threads wait": name},
                partial(workers[name, one].call, request),
                partial(busy.set, n),
            )
            for load, n, one in situations
            for request in workers[OURS, False].about["requests"]
            for name in environments(config)
        ]
        yield Group({}, cases, {"load_average": os.getloadavg()[0], "niceness": os.nice(0)}, warm_up=False)


def environments(config: ContentionConfig) -> dict[str, dict[str, str]]:
    """Wait policy -> the worker's further environment variables."""
    libgomp = {LIBGOMP: {SPIN: LIBGOMP_SPINS, COUNT: str(SETTLED.cpus.affinity)}} if config.libgomp else {}
    return {OURS: {}, **libgomp}


def _worker(
    config: ContentionConfig, folder: Path, environment: dict[str, str], log: str, launcher: Sequence[str]
) -> WorkerProcess:
    inherited = {name: value for name, value in os.environ.items() if name not in SETTLED.ours}
    task = {"config": config.model_dump(mode="json"), "folder": str(folder / "kv")}
    return WorkerProcess(__name__, task, folder / log, {**inherited, **environment}, launcher)


class BusyProcesses:
    """Processes that keep one core each busy, as nice as this one and of its session. A context manager."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def set(self, n: int) -> None:
        """Run n from now on. Raises InputError when one ended too early."""
        if any(process.poll() is not None for process in self.processes):
            raise InputError(f"a busy process ended early; one measurement may take {MAX_S} s: ask for less")
        while len(self.processes) > n:
            process = self.processes.pop()
            process.kill()
            process.communicate()
        while len(self.processes) < n:
            command = [sys.executable, "-S", "-c", BUSY]
            self.processes.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            )
            started = self.processes[-1].stdout
            assert started
            started.readline()

    def __enter__(self) -> BusyProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(InputError):
            self.set(0)


Launch = Callable[[Callable[[Sequence[str]], WorkerProcess]], WorkerProcess]


@contextmanager
def one_core(parent: Path = Path("/sys/fs/cgroup")) -> Iterator[Launch]:
    """Starts workers with the time of one core: by a quota (cgroup v2) where one can be made, else by affinity."""
    group = parent / f"blendserve-bench-{os.getpid()}"
    quota = False
    with suppress(OSError):
        group.mkdir()
        quota = (group / "cpu.max").exists()
    if quota:
        (group / "cpu.max").write_text(f"{PERIOD} {PERIOD}")

    def launch(start: Callable[[Sequence[str]], WorkerProcess]) -> WorkerProcess:
        if quota:  # a shell that joins the cgroup and becomes the command
            return start(["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")])
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(before)})
        try:
            return start(())
        finally:
            os.sched_setaffinity(0, before)

    try:
        yield launch
    finally:
        with suppress(OSError):
            group.rmdir()


def _start(task: dict[str, Any]) -> tuple[dict[str, Any], Callable[[str], Metrics]]:
    config = ContentionConfig(**task["config"])
    reader = load_model(config.reader)
    workload = config.workload(reader)
    ids, n = workload.prompt.ids, config.new_tokens
    check_room(reader, len(ids) + n, f"the prompt and {n} new tokens")
    fixture = PromptFixture(reader, workload, config.compared, Path(task["folder"]))
    fixture.precompute()
    done = prefilled(reader.adapter, ids, n)

    def generate() -> Metrics:
        """transformers' generate is one call: text to first token, and the tokens after it."""
        clock = Clock(reader.adapter.device)
        prompt = workload.draw().ids
        tokenized = clock.elapsed()
        at = run_generate(reader.adapter, prompt, n)[1]
        return {"ttft_s": tokenized + at[0], "token_s": (at[-1] - at[0]) / (n - 1)}

    def decode() -> Metrics:
        at = run_ours(reader.adapter, done, len(ids), n)[1]
        return {"token_s": (at[-1] - at[0]) / (n - 1)}

    def first_token(method: MethodSpec) -> Metrics:
        return {"ttft_s": fixture.run(method)["ttft_s"]}

    requests: dict[str, Callable[[], Metrics]] = {"decode": decode}
    for method in config.compared:
        requests[method.name] = generate if method.kind == TRANSFORMERS else partial(first_token, method)
    for request in requests.values():  # warm-up
        request()
    about = {"model": {"model": reader.name}, "machine": machine(), "requests": list(requests)}
    return about, lambda request: requests[request]()


TABLE = table(
    "Beside other work",
    ms("TTFT ms", "ttft_s"),
    ratio("/ idle", "ttft_s", load=IDLE),
    ms("ms per token", "token_s"),
    ratio("token / idle", "token_s", load=IDLE),
)
BENCH = Bench(
    ContentionConfig, groups, (TABLE,), tiny={"chunks": 2, "new_tokens": 3, "busy": (1,), "libgomp": False}
)


if __name__ == "__main__":
    serve(_start)
