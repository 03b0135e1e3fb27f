"""What the server is told: read from the `serve` section of a YAML file and from flags."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field

from blendserve.config import Config as EngineConfig
from blendserve.config import Positive, Section
from blendserve.errors import ConfigError

NotNegative = Annotated[float, Field(ge=0.0)]


class ServeConfig(Section):
    """The server. Limits hold for each API key that has none of its own."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    keys: Path | None = None  # file of API keys (`blendserve keys create`); None = nobody is asked for one
    slots: Positive = 8  # requests that decode together
    slot_tokens: Positive | None = None  # room of a slot, prompt and answer; None = the reader's context
    queue: Positive = 64  # requests that may wait for their prefill
    gap_ms: NotNegative = 50.0  # how long a prefill runs before it lets the running answers take a step
    prefill_share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.75  # and of the time, what it keeps then
    share_mb: NotNegative = 256.0  # stored KV kept in memory while other waiting requests want it, too
    conversations_mb: NotNegative = 256.0  # KV of earlier turns
    max_body_kb: Positive = 1024
    max_concurrent: Positive = 64  # requests of one key at a time
    max_per_minute: Positive = 6000  # requests of one key
    drain_s: NotNegative = 30.0  # what running requests are given after SIGTERM
    log_text: bool = False  # questions in the log


class Config(EngineConfig):
    """The engine's settings and the server's."""

    serve: ServeConfig = ServeConfig()


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


def check_binding(serve: ServeConfig) -> None:
    """Raises ConfigError for an address that others can reach, without API keys."""
    if serve.host not in {"127.0.0.1", "::1", "localhost"} and serve.keys is None:
        raise ConfigError(
            f"serve.host {serve.host!r} can be reached by others, and no API keys are set: "
            "make some with `blendserve keys create` and give serve.keys, or bind to 127.0.0.1"
        )
