"""A suite: a YAML list of runs in order of importance, and the claims that they prove.

    runs:
      ttft: {bench: ttft, contexts: [3072], methods: [query+prior@0.05]}      # any bench; modules by their path
      quality: {command: blendserve evaluate --dataset facts --out OUT}       # any module; OUT is a folder
    claims:
      - says: First token 12x sooner than transformers
        run: ttft
        metric: ttft_s
        where: {method: query+prior@0.05}
        baseline: {method: transformers}
        target: ">= 12"

A run that fails costs its own result alone. Every result is a file in the suite's folder as soon as it is there; the same
command goes on where the last one ended.
"""

from __future__ import annotations

import json
import logging
import operator
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import Field, field_validator

from blendserve.bench.fixture import scratch
from blendserve.bench.harness import Column, read_result, select, summarize
from blendserve.bench.runner import load_bench, run_bench
from blendserve.config import Section
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
    "max_position_embeddings": 512,
}


class Verdict(NamedTuple):
    """What a claim's run measured."""

    value: float
    low: float
    high: float
    met: bool


class Claim(Section):
    """One sentence, and the figure that proves it."""

    says: str = Field(description="The sentence.")
    run: str = Field(description="Name of the run.")
    metric: str | None = Field(None, description="Metric of a bench.")
    where: Mapping[str, Any] = Field({}, description="Labels of the row.")
    baseline: Mapping[str, Any] | None = Field(None, description="Labels of the case to compare with.")
    compare: Literal["speedup", "ratio"] = Field(
        "speedup", description="Baseline / this one, or this one / baseline."
    )
    fact: str | None = Field(None, description="Fact of a bench's groups; the largest counts.")
    path: tuple[str, ...] = Field((), description="Keys of the figure in a command's JSON.")
    unit: str = Field("", description="Unit of the figure.")
    target: str = Field(description="Such as >= 12.")

    @field_validator("target")
    @classmethod
    def _target(cls, target: str) -> str:
        sign, _, bound = target.partition(" ")
        if sign not in COMPARE or not bound.replace(".", "").isdigit():
            raise ValueError(f"a target is written like >= 12 or <= 1.3, not {target!r}")
        return target

    def judge(self, result: Mapping[str, Any]) -> Verdict:
        """Raises InputError when the result does not have the figure."""
        values = self._values(dict(result))
        sign, _, bound = self.target.partition(" ")
        summary = summarize(values)
        return Verdict(*summary, met=COMPARE[sign](summary.median, float(bound)))

    def _values(self, result: dict[str, Any]) -> list[float]:
        if self.metric:
            return select(
                result,
                Column(self.says, self.metric, baseline=self.baseline, compare=self.compare),
                self.where,
            )
        if self.fact:
            facts = [group["facts"][self.fact] for group in result["groups"] if self.fact in group["facts"]]
            if not facts:
                raise InputError(f"run {self.run!r} has no fact {self.fact!r}")
            return [max(facts)]
        found: Any = result
        for key in self.path:
            if not isinstance(found, dict) or key not in found:
                raise InputError(f"run {self.run!r} has no {'.'.join(self.path)}")
            found = found[key]
        return [found["low"], found["mean"], found["high"]] if isinstance(found, dict) else [float(found)]


class Suite(Section):
    """What a suite's file holds."""

    runs: Mapping[str, Mapping[str, Any]] = Field(description="Runs by name, the most important first.")
    claims: tuple[Claim, ...] = Field((), description="Claims.")

    @classmethod
    def read(cls, file: str | Path) -> Suite:
        """Raises ConfigError, also for wrong settings of a bench."""
        try:
            suite = cls(**yaml.safe_load(Path(file).read_text("utf-8")))
        except (OSError, TypeError, yaml.YAMLError) as error:
            raise ConfigError(f"the suite {file} cannot be read: {error}") from None
        for name, settings in suite.runs.items():
            if "bench" in settings:
                suite.config(name)
            elif set(settings) != {"command"}:
                raise ConfigError(f"run {name!r} of {file} names no bench and no command")
        if unknown := {claim.run for claim in suite.claims} - set(suite.runs):
            raise ConfigError(
                f"{file} has claims on runs that it does not have: {', '.join(sorted(unknown))}"
            )
        return suite

    def config(self, name: str, **overrides: Any) -> Any:
        """Raises ConfigError."""
        settings = dict(self.runs[name])
        return load_bench(settings.pop("bench")).config(**{**settings, **overrides})

    def verdicts(self, folder: Path) -> Iterator[tuple[Claim, Verdict | None]]:
        """None where the run has no result yet. Raises InputError where a result lacks the figure."""
        for claim in self.claims:
            file = result_file(folder, claim.run, self.runs[claim.run])
            yield claim, claim.judge(_read(file)) if file.exists() else None


def run_suite(suite: Suite, out: Path, minutes: float, dry_run: bool = False) -> dict[str, str]:
    """Run what is missing in `out` -> by name: "done", "skipped" for want of time, or the error."""
    end = time.monotonic() + 60 * minutes
    states: dict[str, str] = {}
    out.mkdir(parents=True, exist_ok=True)
    for name, settings in suite.runs.items():
        if time.monotonic() >= end:
            states[name] = "skipped"
            continue
        log.info(f"{name} ({(end - time.monotonic()) / 60:.0f} minutes left)")
        try:
            if "command" in settings:
                if not dry_run:
                    _run_command(settings["command"], result_file(out, name, settings))
            elif dry_run:
                with tiny_model() as model:
                    run_bench(settings["bench"], suite.config(name, **dry_settings(settings["bench"], model)))
            else:
                run_bench(settings["bench"], suite.config(name), out / f"{name}.jsonl")
            states[name] = "done"
        except Exception:
            states[name] = traceback.format_exc()
            log.warning("%s failed: %s", name, states[name].splitlines()[-1])
    return states


def dry_settings(bench: str, model: Mapping[str, Any]) -> dict[str, Any]:
    """The smallest settings of a bench, over a tiny model on a CPU."""
    made = load_bench(bench)
    return {name: value for name, value in {**model, **made.tiny}.items() if name in made.config.model_fields}


def result_file(folder: Path, name: str, settings: Mapping[str, Any]) -> Path:
    return folder / f"{name}.{'json' if 'command' in settings else 'jsonl'}"


def _run_command(command: str, file: Path) -> None:
    """The result is metrics.json in the folder OUT, else the last line of stdout. Raises InputError."""
    if file.exists():
        return
    folder = file.with_suffix("")
    words = [str(folder) if word == "OUT" else word for word in shlex.split(command)]
    done = subprocess.run([sys.executable, "-m", *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise InputError(f"{command} ended with exit code {done.returncode}")
    metrics = folder / "metrics.json"
    file.write_text(
        metrics.read_text("utf-8") if metrics.exists() else done.stdout.strip().splitlines()[-1] + "\n"
    )


def _read(file: Path) -> dict[str, Any]:
    return read_result(file) if file.suffix == ".jsonl" else dict(json.loads(file.read_text("utf-8")))


@contextmanager
def tiny_model() -> Iterator[dict[str, Any]]:
    """Settings of a random model that runs every bench in seconds, on a CPU."""
    with scratch(None) as folder:
        (folder / "config.json").write_text(json.dumps(TINY_MODEL))
        yield {"model": f"random:{folder}", "dtype": "float32", "device": "cpu", "tier": "disk"}
