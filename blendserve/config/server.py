"""Settings of the servers: sections `serve` and `deliver` of a YAML file, and flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_core import PydanticCustomError

from blendserve.config.base import SECRET, Section
from blendserve.config.engine import Positive
from blendserve.errors import ConfigError

NotNegative = Annotated[float, Field(ge=0.0)]


def _api_key(key: Any) -> SecretStr:
    """Raises an error that does not repeat the key."""
    text = key.get_secret_value() if isinstance(key, SecretStr) else key
    if not isinstance(text, str) or not text or not all("!" <= c <= "~" for c in text):
        raise PydanticCustomError(SECRET, "must be one or more printable ASCII characters without spaces")
    return SecretStr(text)


def _origin(text: str) -> str:
    """Raises ValueError."""
    parts = urlsplit(text)
    if text == "*" or (parts.scheme and parts.netloc and text.count("/") == 2 and not parts.query):
        return text
    raise ValueError("an origin looks like https://app.example.org or http://localhost:3000; * allows all")


class HttpConfig(Section):
    """Address, API keys and limits. Limits hold for each API key without limits of its own; without keys, for each
    client address."""

    host: str = "127.0.0.1"
    """Address to listen on; an address that others can reach needs API keys."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 chooses a free one."""
    keys: Path | None = None
    """File with API keys (`blendserve keys create`). Without keys, requests need none."""
    api_key: Annotated[SecretStr, BeforeValidator(_api_key)] | None = None
    """A single API key with full access, in addition to those of `keys`. `blendserve serve` also reads it from
    BLENDSERVE_API_KEY, which keeps it out of the process list."""
    max_body_kb: Positive = 1024
    """Largest request body, in KB."""
    body_s: ClassVar[float] = 30.0  # for a request body
    max_concurrent: Positive = 64
    """Concurrent requests per API key."""
    max_per_minute: Positive = 6000
    """Requests per minute and API key."""
    queue: Positive = 64
    """Queued requests per API key; further requests get status 429."""
    drain_s: NotNegative = 30.0
    """Time for running requests to end after SIGTERM, in seconds."""


class ServeConfig(HttpConfig):
    """The server."""

    served_model_name: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """Model name in /v1/models and in responses; requests may use it. By default the name given as `--model`, of a
    folder its last part."""
    cors_origins: tuple[Annotated[str, AfterValidator(_origin)], ...] = ()
    """Web origins whose pages may call the API from a browser, such as http://localhost:3000; * allows all. Without
    any, browsers block such calls."""
    slots: Positive = 8
    """Requests that decode in one batch."""
    slot_tokens: Positive | None = None
    """Tokens reserved for prompt and answer of a request; by default the model's context length."""
    gap_ms: NotNegative = 50.0
    """Prefill time after which running answers decode one step, in milliseconds."""
    prefill_share: ClassVar[float] = 0.75  # of the time, for a prefill while answers are decoded
    background_share: ClassVar[float] = 0.1  # of the time, for documents and write-back while requests run
    share_mb: ClassVar[int] = 256  # memory for KV that several queued requests load
    conversations_mb: NotNegative = 256.0
    """Memory for the KV of earlier conversation turns, in MB."""
    ping_s: ClassVar[float] = 15.0  # without an event, after which a stream sends a comment line
    log_text: bool = False
    """Write questions to the log."""

    @property
    def batching(self) -> dict[str, Any]:
        """The arguments of BatchEngine."""
        return {
            "slots": self.slots,
            "slot_tokens": self.slot_tokens,
            "queue": self.queue,
            "gap_s": self.gap_ms / 1e3,
            "prefill_share": self.prefill_share,
            "share_bytes": round(self.share_mb * 1e6),
            "prefix_bytes": round(self.conversations_mb * 1e6),
            "job_share": self.background_share,
        }


class DeliverConfig(HttpConfig):
    """The service that delivers the chunk KV of collections: `blendserve kdn serve`."""

    port: int = Field(8010, ge=0, le=65535)
    """Port to listen on; 0 chooses a free one."""
    memory_mb: NotNegative = 256.0
    """Memory for recently delivered chunks, in MB."""
    send_s: ClassVar[float] = 30.0  # without progress, after which a client is disconnected
    mb_per_minute: NotNegative = 0.0
    """MB sent per minute and API key; 0 sets no limit."""


def check_binding(http: HttpConfig) -> None:
    """Raises ConfigError for an address that others can reach, without API keys."""
    if http.host not in {"127.0.0.1", "::1", "localhost"} and http.keys is None and http.api_key is None:
        section, option = ("deliver", "") if isinstance(http, DeliverConfig) else ("serve", "--api-key, or ")
        raise ConfigError(
            f"{section}.host {http.host!r} can be reached by others, and no API keys are set: give {option}--keys "
            "with a file made by `blendserve keys create`, or bind to 127.0.0.1"
        )
