"""A toy server as a process of its own, with its store on disk: `python -m tests.serve.toy_server FOLDER [PORT]`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from blendserve.engine.engine import Engine
from blendserve.serve.config import ServeConfig
from blendserve.serve.running import run
from blendserve.store import LMDBStore
from tests.engine.helpers import CONFIG, reader
from tests.serve.helpers import library


def main(folder: Path, port: int) -> None:
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with Engine(CONFIG, reader(), LMDBStore(folder / "kv", 2**27)) as engine:
        engine.precompute([])  # the prefix
        run(
            engine,
            library(folder, engine),
            ServeConfig(port=port, drain_s=20),
            lambda text: print(text, flush=True),
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
