"""Settings of the KV store and of what stands around it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, ByteSize, Field
from pydantic_core import PydanticCustomError

from blendserve.config.errors import SECRET
from blendserve.config.section import Section
from blendserve.registry import ADMISSIONS, CODECS, EVICTIONS, STORES, parse_codec

TLS = {"valkeys", "rediss"}  # schemes with TLS


def _codec(word: str) -> str:
    parse_codec(word)
    return word


def _parts(url: str, secrets: str) -> SplitResult:
    """Raises ValueError; for a URL with a user name or a password, an error that does not repeat it."""
    if "@" in url:
        raise PydanticCustomError(
            SECRET, f"must hold no user name and no password, as it is shown in logs: put {secrets}"
        )
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"this is no URL: {error}") from None
    return parts


def _server_url(url: str) -> str:
    parts = _parts(
        url,
        "the password into BLENDSERVE_VALKEY_PASSWORD or the setting password_file beside it, the name into username",
    )
    where, known = parts.path if parts.scheme == "unix" else parts.hostname, {"valkey", "redis", "unix", *TLS}
    if parts.scheme not in known or not where or parts.query or parts.fragment:
        raise ValueError("a URL looks like valkey://HOST:6379, valkeys://HOST:6379 (TLS) or unix:///PATH")
    if parts.scheme != "unix" and not (parts.path.strip("/") or "0").isdigit():
        raise ValueError(f"the path of a URL is a database's number, not {parts.path.strip('/')!r}")
    return url


def _http_url(url: str) -> str:
    parts = _parts(url, "the API key into BLENDSERVE_KDN_KEY or the file that key_file beside it names")
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError("a URL looks like http://HOST:8010, or https://HOST (TLS)")
    return url.rstrip("/")


ServerUrl = Annotated[str, AfterValidator(_server_url)]
HttpUrl = Annotated[str, AfterValidator(_http_url)]
CodecWord = Annotated[str, AfterValidator(_codec)]
StoreKindName = Annotated[
    str, AfterValidator(STORES.check), Field(json_schema_extra={"enum": list(STORES.names)})
]
EvictionName = Annotated[
    str, AfterValidator(EVICTIONS.check), Field(json_schema_extra={"enum": list(EVICTIONS.names)})
]
AdmissionName = Annotated[
    str, AfterValidator(ADMISSIONS.check), Field(json_schema_extra={"enum": list(ADMISSIONS.names)})
]


class ValkeyConfig(Section):
    """The server that engines share chunk KV on."""

    prefix = "store."
    url: ServerUrl = Field(
        "valkey://127.0.0.1:6379",
        description="Address of the Valkey or Redis server, or of any node of a cluster: "
        "valkey://HOST:PORT/DATABASE, valkeys:// for TLS, or unix:///PATH.",
    )
    username: str = Field("", description="User name for the server; the server's default user if empty.")
    password_file: Path | None = Field(
        None,
        description="File with the password for the server; the environment variable "
        "BLENDSERVE_VALKEY_PASSWORD if not set.",
    )
    ca_file: Path | None = Field(
        None,
        description="File with the certificate authorities trusted for TLS; the system's if not set.",
    )
    deadline_s: float = Field(
        1.0,
        gt=0,
        le=60,
        description="Maximum time that a request waits for the server in total, in seconds.",
    )
    in_flight_mb: ClassVar[int] = 256  # of chunks in transfer at a time, about

    @property
    def where(self) -> str:
        """The address without its scheme."""
        return self.socket or f"{self.host}:{self.port}"

    @property
    def server(self) -> str:
        """How messages call it."""
        return f"the Valkey server at {self.where}"

    @property
    def tls(self) -> bool:
        return urlsplit(self.url).scheme in TLS

    @property
    def socket(self) -> str:
        """The path of a Unix socket, "" where the server is reached by TCP."""
        parts = urlsplit(self.url)
        return parts.path if parts.scheme == "unix" else ""

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 6379

    @property
    def database(self) -> int:
        return int(urlsplit(self.url).path.strip("/") or 0)


class KdnConfig(Section):
    """The service that delivers the chunk KV of a collection: `blendserve kdn serve`."""

    prefix = "store."
    url: HttpUrl = Field(
        "http://127.0.0.1:8010",
        description="Address of the delivery service, http://HOST:PORT or https:// for TLS.",
    )
    collection: str = Field("", description="Name of the collection to fetch chunks from.")
    level: str = Field(
        "auto",
        description="Codec and level to fetch chunks at, such as raw or predict@2; auto chooses for each "
        "chunk from the speed of the link, decoding and prefill.",
    )
    ttft_ms: float = Field(
        0.0,
        ge=0,
        description="Time limit for fetching and decoding a request's chunks at level auto, in "
        "milliseconds: the finest level that meets it is chosen; 0 chooses the fastest level.",
    )
    relay: str = Field(
        "",
        description="URL of a MoQ relay to fetch chunks from, https://HOST:PORT; chunks that it does not "
        "deliver come from the service.",
    )
    relay_fingerprint: str = Field(
        "",
        description="SHA-256 of the relay's certificate, in hex; without it, the certificate must be "
        "signed by a trusted authority.",
    )
    key_file: Path | None = Field(
        None,
        description="File with the API key for the service; the environment variable BLENDSERVE_KDN_KEY "
        "if not set.",
    )
    ca_file: Path | None = Field(
        None,
        description="File with the certificate authorities trusted for TLS; the system's if not set.",
    )
    deadline_s: float = Field(
        5.0,
        gt=0,
        le=60,
        description="Deadline for the delivery service per request, in seconds.",
    )
    in_flight_mb: ClassVar[int] = 256  # of chunks in one transfer; larger chunks are refused

    @property
    def where(self) -> str:
        """The address without its scheme."""
        return urlsplit(self.url).netloc

    @property
    def server(self) -> str:
        """How messages call it."""
        return f"the delivery service at {self.where}"


class PlaceConfig(Section):
    """Where one store of chunk KV is, and what it may hold."""

    kind: StoreKindName = Field(STORES.default, description="Kind of KV store.")
    path: Path | None = Field(
        None, description="Folder of the KV store; kv/ in the folder of the index if not set."
    )
    cap_gb: float = Field(
        32.0,
        gt=0,
        description="Maximum size of the KV store, in GB (10^9 bytes); of each namespace on a shared "
        "server. The files are slightly larger.",
    )
    eviction: EvictionName = Field(
        EVICTIONS.default,
        description="What happens when the store is full: lru evicts the least recently used unpinned "
        "chunks, refuse stores nothing more.",
    )
    admission: AdmissionName = Field(
        ADMISSIONS.default,
        description="Which new chunks a full store admits: tinylfu those used more often than the chunks "
        "they would replace, always all.",
    )

    valkey: ValkeyConfig = ValkeyConfig()
    kdn: KdnConfig = KdnConfig()

    @property
    def cap_bytes(self) -> int:
        return round(self.cap_gb * 1e9)


class RemoteConfig(PlaceConfig):
    """A store that other machines use, too."""

    prefix = "store.tiers."


class TiersConfig(Section):
    """What stands around the store: copies of hot chunks nearer to who computes, and a store shared with others."""

    prefix = "store."
    device_bytes: ByteSize = Field(
        ByteSize(0),
        ge=0,
        description="Size of the cache of hot chunks in GPU memory, in bytes or as 4GB; 0 turns it off.",
    )
    host_bytes: ByteSize = Field(
        ByteSize(0),
        ge=0,
        description="Size of the cache of hot chunks in pinned host memory, in bytes or as 4GB; 0 turns it off.",
    )
    memory_bytes: ByteSize = Field(
        ByteSize(0),
        ge=0,
        description="Size of the cache of decoded hot chunks in process memory, in bytes or as 4GB; 0 turns it off.",
    )
    remote: RemoteConfig | None = Field(
        None,
        description="Store shared with other machines: read for chunks that the own store lacks, written "
        "with the chunks computed here. It has the settings kind, path, cap_gb, eviction, admission, "
        "valkey and kdn of `store`.",
    )
    write: Literal["back", "through"] = Field(
        "back",
        description="When to write to the remote store: back writes in the background, through before a "
        "chunk counts as stored.",
    )
    prefetch_bytes: ClassVar[int] = 500_000_000  # of chunks prefetched for queued requests


class StoreConfig(PlaceConfig):
    """Where chunk KV lives."""

    codec: CodecWord = Field(
        CODECS.default,
        description="Codec of newly stored KV, written name or name@level; stored chunks keep theirs. "
        f"One of {', '.join(CODECS.names)}.",
    )
    write_back: bool = Field(
        True, description="Store the chunks that a request had to compute, after its answer."
    )
    namespace: str = Field(
        "",
        description="Namespace of the KV: part of every chunk's key, so tenants cannot read each other's KV.",
    )
    tiers: TiersConfig = TiersConfig()
