"""Check the files of a published collection, and delete those that no version names."""

from __future__ import annotations

import time
from contextlib import closing, suppress

from blendserve.config import KdnConfig
from blendserve.errors import StoreUnavailable
from blendserve.fetch.kdn.client import CollectionClient, KdnPeer
from blendserve.fetch.kdn.files import InvalidReply, NoFile
from blendserve.fetch.kdn.manifest import DIRECTORY, PIECES, Collection, Directory
from blendserve.kdn.target import DAY_S, PublishTarget
from blendserve.store.base import Progress
from blendserve.store.bounded import BoundedClient
from blendserve.store.codecs.base import tables_hash

KEEPS = "nothing was deleted, as"


def verify(settings: KdnConfig, done: Progress = lambda n, total: None) -> tuple[Collection, list[str]]:
    """Read every file of a collection -> its description, and what is wrong. Raises StoreUnavailable."""
    problems = list[str]()

    def read(client: CollectionClient) -> Collection:
        collection = client.description()
        named = dict.fromkeys(collection.files_with(client.directory(collection)))
        for n, (kind, hash, n_bytes) in enumerate(named, start=1):
            try:
                if len(client.get(kind, hash, n_bytes)) != n_bytes:
                    raise InvalidReply("another size")
            except (NoFile, InvalidReply) as error:
                problems.append(f"{kind}/{hash}: {error}")
            done(n, len(named))
        return collection

    with closing(BoundedClient(KdnPeer(settings))) as client:
        return client.run(read), problems


def prune(target: PublishTarget, days: float) -> int:
    """Delete the files that no version of the last days names, and that are older -> their number.

    Raises StoreUnavailable if a description cannot be read: what it names would be deleted.
    """
    now = time.time()
    kept = set[str]()
    for name in target.names():
        collection = _parsed(target, f"{name}.json")
        kept |= _names(target, collection)
        for hash, replaced in collection.earlier.items():
            if now - replaced < days * DAY_S:
                kept.add(f"{PIECES}/{hash}")
                with suppress(StoreUnavailable):  # it is gone already
                    kept |= _names(target, _parsed(target, f"{PIECES}/{hash}"))
    gone = [
        name
        for name, (_, age_s) in target.stored.items()
        if name not in kept and days * DAY_S < age_s < float("inf")
    ]
    target.delete(gone)
    return len(gone)


def _names(target: PublishTarget, collection: Collection) -> set[str]:
    """The names of a version's files. Raises StoreUnavailable without its directory."""
    raw = target.read(f"{DIRECTORY}/{collection.directory}") or b""
    if tables_hash(raw).hex() != collection.directory:
        raise StoreUnavailable(f"{KEEPS} the directory of {collection.name!r} is damaged: publish it again")
    directory = Directory(raw, len(collection.levels))
    return {f"{kind}/{hash}" for kind, hash, _ in collection.files_with(directory)}


def _parsed(target: PublishTarget, name: str) -> Collection:
    """Raises StoreUnavailable."""
    try:
        return Collection.from_json(target.read(name) or b"")
    except ValueError as error:
        raise StoreUnavailable(
            f"{KEEPS} {name} cannot be read ({error}): publish it again, or delete it"
        ) from None
