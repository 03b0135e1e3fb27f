"""Download the index of a collection from a delivery service.

    kdn:http://HOST:8010/NAME   in place of an index folder, in commands and `Engine.open`

Only texts and vectors are downloaded. KV is fetched chunk by chunk, when a prompt needs it (fetch/kdn/).
"""

from __future__ import annotations

import http.client
import json
import logging
from pathlib import Path

from blendserve.config import Config, KdnConfig, RemoteConfig
from blendserve.errors import IndexDamaged, InputError, StoreUnavailable
from blendserve.fetch.kdn.client import Client, InvalidReply, KdnPeer, NotFoundReply
from blendserve.fetch.kdn.manifest import Blob, Collection, valid_name
from blendserve.fetch.kdn.source import MAX_DESCRIPTION
from blendserve.paths import cache_folder
from blendserve.registry import DELIVERED
from blendserve.retrieve.index import PASSAGES, VECTORS
from blendserve.retrieve.manifest import MANIFEST, Manifest, manifest_digest, read, write
from blendserve.store.bounded import PeerUnusable
from blendserve.store.codecs.base import tables_hash
from blendserve.store.key import namespace_tag

log = logging.getLogger(__name__)

SCHEME = f"{DELIVERED}:"
MAX_FILE_BYTES = 4 << 30  # bytes of one of its files


def resolve(index: str, config: Config) -> tuple[str, Config]:
    """The folder of an index, and the settings to open it with; both unchanged unless `index` names a collection.

    A collection's index is downloaded or updated, and its service becomes the remote store, unless the settings name
    another one. Raises InputError, StoreUnavailable.
    """
    if not index.startswith(SCHEME):
        return index, config
    given = config.store.remote or RemoteConfig()
    remote = given.replace("location", location_of(index))
    folder = pull(remote.kdn, namespace=config.store.namespace)
    if given.location and given.kind != DELIVERED:
        return str(folder), config
    return str(folder), config.replace("store.remote", remote)


def location_of(index: str) -> str:
    """The URL in kdn:URL/NAME. Raises InputError."""
    location = index.removeprefix(SCHEME).rstrip("/")
    if not index.startswith(SCHEME) or not location.startswith(("http://", "https://")):
        raise InputError(f"{index!r} is not a collection: give kdn:http://HOST:8010/NAME")
    return location


def pull(
    settings: KdnConfig,
    folder: Path | None = None,
    namespace: str | None = None,
) -> Path:
    """Download a collection's index into a folder, by default in the user's cache -> that folder.

    A current index is not downloaded again; without the service, the last downloaded one is used. namespace: of the
    engine; another one than the collection's is an InputError. Raises InputError, StoreUnavailable.
    """
    default = cache_folder() / DELIVERED / settings.where.replace(":", "_") / valid_name(settings.collection)
    folder, peer = folder or default, KdnPeer(settings)
    client: Client | None = None
    try:
        client = peer.connect()
        collection = Collection.from_json(client.get(client.path(), MAX_DESCRIPTION))
        _check_namespace(collection, namespace)
        if not _is_current(folder, collection.files.get(MANIFEST)):
            log.info("Fetching the index of %r from %s", collection.name, settings.server)
            _write(folder, {name: _file(client, name, blob) for name, blob in collection.files.items()})
    except (
        OSError,
        http.client.HTTPException,
        PeerUnusable,
        NotFoundReply,
        InvalidReply,
        ValueError,
    ) as error:
        why = peer.explain(error)
        trouble = why if isinstance(why, Exception) else StoreUnavailable(f"{settings.server} {why}")
        if manifest_digest(folder) is None or isinstance(error, NotFoundReply):
            raise trouble from None
        log.warning("%s; using the last fetched index of %r", trouble, settings.collection)
    finally:
        if client:
            client.cut()
    return folder


def _file(client: Client, name: str, blob: Blob) -> bytes:
    """Download a file piece by piece, and check each. Raises InvalidReply, and what the client does."""
    if blob.n_bytes > MAX_FILE_BYTES:
        raise InvalidReply(f"{name} has {blob.n_bytes:,} bytes")
    parts, left = [], blob.n_bytes
    for piece in blob.pieces:
        parts.append(client.get(client.path("pieces", piece), left))
        left -= len(parts[-1])
        if tables_hash(parts[-1]).hex() != piece:
            raise InvalidReply(f"{name} is damaged")
    return b"".join(parts)


def _write(folder: Path, files: dict[str, bytes]) -> None:
    """Write the index with one rename. Raises InvalidReply, VectorIndexError."""
    try:
        manifest = Manifest(**json.loads(files.pop(MANIFEST)))
    except (KeyError, TypeError, ValueError):
        raise InvalidReply("an index that cannot be understood") from None
    if files.keys() != manifest.files.keys() or files.keys() != {PASSAGES, VECTORS}:  # names are paths
        raise InvalidReply("an index of other files than it says")
    write(folder, manifest, files, manifest_digest(folder))
    try:
        read(folder)
    except IndexDamaged as error:
        raise InvalidReply(str(error)) from None


def _is_current(folder: Path, manifest: Blob | None) -> bool:
    """Whether the folder has the published index."""
    try:
        raw = (folder / MANIFEST).read_bytes()
    except OSError:
        return False
    return manifest is not None and manifest.pieces == (tables_hash(raw).hex(),)


def _check_namespace(collection: Collection, namespace: str | None) -> None:
    if namespace is not None and namespace_tag(namespace).hex() != collection.namespace:
        raise InputError(
            f"collection {collection.name!r} was published under another namespace than {namespace!r}, so none of its "
            "chunks would be found: set store.namespace as its publisher did",
            setting="store.namespace",
        )
