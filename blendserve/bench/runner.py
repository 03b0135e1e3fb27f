"""Runs one bench by its name: settings -> groups -> samples -> the JSON, the table and the plot."""

from __future__ import annotations

import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from blendserve.bench.harness import Group, Result, SampleLog, Table, Update, measure
from blendserve.config import ModelConfig, Positive, RuntimeConfig
from blendserve.errors import ConfigError
from blendserve.provenance import machine, versions

if TYPE_CHECKING:
    from blendserve.bench.workload import Workload
    from blendserve.models.loader import LoadedModel

TINY = {"chunks": 3, "chunk_tokens": 40, "suffix_tokens": 25, "repeats": 2}

BENCHES = {  # name, also that of the module -> help
    "ttft": "Prefill one prompt by every method: time to first token, stages, memory.",
    "decode": "Decode after a long context, against transformers' generate.",
    "precompute": "Precompute chunks, against transformers' prefill of the same.",
    "store": "Write and read chunk KV in LMDB, warm and cold.",
    "codec": "Measure codecs: size, speed, and time to first token.",
    "serving": "Load a server: throughput and latency by method.",
}


class BenchConfig(RuntimeConfig):
    """What all benches share. The options of a bench are the fields of its config."""

    model: str = Field(ModelConfig().name, description=ModelConfig.description("name"))
    repeats: Positive = Field(3, description="Number of measured rounds.")
    seed: int = Field(0, description="Random seed of the text.")
    folder: Path | None = Field(
        None, description="Folder for temporary stores; the system's temporary folder if not set."
    )

    @property
    def model_settings(self) -> ModelConfig:
        return ModelConfig(name=self.model, **self.model_dump(include=set(RuntimeConfig.model_fields)))


class PromptBenchConfig(BenchConfig):
    """One prompt of chunks of one length."""

    chunks: Positive = Field(6, description="Number of chunks in the prompt.")
    chunk_tokens: Positive = Field(512, description="Length of a chunk, in tokens.")
    suffix_tokens: Positive = Field(40, description="Length of the prompt after the chunks, in tokens.")

    def workload(self, model: LoadedModel) -> Workload:
        """Raises InputError when it does not fit the model's context."""
        from blendserve.bench.workload import make_workload  # start-up: with torch

        return make_workload(model, self.chunks, self.chunk_tokens, self.suffix_tokens, self.seed)


@dataclass(frozen=True)
class Plot:
    """A metric over a label, with a line for each value of another label."""

    x: str  # a label; numbers make a line, words make groups
    y: str  # a metric in seconds
    series: str  # a label

    def draw(self, result: Mapping[str, Any]) -> bytes:
        """SVG. Bars are the minimum and maximum of the rounds."""
        from blendserve.evaluate.plots import Panel, Point, draw  # start-up: matplotlib

        values: dict[str, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
        for group in result["groups"]:
            for labels, _, metrics in group["samples"]:
                if self.y in metrics and self.x in labels:
                    values[str(labels.get(self.series, ""))][labels[self.x]].append(metrics[self.y])
        xs = list(dict.fromkeys(x for by_x in values.values() for x in by_x))
        words = [] if all(isinstance(x, (int, float)) for x in xs) else [str(x) for x in xs]
        lines = {
            name: sorted(
                Point(xs.index(x) if words else x, statistics.median(seconds), min(seconds), max(seconds))
                for x, seconds in by_x.items()
            )
            for name, by_x in values.items()
        }
        label = f"{self.y.removesuffix('_s')}, s (median, min-max)"
        machine = result["environment"]["machine"]
        title = f"{result['bench']}: {machine['cpu']}, {machine['threads']} threads"
        return draw(title, [Panel(self.x, label, lines, log="y", words=words)])


@dataclass(frozen=True)
class Bench:
    """What one module measures. `tiny` adds to TINY: the smallest settings, for tests and dry runs."""

    config: type[BenchConfig]
    groups: Callable[[Any, SampleLog], Iterator[Group]]
    tables: tuple[Table, ...]
    plot: Plot | None = None
    tiny: Mapping[str, Any] = field(default_factory=dict)

    def tiny_config(self, **model: Any) -> Any:
        """The smallest settings, with those of `model` that the bench has."""
        settings = {**TINY, **model, **self.tiny}
        return self.config(**{n: value for n, value in settings.items() if n in self.config.model_fields})


def load_bench(name: str) -> Bench:
    """A bench of this package by its name, or any other by its module, which may lie in the current folder.

    Raises ConfigError where there is no such module.
    """
    module = name if "." in name else f"blendserve.bench.{name}"
    if "." in name and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # as `python -m` has it
    try:
        bench: Bench = import_module(module).BENCH
    except ModuleNotFoundError as error:
        if not module.startswith(error.name or module):
            raise  # a package that the bench needs
        hint = "run in the folder that holds it" if "." in name else f"choose from {', '.join(BENCHES)}"
        raise ConfigError(f"there is no bench {name!r}: {hint}") from None
    return bench


def run_bench(
    name: str,
    config: BenchConfig,
    out: Path | None = None,
    update: Update = lambda done, total: None,
) -> Result:
    """Measure what `out` does not hold yet -> all of it. Raises BlendserveError."""
    bench = load_bench(name)
    environment = {"versions": versions(), "machine": machine()}
    settings = config.model_dump(mode="json", exclude={"folder"})
    log = SampleLog({"bench": name, "config": settings, "environment": environment}, out)
    if not log.is_complete:
        measure(bench.groups(config, log), config.repeats, log, update)
    return log.result


def open_model(config: BenchConfig, log: SampleLog) -> LoadedModel:
    """Load the model, and note it in the result. Raises ModelError."""
    from blendserve.models.loader import load_model  # start-up: with torch

    loaded = load_model(config.model_settings)
    decoder = loaded.decoder
    dtype = str(loaded.decoder.dtype).removeprefix("torch.")
    model = {"model": loaded.name, "device": str(decoder.device), "dtype": dtype}
    log.note(model=model, machine=machine(), kv_bytes_per_token=decoder.kv_bytes_per_token)
    return loaded
