"""Settings of the KV store, of the copies in front of it, and of the store that machines share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, ByteSize, Field
from pydantic_core import PydanticCustomError

from blendserve.config.base import SECRET, Settings
from blendserve.registry import ADMISSIONS, CODECS, DELIVERED, SHARED_STORE, STORES, parse_codec

DEFAULT_CAP_GB = 32.0
TLS_SCHEMES = ("valkeys", "rediss")
VALKEY_SCHEMES = ("valkey", "redis", "unix", *TLS_SCHEMES)
HTTP_SCHEMES = ("http", "https")
SERVER_URLS = "valkey://HOST:6379, valkeys://HOST:6379 (TLS) or unix:///PATH"
COLLECTION = "kdn:"  # beginning of the location of a published collection
COLLECTIONS = "kdn:https://HOST/NAME, kdn:s3://BUCKET/NAME or kdn:FOLDER/NAME"


def _codec(word: str) -> str:
    """Raises ValueError."""
    parse_codec(word)
    return word


def _parts(url: str) -> SplitResult:
    """Raises ValueError; for a URL with a secret, an error that does not repeat it."""
    scheme, _, rest = url.rpartition("://")
    user, at, _ = rest.rpartition("@")
    if at and (":" in user or scheme not in VALKEY_SCHEMES):
        why = "must not contain a password or key, because logs show it: put the secret into secret_file"
        raise PydanticCustomError(SECRET, why)
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"this is not a URL: {error}") from None
    return parts


def _location(text: str) -> str:
    """Raises ValueError."""
    if text.startswith(COLLECTION):
        return _collection(text)
    scheme, is_url, _ = text.partition("://")
    if not is_url:
        return text
    if scheme in VALKEY_SCHEMES:
        return _server_url(text)
    plug_in, plus, _ = scheme.partition("+")
    if plus:
        STORES.check(plug_in)
        _parts(text)
        return text
    raise ValueError(
        f"a store is a folder, `memory`, a Valkey server at {SERVER_URLS}, or a collection at {COLLECTIONS}, not {text}"
    )


def _collection(text: str) -> str:
    """Raises ValueError."""
    place = text.removeprefix(COLLECTION).rstrip("/")
    folder, _, name = place.rpartition("/")
    if "://" in place:
        parts = _parts(place)
        if parts.query:
            why = "must not contain the query of a signed URL, because logs show it: put it, with its ?, into secret_file"
            raise PydanticCustomError(SECRET, why)
        if not parts.path.strip("/") or not (parts.netloc or parts.scheme == "file"):
            folder = ""
    if not folder or not name:
        raise ValueError(f"a collection is named as {COLLECTIONS}, not {text!r}")
    return COLLECTION + place


def _server_url(url: str) -> str:
    """Raises ValueError."""
    parts = _parts(url)
    where = parts.path if parts.scheme == "unix" else parts.hostname
    if parts.scheme not in VALKEY_SCHEMES or not where or parts.query or parts.fragment:
        raise ValueError(f"the URL of a Valkey server looks like {SERVER_URLS}")
    if parts.scheme != "unix" and not (parts.path.strip("/") or "0").isdigit():
        raise ValueError(f"the path of a URL is a database's number, not {parts.path.strip('/')!r}")
    return url


Location = Annotated[str, AfterValidator(_location)]
CodecWord = Annotated[str, AfterValidator(_codec)]
AdmissionName = Annotated[str, AfterValidator(ADMISSIONS.check)]


class ValkeyConfig(Settings):
    """How a client reaches a Valkey server: what `store.location` and the settings beside it say."""

    url: Annotated[str, AfterValidator(_server_url)]
    secret_file: Path | None = None
    deadline_s: float = 1.0
    in_flight_mb: ClassVar[int] = 256  # of chunks in transfer at a time, about

    @property
    def where(self) -> str:
        """The address without its scheme: host and port, or the path of a Unix socket."""
        parts = urlsplit(self.url)
        return parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"

    @property
    def server(self) -> str:
        """The server's name in messages."""
        return f"the Valkey server at {self.where}"

    @property
    def tls(self) -> bool:
        return self.url.startswith(TLS_SCHEMES)


class KdnConfig(Settings):
    """How a published collection is reached: what `store.location` and the settings beside it say."""

    url: str  # of the folder that has it
    collection: str
    level: str = "auto"
    ttft_ms: float = 0.0
    secret_file: Path | None = None
    trust: Path | None = None
    deadline_s: float = 5.0
    in_flight_mb: ClassVar[int] = 256  # of one chunk; larger ones are refused

    @property
    def is_http(self) -> bool:
        return self.url.partition("://")[0] in HTTP_SCHEMES

    @property
    def where(self) -> str:
        """The collection without the scheme of its URL."""
        return f"{self.url.rpartition('://')[2]}/{self.collection}"

    @property
    def server(self) -> str:
        """The server's name in messages."""
        return f"the collection at {self.url}/{self.collection}"


WriteBack = Literal["auto", "learn", "missing", "none"]


class StoreBackendConfig(Settings):
    """Where one store of chunk KV is, how it is reached, and what it may hold."""

    location: Location = ""
    """Place of the KV store: a folder, `memory`, valkey://HOST:PORT/DATABASE (valkeys:// for TLS, unix:///PATH for a
    socket, USER@HOST for a user), a published collection as kdn:https://HOST/NAME, kdn:s3://BUCKET/NAME or
    kdn:FOLDER/NAME, or KIND+URL of a plug-in; kv/ in the folder of the index if empty."""
    cap_gb: float | None = Field(None, gt=0)
    """Maximum size of the KV store, in GB (10^9 bytes). The files are slightly larger. By default 32, but no more than
    the disk has room for; in memory a quarter of what is available. A Valkey server has its own limit, maxmemory; there
    quotas of pins are shares of this size."""
    admission: ClassVar[str] = ADMISSIONS.default  # at the cap
    secret_file: Path | None = None
    """File with the password of a Valkey server, or with the API key of a collection's server or the query of its
    signed URLs (with the ?). If not set, the environment variable BLENDSERVE_VALKEY_PASSWORD or
    BLENDSERVE_COLLECTION_KEY is used."""
    trust: Path | None = None
    """File with the publisher's public key (Ed25519, PEM): collections without its signature are refused, and then the
    server need not be trusted. By default collections need no signature."""
    deadline_s: float | None = Field(None, gt=0, le=60)
    """Longest total wait of a request for a server, in seconds; by default 1 for Valkey, 5 for a collection."""
    level: str = "auto"
    """Codec and level of fetched chunks, such as raw or predict@2; auto chooses per chunk from the speed of the link,
    of decoding and of prefill."""
    ttft_ms: float = Field(0.0, ge=0)
    """Time limit for fetching and decoding the chunks of a request, in milliseconds. Level auto then chooses the finest
    level that meets it; 0 chooses the fastest level."""

    @property
    def kind(self) -> str:
        """The kind of store at `location`, a name of registry.STORES."""
        if self.location.startswith(COLLECTION):
            return DELIVERED
        scheme, url, _ = self.location.partition("://")
        if "+" in scheme:
            return scheme.partition("+")[0]
        if url:
            return SHARED_STORE
        return self.location if self.location in STORES.names else STORES.default

    @property
    def path(self) -> Path | None:
        """The folder at `location`, None if it names none."""
        is_named = (
            self.location.startswith(COLLECTION) or "://" in self.location or self.location in STORES.names
        )
        return Path(self.location) if self.location and not is_named else None

    @property
    def valkey(self) -> ValkeyConfig:
        """The settings of the Valkey server at `location`."""
        return ValkeyConfig(url=self.location, **self._of_server())

    @property
    def kdn(self) -> KdnConfig:
        """The settings of the collection at `location`."""
        url, _, collection = self.location.removeprefix(COLLECTION).rpartition("/")
        own = {"level": self.level, "ttft_ms": self.ttft_ms, "trust": self.trust}
        return KdnConfig(url=url, collection=collection, **own, **self._of_server())

    def _of_server(self) -> dict[str, Any]:
        """The settings of every kind of server, without unset ones."""
        return self.model_dump(include={"secret_file", "deadline_s"}, exclude_none=True)

    @property
    def cap_bytes(self) -> int:
        return round((DEFAULT_CAP_GB if self.cap_gb is None else self.cap_gb) * 1e9)


class RemoteConfig(StoreBackendConfig):
    """A store that other machines use, too."""

    prefix = "store."


class StoreConfig(StoreBackendConfig):
    """Where chunk KV is stored, how it is coded, and where copies of hot chunks are kept."""

    codec: CodecWord = Field(
        CODECS.default,
        description="Codec of newly stored KV, as name or name@level; stored chunks keep their codec. "
        f"One of {', '.join(CODECS.names)}.",
    )
    write_back: WriteBack = "auto"
    """What to store after an answer: missing stores the chunks that the request had to compute. learn also stores text
    that plain prompts repeat, in at most an eighth of cap_gb. auto is learn on a server without API keys, and missing on
    others. none stores nothing."""
    namespace: str = ""
    """Namespace of the KV. It is part of every chunk's key, so tenants cannot read each other's KV."""
    device_bytes: ByteSize = Field(ByteSize(0), ge=0)
    """Size of the cache of hot chunks in GPU memory, in bytes or as 4GB; 0 turns it off."""
    memory_bytes: ByteSize = Field(ByteSize(0), ge=0)
    """Size of the cache of decoded hot chunks in memory, pinned if the model runs on a GPU, in bytes or as 4GB; 0 turns
    it off."""
    remote: RemoteConfig | None = None
    """Store shared with other machines. The engine reads chunks from it that its own store lacks, and writes the chunks
    that it computes. It has the settings of `store` from location to ttft_ms."""
    pinned_share: ClassVar[float] = 1 / 2  # of the cap without others' pins, for a key that is not an admin's
    learnt_share: ClassVar[float] = 1 / 8  # of the cap, for what was learnt in a namespace
    prefetch_bytes: ClassVar[int] = 500_000_000  # of chunks prefetched for queued requests
