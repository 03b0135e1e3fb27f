"""The process whose answers are compared: `python -m blendserve.bench.answers INDEX SETTINGS` prints the TTFT of each."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from blendserve.config import Config
from blendserve.engine.engine import Engine

ANSWERS = 3
QUESTION = "What does the with statement do?"


def main(index: str, settings: str) -> None:
    """Ask the same several times."""
    with Engine.open(index, Config.load(Path(settings))) as engine:
        print(json.dumps([engine.answer(QUESTION).timings.ttft for _ in range(ANSWERS)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
