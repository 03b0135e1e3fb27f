"""Wrong settings, other servers, credentials, TLS and faults of a server: no password is shown, requests are answered."""

from __future__ import annotations

import logging
import socket
import socketserver
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.proxy import Proxy
from benchmarks.support.valkey import Server, free_port
from blendserve.config import ValkeyConfig
from blendserve.errors import ConfigError, StoreUnavailable
from blendserve.fetch import KVFetcher
from blendserve.fetch.incoming import ChunkRequest
from blendserve.serve.metrics import Metrics
from blendserve.store.valkey import ValkeyStore
from blendserve.store.valkey_client import PASSWORD, library
from blendserve.store.valkey_layout import chunk_name
from tests.endurance.faults import CHUNKS, FAULTS, FaultFixture, run_fault
from tests.support.engines import PASSAGES, QUESTIONS, toy_engine
from tests.support.http import certificate
from tests.support.stores import CAP, chunk, key_of, put_kv, read, same
from tests.support.valkey import PATIENT_S, cluster, needs_server, shared_server
from tests.support.waiting import eventually

SECRET = "open sesame"
HOST = "cache.internal"


def store(url: str, **options: Any) -> ValkeyStore:
    return ValkeyStore(ValkeyConfig(url=url, **{"deadline_s": PATIENT_S, **options}), CAP)


WRONG = "http://127.0.0.1:6379", "127.0.0.1:6379", "valkey://", "valkey://host:port", "valkey://host/first"
PASSWORDS = f"valkey://me:{SECRET}@host", f"{SECRET}@host", f"valkeys://:{SECRET}@host:1/2"


@pytest.mark.parametrize("url", [*WRONG, "valkey://host?ssl_cert_reqs=none", "unix://", *PASSWORDS])
def test_a_wrong_url_is_refused_and_its_password_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as error:
        ValkeyConfig(url=url)
    assert error.value.setting == "valkey.url"
    assert SECRET not in repr(error.value)


def test_a_missing_client_package_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkey", None)
    with pytest.raises(StoreUnavailable):
        store("valkey://127.0.0.1:1")


@pytest.mark.parametrize(
    ("url", "options"),
    [
        *((url, {}) for url in ("valkey://127.0.0.1:{}", "valkeys://127.0.0.1:{}", "unix:///nowhere{}")),
        ("valkey://127.0.0.1:{}", {"secret_file": Path("nowhere")}),
    ],
)
def test_without_a_server_commands_fail_and_requests_miss(url: str, options: dict[str, Path]) -> None:
    with store(url.format(free_port()), **options) as away:
        with pytest.raises(StoreUnavailable):
            away.stats()
        with KVFetcher(away).fetch([ChunkRequest(key_of(n), 5) for n in (1, 2)]) as fetch:
            assert [fetch.misses[key_of(n)].kind for n in (1, 2)] == ["unreachable"] * 2
        assert away.lease([key_of(1)], 9.0)  # rather two computations than none
        away.release([key_of(1)])
        figures = Metrics()
        figures.watch(lambda: (0, 0), 1, away)
        assert b"blendserve_store_up 0.0" in figures.text()


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"$21\r\nredis_version:5.0.7\r\n\r\n",
        b"$16\r\nsomething:else\r\n\r\n",
        b"-LOADING the dataset\r\n",
        b"-NOAUTH Authentication required.\r\n",
    ],
)
def test_a_port_that_is_no_usable_server_is_unavailable(reply: bytes) -> None:
    """It gives the same answer to everything."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while self.request.recv(4096):
                self.request.sendall(reply)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with (
            store(f"valkey://127.0.0.1:{server.server_address[1]}") as strange,
            pytest.raises(StoreUnavailable),
        ):
            strange.stats()
        server.shutdown()


@needs_server
def test_credentials_come_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    (tmp_path / "password").write_text(SECRET + "\n")
    with Server(requirepass=SECRET) as server:
        for user in ("", "unknown@"):
            url = server.url.replace("://", f"://{user}")
            with store(url) as locked, pytest.raises(StoreUnavailable) as error:
                locked.stats()
            assert SECRET not in repr(error.value)
        with store(server.url, secret_file=tmp_path / "password") as opened:
            assert opened.stats().chunks == 0
        monkeypatch.setenv(PASSWORD, SECRET)
        with store(server.url.replace("://", "://default@")) as opened:
            assert opened.stats().chunks == 0
    assert SECRET not in caplog.text


@needs_server
def test_tls_follows_the_url_and_trusts_the_authority_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path)
    with tls_link(shared_server().port, (cert, key)) as link:
        url = link.url.replace("valkey:", "valkeys:") + "/9001"
        with store(url) as wary, pytest.raises(StoreUnavailable):
            wary.stats()
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        with store(url) as trusted:
            put_kv(trusted, key_of(1), chunk())
            assert same(read(trusted, key_of(1)), chunk())


@contextmanager
def tls_link(port: int, cert: tuple[Path, Path]) -> Iterator[Proxy]:
    """A TLS server with this certificate in front of a port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*cert)
    with Proxy(port, tls=context) as link:
        yield link


@pytest.fixture(scope="module")
def one_node() -> Iterator[Server]:
    """A cluster of one node, which holds all slots and asks for a password."""
    with cluster(1) as servers:
        library().Valkey(port=servers[0].port).config_set("requirepass", SECRET)
        yield servers[0]


@needs_server
@pytest.mark.parametrize("found_by", ["the url", "the cluster"])
@pytest.mark.parametrize("name", ["IP:127.0.0.1", "DNS:attacker.example"])
def test_a_trusted_certificate_of_another_name_gets_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_node: Server, found_by: str, name: str
) -> None:
    """Whether the server is that of the settings, or a node that a cluster names. The right name shows it can be used."""
    monkeypatch.setenv(PASSWORD, SECRET)
    ours, theirs = certificate(tmp_path), certificate(tmp_path, name)
    trusted = tmp_path / "trusted.pem"
    trusted.write_text(ours[0].read_text() + theirs[0].read_text())
    with (
        library().Valkey(port=one_node.port, password=SECRET) as server,
        tls_link(one_node.port, ours) as honest,
        tls_link(one_node.port, theirs) as other,
    ):
        server.config_set("cluster-announce-port", other.port)
        first = honest if found_by == "the cluster" else other
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        with store(f"valkeys://127.0.0.1:{first.port}") as opened:
            if name == "IP:127.0.0.1":
                assert put_kv(opened, key_of(1), chunk())
            else:
                with pytest.raises(StoreUnavailable):
                    opened.stats()
        assert bool(other.up.n_bytes) == (name == "IP:127.0.0.1")


def test_a_server_that_is_down_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """By an answer, its report and the log together."""
    away = store(f"valkey://127.0.0.1:{free_port()}")
    with toy_engine(away) as engine:
        report = engine.answer(QUESTIONS[0], PASSAGES, method="blend", max_new_tokens=1).report
    assert {miss["kind"] for miss in report.unusable} == {"unreachable"}
    said = [*(record.getMessage() for record in caplog.records), report.reason]
    said += [miss["reason"] for miss in report.unusable]
    assert sum(away.config.where in text for text in said) == 1


# Failover: the address of the settings leads to another server


@pytest.fixture
def name_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Server], str]:
    """Makes one host name lead to a server from now on -> the URL with that name."""
    resolve = socket.getaddrinfo
    ports = list[int]()

    def lookup(host: str, *args: Any, **named: Any) -> Any:
        return (
            resolve("127.0.0.1", ports[-1], *args[1:], **named)
            if host == HOST
            else resolve(host, *args, **named)
        )

    def point(server: Server) -> str:
        ports.append(server.port)
        return f"valkey://{HOST}:6379"

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    return point


def demote(old: Server, new: Server) -> None:
    """What a failover does: the old primary becomes a replica."""
    with library().Valkey(port=old.port) as client:
        client.replicaof("127.0.0.1", new.port)
        eventually(lambda: client.info("replication")["master_link_status"] == "up")


def orphan(old: Server, new: Server) -> None:
    """It becomes a replica that never finds its primary, and says so."""
    with library().Valkey(port=old.port) as client:
        client.config_set("replica-serve-stale-data", "no")
        client.replicaof("127.0.0.1", free_port())


def isolate(old: Server, new: Server) -> None:
    """It has lost its replicas, and refuses to be written to alone."""
    with library().Valkey(port=old.port) as client:
        client.config_set("min-replicas-to-write", 1)


@needs_server
@pytest.mark.parametrize("fail_over", [demote, orphan, isolate])
def test_after_a_failover_the_next_write_reaches_the_new_primary(
    name_of: Callable[[Server], str], fail_over: Callable[[Server, Server], None]
) -> None:
    with Server() as old, Server() as new, store(name_of(old)) as opened:
        assert put_kv(opened, key_of(1), chunk())
        name_of(new)
        fail_over(old, new)
        assert put_kv(opened, key_of(2), chunk())
        assert set(opened.keys()) == {key_of(2)}
        assert library().Valkey(port=new.port).exists(chunk_name(key_of(2)))


@needs_server
def test_without_a_new_primary_writes_fail_until_there_is_one(name_of: Callable[[Server], str]) -> None:
    with Server() as old, Server() as new, store(name_of(old)) as opened:
        assert put_kv(opened, key_of(1), chunk())
        demote(old, new)
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                put_kv(opened, key_of(2), chunk())
        name_of(new)
        assert put_kv(opened, key_of(2), chunk())


# Faults while requests are answered. `python -m tests.endurance.faults` measures each.

AWAY, DAMAGED = {"unreachable"}, {"corrupt"}
REASONS = {  # that the reports name
    **dict.fromkeys(("killed", "hung", "slow", "cut within a record"), AWAY),
    **dict.fromkeys(("damaged where stored", "another chunk's bytes"), DAMAGED),
}
SLOW = "hung", "slow", "damaged on the way", "cut within a record"  # seen after the deadline, others at once
REQUESTS, DEADLINE_S = 4, 1.0


@pytest.fixture(scope="module")
def fixtures() -> Iterator[dict[str, FaultFixture]]:
    with FaultFixture(DEADLINE_S) as hasty, FaultFixture(PATIENT_S) as patient:
        yield {name: hasty if name in SLOW else patient for name in FAULTS}


@needs_server
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_no_answer_and_ends(
    fixtures: dict[str, FaultFixture], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blendserve.fetch.incoming.FAILED_S", 0.1)  # from damage to the next try
    result = run_fault(fixtures[name], name, REQUESTS)
    assert result.wrong == 0
    assert result.looked_for == REQUESTS * CHUNKS
    assert result.reasons >= REASONS.get(name, set())
