"""A server as a process of its own, from outside: where it listens, what it takes, and its end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from blendserve.errors import ServeError
from blendserve.serve.child import Child

SERVER = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
held = bytearray(b"x") * 30_000_000
print("Listening on nothing at all", file=sys.stderr)
print("Listening on http://here:" + sys.argv[1], flush=True)
while True:
    signal.pause()
"""


def child(folder: Path, port: int) -> Child:
    return Child([sys.executable, "-c", SERVER, str(port)], folder / "log")


def test_it_says_where_it_listens_and_ends_when_told_to(tmp_path: Path) -> None:
    with child(tmp_path, 1) as first:
        assert first.url == "http://here:1"
        assert 30 < first.memory_mb < 1000
        assert first.stop() == 3
    with child(tmp_path, 2) as second:  # the log has the first one's line, too
        assert second.url == "http://here:2"
        second.kill()
        assert second._process.returncode < 0


def test_who_leaves_with_an_error_takes_it_along(tmp_path: Path) -> None:
    with pytest.raises(KeyError), child(tmp_path, 1) as server:
        raise KeyError
    assert server._process.returncode < 0


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("raise SystemExit(5)", "it said nothing"),
        (
            "print('reading'); print('error: there is no index'); raise SystemExit(5)",
            "error: there is no index",
        ),
    ],
)
def test_one_that_ends_before_it_listens_is_told_with_its_last_words(
    tmp_path: Path, program: str, why: str
) -> None:
    (tmp_path / "log").write_text("an earlier one's words\n")
    with pytest.raises(ServeError, match=rf"ended with 5 at its start: {why} \(.*log\)"):
        Child([sys.executable, "-c", program], tmp_path / "log")
