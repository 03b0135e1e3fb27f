"""Clients that open connections and make no progress are disconnected, and keep nobody from the server."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from blendserve.serve import connections, server
from tests.support.engines import QUESTIONS
from tests.support.http import KEY, Server, serving

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/rag/query HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
N_FILES = 32


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server with a key, short timeouts and few connections."""
    monkeypatch.setattr(connections, "HEAD_S", 0.05)
    monkeypatch.setattr(connections, "READ_S", 0.05)
    monkeypatch.setattr(server, "raise_file_limit", lambda: N_FILES)
    with serving(tmp_path, api_key=KEY) as made:
        yield made


def connect(to: Server) -> socket.socket:
    host, port = to.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=180)


def silent(connection: socket.socket) -> None:
    """Nothing is sent."""


def half_head(connection: socket.socket) -> None:
    connection.sendall(GET)


def head_in_drips(connection: socket.socket) -> None:
    """Each byte comes in time; the head never ends."""
    connection.settimeout(0.01)
    connection.sendall(GET + b"X-Long: ")
    while True:
        connection.sendall(b"a")
        with suppress(TimeoutError):
            if not connection.recv(1):
                return


def half_head_after_an_answer(connection: socket.socket) -> None:
    connection.sendall(GET + b"\r\n")
    assert b"200 OK" in connection.recv(65536)
    connection.sendall(GET)


def rest_of_a_refused_body(connection: socket.socket) -> None:
    connection.sendall(POST + b"Content-Length: 1000\r\n\r\n{")
    assert b"401 Unauthorized" in connection.recv(65536)


def answers_that_nobody_reads(connection: socket.socket) -> None:
    with suppress(OSError):  # disconnected
        while True:
            connection.sendall((b"GET /page/style.css HTTP/1.1\r\nHost: x\r\n\r\n") * 100)


STALLS = [
    *(silent, half_head, head_in_drips, half_head_after_an_answer),
    *(rest_of_a_refused_body, answers_that_nobody_reads),
]


@pytest.mark.parametrize("stall", STALLS)
def test_a_client_without_progress_is_disconnected(
    closed: Server, stall: Callable[[socket.socket], None]
) -> None:
    with connect(closed) as connection, suppress(ConnectionError):
        stall(connection)
        while connection.recv(1 << 20):
            pass
    assert closed.with_key(KEY).get("/v1/models").status_code == 200


def test_an_answer_may_take_longer_than_a_head(closed: Server) -> None:
    body = {"question": QUESTIONS[0], "passages": [], "max_tokens": 1}
    client = closed.with_key(KEY)
    with closed.busy() as release, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, "/v1/rag/query", body)
        closed.wait_for_load(1)
        with connect(closed) as later:
            assert later.recv(1) == b""  # it has waited for as long as a head may take
        release.set()
        assert answer.result().status_code == 200


def test_silent_connections_keep_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they fill the log, where connections cannot be accepted."""
    monkeypatch.setattr(server, "raise_file_limit", lambda: N_FILES)
    monkeypatch.setattr(connections, "HEAD_S", 1e4)  # none ends by itself
    with serving(tmp_path, api_key=KEY) as made, ExitStack() as held:
        silent = [held.enter_context(connect(made)) for _ in range(N_FILES // 2 + 4)]
        assert made.with_key(KEY).get("/v1/models").status_code == 200
        assert silent[0].recv(1) == b""  # the oldest one had to go
        silent[-1].sendall(GET + b"\r\n")
        assert b"200 OK" in silent[-1].recv(65536)


def test_failures_to_accept_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    handle, loop = connections.AcceptErrors(), asyncio.new_event_loop()
    full = {"message": "socket.accept() out of system resource", "exception": OSError(errno.EMFILE, "full")}
    for _ in range(1000):
        handle(loop, full)
    assert len(caplog.records) == 1
    handle(loop, {"message": "another"})
    assert len(caplog.records) == 2
    loop.close()
