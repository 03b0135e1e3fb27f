"""What the server is told: read from the `serve` section of a YAML file and from flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from blendserve.config import Config as EngineConfig
from blendserve.config import Positive, Section
from blendserve.engine.standby import SHARE
from blendserve.errors import ConfigError

NotNegative = Annotated[float, Field(ge=0.0)]
Seconds = Annotated[float, Field(gt=0.0)]


class HttpConfig(Section):
    """Who may ask, and how much. Limits hold for each API key that has none of its own, and for each address where there
    are no keys."""

    host: str = Field(
        "127.0.0.1", description="Bind to this address; one that others can reach needs API keys."
    )
    port: int = Field(8000, ge=0, le=65535, description="Listen on this port; 0 takes any free one.")
    keys: Path | None = Field(
        None,
        description="Read API keys from this file (`blendserve keys create`); without it nobody needs one.",
    )
    max_body_kb: Positive = Field(1024, description="Refuse requests whose body has more than so many KB.")
    body_s: Seconds = Field(
        30.0, description="Refuse requests whose body is not there after so many seconds."
    )
    max_concurrent: Positive = Field(64, description="Let one API key have so many requests at a time.")
    max_per_minute: Positive = Field(6000, description="Let one API key send so many requests a minute.")
    drain_s: NotNegative = Field(
        30.0, description="Give running requests so many seconds to end after SIGTERM."
    )


class ServeConfig(HttpConfig):
    """The server."""

    slots: Positive = Field(8, description="Let so many requests decode together.")
    slot_tokens: Positive | None = Field(
        None,
        description="Give prompt and answer of a request so many tokens; the reader's context if none is given.",
    )
    queue: Positive = Field(
        64, description="Let so many requests of one API key wait for their prefill, and refuse more."
    )
    gap_ms: NotNegative = Field(
        50.0, description="Let the running answers take a step after so many milliseconds of a prefill."
    )
    prefill_share: float = Field(
        0.75, ge=0.0, lt=1.0, description="Leave a prefill this share of the time while answers are running."
    )
    job_share: float = Field(
        SHARE,
        gt=0.0,
        le=1.0,
        description="Leave added documents and chunks to be stored this share of the time while requests are in flight.",
    )
    share_mb: NotNegative = Field(
        256.0, description="Keep so many MB of stored KV in memory while other waiting requests want it, too."
    )
    conversations_mb: NotNegative = Field(
        256.0, description="Keep so many MB of KV of conversations' earlier turns."
    )
    log_text: bool = Field(False, description="Write questions to the log.")

    @property
    def batching(self) -> dict[str, Any]:
        """As BatchEngine takes it."""
        return {
            "slots": self.slots,
            "slot_tokens": self.slot_tokens,
            "queue": self.queue,
            "gap_s": self.gap_ms / 1e3,
            "prefill_share": self.prefill_share,
            "share_bytes": round(self.share_mb * 1e6),
            "prefix_bytes": round(self.conversations_mb * 1e6),
            "job_share": self.job_share,
        }


class DeliverConfig(HttpConfig):
    """The service that delivers knowledge: `blendserve kdn serve`."""

    port: int = Field(8010, ge=0, le=65535, description="Listen on this port; 0 takes any free one.")
    memory_mb: NotNegative = Field(
        256.0, description="Keep so many MB of what was delivered last in memory, for who asks for it next."
    )
    queue: Positive = Field(64, description="Let so many look-ups of one API key wait, and refuse more.")
    send_s: Seconds = Field(30.0, description="Cut readers that have taken nothing for so many seconds.")
    mb_per_minute: NotNegative = Field(
        0.0, description="Send one API key so many MB a minute, and refuse more; 0 sends any number."
    )


class Config(EngineConfig):
    """The engine's settings and the servers'."""

    serve: ServeConfig = ServeConfig()
    deliver: DeliverConfig = DeliverConfig()

    @property
    def engine(self) -> EngineConfig:
        """The engine's alone."""
        return EngineConfig(**self.model_dump(include=set(EngineConfig.model_fields)))


def load_settings(path: Path | None) -> Config:
    """A YAML file of the engine's sections and `serve`; None = the defaults. Raises ConfigError."""
    if path is None:
        return Config()
    loaded = Config.load(path)
    assert isinstance(loaded, Config)
    return loaded


def effective(settings: Config, indexes: list[str]) -> str:
    """What is printed at the start: everything that is in force, as YAML."""
    values: dict[str, Any] = {"indexes": indexes, **settings.model_dump(mode="json")}
    text: str = yaml.safe_dump(values, sort_keys=False)
    return text


def check_binding(serve: HttpConfig) -> None:
    """Raises ConfigError for an address that others can reach, without API keys."""
    if serve.host not in {"127.0.0.1", "::1", "localhost"} and serve.keys is None:
        raise ConfigError(
            f"serve.host {serve.host!r} can be reached by others, and no API keys are set: "
            "make some with `blendserve keys create` and give serve.keys, or bind to 127.0.0.1"
        )
