"""What a stranger can do wrong, and what servers are: told by name, with the way out, and never with the password."""

from __future__ import annotations

import builtins
import logging
import re
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from blendserve.bench.link import Link
from blendserve.bench.servers import Server, free_port
from blendserve.config import ValkeyConfig
from blendserve.errors import ConfigError, StoreUnavailable
from blendserve.serve.metrics import Metrics
from blendserve.store import LayeredStore, MemoryStore
from blendserve.store.valkey.client import PASSWORD
from blendserve.store.valkey.store import ValkeyStore
from tests.store.helpers import CAP, chunk, key_of, read, same
from tests.store.valkey.servers import PATIENT_S, database, needs_server, shared_server

SECRET = "open sesame"


def store(url: str, **options: Any) -> ValkeyStore:
    return ValkeyStore(ValkeyConfig(url=url, **{"deadline_s": PATIENT_S, **options}), CAP)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:6379", "valkey://HOST:6379"),
        ("127.0.0.1:6379", "valkey://HOST:6379"),
        ("valkey://", "valkey://HOST:6379"),
        ("valkey://host:port", "no URL"),
        ("valkey://host/first", "database's number, not 'first'"),
        ("valkey://host?ssl_cert_reqs=none", "valkey://HOST:6379"),
        ("unix://", "unix:///PATH"),
    ],
)
def test_a_url_that_is_none_is_refused(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"store.valkey.url.*{why}"):
        ValkeyConfig(url=url)


@pytest.mark.parametrize(
    "url",
    [
        f"valkey://me:{SECRET}@host",
        f"valkeys://:{SECRET}@host:1/2",
        f"valkey://:{SECRET}@host:port",
        f"{SECRET}@host",
    ],
)
def test_a_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="password_file") as caught:
        ValkeyConfig(url=url)
    assert SECRET not in str(caught.value)


def test_without_the_package_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any) -> Any:
        if name == "valkey":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(StoreUnavailable, match=r"pip install 'valkey>="):
        store("valkey://127.0.0.1:1")


@pytest.mark.parametrize("url", ["valkey://127.0.0.1:{}", "valkeys://127.0.0.1:{}", "unix:///nowhere{}"])
def test_where_nothing_answers_commands_fail_and_requests_miss(url: str) -> None:
    with store(url.format(free_port())) as nobody:
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            nobody.stats()
        with nobody.reading() as snapshot:
            snapshot.expect([key_of(1), key_of(2)])
            assert snapshot.get(key_of(1)) is None
            assert snapshot.undecodable[key_of(1)].kind == "unreachable"
        lease = nobody.lease(key_of(1), 9.0)
        assert lease is not None  # better computed twice than not at all
        lease.release()


def test_an_engines_store_opens_without_its_server_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    from blendserve.config import StoreConfig
    from blendserve.store import open_store

    server = {"url": f"valkey://127.0.0.1:{free_port()}"}
    with open_store(StoreConfig(kind="valkey", valkey=server), None) as kept:
        for _ in range(3):
            assert read(kept, key_of(1)) is None
    assert ["cannot be reached" in record.message for record in caplog.records] == [True]


def test_a_servers_figures_tell_that_its_store_is_away(path: Path) -> None:
    figures = Metrics()
    with store(f"valkey://127.0.0.1:{free_port()}") as nobody:
        figures.watch(lambda: (0, 0), 1, nobody)
        assert b"blendserve_store_up 0.0" in figures.text()


@contextmanager
def answering(reply: bytes) -> Iterator[str]:
    """Something at a port that says the same to everybody."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    line, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=talk, args=(line,), daemon=True).start()

        def talk(line: socket.socket) -> None:
            with line:
                while line.recv(4096):
                    line.sendall(reply)

        threading.Thread(target=serve, daemon=True).start()
        yield f"valkey://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def info(**fields: str) -> bytes:
    body = "".join(f"{name}:{value}\r\n" for name, value in fields.items()).encode()
    return b"$%d\r\n%s\r\n" % (len(body), body)


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "sends what is no answer|cannot be reached"),
        (info(redis_version="5.0.7"), "is redis 5.0.7, and Valkey 7 or Redis 6 is needed"),
        (info(something="else"), "of no version"),
        (b"-LOADING the dataset\r\n", "still loading"),
        (b"-NOAUTH Authentication required.\r\n", f"credentials: set {PASSWORD}"),
    ],
)
def test_what_is_no_server_for_us_is_named(reply: bytes, why: str) -> None:
    with answering(reply) as url, store(url) as strange, pytest.raises(StoreUnavailable, match=why):
        strange.stats()


@needs_server
def test_credentials_come_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    (tmp_path / "password").write_text(SECRET + "\n")
    with Server(requirepass=SECRET) as server:
        for config in ({}, {"username": "nobody"}, {"password_file": tmp_path / "missing"}):
            with (
                store(server.url, **config) as locked,
                pytest.raises(StoreUnavailable, match="password_file") as caught,
            ):
                locked.stats()
            assert SECRET not in str(caught.value)
        with store(server.url, password_file=tmp_path / "password") as opened:
            assert opened.stats().chunks == 0
        monkeypatch.setenv(PASSWORD, SECRET)
        with store(server.url, username="default") as opened:
            assert opened.stats().chunks == 0
    assert SECRET not in caplog.text


@needs_server
def test_tls_goes_by_the_url_and_trusts_the_given_authority(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    try:
        command = [*made.split(), "-keyout", str(key), "-out", str(cert)]
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no openssl here to make a certificate with")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with Link(shared_server().port, tls=context) as link:
        url = link.url.replace("valkey:", "valkeys:") + "/9001"
        with store(url, ca_file=cert) as trusted:
            trusted.put(key_of(1), chunk())
            assert same(read(trusted, key_of(1)), chunk())
        with store(url) as wary, pytest.raises(StoreUnavailable, match=r"cannot be reached.*certificate"):
            wary.stats()


@needs_server
def test_a_server_that_was_started_again_is_not_missed(tmp_path: Path) -> None:
    with Server() as server, store(server.url) as kept:
        kept.put(key_of(1), chunk())
        server.restart()
        with kept.reading() as snapshot:
            assert snapshot.get(key_of(1)) is None
            assert not snapshot.undecodable  # it is not there: that is known
        kept.put(key_of(1), chunk())
        assert same(read(kept, key_of(1)), chunk())


@needs_server
def test_a_reply_that_never_ends_is_given_up(tmp_path: Path) -> None:
    """Bytes that keep coming keep a socket's own timeout from ever passing."""
    with Link(shared_server().port) as link, store(f"{link.url}/9002", deadline_s=0.3) as slow:
        with store(database(tmp_path).rpartition("/")[0] + "/9002") as direct:
            direct.put(key_of(1), chunk(200))
        link.weather.bytes_per_s = 2000
        with slow.reading() as snapshot:
            assert snapshot.get(key_of(1)) is None
            assert "does not answer within 0.3 s" in str(snapshot.undecodable[key_of(1)])
            assert snapshot.get(key_of(2)) is None


@needs_server
def test_more_threads_than_connections_all_get_their_answers(tmp_path: Path) -> None:
    with store(database(tmp_path)) as busy, ThreadPoolExecutor(16) as pool:
        busy.put(key_of(1), chunk())
        assert all(pool.map(lambda _: same(read(busy, key_of(1)), chunk()), range(64)))


@pytest.mark.parametrize(
    ("scheme", "options", "why"),
    [
        (
            "valkey",
            {"password_file": Path("nowhere")},
            "the file nowhere cannot be read .*correct password_file",
        ),
        ("valkeys", {"ca_file": Path("nowhere")}, "the file nowhere cannot be read .*correct ca_file"),
        ("valkeys", {"deadline_s": 0.2}, "over TLS: where it speaks none, its url begins with valkey://"),
    ],
)
@needs_server
def test_in_front_of_what_cannot_be_used_the_log_says_why_once(
    scheme: str, options: dict[str, Any], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = database(tmp_path).replace("valkey://", f"{scheme}://")
    with LayeredStore(MemoryStore(CAP), store(url, **options)) as both:
        for n in range(3):
            with both.reading() as snapshot:
                assert snapshot.get(key_of(n)) is None
        both.put(key_of(1), chunk(1), pin=True)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert re.search(why, said)
