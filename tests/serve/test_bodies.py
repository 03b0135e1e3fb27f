"""Hostile clients: bodies that are large, slow, deep or sent without a right to be read, over real connections."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from blendserve.config import ServeConfig
from blendserve.errors import InputError
from blendserve.serve.keys import Tenant
from blendserve.serve.limits import Limits
from blendserve.serve.middleware import MAX_JSON_DEPTH, MAX_JSON_TOKENS, check_json_complexity
from tests.support.engines import QUESTIONS
from tests.support.http import Client, Server, serving

PATH = "/v1/rag/query"
CHUNKED = "Transfer-Encoding: chunked"


@contextmanager
def sent(server: Client, key: str, *headers: str, body: bytes = b"") -> Iterator[socket.socket]:
    """A connection with a request whose body may be incomplete."""
    host, port = server.url.removeprefix("http://").split(":")
    lines = [f"POST {PATH} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    lines += [f"Authorization: Bearer {key}"] if key else []
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        yield connection


def status(connection: socket.socket) -> int:
    return int(connection.recv(65536).split()[1])


@pytest.mark.parametrize("length", ["Content-Length: 9999", CHUNKED], ids=["length", "chunked"])
@pytest.mark.parametrize("key", ["", "bsk-guess"], ids=["none", "wrong"])
def test_the_key_is_checked_before_the_body_arrives(server: Server, length: str, key: str) -> None:
    with sent(server, key, length) as connection:
        assert status(connection) == 401


def test_limits_are_checked_before_the_body_arrives(server: Server) -> None:
    """A request above its rate, and one beside another whose body is still being read."""
    limited, single = server.tenant(max_per_minute=1), server.tenant(max_concurrent=1)
    assert limited.get("/v1/models").status_code == 200
    with sent(server, limited.key, "Content-Length: 9999") as connection:
        assert status(connection) == 429
    with sent(server, single.key, "Content-Length: 9999", body=b"{"):

        def refused() -> bool:
            with sent(server, single.key, "Content-Length: 9999", body=b"{") as second:
                second.settimeout(0.5)
                try:
                    return status(second) == 429
                except TimeoutError:  # the first one's headers had not been read
                    return False

        assert any(refused() for _ in range(20))


@pytest.mark.parametrize(
    "length", ["Content-Length: 65537", "Content-Length: -1", f"Content-Length: {'9' * 20}"], ids=str
)
def test_a_wrong_length_is_refused_before_the_body_arrives(
    server: Server, client: Client, length: str
) -> None:
    with sent(server, client.key, length) as connection:
        assert status(connection) in (400, 413)


def test_a_body_of_unknown_length_is_cut_at_the_limit(server: Server, client: Client) -> None:
    part = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    with sent(server, client.key, CHUNKED, body=part) as connection:
        connection.sendall(b"1\r\nx\r\n")
        assert status(connection) == 413


def test_a_slow_body_ends_its_connection(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServeConfig, "body_s", 0.1)
    with serving(tmp_path) as server, sent(server, "", "Content-Length: 99", body=b"{") as slow:
        answer = slow.recv(65536).decode().lower()
        assert (answer.split()[1], "connection: close" in answer) == ("408", True)
        assert server.ask(max_tokens=1)["tokens"] == 1


@pytest.mark.parametrize(
    ("body", "allowed"),
    [
        (b"[" * MAX_JSON_DEPTH, True),
        (b"[" * (MAX_JSON_DEPTH + 1), False),
        (b'{"a":' * (MAX_JSON_DEPTH + 1), False),
        (b"[]" * 1000, True),
        (b"," * MAX_JSON_TOKENS, True),
        (b"," * (MAX_JSON_TOKENS + 1), False),
        (b'"' + b"[,:{" * MAX_JSON_TOKENS + b'"', True),  # the contents of a string
        (rb'"\"' + b"[" * 100 + b'"', True),
        (rb'"\\"' + b"[" * 100, False),
        (b'""' * (2 * MAX_JSON_TOKENS + 1), False),
        (b"{}\0", False),
    ],
    ids=range(11),
)
def test_expensive_json_is_refused_before_it_is_parsed(body: bytes, allowed: bool) -> None:
    if allowed:
        check_json_complexity(body)
    else:
        with pytest.raises(InputError):
            check_json_complexity(body)


def test_many_small_parts_of_a_body_are_one_body(server: Server, client: Client) -> None:
    body = json.dumps({"question": QUESTIONS[0], "passages": [], "max_tokens": 1}).encode()
    parts = b"".join(b"1\r\n" + body[n : n + 1] + b"\r\n" for n in range(len(body)))
    with sent(server, client.key, CHUNKED, body=parts + b"0\r\n\r\n") as connection:
        assert status(connection) == 200


def test_a_body_of_many_json_elements_is_refused(client: Client) -> None:
    """Of a field that would be ignored: nothing else refuses it."""
    body: dict[str, Any] = {"question": QUESTIONS[0], "passages": [], "max_tokens": 1}
    few, many = (
        client.post(PATH, {**body, "ignored": [0] * n}).status_code for n in (1000, MAX_JSON_TOKENS + 1)
    )
    assert (few, many) == (200, 400)


def test_a_body_above_its_rate_is_read_slowly(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = list[int]()

    def throttle(self: Limits, tenant: Tenant, n_bytes: int) -> float:
        counted.append(n_bytes)
        return 60.0  # longer than the body may take

    monkeypatch.setattr(Limits, "throttle", throttle)
    monkeypatch.setattr(ServeConfig, "body_s", 0.1)
    body = {"question": QUESTIONS[0]}
    with serving(tmp_path) as server:
        assert server.post(PATH, body).status_code == 408
    assert 0 < sum(counted) <= len(json.dumps(body))
