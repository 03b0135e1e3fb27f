"""`kdn serve`: who may read what, and what a client may do."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from blendserve.config import DeliverConfig
from blendserve.serve.keys import KeyFile, Tenant
from tests.support.http import bearer
from tests.support.peers import NAME, Published, Service
from tests.support.waiting import eventually


def test_keys_open_descriptions_and_other_files_are_known_by_their_hashes(
    made: Published, tmp_path: Path
) -> None:
    """A hidden collection looks like a missing one, and nothing else of the folder is served."""
    (made.folder / "keys.json.txt").write_text("secret")
    file = KeyFile(tmp_path / "keys.json")
    collections = {"reader": (NAME,), "other": ("another",)}
    keys = {name: bearer(file.create(Tenant(name, collections=own))) for name, own in collections.items()}
    with Service(made.folder, keys=file.path) as service:
        assert service.get(f"{NAME}.json").status_code == 401
        read = service.get(f"{NAME}.json", **keys["reader"])
        assert (read.content, read.headers["Cache-Control"]) == (
            made.file(f"{NAME}.json"),
            "private, max-age=10",
        )
        hidden = [service.get(f"{name}.json", **keys["other"]) for name in (NAME, "x", "another")]
        assert {(reply.status_code, reply.text) for reply in hidden} == {(404, hidden[0].text)}
        path = made.chunk()
        assert service.get(path, **keys["other"]).content == made.file(path)
        for name in (
            "chunks/00",
            "chunks/..",
            "keys.json.txt",
            f"..%2f{NAME}",
            "pieces/../x.json",
            "none/" + "0" * 32,
        ):
            assert service.get(name, **keys["reader"]).status_code == 404


def test_a_part_and_an_unchanged_file(service: Service, made: Published) -> None:
    path, whole = made.chunk(), made.file(made.chunk())
    part = service.get(path, Range="bytes=7-40")
    assert (part.status_code, part.content) == (206, whole[7:41])
    assert "immutable" in part.headers["Cache-Control"]
    assert service.get(path, **{"If-None-Match": part.headers["ETag"]}).status_code == 304
    assert service.http.head(path).headers["Content-Length"] == str(len(whole))


def test_a_client_that_reads_nothing_is_cut(made: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had asked for counts no longer among its requests."""
    asks = f"GET /{made.chunk()} HTTP/1.1\r\nHost: x\r\n\r\n".encode() * 400  # more than sockets hold
    monkeypatch.setattr(DeliverConfig, "send_s", 0.2)
    service = Service(made.folder, max_concurrent=1)
    with service, socket.create_connection(("127.0.0.1", service.port)) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.sendall(asks)
        eventually(lambda: service.get(made.chunk()).status_code == 200)
