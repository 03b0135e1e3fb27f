"""All settings: one frozen section per stage inside one Config. Every default of the project is written here, once.

Commands take defaults, choices and help from these fields (cli/options.py), as does docs/reference/settings.md. A YAML
file names only the settings that it changes. A wrong value is refused here, before anything is loaded.
"""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from blendserve.errors import ConfigError
from blendserve.registry import (
    ADMISSIONS,
    CODECS,
    CORRECTIONS,
    EVICTIONS,
    POLICIES,
    STORES,
    parse_codec,
)
from blendserve.setting_errors import SECRET, config_error

Method = Literal["auto", "blend", "full", "prefix", "reuse"]
PolicyName = Annotated[
    str, AfterValidator(POLICIES.check), Field(json_schema_extra={"enum": list(POLICIES.names)})
]
CorrectionName = Annotated[
    str, AfterValidator(CORRECTIONS.check), Field(json_schema_extra={"enum": list(CORRECTIONS.names)})
]
KVContext = Literal["prefix", "primer", "bos", "none"]
StoreKindName = Annotated[
    str, AfterValidator(STORES.check), Field(json_schema_extra={"enum": list(STORES.names)})
]
EvictionName = Annotated[
    str, AfterValidator(EVICTIONS.check), Field(json_schema_extra={"enum": list(EVICTIONS.names)})
]
AdmissionName = Annotated[
    str, AfterValidator(ADMISSIONS.check), Field(json_schema_extra={"enum": list(ADMISSIONS.names)})
]


def _codec(word: str) -> str:
    parse_codec(word)
    return word


def _separator(text: str) -> str:
    """Raises ValueError for white space alone, which ordinary text is full of."""
    if text and not text.strip():
        raise ValueError("a separator of white space alone would cut ordinary text: add other characters")
    return text


SECURE = {"valkeys", "rediss"}  # schemes with TLS


def _server_url(url: str) -> str:
    """Raises ValueError; of a kind that does not repeat the URL where there may be a password in it."""
    if "@" in url:
        raise PydanticCustomError(
            SECRET,
            "must hold no user name and no password, as it is shown in logs: put the password into "
            "BLENDSERVE_VALKEY_PASSWORD or the setting password_file beside it, the name into username",
        )
    try:
        parts = urlsplit(url)
        whole = parts.path if parts.scheme == "unix" else parts.hostname and (parts.port, True)
    except ValueError as error:
        raise ValueError(f"this is no URL: {error}") from None
    known = {"valkey", "redis", "unix", *SECURE}
    if parts.scheme not in known or not whole or parts.query or parts.fragment:
        raise ValueError("a URL looks like valkey://HOST:6379, valkeys://HOST:6379 (TLS) or unix:///PATH")
    if parts.scheme != "unix" and not (parts.path.strip("/") or "0").isdigit():
        raise ValueError(f"the path of a URL is a database's number, not {parts.path.strip('/')!r}")
    return url


def _http_url(url: str) -> str:
    """Raises ValueError, as `_server_url` does."""
    if "@" in url:
        raise PydanticCustomError(
            SECRET,
            "must hold no user name and no password, as it is shown in logs: put the API key into BLENDSERVE_KDN_KEY or "
            "the file that key_file beside it names",
        )
    try:
        parts = urlsplit(url)
        whole = parts.hostname and (parts.port, True)
    except ValueError as error:
        raise ValueError(f"this is no URL: {error}") from None
    if parts.scheme not in {"http", "https"} or not whole or parts.path.strip("/") or parts.query:
        raise ValueError("a URL looks like http://HOST:8010, or https://HOST (TLS)")
    return url.rstrip("/")


ServerUrl = Annotated[str, AfterValidator(_server_url)]
HttpUrl = Annotated[str, AfterValidator(_http_url)]
CodecWord = Annotated[str, AfterValidator(_codec)]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]

Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(gt=0)]


AnySection = TypeVar("AnySection", bound="Section")

_checking: ContextVar[bool] = ContextVar("checking", default=False)  # whether a section is being made


class Section(BaseModel):
    """A frozen group of settings that refuses names it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    inside: ClassVar[str] = ""  # of which section it is a part

    def __init__(self, **values: Any) -> None:
        outermost = _checking.set(True) if not _checking.get() else None
        try:
            super().__init__(**values)
        except ValidationError as error:
            if outermost is None:
                raise  # the section that this one is a part of knows where it stands
            raise config_error(type(self), self.inside, error) from None
        finally:
            if outermost is not None:
                _checking.reset(outermost)

    @classmethod
    def load(cls: type[AnySection], path: str | Path) -> AnySection:
        """Read a YAML file. Raises ConfigError naming the file and the setting."""
        path = Path(path)
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise ConfigError(f"config file {path} cannot be read: {error.strerror}", path=path) from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"config file {path} is not YAML: {str(error).splitlines()[0]}", path=path
            ) from None
        if not isinstance(values, dict):
            raise ConfigError(
                f"config file {path} must hold sections ({', '.join(cls.model_fields)}), not {values!r}",
                path=path,
            )
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"config file {path}: {error}", setting=error.setting, path=path) from None


class ReaderConfig(Section):
    """The language model that answers."""

    model: str = Field(
        "smollm2-135m",
        description="Model: a bundled name, a folder, a Hugging Face id, or random:SHAPE for random weights.",
    )
    dtype: Dtype = Field(
        "auto",
        description="Number format of weights, computation and KV; auto chooses the fastest one of the "
        "device.",
    )
    device: str = Field(
        "auto", description="Device to run on, such as cpu or cuda:1; auto chooses a GPU if there is one."
    )
    threads: Positive | None = Field(
        None,
        description="Number of CPU threads; all CPUs that the process may use if not set.",
    )


class RetrieveConfig(Section):
    """Documents to passages to nearest passages."""

    embedder: str = Field(
        "minilm-l6", description="Embedding model: a bundled name, a folder or a Hugging Face id."
    )
    chunk_tokens: Positive = Field(
        512,
        description="Maximum length of a passage, in tokens of the model, title line included.",
    )
    top_k: Positive = Field(6, description="Number of passages to retrieve for a question.")
    index: Literal["flat", "hnsw"] = Field(
        "flat",
        description="Vector search: flat is exact, hnsw is approximate and faster on large corpora.",
    )


class PromptConfig(Section):
    """The words around the chunks."""

    system: str = Field(
        "You answer questions from the given passages, briefly and in your own words.",
        description="System message.",
    )
    instruction: str = Field(
        "Read the passages, then answer the question.",
        description="Instruction before the passages.",
    )
    kv_context: KVContext = Field(
        "prefix",
        description="Text that chunk KV is computed after; with prefix, the first chunk of a prompt is "
        "exact.",
    )
    separator: Annotated[str, AfterValidator(_separator)] = Field(
        "",
        description="Text that separates chunks inside a question, such as ' # # ': each part before the last is a "
        "chunk, the last part is the question; empty turns this off.",
    )


class ValkeyConfig(Section):
    """The server that engines share chunk KV on."""

    inside = "store."
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
    in_flight_mb: Positive = Field(
        256,
        description="Approximate size of the chunks in transfer from the server at a time, in MB (10^6 "
        "bytes).",
    )

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
        return urlsplit(self.url).scheme in SECURE

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

    inside = "store."
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
    in_flight_mb: Positive = Field(
        256,
        description="Maximum size of the chunks in one transfer from the service, in MB (10^6 bytes); "
        "larger chunks are refused.",
    )

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

    inside = "store.tiers."


class TiersConfig(Section):
    """What stands around the store: copies of hot chunks nearer to who computes, and a store shared with others."""

    inside = "store."
    device_bytes: int = Field(
        0,
        ge=0,
        description="Size of the cache of hot chunks in GPU memory, in bytes; 0 turns it off.",
    )
    host_bytes: int = Field(
        0,
        ge=0,
        description="Size of the cache of hot chunks in pinned host memory, in bytes; 0 turns it off.",
    )
    memory_bytes: int = Field(
        0,
        ge=0,
        description="Size of the cache of decoded hot chunks in process memory, in bytes; 0 turns it off.",
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
    prefetch_bytes: int = Field(
        500_000_000,
        ge=0,
        description="Maximum size of the chunks prefetched from a store on another machine for queued "
        "requests, in bytes; 0 turns it off.",
    )


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


class BlendConfig(Section):
    """Which tokens are recomputed, and what is done for the others."""

    method: Method = Field(
        "auto",
        description="How cached KV is used; auto chooses the fastest method for the prompt on this machine.",
    )
    policy: PolicyName = Field(POLICIES.default, description="Policy that selects the tokens to recompute.")
    ratio: Ratio | Literal["auto"] = Field(
        0.05,
        description="Fraction of the context tokens to recompute; auto recomputes as many as fit into "
        "the loading time.",
    )
    floor: Ratio = Field(0.05, description="Minimum fraction of tokens to recompute when the ratio is auto.")
    correction: CorrectionName = Field(
        CORRECTIONS.default, description="Correction of the KV of tokens that are not recomputed."
    )
    check_layers: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (1,),
        description="Layers at which a policy that compares layers selects tokens; several layers narrow "
        "the selection step by step.",
    )
    seed: int = Field(0, description="Random seed of the policy.")
    near: bool = Field(
        False,
        description="Reuse the KV of identical text in similar cached chunks (near-duplicates).",
    )

    @property
    def share(self) -> float:
        """The ratio as a number; "auto" is at least its floor (blend/cost.py finds out what it is)."""
        return self.floor if self.ratio == "auto" else self.ratio


class DecodeConfig(Section):
    """How the answer is written."""

    max_new_tokens: Positive = Field(64, description="Maximum length of an answer, in tokens.")
    temperature: float = Field(0.0, ge=0.0, description="Sampling temperature; 0 is greedy decoding.")
    top_p: float = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="Nucleus sampling: draw from the likeliest tokens whose probabilities sum to this.",
    )
    seed: int = Field(0, description="Random seed of sampling.")
    stop: tuple[str, ...] = Field((), description="Texts that end the answer.")


class Config(Section):
    """The whole of it, in pipeline order."""

    reader: ReaderConfig = ReaderConfig()
    retrieve: RetrieveConfig = RetrieveConfig()
    prompt: PromptConfig = PromptConfig()
    store: StoreConfig = StoreConfig()
    blend: BlendConfig = BlendConfig()
    decode: DecodeConfig = DecodeConfig()

    def to_yaml(self) -> str:
        """The effective settings, as `load` reads them."""
        text: str = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)
        return text


def changed(section: AnySection, **values: Any) -> AnySection:
    """The section with the values that are not None replaced, and checked again."""
    given = {name: value for name, value in values.items() if value is not None}
    return type(section)(**{**section.model_dump(), **given}) if given else section
