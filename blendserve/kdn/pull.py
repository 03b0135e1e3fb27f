"""Download the index of a collection from a delivery service.

    kdn:http://HOST:8010/NAME   in place of an index folder, in commands and `Engine.open`

Only texts and vectors are downloaded. KV is fetched chunk by chunk, when a prompt needs it (fetch/kdn/).
"""

from __future__ import annotations

import http.client
import json
import logging
from contextlib import closing, suppress
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
# Of a service
ERRORS = (OSError, ValueError, http.client.HTTPException, PeerUnusable, NotFoundReply, InvalidReply)


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


def pull(settings: KdnConfig, folder: Path | None = None, namespace: str | None = None) -> Path:
    """Download a collection's index into a folder, by default in the user's cache -> that folder.

    A current index is not downloaded again; without the service, the last downloaded one is used. namespace: of the
    engine; another one than the collection's is an InputError. Raises InputError, StoreUnavailable.
    """
    default = cache_folder() / DELIVERED / settings.where.replace(":", "_") / valid_name(settings.collection)
    folder, peer = folder or default, KdnPeer(settings)
    try:
        with closing(peer.connect()) as client:
            _update(client, folder, namespace)
    except ERRORS as error:
        why = peer.explain(error)
        trouble = why if isinstance(why, Exception) else StoreUnavailable(f"{settings.server} {why}")
        if manifest_digest(folder) is None or isinstance(error, NotFoundReply):
            raise trouble from None
        log.warning("%s; using the last fetched index of %r", trouble, settings.collection)
    return folder


def _update(client: Client, folder: Path, namespace: str | None) -> None:
    """Download the published index unless the folder has it. Raises InputError, and what the client does."""
    collection = Collection.from_json(client.get(client.path(), MAX_DESCRIPTION))
    if namespace is not None and namespace_tag(namespace).hex() != collection.namespace:
        raise InputError(
            f"collection {collection.name!r} was published under another namespace than {namespace!r}, so none of its "
            "chunks would be found: set store.namespace as its publisher did",
            setting="store.namespace",
        )
    manifest = collection.files.get(MANIFEST)
    with suppress(OSError):
        if manifest and manifest.pieces == (tables_hash((folder / MANIFEST).read_bytes()).hex(),):
            return
    log.info("Fetching the index of %r", collection.name)
    _write(folder, {name: _file(client, name, blob) for name, blob in collection.files.items()})


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
