"""Settings: one tree of frozen sections, `Config`. Every default of the project is written here, once.

sections.py and store.py have the sections, and base.py what each can do. Commands take their options from the fields
(cli/options.py), as does docs/reference/settings.md. A wrong value is refused before anything is loaded.
"""

from __future__ import annotations

import os
from typing import ClassVar

import yaml

from blendserve.config.base import Settings
from blendserve.config.sections import (
    ANSWER_TOKENS,
    LOOPBACK,
    Arithmetic,
    BlendConfig,
    CorrectionName,
    DecodeConfig,
    DeliverConfig,
    HttpConfig,
    KVContext,
    Method,
    ModelConfig,
    PolicyName,
    Positive,
    PromptConfig,
    QualityConfig,
    Ratio,
    RetrieveConfig,
    RuntimeConfig,
    ServeConfig,
    Similarity,
    check_binding,
)
from blendserve.config.store import (
    COLLECTION,
    AdmissionName,
    KdnConfig,
    RemoteConfig,
    StoreBackendConfig,
    StoreConfig,
    ValkeyConfig,
)

__all__ = ["ANSWER_TOKENS", "BASIC", "COLLECTION", "LOOPBACK", "Config", "Settings", "check_binding"]
__all__ += [
    "AdmissionName",
    "Arithmetic",
    "CorrectionName",
    "KVContext",
    "Method",
    "PolicyName",
    "Positive",
    "Ratio",
    "Similarity",
]
__all__ += ["BlendConfig", "DecodeConfig", "DeliverConfig", "HttpConfig", "KdnConfig", "ModelConfig"]
__all__ += [
    "PromptConfig",
    "QualityConfig",
    "RemoteConfig",
    "RetrieveConfig",
    "RuntimeConfig",
    "ServeConfig",
    "StoreBackendConfig",
]
__all__ += ["StoreConfig", "ValkeyConfig"]

API_KEY = "BLENDSERVE_API_KEY"
BASIC = (  # what --help shows; --help-all shows every setting of a command
    *("model.name", "model.device"),
    *("retrieve.chunk_tokens", "retrieve.top_k", "store.location", "store.cap_gb", "store.codec"),
    *("blend.method", "blend.ratio", "blend.near", "decode.max_new_tokens", "decode.temperature"),
    *("serve.host", "serve.port", "serve.api_key"),  # of deliver the same
)


class Config(Settings):
    """All settings, in the order of the pipeline."""

    environment: ClassVar[str] = "BLENDSERVE__"  # BLENDSERVE__STORE__CAP_GB=8
    model: ModelConfig = ModelConfig()
    retrieve: RetrieveConfig = RetrieveConfig()
    prompt: PromptConfig = PromptConfig()
    store: StoreConfig = StoreConfig()
    blend: BlendConfig = BlendConfig()
    quality: QualityConfig = QualityConfig()
    decode: DecodeConfig = DecodeConfig()
    serve: ServeConfig = ServeConfig()
    deliver: DeliverConfig = DeliverConfig()

    def with_environment_key(self) -> Config:
        """The settings with `serve.api_key` of BLENDSERVE_API_KEY, unless they have one. Raises ConfigError."""
        key = os.environ.get(API_KEY)
        return self if key is None or self.serve.api_key is not None else self.replace("serve.api_key", key)

    def without_keys(self) -> Config:
        """The settings without API keys, for other machines and for files; what depends on them is decided."""
        made = self.replace("serve.api_key", None).replace("deliver.api_key", None)
        is_open = self.store.write_back != "auto" or not self.serve.has_keys
        return made if is_open else made.replace("store.write_back", "missing")

    def to_yaml(self, changes: bool = False) -> str:
        """All settings but API keys, as `load` reads them. changes: without default values."""
        keys = {section: {"api_key"} for section in ("serve", "deliver")}
        values = self.model_dump(mode="json", exclude=keys, exclude_defaults=changes)
        return str(yaml.safe_dump(values, sort_keys=False)) if values else ""
