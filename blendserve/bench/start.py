"""`blendserve bench start`: whole processes from start to exit, and the first answer of a process against later ones.

Everything is a process of its own, over one small index of bundled text that is built and precomputed beforehand. What
is asked is the same each time, so answers differ only in what the process has done before.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import yaml

from blendserve.bench.answers import ANSWERS, QUESTION
from blendserve.bench.config import StartConfig
from blendserve.bench.figures import Figures, Update, interleaved, ratios, spread
from blendserve.bench.harness import scratch
from blendserve.bench.machine import where
from blendserve.config import BlendConfig, Config, DecodeConfig, RetrieveConfig
from blendserve.engine.engine import Engine
from blendserve.errors import InputError
from blendserve.retrieve import language_reference
from blendserve.threads import SETTLED
from blendserve.timing import Clock

Say = Callable[[str], None]

CHARACTERS = 16_000  # of the index's text: about 4,000 tokens


def measure(
    config: StartConfig, say: Say = lambda text: None, update: Update = lambda done, total: None
) -> Figures:
    """Everything that the bench prints. Raises InputError, ModelError, StoreError."""
    with scratch(config.folder) as folder:
        index, file = folder / "index", folder / "settings.yaml"
        settings = _settings(config)
        file.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
        with Engine.build(index, language_reference(limit=CHARACTERS), settings, say) as engine:
            engine.precompute()
            known = where(config, engine.reader)
        ours, there = [sys.executable, "-m"], (str(index), str(file))
        ask = ("blendserve", "ask", QUESTION, "--index", there[0], "--config", there[1], "--json")
        calls = {
            "blendserve --help": partial(timed, (*ours, "blendserve", "--help")),
            "blendserve ask": partial(timed, (*ours, *ask), json.loads),
            f"{ANSWERS} answers": partial(timed, (*ours, "blendserve.bench.answers", *there), json.loads),
        }
        taken = interleaved(calls, config.repeats, update)
    return {"bench": "start", **known, **_figures(*taken.values(), names=list(taken))}


def _settings(config: StartConfig) -> Config:
    return Config(
        reader=config.reader,
        retrieve=RetrieveConfig(top_k=config.passages, chunk_tokens=config.chunk_tokens),
        blend=BlendConfig(method="blend"),
        decode=DecodeConfig(max_new_tokens=config.new_tokens),
    )


def timed(command: Sequence[str], read: Callable[[str], Any] = len) -> tuple[float, Any]:
    """Seconds from start to exit, and what it printed. Raises InputError when it fails."""
    given = {name: value for name, value in os.environ.items() if name not in SETTLED.ours}
    clock = Clock()
    done = subprocess.run(command, capture_output=True, text=True, env=given, check=False)
    seconds = clock.elapsed()
    if done.returncode:
        why = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise InputError(f"a process that was to be measured failed: {why}")
    return seconds, read(done.stdout)


def _figures(*taken: list[tuple[float, Any]], names: list[str]) -> Figures:
    """Of --help, of ask with its answers, and of the process with several, round by round."""
    asked = [answer for _, answer in taken[1]]
    rounds = [times for _, times in taken[2]]
    by_answer = list(zip(*rounds, strict=True))
    later = [statistics.mean(times[1:]) for times in rounds]
    return {
        "processes": {
            name: spread([seconds for seconds, _ in rows]) for name, rows in zip(names, taken, strict=True)
        },
        "tokens": [answer["tokens"] for answer in asked],
        "ttft": {
            "ask": spread([answer["timings"]["ttft"] for answer in asked]),
            "answers": [spread(times) for times in by_answer],
        },
        "first_against_later": ratios(by_answer[0], later),
    }
