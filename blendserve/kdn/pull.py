"""Download the index of a published collection.

    kdn:https://HOST/NAME   in place of an index folder, in commands and `Engine.open`

Only texts and vectors are downloaded. KV is fetched chunk by chunk, when a prompt needs it (fetch/kdn/).
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from functools import partial
from pathlib import Path

from blendserve.config import COLLECTION, Config, KdnConfig, RemoteConfig
from blendserve.errors import InputError, StoreCircuitOpen, StoreUnavailable, VectorIndexError
from blendserve.fetch.kdn.client import CollectionClient, KdnPeer
from blendserve.fetch.kdn.files import InvalidReply
from blendserve.fetch.kdn.manifest import PIECE_BYTES, PIECES, Collection, valid_name
from blendserve.paths import cache_folder
from blendserve.registry import DELIVERED
from blendserve.retrieve import read_manifest
from blendserve.retrieve.published import FILES, MANIFEST, Contents, manifest_file, parse_files, write_index
from blendserve.store.bounded import BoundedClient
from blendserve.store.codecs.base import tables_hash
from blendserve.store.key import namespace_tag

log = logging.getLogger(__name__)

FASTEST_LIMIT_S = 30.0  # for a description, and for an index of any size
MIN_BYTES_S = 64 << 10  # a server that is slower counts as dead


def resolve(index: str, config: Config) -> tuple[str, Config]:
    """The folder of an index, and the settings to open it with; both unchanged unless `index` names a collection.

    A collection's index is downloaded or updated, and the collection becomes the remote store, unless the settings name
    another one. Raises ConfigError, InputError, StoreUnavailable.
    """
    if index.startswith(("http://", "https://")):
        raise InputError(f"{index} is not an index: a published collection is named as {COLLECTION}{index}")
    if not index.startswith(COLLECTION):
        return index, config
    given = config.store.remote or RemoteConfig()
    remote = given.replace("location", index)
    folder = pull(remote.kdn, namespace=config.store.namespace)
    if given.location and given.kind != DELIVERED:
        return str(folder), config
    return str(folder), config.replace("store.remote", remote)


def pull(settings: KdnConfig, folder: Path | None = None, namespace: str | None = None) -> Path:
    """Download a collection's index into a folder, by default in the user's cache -> that folder.

    A current index is not downloaded again; without the server, the last downloaded one is used. namespace: of the
    engine; another one than the collection's is an InputError. Raises InputError, StoreUnavailable.
    """
    place = re.sub(r"[^\w.-]+", "_", settings.where) + ("_signed" if settings.trust else "")
    valid_name(settings.collection)
    folder = folder or cache_folder() / DELIVERED / place
    client = BoundedClient(KdnPeer(settings), workers=1)
    try:
        collection = client.ask(CollectionClient.description, FASTEST_LIMIT_S)
        if not _is_current(collection, folder, namespace):
            n_bytes = sum(blob.n_bytes for blob in collection.files.values())
            limit_s = FASTEST_LIMIT_S + n_bytes / MIN_BYTES_S
            write_index(folder, client.ask(partial(_download, collection=collection), limit_s))
    except StoreUnavailable as error:
        if _fetched(folder) is None or not isinstance(error, StoreCircuitOpen):
            raise
        log.warning("%s; using the index of %r that was fetched before", error, settings.collection)
    finally:
        client.close()
    return folder


def _is_current(collection: Collection, folder: Path, namespace: str | None) -> bool:
    """Whether a folder has the published index. Raises InputError for an engine of another namespace."""
    if namespace is not None and namespace_tag(namespace).hex() != collection.namespace:
        raise InputError(
            f"collection {collection.name!r} was published under another namespace than {namespace!r}, so none of its "
            "chunks would be found: set store.namespace as its publisher did",
            setting="store.namespace",
        )
    described = collection.files.get(MANIFEST)
    return described is not None and described.pieces == (_fetched(folder),)


def _download(client: CollectionClient, collection: Collection) -> Contents:
    """The published index. Raises InvalidReply, and what the client does."""
    if collection.files.keys() != FILES:
        raise InvalidReply("an index of other files than this blendserve's: publish it again")
    log.info("Fetching the index of %r", collection.name)
    files = dict[str, bytes]()
    for name, blob in collection.files.items():
        sizes = range(blob.n_bytes, 0, -PIECE_BYTES)  # that are left
        pieces = [client.get(PIECES, hash, n) for hash, n in zip(blob.pieces, sizes, strict=False)]
        files[name] = b"".join(pieces)
    try:
        return parse_files(files)
    except (ValueError, MemoryError) as error:
        raise InvalidReply(f"an index that cannot be read ({type(error).__name__})") from None


def _fetched(folder: Path) -> str | None:
    """The hash of the published manifest of the index in a folder; None if there is none that can be used."""
    with suppress(VectorIndexError):
        return tables_hash(manifest_file(read_manifest(folder))).hex()
    return None
