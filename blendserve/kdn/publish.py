"""Publish an index and its KV as a collection; pin, unpin and unpublish collections.

    precompute      all chunks, at the store's codec
    encode          once more at every further level, from the first level's KV
    describe        directory, index, tables -> catalog

Each step skips what is stored: the command resumes where it was stopped, and a second publication writes changes alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone

from blendserve.engine.codec_fit import writing_codec
from blendserve.engine.engine import Engine
from blendserve.errors import InputError, StoreUnavailable
from blendserve.fetch.kdn.manifest import (
    Collection,
    DirectoryEntry,
    TablesInfo,
    encode_body,
    level_key,
    valid_name,
    write_directory,
)
from blendserve.kdn.catalog import CollectionCatalog
from blendserve.registry import codec_word, parse_codec
from blendserve.retrieve.published import to_files
from blendserve.store import ChunkKey, ChunkRecord, KVStore, read_record
from blendserve.store.base import Progress
from blendserve.store.codecs.base import Codec, Undecodable
from blendserve.store.key import namespace_tag
from blendserve.store.view import decode


def publish(
    engine: Engine,
    name: str,
    levels: Sequence[str] = (),
    progress: Progress | None = None,
    done: Progress = lambda n, total: None,
    sampling: Progress = lambda n, total: None,
    fitting: Progress = lambda n, total: None,
) -> Collection:
    """Publish an engine's index and store. levels: codecs beside the one that the store writes.

    progress: of precompute, in tokens. done: of encoding, in chunks. sampling, fitting: of missing tables of the levels
    (codec_fit.py). Raises InputError, ConfigError, StoreError.
    """
    valid_name(name)
    words, index, store = _levels(engine, levels), engine.index, engine.store
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
        name,
        (index.manifest.reader, engine.model.fingerprint),
        words,
        codecs,
        tokens,
        engine.config.store.namespace,
        to_files(index),
        {prior} if prior else set(),
        done,
    )


def publish_chunks(
    store: KVStore,
    name: str,
    model: tuple[str, str],
    levels: Sequence[str],
    codecs: Mapping[str, Codec],
    tokens: Mapping[ChunkKey, int],
    namespace: str = "",
    files: Mapping[str, bytes] | None = None,
    tables: set[bytes] | None = None,
    done: Progress = lambda n, total: None,
) -> Collection:
    """Publish stored chunks, with their numbers of tokens; stores them at missing levels.

    model: name and fingerprint. codecs: of the levels after the first. files: of the index. tables: hashes of blobs
    beside the codecs' tables. Raises StoreError.
    """
    catalog = CollectionCatalog(store)
    used = set(tables or ())
    directory: dict[ChunkKey, DirectoryEntry] = {}
    for n, (key, n_tokens) in enumerate(tokens.items(), start=1):
        records = [_at_level(store, key, level, levels, codecs) for level in levels]
        used |= {record.coding.tables for record in records}
        directory[key] = DirectoryEntry(n_tokens, tuple(sum(map(len, encode_body(key, r))) for r in records))
        done(n, len(tokens))
    infos = [info for info in store.blobs.list() if info.hash in used]
    collection = Collection(
        name=name,
        reader=model[0],
        reader_fingerprint=model[1],
        namespace=namespace_tag(namespace).hex(),
        levels=tuple(levels),
        chunks=len(directory),
        tokens=sum(tokens.values()),
        n_bytes=sum(sum(entry.bodies) for entry in directory.values()),
        published=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        pinned=True,
        files={name: catalog.write_blob(raw) for name, raw in (files or {}).items()},
        directory=catalog.write_blob(write_directory(directory)),
        tables=tuple(TablesInfo(i.hash.hex(), i.kind, i.owner, i.n_bytes) for i in infos),
    )
    catalog.write(collection)
    return collection


def set_pins(catalog: CollectionCatalog, name: str, pinned: bool) -> int:
    """Pin a collection's chunks, or unpin the ones that no other pinned collection has -> number of stored ones."""
    collection = catalog.collection(name)
    keys = set(_stored_keys(catalog, collection))
    n = catalog.store.pin(keys if pinned else keys - _keys_of_others(catalog, name, pinned_only=True), pinned)
    if collection.pinned != pinned:
        catalog.write(replace(collection, pinned=pinned))
    return n


def unpublish(catalog: CollectionCatalog, name: str, delete: bool = False) -> int:
    """Delete a collection, and unpin or delete the chunks that no other collection has -> their number.

    Services stop delivering it within seconds. Raises NotFound, StoreError.
    """
    keys = set(_stored_keys(catalog, catalog.collection(name))) - _keys_of_others(catalog, name)
    catalog.delete(name)
    return catalog.store.delete(keys) if delete else catalog.store.pin(keys, pinned=False)


def _stored_keys(catalog: CollectionCatalog, collection: Collection) -> Iterator[ChunkKey]:
    """The keys of its chunks at every level."""
    levels = collection.levels
    return (level_key(key, level, levels) for key in catalog.directory(collection) for level in levels)


def _keys_of_others(catalog: CollectionCatalog, name: str, pinned_only: bool = False) -> set[ChunkKey]:
    """The stored keys of all other collections."""
    found = catalog.collections(anew=True).items()
    others = [c for other, c in found if other != name and (c.pinned or not pinned_only)]
    return {key for collection in others for key in _stored_keys(catalog, collection)}


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
    """A chunk at a level; a missing one is encoded from the first level and stored. Raises StoreError."""
    own = level_key(key, level, levels)
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
    store.put(own, record, pin=True)
    return record
