"""A link in a process of its own does what a link does, is told the weather, and ends with who started it."""

from __future__ import annotations

import os
import socket
import time

from blendserve.bench.link import Weather
from blendserve.bench.link_process import LinkProcess
from tests.bench.test_link import echo


def test_what_comes_back_is_counted_and_a_dead_link_holds_it_until_it_lives_again() -> None:
    with (
        echo() as port,
        LinkProcess(port) as link,
        socket.create_connection(("127.0.0.1", link.port)) as line,
    ):
        line.sendall(b"x" * 1000)
        assert _read(line, 1000) == b"x" * 1000
        assert link.n_bytes == 1000
        link.set_to(Weather(dead=True))
        assert link.n_bytes == 1000  # it has read the weather by now
        line.sendall(b"y" * 500)
        line.setblocking(False)
        time.sleep(0.05)
        assert not _there(line)
        line.setblocking(True)
        link.set_to(Weather())
        assert _read(line, 500) == b"y" * 500
        assert link.n_bytes == 1500


def test_it_ends_with_who_started_it() -> None:
    with echo() as port:
        with LinkProcess(port) as link:
            process = link._process
            os.kill(process.pid, 0)
        assert process.returncode is not None


def _there(line: socket.socket) -> bytes:
    try:
        return line.recv(1)
    except BlockingIOError:
        return b""


def _read(line: socket.socket, n: int) -> bytes:
    got = b""
    while len(got) < n and (piece := line.recv(n - len(got))):
        got += piece
    return got
