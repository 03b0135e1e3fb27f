"""A link (link.py) in a process of its own: it does not share an interpreter with who is measured, as no network does."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from blendserve.bench.child import run, say
from blendserve.bench.link import Link, Weather


class LinkProcess:
    """Forwards connections to a port of this machine from one of its own. A context manager."""

    def __init__(self, to_port: int, seed: int = 0) -> None:
        command = [sys.executable, "-m", __name__, str(to_port), str(seed)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self.port = int(self._told())

    @property
    def n_bytes(self) -> int:
        """That have come from the server."""
        self._tell(None)
        return int(self._told())

    def set_to(self, weather: Weather) -> None:
        """From the next piece on."""
        self._tell(asdict(weather))

    def __enter__(self) -> LinkProcess:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            self._process.kill()

    def _tell(self, value: Any) -> None:
        assert self._process.stdin
        print(json.dumps(value), file=self._process.stdin, flush=True)

    def _told(self) -> Any:
        assert self._process.stdout
        return json.loads(self._process.stdout.readline())


def main() -> None:
    """A line with the port; then new weather is read, or a question how many bytes have come, until there is no more."""
    to_port, seed = map(int, sys.argv[1:])
    with Link(to_port, seed) as link:
        say(link.port)
        for line in sys.stdin:
            asked = json.loads(line)
            if asked is None:
                say(link.down.n_bytes)
            else:
                link.weather = Weather(**asked)


if __name__ == "__main__":
    run(main)
