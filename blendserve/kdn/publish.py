"""Publish an index and its KV as files (fetch/kdn/manifest.py has their formats).

    precompute      all chunks, at the store's codec
    encode          once more at every further level, from the first level's KV; the store keeps what it has room for
    describe        chunks, tables, index, directory -> target; then NAME.json

Each step skips what there is: the command resumes where it was stopped, and a second publication writes changes alone.
Readers see the old version or the new one, as no other file ever changes.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from blendserve.engine.codec_fit import writing_codec
from blendserve.engine.engine import Engine
from blendserve.errors import InputError, StoreUnavailable
from blendserve.fetch.kdn.manifest import (
    CHUNKS,
    DIRECTORY,
    PIECE_BYTES,
    PIECES,
    TABLES,
    Blob,
    ChunkFile,
    Collection,
    Directory,
    TablesInfo,
    encode_body,
    write_directory,
)
from blendserve.fetch.kdn.signature import sign
from blendserve.kdn.target import DAY_S, PublishTarget
from blendserve.registry import codec_word, parse_codec
from blendserve.retrieve.published import to_files
from blendserve.store import ChunkKey, ChunkRecord, KVStore, read_record
from blendserve.store.base import Progress
from blendserve.store.codecs.base import Codec, Undecodable, tables_hash
from blendserve.store.key import DIGEST_BYTES, TAG_BYTES, namespace_tag
from blendserve.store.view import decode

WRITES = 8  # files that are written at a time
EARLIER_DAYS = 90  # that a description names earlier ones

Write = Callable[[str, bytes], str]  # kind and content of a file -> its hash; it is written in the background


def publish(
    engine: Engine,
    target: PublishTarget,
    levels: Sequence[str] = (),
    key: bytes | None = None,
    progress: Progress | None = None,
    done: Progress = lambda n, total: None,
    sampling: Progress = lambda n, total: None,
    fitting: Progress = lambda n, total: None,
) -> Collection:
    """Publish an engine's index and KV. levels: codecs beside the one that the store writes. key: signs it, in PEM.

    progress: of precompute, in tokens. done: of encoding, in chunks. sampling, fitting: of missing tables of the levels
    (codec_fit.py). Raises InputError, ConfigError, StoreError.
    """
    words = _levels(engine, levels)
    index = engine.index
    store = engine.store
    if index is None:
        raise InputError("there is no index to publish: open the engine with one")
    engine.precompute(progress=progress)
    tokens = {engine.blender.key(ids): len(ids) for ids in engine.prompts.chunk_ids(index.passages) if ids}
    if missing := tokens.keys() - store.contains(tokens):
        raise StoreUnavailable(
            f"{len(missing)} of {len(tokens)} chunks are not in the store: is its cap too small? Publish again when "
            "there is room"
        )
    settings = {word: engine.config.replace("store.codec", word) for word in words[1:]}
    fitted = engine.model, engine.prompts, store, sampling, fitting
    codecs = {word: writing_codec(config, *fitted) for word, config in settings.items()}
    prior = engine.blender.priors.hash()
    return publish_chunks(
        store,
        target,
        (index.manifest.reader, engine.model.fingerprint),
        words,
        codecs,
        tokens,
        engine.config.store.namespace,
        to_files(index),
        {prior} if prior else set(),
        key,
        done,
    )


def publish_chunks(
    store: KVStore,
    target: PublishTarget,
    model: tuple[str, str],
    levels: Sequence[str],
    codecs: Mapping[str, Codec],
    tokens: Mapping[ChunkKey, int],
    namespace: str = "",
    files: Mapping[str, bytes] | None = None,
    tables: set[bytes] | None = None,
    key: bytes | None = None,
    done: Progress = lambda n, total: None,
) -> Collection:
    """Publish stored chunks, with their numbers of tokens, at all levels.

    model: name and fingerprint. codecs: of the levels after the first. files: of the index. tables: hashes of blobs
    beside the codecs' tables. Raises ConfigError, StoreError.
    """
    before = Earlier(target, key)
    used = set(tables or ())
    directory: dict[ChunkKey, list[ChunkFile]] = {}
    with writing(target, before.whole) as write:
        for n, chunk in enumerate(tokens, start=1):
            directory[chunk] = []
            for level in levels:
                body = before.body(chunk, level)
                if body is None:
                    record = _at_level(store, chunk, level, levels, codecs)
                    used.add(record.coding.tables)
                    raw = b"".join(encode_body(chunk, record))
                    body = ChunkFile(len(raw), bytes.fromhex(write(CHUNKS, raw)))
                directory[chunk].append(body)
            done(n, len(tokens))
        infos = [info for info in store.blobs.list() if info.hash in used]
        for info in infos:
            write(TABLES, store.blobs.get(info.hash) or b"")
        made = {
            info.hash.hex(): TablesInfo(info.hash.hex(), info.kind, info.owner, info.n_bytes)
            for info in infos
        }
        collection = Collection(
            name=target.name,
            reader=model[0],
            reader_fingerprint=model[1],
            namespace=namespace_tag(namespace).hex(),
            levels=tuple(levels),
            chunks=len(directory),
            tokens=sum(tokens.values()),
            n_bytes=sum(body.n_bytes for bodies in directory.values() for body in bodies),
            published=int(time.time()),
            files={name: _write_blob(write, raw) for name, raw in (files or {}).items()},
            directory=write(DIRECTORY, write_directory(directory, len(levels))),
            tables=tuple({**before.tables, **made}.values()),
            earlier=before.replaced(write),
        )
    if key:
        collection = replace(collection, signature=sign(collection.signed_bytes, key))
    target.publish(collection.to_json())
    return collection


class Earlier:
    """The version that is published: what it has need not be encoded and written again."""

    def __init__(self, target: PublishTarget, key: bytes | None) -> None:
        """key: if given, only what it has signed is used. Raises StoreUnavailable for a description of another form."""
        self._raw = target.read(f"{target.name}.json")
        self._collection: Collection | None = None
        self._directory = Directory(b"", 1)
        self.whole = set[str]()  # its files that are there
        self.tables: dict[str, TablesInfo] = {}
        if self._raw is None:
            return
        try:
            found = self._collection = Collection.from_json(self._raw)
        except ValueError as error:
            why = f"{target.name}.json is no description that can be replaced ({error})"
            raise StoreUnavailable(f"{why}: delete it, or publish under another name") from None
        raw = target.read(f"{DIRECTORY}/{found.directory}") or b""
        is_trusted = key is None or sign(found.signed_bytes, key) == found.signature
        if is_trusted and tables_hash(raw).hex() == found.directory:
            self._directory = Directory(raw, len(found.levels))
            sizes = {f"{kind}/{hash}": n_bytes for kind, hash, n_bytes in found.files_with(self._directory)}
            self.whole = {name for name, (n_bytes, _) in target.stored.items() if sizes.get(name) == n_bytes}
            self.tables = {tables.hash: tables for tables in found.tables}

    def body(self, chunk: ChunkKey, level: str) -> ChunkFile | None:
        """A chunk at a level, if it is published and its file is there."""
        if not self.whole or not self._collection or chunk not in self._directory:
            return None
        body = dict(zip(self._collection.levels, self._directory[chunk], strict=True)).get(level)
        return body if body and f"{CHUNKS}/{body.hash.hex()}" in self.whole else None

    def replaced(self, write: Write) -> dict[str, int]:
        """Return the hashes of the description and of earlier ones, with the times at which each was replaced."""
        if self._raw is None or self._collection is None:
            return {}
        now = int(time.time())
        known = {**self._collection.earlier, write(PIECES, self._raw): now}
        return {hash: replaced for hash, replaced in known.items() if now - replaced < EARLIER_DAYS * DAY_S}


@contextmanager
def writing(target: PublishTarget, known: set[str]) -> Iterator[Write]:
    """Files that are written by the end of the block, but for known ones. Raises StoreUnavailable."""
    running = deque[Future[None]]()
    with ThreadPoolExecutor(WRITES) as pool:

        def write(kind: str, raw: bytes) -> str:
            if len(running) >= WRITES:
                running.popleft().result()
            hash = tables_hash(raw).hex()
            if f"{kind}/{hash}" not in known:
                running.append(pool.submit(target.put, f"{kind}/{hash}", raw))
            return hash

        yield write
        for each in running:
            each.result()


def _write_blob(write: Write, raw: bytes) -> Blob:
    pieces = [raw[at : at + PIECE_BYTES] for at in range(0, len(raw), PIECE_BYTES)]
    return Blob(len(raw), tuple(write(PIECES, piece) for piece in pieces))


def _levels(engine: Engine, more: Sequence[str]) -> tuple[str, ...]:
    """The codec that the store writes, and further ones. Raises InputError."""
    words = engine.config.store.codec, *more
    try:
        return tuple(dict.fromkeys(codec_word(*parse_codec(word)) for word in words))
    except ValueError as error:
        raise InputError(f"this level cannot be published: {error}") from None


def _at_level(
    store: KVStore, key: ChunkKey, level: str, levels: Sequence[str], codecs: Mapping[str, Codec]
) -> ChunkRecord:
    """A chunk at a level; a missing one is encoded from the first level, and stored if there is room.

    Raises StoreError.
    """
    own = key if level == levels[0] else _level_key(key, level)
    if found := read_record(store, own):
        return found
    first = read_record(store, key) if own != key else None
    if first is None:
        raise StoreUnavailable("a chunk was evicted meanwhile: publish again when there is room")
    try:
        kv = replace(decode(first, store.blobs.get), ids=())
    except Undecodable as error:
        raise StoreUnavailable(f"a chunk cannot be coded at another level: {error}") from None
    record = ChunkRecord.encode(key, kv, codecs[level])
    store.put(own, record)
    return record


def _level_key(key: ChunkKey, word: str) -> ChunkKey:
    """The key of a chunk at a further level, in the same namespace."""
    digest = hashlib.blake2b(key + word.encode(), digest_size=DIGEST_BYTES, person=b"blendserve.lv.1")
    return key[:TAG_BYTES] + digest.digest()
