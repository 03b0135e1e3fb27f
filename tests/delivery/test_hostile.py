"""A server that lies: each lie is a miss with a reason, costs a bounded number of bytes, and never a wrong answer."""

from __future__ import annotations

import json
import socket
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from blendserve.config import BlendConfig
from blendserve.errors import StoreError, StoreUnavailable
from blendserve.kdn.pull import pull
from blendserve.store import MemoryStore
from blendserve.store.codecs.base import tables_hash
from tests.support.links import Known
from tests.support.peers import (
    NAME,
    SLOW,
    Peer,
    Published,
    answered,
    blender,
    head,
    kdn_store,
    question,
    settings,
    some_key,
)
from tests.support.waiting import ManualClock

MOST_SENT = 16 << 20  # bytes that sockets may hold between two processes, and a read
# chunks; a second connection; other chunks' ends, as all connections end together; again
MOST_TRIES = 4 * 2 * 2 * 2
ASKED = 3  # passages

ZEROS, CHUNKED = bytes(1 << 16), "Transfer-Encoding: chunked\r\n"
Lie = Callable[[bytes], tuple[bytes, "bytes | None"]]
"""the true body -> what is sent, and what is then sent for ever; None = the connection ends"""
LIES: dict[str, Lie] = {
    "flipped": lambda body: (head(len(body)) + body[:-9] + bytes([body[-9] ^ 4]) + body[-8:], b""),
    "longer": lambda body: (head(1 << 40), ZEROS),
    "no length": lambda body: (head(None), ZEROS),
    "pieces": lambda body: (head(None, more=CHUNKED), b"10000\r\n" + ZEROS + b"\r\n"),
    "headers": lambda body: (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 1000),
    "large header": lambda body: (head(len(body)) + b"\xff\xff\xff\x7f" + body[4:], b""),
    "short": lambda body: (head(len(body)) + body[:10], None),
    "another part": lambda body: (
        head(10, "206 Partial Content", f"Content-Range: bytes 7-16/{len(body)}\r\n") + body[:10],
        b"",
    ),
    "no http": lambda body: (b"+PONG\r\n\r\n" * 100, b""),
}


def honest(body: bytes) -> tuple[bytes, bytes]:
    return head(len(body)) + body, b""


class Liar(Peer):
    """Tells the truth about the collection, and lies where the path has this part. `about`: the path that it sends."""

    def __init__(self, made: Published, lie: Lie, where: str = "/chunks/", about: str = "") -> None:
        self.sent, self._lock = 0, threading.Lock()

        def speak(connection: socket.socket, path: str) -> None:
            is_lie = where in path
            said, then = (lie if is_lie else honest)(made.file(about if is_lie and about else path))
            connection.sendall(said)
            if then is None:
                connection.shutdown(socket.SHUT_RDWR)
            while then:
                connection.sendall(then)
                with self._lock:
                    self.sent += len(then)

        super().__init__(speak)


@pytest.fixture(scope="module")
def plain() -> torch.Tensor:
    """The logits without a store."""
    return answered(MemoryStore(2**30), ASKED).result.logits


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_lie_about_a_chunk_is_a_miss_and_bounded(made: Published, plain: torch.Tensor, lie: Lie) -> None:
    """So is one about a sample of the link, and of what decoding needs."""
    clock = ManualClock()
    with Liar(made, lie) as liar, kdn_store(settings(liar.url), clock=clock) as store:
        of = blender(store)
        done = of.run(question(ASKED), BlendConfig(method="blend"))
        of.fetcher.flush()
        tries = sum("/chunks/" in path for path in liar.paths)
        clock.advance(600)  # after a failure the service is left alone
        with suppress(StoreError):
            store.source.probe([some_key()], 1 << 12)
    assert torch.equal(done.result.logits, plain)
    assert done.report.chunks_hit == 0
    assert done.report.unusable or done.report.chunks_corrupt
    assert liar.sent < 2 * MOST_SENT
    assert tries <= MOST_TRIES
    assert sum("/chunks/" in path for path in liar.paths) > tries


def test_another_chunk_is_no_answer_and_the_truth_is(made: Published, plain: torch.Tensor) -> None:
    """The liar sends one chunk for all; the second half shows that the test above can fail."""
    with Liar(made, honest, about=made.chunk()) as liar, kdn_store(settings(liar.url)) as store:
        assert answered(store, ASKED).report.chunks_hit == 1
    with Liar(made, honest) as peer, kdn_store(settings(peer.url)) as store:
        done = answered(store, ASKED)
        assert done.report.chunks_hit == ASKED
        assert not torch.equal(done.result.logits, plain)


@pytest.mark.parametrize("name", LIES)
def test_a_lie_about_one_of_several_is_bounded_and_the_others_come(made: Published, name: str) -> None:
    """All are asked for at a time. What may be the connection's fault ends them all."""
    with (
        Liar(made, LIES[name], made.chunk()) as liar,
        kdn_store(settings(liar.url), link=Known(1e9)) as store,
    ):
        store.source.contains([])
        done = blender(store, costs=SLOW).run(question(ASKED), BlendConfig(method="auto"))
    assert liar.sent < 2 * MOST_SENT
    assert done.report.chunks_hit == ASKED - 1 or name in ("short", "headers", "no http")


@pytest.mark.parametrize("lie", [*LIES.values()][1:], ids=[*LIES][1:])
def test_a_lie_about_the_collection_is_an_error_and_bounded(made: Published, lie: Lie) -> None:
    liar = Liar(made, lie, ".json")
    with liar, kdn_store(settings(liar.url)) as store, pytest.raises(StoreUnavailable):
        store.source.contains([])
    assert liar.sent < MOST_SENT


def test_silence_ends_at_the_deadline(made: Published) -> None:
    quiet = threading.Event()

    def silent(body: bytes) -> tuple[bytes, bytes]:
        quiet.wait(60)
        return b"", b""

    with Liar(made, silent) as liar, kdn_store(settings(liar.url, deadline_s=0.5)) as store:
        assert {why["kind"] for why in answered(store, ASKED).report.unusable} == {"unreachable"}
        quiet.set()


# The index


Files = dict[str, bytes]


def published_files(made: Published) -> Files:
    """The files of the published index."""
    blobs = made.collection.files.items()
    return {name: b"".join(made.file(f"pieces/{hash}") for hash in blob.pieces) for name, blob in blobs}


class Forger(Peer):
    """A server whose index has these files, with right hashes; `about` changes what it says of them."""

    def __init__(self, made: Published, files: Files, /, **about: Any) -> None:
        said = json.loads(made.file(f"{NAME}.json"))
        hashes = {name: tables_hash(raw).hex() for name, raw in files.items()}
        said["files"] = {name: {"n_bytes": len(raw), "pieces": [hashes[name]]} for name, raw in files.items()}
        self.pieces = {f"/pieces/{hashes[name]}": raw for name, raw in files.items()}
        bodies = {**self.pieces, f"/{NAME}.json": json.dumps({**said, **about}).encode()}
        super().__init__(lambda line, path: self.answer(line, bodies.get(path, b"")))

    def answer(self, line: socket.socket, body: bytes) -> None:
        line.sendall(honest(body)[0])


def about(files: Files, **changes: Any) -> Files:
    """The files with these changes of the manifest."""
    manifest = json.loads(files["manifest.json"])
    return {**files, "manifest.json": json.dumps({**manifest, **changes}).encode()}


def first_line(files: Files, **values: Any) -> Files:
    """The files with these values of the first document."""
    first, *others = files["documents.jsonl"].decode().split("\n")
    lines = [json.dumps({**json.loads(first), **values}), *others]
    return {**files, "documents.jsonl": "\n".join(lines).encode()}


Forgery = Callable[[Files], Files]
FORGERIES: dict[str, Forgery] = {
    **{
        f"file {name}": lambda files, name=name: {**files, name: b"x"}  # type: ignore[misc]
        for name in ("../outside", "/tmp/outside", "another")
    },
    "no vectors": lambda files: {n: raw for n, raw in files.items() if n != "vectors.f32"},
    "documents of another form": lambda files: {**files, "documents.jsonl": b'{"nothing": 1}\n'},
    "documents that are no text": lambda files: {**files, "documents.jsonl": b"\xff\xff\n"},
    "a text that is a number": lambda files: first_line(files, texts=[7]),
    "more windows than vectors": lambda files: first_line(files, windows=[50]),
    "fewer windows than texts": lambda files: first_line(files, texts=["a", "b"]),
    "no windows": lambda files: first_line(files, texts=[], windows=[]),
    "one document twice": lambda files: about(
        {**files, **{name: files[name] * 2 for name in ("documents.jsonl", "vectors.f32")}},
        **{
            name: 2 * json.loads(files["manifest.json"])[name]
            for name in ("documents", "passages", "vectors")
        },
    ),
    "deep JSON": lambda files: {**files, "manifest.json": b"[" * 100_000},
    "no bytes of vectors": lambda files: {**files, "vectors.f32": b""},
    "cut vectors": lambda files: {**files, "vectors.f32": files["vectors.f32"][:99]},
    "vectors that are not finite": lambda files: {
        **files,
        "vectors.f32": b"\xff" * len(files["vectors.f32"]),
    },
    **{
        f"{name} {value!r}": lambda files, name=name, value=value: about(files, **{name: value})  # type: ignore[misc]
        for name, value in (
            *(
                ("dimension", "x"),
                ("dimension", 7),
                ("dimension", -1),
                ("chunk_tokens", "x"),
                ("passages", 0),
            ),
            ("format", 2),
        )
    },
}


def on_disk(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_index_replaces_no_good_one(made: Published, tmp_path: Path, forgery: Forgery) -> None:
    files, folder = published_files(made), tmp_path / "index"
    with Forger(made, about(files, reader="another version")) as honest_one:
        pull(settings(honest_one.url), folder)
    before = on_disk(folder)
    with Forger(made, forgery(files)) as forger:
        pull(settings(forger.url), folder)  # the last good one is used
        with pytest.raises(StoreUnavailable):
            pull(settings(forger.url), tmp_path / "other")
        if forgery(files).keys() != files.keys():  # names are checked before anything is downloaded
            assert not forger.pieces.keys() & set(forger.paths)
    assert on_disk(folder) == before
    assert not (tmp_path / "other").exists()
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("n_bytes", [-5, 1 << 40])
def test_an_index_of_impossible_size_is_not_downloaded(made: Published, tmp_path: Path, n_bytes: int) -> None:
    files = published_files(made)
    about = {name: {"n_bytes": n_bytes, "pieces": ["00" * 16]} for name in files}
    with Forger(made, files, files=about) as forger, pytest.raises(StoreUnavailable):
        pull(settings(forger.url), tmp_path / "index")
    assert not any("/pieces/" in path for path in forger.paths)


@pytest.mark.parametrize("what", ["head", "description", "piece"])
def test_a_service_that_drips_bytes_is_given_up(
    made: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Each byte comes in time, and the whole never does."""
    monkeypatch.setattr("blendserve.kdn.pull.FASTEST_LIMIT_S", 0.5)
    monkeypatch.setattr("blendserve.kdn.pull.MIN_BYTES_S", 1 << 30)
    over = threading.Event()

    class Dripping(Forger):
        def answer(self, line: socket.socket, body: bytes) -> None:
            is_piece = body in self.pieces.values()
            if is_piece != (what == "piece"):
                super().answer(line, body)
                return
            line.sendall(b"HTTP/1.1 200 OK\r\n" if what == "head" else head(1 << 20))
            while not over.wait(0.02):
                line.sendall(b"X: y\r\n" if what == "head" else b" ")

    with Dripping(made, published_files(made)) as slow:
        with pytest.raises(StoreUnavailable):
            pull(settings(slow.url, deadline_s=60.0), tmp_path / "index")
        over.set()
    assert not (tmp_path / "index").exists()


def test_memory_is_taken_for_bytes_that_came_and_not_for_announced_ones(made: Published) -> None:
    class Announcing(Forger):
        def answer(self, line: socket.socket, body: bytes) -> None:
            line.sendall(honest(body)[0] if body else head(200 << 20) + bytes(999))
            if not body:
                line.shutdown(socket.SHUT_RDWR)

    with Announcing(made, {}, chunks=1 << 21) as peer, kdn_store(settings(peer.url)) as store:
        tracemalloc.start()
        try:
            with pytest.raises(StoreUnavailable):
                store.source.contains([])
            assert tracemalloc.get_traced_memory()[1] < 64 << 20
        finally:
            tracemalloc.stop()
