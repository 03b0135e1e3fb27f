"""Publishing: what is written, whoever is killed, and what a signature is worth."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given
from hypothesis import strategies as st

from blendserve.engine import codec_fit
from blendserve.errors import InputError, StoreUnavailable
from blendserve.fetch.incoming import ChunkRequest, IncomingChunk
from blendserve.fetch.kdn.manifest import (
    ChunkFile,
    Collection,
    Directory,
    encode_body,
    valid_name,
    write_directory,
)
from blendserve.kdn.publish import publish, publish_chunks
from blendserve.kdn.pull import pull
from blendserve.kdn.target import DAY_S, PublishTarget
from blendserve.kdn.upkeep import prune, verify
from blendserve.models import sources
from blendserve.retrieve.published import to_files
from blendserve.store import ChunkRecord, LMDBStore, MemoryStore, read_record
from blendserve.store.codecs.raw import Raw
from blendserve.store.key import KEY_BYTES
from blendserve.store.view import decode
from tests.support import peers
from tests.support.forked import process
from tests.support.http import DOCUMENTS
from tests.support.peers import LEVELS, NAME, Published, answered, kdn_store, settings

KILLS = 50


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_publishing_shows_the_progress_of_tables_that_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sources.BUNDLED, "tiny", sources.BUNDLED["smollm2-135m"])
    monkeypatch.setattr(codec_fit, "FIT_TOKENS", 100)
    monkeypatch.setattr(codec_fit, "TEXT_TOKENS", 50)
    shown: dict[str, list[tuple[int, int]]] = {name: [] for name in ("computed", "done", "sampled", "fitted")}
    updates = [lambda n, total, steps=steps: steps.append((n, total)) for steps in shown.values()]
    place = PublishTarget(f"{tmp_path}/www/{NAME}")
    made = publish(peers.publisher(tmp_path, MemoryStore(2**30)), place, ["predict"], None, *updates)
    for name, steps in shown.items():
        assert (name, len(steps) > 0, steps[-1][0]) == (name, True, steps[-1][1])
    assert [tables.codec for tables in made.tables] == ["predict"]
    assert verify(settings(f"{tmp_path}/www")) == (made, [])


def test_publishing_again_writes_what_has_changed(tmp_path: Path) -> None:
    made = peers.published(tmp_path)
    engine, before = peers.publisher(tmp_path, made.store), files(made.folder)
    again = PublishTarget(made.place)
    assert publish(engine, again, LEVELS[1:]).directory == made.collection.directory
    after = files(made.folder)
    new = after.keys() - before.keys()
    assert {name: after[name] for name in before if not name.endswith(".json")}.items() <= before.items()
    assert {after[name] for name in new} == {before[f"{NAME}.json"]}  # the earlier description
    assert again.written == len(before[f"{NAME}.json"]) + len(after[f"{NAME}.json"])
    damaged = made.folder / made.chunk()
    damaged.write_bytes(damaged.read_bytes()[:-1])
    publish(engine, PublishTarget(made.place), LEVELS[1:])
    assert verify(settings(str(made.folder)))[1] == []
    assert engine.index is not None
    engine.index.delete(str(DOCUMENTS[0].id))
    smaller = publish(engine, PublishTarget(made.place), ())
    assert (smaller.chunks, smaller.levels) == (made.collection.chunks - 1, ("raw",))
    assert [n for n in files(made.folder) if n.startswith("chunks/") and n not in before] == []


def test_verifying_names_what_is_missing_or_damaged(tmp_path: Path) -> None:
    made = peers.published(tmp_path)
    (tmp_path / "www" / made.chunk(0)).unlink()
    damaged = tmp_path / "www" / made.chunk(1)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    problems = verify(settings(str(made.folder)))[1]
    assert {problem.partition(":")[0] for problem in problems} == {made.chunk(0), made.chunk(1)}


def test_pruning_keeps_what_a_version_of_the_last_days_names(tmp_path: Path) -> None:
    made = peers.published(tmp_path)
    engine = peers.publisher(tmp_path, made.store)
    second = publish(engine, PublishTarget(f"{made.folder}/second"), ())
    smaller = publish(engine, PublishTarget(made.place), ())  # int8 is named by the earlier version alone

    def age(days: float) -> None:
        """Of all files, and of the time at which the first version was replaced."""
        for path in made.folder.rglob("*"):
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - days * DAY_S))
        past = {hash: replaced - round(days * DAY_S) for hash, replaced in smaller.earlier.items()}
        PublishTarget(made.place).publish(replace(smaller, earlier=past).to_json())

    before, unnamed = files(made.folder), made.chunk(1)
    assert prune(PublishTarget(made.place), 7) == 0
    age(6)
    (made.folder / "chunks" / "young").touch()  # of another publisher
    assert prune(PublishTarget(made.place), 7) == 0
    age(8)
    (made.folder / "chunks" / "young").touch()
    n_deleted = prune(PublishTarget(made.place), 7)
    gone = before.keys() - files(made.folder).keys()
    assert len(gone) == n_deleted > made.collection.chunks
    assert unnamed in gone
    assert verify(settings(str(made.folder)))[1] == []
    assert verify(settings(str(made.folder), collection="second")) == (second, [])
    (made.folder / "third.json").write_text("{}")
    with pytest.raises(StoreUnavailable):
        prune(PublishTarget(made.place), 7)


def killed_everywhere(connection: Connection, folder: Path) -> None:
    """Publish a first and a second version, in processes that are killed at each moment of writing -> how many were."""
    kills = 0
    with LMDBStore(folder / "kv", 2**30) as store:
        engine = peers.publisher(folder, store)
        new = publish(engine, PublishTarget(f"{folder}/new/{NAME}"), LEVELS[1:])
        assert engine.index is not None
        stored = {
            engine.blender.key(ids): len(ids) for ids in engine.prompts.chunk_ids(engine.index.passages)
        }
        files = to_files(engine.index)

    def write(place: str, levels: Sequence[str]) -> Collection:
        with LMDBStore(folder / "kv", 2**30, read_only=True) as store:
            target = PublishTarget(f"{folder}/{place}/{NAME}")
            return publish_chunks(store, target, ("", ""), levels, {}, stored, "", files)

    old = write("old", LEVELS[:1])
    for before in ("none", "old"):
        for moment in range(1, 1000):
            shutil.rmtree(folder / "www", ignore_errors=True)
            if before == "old":
                shutil.copytree(folder / "old", folder / "www")
            child = os.fork()
            if not child:
                die_at(moment)
                write("www", LEVELS)
                os._exit(0)  # allow: of Python, not of the package
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if (folder / "www" / f"{NAME}.json").exists():
                found, problems = verify(settings(f"{folder}/www"))
                assert problems == []
                assert found.directory in {old.directory if before == "old" else "", new.directory}
            else:
                assert before == "none"
            assert status in (0, -signal.SIGKILL)
            if not status:
                break
            kills += 1
        assert found.directory == new.directory
    connection.send(kills)


def die_at(moment: int) -> None:
    """From now on this process is killed at the nth step: half of a file is written, or it has its name."""
    pipe_file, rename, steps = LocalFileSystem.pipe_file, os.replace, itertools.count(1)

    def step() -> None:
        if next(steps) == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self: LocalFileSystem, path: str, raw: bytes) -> None:
        pipe_file(self, path, raw[: len(raw) // 2])
        step()
        pipe_file(self, path, raw)

    def replace(*names: str) -> None:
        rename(*names)
        step()

    LocalFileSystem.pipe_file = write
    os.replace = replace  # type: ignore[assignment]


def test_whoever_kills_a_publisher_readers_see_a_whole_version(tmp_path: Path) -> None:
    with process(killed_everywhere, tmp_path) as (_, connection):
        assert connection.recv() >= KILLS


# Signatures


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A private and a public key, by openssl."""
    pytest.importorskip("cryptography", reason="cryptography is not installed: pip install '.[cloud]'")
    folder = tmp_path_factory.mktemp("keys")
    private, public = folder / "private.pem", folder / "public.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
    subprocess.run(["openssl", "pkey", "-in", private, "-pubout", "-out", public], check=True)
    return private, public


def test_with_a_signature_a_mirror_need_not_be_trusted(
    made: Published, tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    private, public = keys
    signed = peers.published(tmp_path, key=private.read_bytes())
    trusting = settings(str(signed.folder), trust=public)
    pull(trusting, tmp_path / "index")
    with kdn_store(trusting) as store:
        assert answered(store).report.chunks_hit == 4
    for other in (settings(str(made.folder), trust=public), settings(str(signed.folder), trust=private)):
        with pytest.raises(StoreUnavailable):
            pull(other, tmp_path / "index")  # not even the one that was fetched before
    # KV of another text, as whole as any: its checksums are right, and its hash is not
    directory, (first, second) = dict(signed.directory), sorted(signed.directory)[:2]
    record = read_record(signed.store, second)
    assert record
    forged = b"".join(
        encode_body(first, ChunkRecord.encode(first, decode(record, signed.store.blobs.get), Raw()))
    )
    for trust, n_hits in ((None, 1), (public, 0)):
        place = tmp_path / f"forged-{n_hits}"
        shutil.copytree(signed.folder, place)
        (place / "chunks" / directory[first][0].hash.hex()).write_bytes(forged)
        with kdn_store(settings(str(place), trust=trust)) as store:
            source = store.source
            assert len(forged) == directory[first][0].n_bytes
            chunk = IncomingChunk(first, source.sizes([ChunkRequest(first, 1)])[first], threading.Condition())
            chunk.start("raw")
            source.transfer([chunk])
            assert chunk.is_whole == (n_hits == 1)
    PublishTarget(signed.place).publish(replace(signed.collection, tokens=7).to_json())
    with pytest.raises(StoreUnavailable):
        verify(trusting)


# Formats


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"format": 1}', None])
def test_other_bytes_and_other_formats_are_refused(made: Published, raw: bytes | None) -> None:
    newer = made.collection.to_json().replace(b'"format": 2', b'"format": 3')
    with pytest.raises(ValueError):  # noqa: PT011
        Collection.from_json(newer if raw is None else raw)
    with pytest.raises(ValueError):  # noqa: PT011
        Directory(bytes(KEY_BYTES), 1)  # half a row


HASHES = st.builds(ChunkFile, st.integers(0, 2**60), st.binary(min_size=16, max_size=16))
KEYS = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)


@given(st.dictionaries(KEYS, st.tuples(HASHES, HASHES)), KEYS)
def test_a_directory_finds_what_was_written(
    chunks: dict[bytes, tuple[ChunkFile, ChunkFile]], other: bytes
) -> None:
    directory = Directory(write_directory(chunks, 2), 2)
    assert dict(directory) == chunks
    assert (other in directory) == (other in chunks)


@pytest.mark.parametrize("name", ["", "..", ".x", "a/b", "a b", "x" * 65, "é", "a\n"])
def test_names_that_could_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(InputError):
        valid_name(name)
