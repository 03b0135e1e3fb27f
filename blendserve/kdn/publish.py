"""Publish an index and its KV as a collection; pin, unpin and retire collections.

    precompute      all chunks, at the store's codec
    encode          once more at every further level, from the first level's KV
    describe        directory, index, tables -> catalogue

Each step skips what is stored: the command resumes where it was stopped, and a second publication writes changes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone

from blendserve.engine.codec_fit import writing_codec
from blendserve.engine.engine import Engine
from blendserve.errors import InputError, StoreUnavailable
from blendserve.fetch.kdn.manifest import (
    Blob,
    Collection,
    Entry,
    TablesInfo,
    encode_body,
    level_key,
    valid_name,
    write_directory,
)
from blendserve.kdn.catalogue import Catalogue
from blendserve.registry import codec_word, parse_codec
from blendserve.retrieve.manifest import MANIFEST, read
from blendserve.store import ChunkKey, ChunkRecord, KVStore, read_record
from blendserve.store.codecs.base import NO_TABLES, Codec, Undecodable
from blendserve.store.key import namespace_tag
from blendserve.store.view import decode

Progress = Callable[[int, int], None]


def publish(
    engine: Engine,
    name: str,
    levels: Sequence[str] = (),
    progress: Progress | None = None,
    done: Progress = lambda n, total: None,
) -> Collection:
    """Publish an engine's index and store. levels: codecs beside the one that the store writes.

    progress: of precompute, in tokens. done: of encoding, in chunks. Raises InputError, ConfigError, StoreError.
    """
    valid_name(name)
    words = _levels(engine, levels)
    index = engine.index
    if index is None:
        raise InputError("there is no index to publish: open the engine with one")
    engine.precompute(progress=progress)
    tokens = _tokens(engine)
    lacking = tokens.keys() - engine.store.contains(tokens)
    if lacking:
        raise StoreUnavailable(
            f"{len(lacking)} of {len(tokens)} chunks are not in the store: is its cap too small? Publish again when "
            "there is room"
        )
    codecs = _codecs(engine, words[1:])
    coding = LevelCoder(engine.store, words, codecs)
    directory: dict[ChunkKey, Entry] = {}
    for n, (key, n_tokens) in enumerate(tokens.items(), start=1):
        directory[key] = Entry(n_tokens, tuple(coding.sizes(key)))
        done(n, len(tokens))
    catalogue, prior = Catalogue(engine.store), engine.blender.priors.hash()
    tables = coding.tables | ({prior} if prior else set())
    collection = describe(
        engine.store,
        name,
        (index.manifest.reader, engine.reader.fingerprint),
        namespace_tag(engine.config.store.namespace),
        words,
        directory,
        tables,
        _files(engine, catalogue),
    )
    catalogue.write(collection)
    return collection


def describe(
    store: KVStore,
    name: str,
    reader: tuple[str, str],
    namespace: bytes,
    levels: tuple[str, ...],
    directory: Mapping[ChunkKey, Entry],
    tables: set[bytes],
    files: Mapping[str, Blob],
) -> Collection:
    """The description of these chunks; writes their directory. reader: its name and fingerprint. tables: hashes."""
    return Collection(
        name=name,
        reader=reader[0],
        reader_fingerprint=reader[1],
        namespace=namespace.hex(),
        levels=levels,
        chunks=len(directory),
        tokens=sum(entry.n_tokens for entry in directory.values()),
        n_bytes=sum(sum(entry.bodies) for entry in directory.values()),
        published=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        pinned=True,
        files=files,
        directory=Catalogue(store).write_blob(write_directory(directory)),
        tables=tables_of(store, tables),
    )


def set_pins(store: KVStore, catalogue: Catalogue, name: str, pinned: bool) -> int:
    """Pin a collection's chunks, or unpin the ones that no other pinned collection has -> number of stored ones."""
    collection = catalogue.collection(name)
    keys = set(stored_keys(collection, catalogue.directory(collection)))
    n = store.pin(keys if pinned else keys - _keys_of_others(catalogue, name, pinned_only=True), pinned)
    if collection.pinned != pinned:
        catalogue.write(replace(collection, pinned=pinned))
    return n


def retire(store: KVStore, catalogue: Catalogue, name: str, delete: bool = False) -> int:
    """Withdraw a collection, and unpin or delete the chunks that no other collection has -> their number.

    Services stop delivering it within seconds. Raises NotFound, StoreError.
    """
    collection = catalogue.collection(name)
    keys = set(stored_keys(collection, catalogue.directory(collection))) - _keys_of_others(catalogue, name)
    catalogue.retire(name)
    return store.delete(keys) if delete else store.pin(keys, pinned=False)


def stored_keys(collection: Collection, directory: Iterable[ChunkKey]) -> Iterator[ChunkKey]:
    """The keys of its chunks at every level."""
    for key in directory:
        yield from (level_key(key, word, collection.levels) for word in collection.levels)


def _keys_of_others(catalogue: Catalogue, name: str, pinned_only: bool = False) -> set[ChunkKey]:
    """The stored keys of all other collections."""
    others = (c for other, c in catalogue.collections(anew=True).items() if other != name)
    wanted = [c for c in others if c.pinned or not pinned_only]
    return {key for c in wanted for key in stored_keys(c, catalogue.directory(c))}


def _levels(engine: Engine, more: Sequence[str]) -> tuple[str, ...]:
    """The codec that the store writes, and further ones. Raises InputError."""
    try:
        return tuple(
            dict.fromkeys(codec_word(*parse_codec(word)) for word in (engine.config.store.codec, *more))
        )
    except ValueError as error:
        raise InputError(f"this level cannot be published: {error}") from None


def _tokens(engine: Engine) -> dict[ChunkKey, int]:
    """Every chunk of the index -> its number of tokens."""
    assert engine.index is not None
    chunks = engine.prompts.chunk_ids(engine.index.passages)
    return {engine.blender.key(ids): len(ids) for ids in chunks if ids}


class LevelCoder:
    """Encodes chunks at levels after the first."""

    def __init__(self, store: KVStore, words: Sequence[str], codecs: Mapping[str, Codec]) -> None:
        """words: the levels. codecs: of the levels after the first."""
        self._store, self._words, self._codecs = store, words, codecs
        self.tables: set[bytes] = set()  # that the chunks need

    def sizes(self, key: ChunkKey) -> Iterator[int]:
        """Bytes of the chunk's body at each level; stores the chunk at missing levels."""
        for word in self._words:
            record = self._record(key, word)
            self.tables |= {record.coding.tables} - {NO_TABLES}
            yield sum(map(len, encode_body(key, record)))

    def _record(self, key: ChunkKey, word: str) -> ChunkRecord:
        own = level_key(key, word, self._words)
        found = read_record(self._store, own)
        if found is None and own != key:
            found = self._code(key, word)
            self._store.put(own, found, pin=True)
        if found is None:
            raise StoreUnavailable("a chunk was evicted meanwhile: publish again when there is room")
        return found

    def _code(self, key: ChunkKey, word: str) -> ChunkRecord:
        found = read_record(self._store, key)
        if found is None:
            raise StoreUnavailable("a chunk was evicted meanwhile: publish again when there is room")
        try:
            kv = replace(decode(found, self._store.blobs.get), ids=())
        except Undecodable as error:
            raise StoreUnavailable(f"a chunk cannot be coded at another level: {error}") from None
        return ChunkRecord.encode(key, kv, self._codecs[word])


def _codecs(engine: Engine, words: Sequence[str]) -> dict[str, Codec]:
    """Codecs with tables for the model, fitted if the store has none."""
    found = {}
    for word in words:
        config = engine.config.replace("store.codec", word)
        found[word] = writing_codec(config, engine.reader, engine.prompts, engine.store)
    return found


def _files(engine: Engine, catalogue: Catalogue) -> Mapping[str, Blob]:
    assert engine.index is not None
    _, files, _ = read(engine.index.path)
    found = {MANIFEST: (engine.index.path / MANIFEST).read_bytes(), **files}
    return {name: catalogue.write_blob(raw) for name, raw in found.items()}


def tables_of(store: KVStore, hashes: set[bytes]) -> tuple[TablesInfo, ...]:
    """The descriptions of the tables with these hashes."""
    return tuple(
        TablesInfo(info.hash.hex(), info.kind, info.owner, info.n_bytes)
        for info in store.blobs.list()
        if info.hash in hashes
    )
