"""Download the index of a collection from a delivery service.

    http://HOST:8010/NAME   in place of an index folder, in commands and `Engine.open`

Only texts and vectors are downloaded. KV is fetched chunk by chunk, when a prompt needs it (fetch/kdn/).
"""

from __future__ import annotations

import http.client
import logging
from contextlib import closing, suppress
from pathlib import Path

from blendserve.config import Config, KdnConfig, RemoteConfig
from blendserve.errors import InputError, StoreUnavailable, VectorIndexError
from blendserve.fetch.kdn.client import DeliveryClient, InvalidReply, KdnPeer, NotFoundReply
from blendserve.fetch.kdn.manifest import Blob, Collection, valid_name
from blendserve.fetch.kdn.source import MAX_DESCRIPTION
from blendserve.paths import cache_folder
from blendserve.registry import DELIVERED
from blendserve.retrieve import read_manifest
from blendserve.retrieve.published import FILES, MANIFEST, manifest_file, parse_files, write_index
from blendserve.store.bounded import PeerUnusable
from blendserve.store.codecs.base import tables_hash
from blendserve.store.key import namespace_tag

log = logging.getLogger(__name__)

URLS = "http://", "https://"  # beginnings of the name of a collection
MAX_FILE_BYTES = 4 << 30  # bytes of one of its files
FASTEST_LIMIT_S = 30.0  # for a description, and for an index of any size
MIN_BYTES_S = 64 << 10  # a service that is slower counts as dead
# Of a service
ERRORS = (
    OSError,
    ValueError,
    RecursionError,
    http.client.HTTPException,
    PeerUnusable,
    NotFoundReply,
    InvalidReply,
)


def resolve(index: str, config: Config) -> tuple[str, Config]:
    """The folder of an index, and the settings to open it with; both unchanged unless `index` names a collection.

    A collection's index is downloaded or updated, and its service becomes the remote store, unless the settings name
    another one. Raises InputError, StoreUnavailable.
    """
    if not index.startswith(URLS):
        return index, config
    given = config.store.remote or RemoteConfig()
    remote = given.replace("location", location_of(index))
    folder = pull(remote.kdn, namespace=config.store.namespace)
    if given.location and given.kind != DELIVERED:
        return str(folder), config
    return str(folder), config.replace("store.remote", remote)


def location_of(index: str) -> str:
    """The URL of a collection. Raises InputError."""
    if not index.startswith(URLS):
        raise InputError(f"{index!r} is not a collection: give its URL, such as http://HOST:8010/NAME")
    return index.rstrip("/")


def pull(settings: KdnConfig, folder: Path | None = None, namespace: str | None = None) -> Path:
    """Download a collection's index into a folder, by default in the user's cache -> that folder.

    A current index is not downloaded again; without the service, the last downloaded one is used. namespace: of the
    engine; another one than the collection's is an InputError. Raises InputError, StoreUnavailable.
    """
    default = cache_folder() / DELIVERED / settings.where.replace(":", "_") / valid_name(settings.collection)
    folder = folder or default
    peer = KdnPeer(settings)
    try:
        with closing(peer.connect()) as client:
            _update(client, folder, namespace)
    except ERRORS as error:
        why = peer.explain(error)
        trouble = why if isinstance(why, Exception) else StoreUnavailable(f"{settings.server} {why}")
        if _fetched(folder) is None or isinstance(error, NotFoundReply):
            raise trouble from None
        log.warning("%s; using the index of %r that was fetched before", trouble, settings.collection)
    return folder


def _update(client: DeliveryClient, folder: Path, namespace: str | None) -> None:
    """Download the published index unless the folder has it. Raises InputError, and what the client does.

    Names and sizes are checked before the files are downloaded, and the files before the folder is written to.
    """
    with client.within(FASTEST_LIMIT_S):
        collection = Collection.from_json(client.get(client.path(), MAX_DESCRIPTION))
    if namespace is not None and namespace_tag(namespace).hex() != collection.namespace:
        raise InputError(
            f"collection {collection.name!r} was published under another namespace than {namespace!r}, so none of its "
            "chunks would be found: set store.namespace as its publisher did",
            setting="store.namespace",
        )
    described = collection.files.get(MANIFEST)
    if described and described.pieces == (_fetched(folder),):
        return
    if collection.files.keys() != FILES:  # names are paths
        raise InvalidReply("an index of other files than this blendserve's: publish it again")
    for name, blob in collection.files.items():
        if not 0 <= blob.n_bytes <= MAX_FILE_BYTES:
            raise InvalidReply(f"{name} has {blob.n_bytes:,} bytes")
    log.info("Fetching the index of %r", collection.name)
    n_bytes = sum(blob.n_bytes for blob in collection.files.values())
    with client.within(FASTEST_LIMIT_S + n_bytes / MIN_BYTES_S):
        files = {name: _file(client, name, blob) for name, blob in collection.files.items()}
    try:
        contents = parse_files(files)
    except (ValueError, MemoryError) as error:
        raise InvalidReply(f"an index that cannot be read ({type(error).__name__})") from None
    write_index(folder, contents)


def _fetched(folder: Path) -> str | None:
    """The hash of the published manifest of the index in a folder; None if there is none that can be used."""
    with suppress(VectorIndexError):
        return tables_hash(manifest_file(read_manifest(folder))).hex()
    return None


def _file(client: DeliveryClient, name: str, blob: Blob) -> bytes:
    """Download a file piece by piece, and check each. Raises InvalidReply, and what the client does."""
    whole = bytearray()
    for piece in blob.pieces:
        part = client.get(client.path("pieces", piece), blob.n_bytes - len(whole))
        if not part or tables_hash(part).hex() != piece:
            raise InvalidReply(f"{name} is damaged")
        whole += part
    return bytes(whole)
