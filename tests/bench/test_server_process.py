"""A server as a process of its own, as benches start it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from blendserve.bench.server_process import ServerProcess
from blendserve.errors import ServeError

PROGRAM = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
held = bytearray(b"x") * 30_000_000
print("Listening on nothing at all", file=sys.stderr)
print("Listening on http://here:" + sys.argv[1], flush=True)
while True:
    signal.pause()
"""


def test_a_server_process_has_a_url_and_ends(tmp_path: Path) -> None:
    def start(port: int) -> ServerProcess:
        return ServerProcess([sys.executable, "-c", PROGRAM, str(port)], tmp_path / "log")

    def runs(process: ServerProcess) -> bool:
        return Path(f"/proc/{process.pid}").exists()

    with start(1) as first:
        assert first.url == "http://here:1"
        assert 30 < first.memory_mb < 1000
        assert first.stop() == 3
    with start(2) as second:  # the log also has the first one's line
        assert second.url == "http://here:2"
        second.kill()
        assert not runs(second)
    with pytest.raises(KeyError), start(3) as third:
        raise KeyError
    assert not runs(third)
    with pytest.raises(ServeError) as error:
        ServerProcess([sys.executable, "-c", "raise SystemExit(5)"], tmp_path / "log")
    assert error.value.path == str(tmp_path / "log")
