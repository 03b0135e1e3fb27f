"""All settings: one frozen section per stage inside one Config. Every default of the project is written here, once.

The command line takes defaults, choices and help from these fields (cli/options.py), and so does docs/cli.md; a YAML file
names only what it changes. A wrong value is refused here, before anything is loaded.
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
from blendserve.setting_errors import SECRET, explained

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
            raise ConfigError(explained(type(self), self.inside, error)) from None
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
            raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"config file {path} is not YAML: {str(error).splitlines()[0]}") from None
        if not isinstance(values, dict):
            raise ConfigError(
                f"config file {path} must hold sections ({', '.join(cls.model_fields)}), not {values!r}"
            )
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"config file {path}: {error}") from None


class ReaderConfig(Section):
    """The language model that answers."""

    model: str = Field(
        "smollm2-135m",
        description="Answer with this model: a bundled name, a folder, a hub id, or random:SHAPE for random weights.",
    )
    dtype: Dtype = Field(
        "auto", description="Compute and store in this number format; auto is what the device computes well."
    )
    device: str = Field(
        "auto", description="Run on this device, such as cpu or cuda:1; auto is a GPU where there is one."
    )
    threads: Positive | None = Field(
        None,
        description="Use so many CPU threads; as many as this process may use CPUs if no number is given.",
    )


class RetrieveConfig(Section):
    """Documents to passages to nearest passages."""

    embedder: str = Field(
        "minilm-l6", description="Embed texts with this model: a bundled name, a folder or a hub id."
    )
    chunk_tokens: Positive = Field(
        512,
        description="Cut documents into passages of at most so many of the reader's tokens, title line included.",
    )
    top_k: Positive = Field(6, description="Retrieve so many passages for a question.")
    index: Literal["flat", "hnsw"] = Field(
        "flat",
        description="Search vectors exactly (flat), or approximately, which is faster on large corpora (hnsw).",
    )


class PromptConfig(Section):
    """The words around the chunks."""

    system: str = Field(
        "You answer questions from the given passages, briefly and in your own words.",
        description="Give the reader this system message.",
    )
    instruction: str = Field(
        "Read the passages, then answer the question.",
        description="Put this instruction before the passages.",
    )
    kv_context: KVContext = Field(
        "prefix",
        description="Compute a chunk's KV behind this; only behind the prefix is the first chunk of a prompt exact.",
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
        description="Share chunk KV on this Valkey or Redis server, or on the cluster that it belongs to: "
        "valkey://HOST:PORT/DATABASE, valkeys:// for TLS, or unix:///PATH.",
    )
    username: str = Field(
        "", description="Log in to the server as this user; the default user if it is empty."
    )
    password_file: Path | None = Field(
        None,
        description="Log in to the server with the password in this file; with BLENDSERVE_VALKEY_PASSWORD of the "
        "environment if none is given.",
    )
    ca_file: Path | None = Field(
        None,
        description="Trust the certificate authorities in this file for TLS; those of the system if none is given.",
    )
    deadline_s: float = Field(
        1.0,
        gt=0,
        le=60,
        description="Wait no longer than so many seconds for the server, in all of a request.",
    )
    in_flight_mb: Positive = Field(
        256, description="Have about so many MB (10^6 bytes) of chunks under way from the server at a time."
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
        description="Have chunk KV delivered by the service at this address; https:// for TLS.",
    )
    collection: str = Field("", description="Have the chunks of this collection delivered.")
    level: str = Field(
        "auto",
        description="Have chunks delivered at this level of the collection, such as raw or predict@2; auto chooses for "
        "each chunk by how fast the link, decoding and computing are.",
    )
    ttft_ms: float = Field(
        0.0,
        ge=0,
        description="Choose the finest level by which a request's chunks are here, decoded, after so many milliseconds; "
        "0 chooses what is quickest.",
    )
    relay: str = Field(
        "",
        description="Have chunks from the MoQ relay at this URL, https://HOST:PORT, and what does not come from there "
        "from the service.",
    )
    relay_fingerprint: str = Field(
        "",
        description="Trust the relay whose certificate has this SHA-256, in hex; without one, those that "
        "authorities vouch for.",
    )
    key_file: Path | None = Field(
        None,
        description="Bring the API key in this file; the one in BLENDSERVE_KDN_KEY of the environment if none is given.",
    )
    ca_file: Path | None = Field(
        None,
        description="Trust the certificate authorities in this file for TLS; those of the system if none is given.",
    )
    deadline_s: float = Field(
        5.0,
        gt=0,
        le=60,
        description="Wait no longer than so many seconds for the service, in all of a request.",
    )
    in_flight_mb: Positive = Field(
        256,
        description="Refuse chunks that would take more than so many MB (10^6 bytes) together on their way.",
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

    kind: StoreKindName = Field(STORES.default, description="Keep chunk KV in a store of this kind.")
    path: Path | None = Field(
        None, description="Keep chunk KV in this folder; it is the index's own kv/ if none is given."
    )
    cap_gb: float = Field(
        32.0,
        gt=0,
        description="Keep at most so many GB (10^9 bytes) of KV, of each namespace on a shared server; a store's file is "
        "a little larger.",
    )
    eviction: EvictionName = Field(
        EVICTIONS.default,
        description="Make room at the cap by giving up the least recently used chunks that are not pinned, or refuse.",
    )
    admission: AdmissionName = Field(
        ADMISSIONS.default,
        description="Let in at the cap only what is asked for more often than what it displaces (tinylfu), or all.",
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
        description="Keep hot chunks in so many bytes of the GPU's own memory; 0 keeps none.",
    )
    host_bytes: int = Field(
        0, ge=0, description="Keep hot chunks in so many bytes of pinned host memory; 0 keeps none."
    )
    memory_bytes: int = Field(
        0, ge=0, description="Keep hot chunks decoded in so many bytes of the process's memory; 0 keeps none."
    )
    remote: RemoteConfig | None = Field(
        None,
        description="Look in this store, which other machines use, too, for what the own one lacks, and store there "
        "what is computed here; it has the settings kind, path, cap_gb, eviction, admission, valkey and kdn, as "
        "`store` does.",
    )
    write: Literal["back", "through"] = Field(
        "back",
        description="Write to the remote store in the background (back), or before a chunk counts as stored (through).",
    )
    prefetch_bytes: int = Field(
        500_000_000,
        ge=0,
        description="Read from a store on another machine ahead of requests that wait for their turn, at most so many "
        "bytes; 0 reads none.",
    )


class StoreConfig(PlaceConfig):
    """Where chunk KV lives."""

    codec: CodecWord = Field(
        CODECS.default,
        description="Store KV by this codec, written name or name@level; what is stored already is read by its own. "
        f"One of {', '.join(CODECS.names)}.",
    )
    write_back: bool = Field(
        True, description="Store the chunks that a request found missing or damaged, after its answer."
    )
    namespace: str = Field(
        "", description="Make this a part of every chunk's key, so that other tenants find none of the KV."
    )
    tiers: TiersConfig = TiersConfig()


class BlendConfig(Section):
    """Which tokens are recomputed, and what is done for the others."""

    method: Method = Field(
        "auto",
        description="Use stored KV in this way; auto takes the one that is cheapest on this machine for the prompt.",
    )
    policy: PolicyName = Field(
        POLICIES.default, description="Choose the tokens that are recomputed by this rule."
    )
    ratio: Ratio | Literal["auto"] = Field(
        0.05,
        description="Recompute this share of the context's tokens; auto takes as many as loading hides.",
    )
    floor: Ratio = Field(0.05, description="Recompute at least this share where the ratio is auto.")
    correction: CorrectionName = Field(
        CORRECTIONS.default, description="Correct the KV of tokens that are not recomputed in this way."
    )
    check_layers: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (1,),
        description="Choose at these layers, by a policy that looks at layers; several narrow its choice step by step.",
    )
    seed: int = Field(0, description="Draw by this seed where the policy is random.")
    near: bool = Field(
        False,
        description="Reuse, of a chunk that is not stored, what stored chunks have word for word: of an edited page, all "
        "but the edits.",
    )

    @property
    def share(self) -> float:
        """The ratio as a number; "auto" is at least its floor (blend/cost.py finds out what it is)."""
        return self.floor if self.ratio == "auto" else self.ratio


class DecodeConfig(Section):
    """How the answer is written."""

    max_new_tokens: Positive = Field(64, description="End an answer after so many tokens.")
    temperature: float = Field(
        0.0, ge=0.0, description="Draw tokens this freely; 0 always takes the likeliest one."
    )
    top_p: float = Field(
        1.0, gt=0.0, le=1.0, description="Draw from the likeliest tokens that together have this probability."
    )
    seed: int = Field(0, description="Draw tokens by this seed.")
    stop: tuple[str, ...] = Field((), description="End the answer before any of these texts.")


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
