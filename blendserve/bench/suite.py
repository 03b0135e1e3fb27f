"""A suite: runs in order of importance, and the claims that they prove.

    runs:
      ttft: {minutes: 3, bench: ttft, contexts: [3072], methods: [query+prior]}            # any bench, also by module
      quality: {minutes: 2, command: blendserve evaluate --dataset $data/q.json --runs $OUT --json}    # any module
    claims:
      - says: First token 12x sooner than transformers
        run: ttft
        metric: ttft_s
        where: {method: query+prior@0.05}
        baseline: {method: transformers}
        target: ">= 12"

A run starts only if its `minutes` are left. A run that fails costs its own result alone. Every result is a file in the
suite's folder; the same command continues where the last one stopped. `$NAME` is a variable that the user sets; runs
whose variables are not set are skipped.
"""

from __future__ import annotations

import json
import logging
import operator
import re
import shlex
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import reduce
from pathlib import Path
from string import Template
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import ConfigDict, Field, model_validator

from blendserve.bench.fixture import scratch
from blendserve.bench.harness import Column, read_result, select, summarize
from blendserve.bench.runner import load_bench, run_bench
from blendserve.config import Settings
from blendserve.errors import ConfigError, InputError

log = logging.getLogger(__name__)

COMPARE: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le}
TINY_MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 2048,
}
TINY_RUN = {"dtype": "float32", "device": "cpu", "tier": "disk"}  # with it every bench takes seconds
FOLDER = "OUT"  # the variable of a command's scratch folder


class Verdict(NamedTuple):
    """What a claim's run measured."""

    value: float
    low: float
    high: float
    met: bool


class Claim(Settings):
    """One sentence, and the figure that proves it."""

    says: str = Field(description="The sentence.")
    run: str = Field(description="Name of the run.")
    metric: str | None = Field(None, description="Metric of a bench.")
    where: Mapping[str, Any] = Field({}, description="Labels of the row.")
    baseline: Mapping[str, Any] | None = Field(None, description="Labels of the case to compare with.")
    compare: Literal["speedup", "ratio"] = Field("speedup", description="Baseline / this, or the inverse.")
    fact: str | None = Field(None, description="Fact of a bench's groups; the worst by the target counts.")
    path: tuple[str, ...] = Field((), description="Keys of the figure in a command's JSON.")
    target: str = Field(description="Such as >= 12.", pattern=r"^(>=|<=) -?\d+(\.\d+)?$")

    def judge(self, result: Mapping[str, Any]) -> Verdict:
        """Raises InputError when the result does not have the figure."""
        sign, _, bound = self.target.partition(" ")
        try:
            summary = summarize(self._values(dict(result)))
        except (KeyError, TypeError, ValueError):
            raise InputError(f"run {self.run!r} has no {self.fact or '.'.join(self.path)}") from None
        return Verdict(*summary, met=COMPARE[sign](summary.median, float(bound)))

    def _values(self, result: dict[str, Any]) -> list[float]:
        if self.metric:
            column = Column(self.says, self.metric, baseline=self.baseline, compare=self.compare)
            return select(result, column, self.where)
        if self.fact:
            worst = min if self.target.startswith(">=") else max
            return [worst(g["facts"][self.fact] for g in result["groups"] if self.fact in g["facts"])]
        found = reduce(operator.getitem, self.path, result)
        return [found["low"], found["mean"], found["high"]] if isinstance(found, dict) else [float(found)]


class SuiteRun(Settings):
    """One run: a bench with its settings, or a command whose last line of stdout is JSON."""

    model_config = ConfigDict(frozen=True, extra="allow")  # settings of the bench
    minutes: float = Field(1.0, description="Time that it needs, in minutes.")
    bench: str = Field("", description="Name of a bench, or of its module.")
    command: str = Field("", description="Module and its words, as after python -m.")

    @model_validator(mode="after")
    def _is_one(self) -> SuiteRun:
        if bool(self.bench) == bool(self.command) or (self.command and self.model_extra):
            raise ValueError("a run needs a bench with its settings, or a command")
        if self.bench and not self.unset:
            self.config()
        return self

    @property
    def unset(self) -> list[str]:
        """Variables that have no value."""
        found = re.findall(r"\$(\w+)", f"{self.command} {self.model_extra}")
        return sorted({name for name in found if name != FOLDER})

    def config(self, **overrides: Any) -> Any:
        """The bench's settings. Raises ConfigError."""
        return load_bench(self.bench).config(**{**(self.model_extra or {}), **overrides})


class Suite(Settings):
    """Runs by name, the most important first, and claims."""

    runs: Mapping[str, SuiteRun]
    claims: tuple[Claim, ...] = ()
    variables: Mapping[str, str] = {}

    @classmethod
    def read(cls, file: str | Path, variables: Mapping[str, str] | None = None) -> Suite:
        """Raises ConfigError, also for wrong settings of a bench."""
        try:
            text = Template(Path(file).read_text("utf-8")).safe_substitute(variables or {})
            suite = cls(**yaml.safe_load(text), variables=variables or {})
        except (OSError, TypeError, ConfigError, yaml.YAMLError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"cannot read the suite {file}: {why}") from None
        if unknown := {claim.run for claim in suite.claims} - set(suite.runs):
            raise ConfigError(f"{file} has claims on unknown runs: {', '.join(sorted(unknown))}")
        return suite

    def file(self, run: str, folder: Path) -> Path:
        """The file of a run's result."""
        return folder / f"{run}.{'json' if self.runs[run].command else 'jsonl'}"

    def result(self, run: str, folder: Path) -> dict[str, Any] | None:
        """The stored result; None without one."""
        file = self.file(run, folder)
        if not file.exists():
            return None
        return dict(json.loads(file.read_text("utf-8"))) if file.suffix == ".json" else read_result(file)

    def verdicts(self, folder: Path) -> Iterator[tuple[Claim, Verdict | None]]:
        """None where the run has no result yet. Raises InputError where a result lacks the figure."""
        for claim in self.claims:
            result = self.result(claim.run, folder)
            yield claim, claim.judge(result) if result is not None else None


def run_suite(
    suite: Suite, out: Path, minutes: float, only: Collection[str] = (), dry_run: bool = False
) -> dict[str, str]:
    """Run what has no result in `out` -> by name: "done", "skipped: REASON", or the error. Raises InputError."""
    if unknown := set(only) - set(suite.runs):
        raise InputError(f"the suite has no run {sorted(unknown)[0]!r}: it has {', '.join(suite.runs)}")
    end = time.monotonic() + 60 * minutes
    states: dict[str, str] = {}
    out.mkdir(parents=True, exist_ok=True)
    for name, run in suite.runs.items():
        left = (end - time.monotonic()) / 60
        file = suite.file(name, out)
        if only and name not in only:
            continue
        if file.exists() and not dry_run:
            states[name] = "done"
        elif run.unset and not dry_run:
            states[name] = f"skipped: needs --set {run.unset[0]}=VALUE"
        elif run.minutes > left:
            states[name] = f"skipped: needs {run.minutes:g} minutes"
        else:
            log.info("%s: %g of %.0f minutes left", name, run.minutes, left)
            states[name] = _do(run, suite.variables, file, dry_run)
        if states[name] != "done":
            log.warning("%s: %s", name, states[name].strip().splitlines()[-1])
    return states


def _do(run: SuiteRun, variables: Mapping[str, str], file: Path, dry_run: bool) -> str:
    """-> "done", or the error with its traceback"""
    try:
        if run.bench and dry_run:
            with scratch(None) as folder:
                (folder / "config.json").write_text(json.dumps(TINY_MODEL))
                tiny = load_bench(run.bench).tiny_config(model=f"random:{folder}", **TINY_RUN)
                run_bench(run.bench, run.config(**tiny.model_dump(include=tiny.model_fields_set)))
        elif run.bench:
            run_bench(run.bench, run.config(), file)
        elif not dry_run:
            _run_command(run.command, variables, file)
        return "done"
    except Exception:
        return traceback.format_exc()


def _run_command(command: str, variables: Mapping[str, str], file: Path) -> None:
    """Write the last line of stdout, with variables' names for their values. Raises InputError."""
    folder = file.with_suffix("")  # kept after a failure, so that the next run resumes
    words = shlex.split(Template(command).safe_substitute({FOLDER: str(folder)}))
    done = subprocess.run([sys.executable, "-m", *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode or not done.stdout.strip():
        raise InputError(f"{command} ended with exit code {done.returncode}")
    text = done.stdout.strip().splitlines()[-1]
    for name, value in {**variables, FOLDER: str(folder)}.items():
        text = text.replace(json.dumps(value)[1:-1], f"${name}")
    file.write_text(json.dumps(json.loads(text), indent=1, ensure_ascii=False) + "\n", "utf-8")
    shutil.rmtree(folder, ignore_errors=True)
