"""Settings: one tree of frozen sections, `Config`. Every default of the project is written here, once.

engine.py, store.py and server.py have the sections, section.py what each can do, sources.py where values come from (YAML,
environment, `--set`), old_names.py names of earlier releases, errors.py messages. Commands take their options from the
fields (cli/options.py), as does docs/reference/settings.md. A wrong value is refused before anything is loaded.
"""

from blendserve.config.engine import (
    BlendConfig,
    CorrectionName,
    DecodeConfig,
    Dtype,
    KVContext,
    Method,
    ModelConfig,
    PolicyName,
    Positive,
    PromptConfig,
    Ratio,
    RetrieveConfig,
    RuntimeConfig,
)
from blendserve.config.section import Section, changed
from blendserve.config.server import DeliverConfig, HttpConfig, ServeConfig, check_binding
from blendserve.config.store import (
    AdmissionName,
    KdnConfig,
    PlaceConfig,
    RemoteConfig,
    StoreConfig,
    ValkeyConfig,
)
from blendserve.config.tree import BASIC, Config

__all__ = [
    "BASIC",
    "AdmissionName",
    "BlendConfig",
    "Config",
    "CorrectionName",
    "DecodeConfig",
    "DeliverConfig",
    "Dtype",
    "HttpConfig",
    "KVContext",
    "KdnConfig",
    "Method",
    "ModelConfig",
    "PlaceConfig",
    "PolicyName",
    "Positive",
    "PromptConfig",
    "Ratio",
    "RemoteConfig",
    "RetrieveConfig",
    "RuntimeConfig",
    "Section",
    "ServeConfig",
    "StoreConfig",
    "ValkeyConfig",
    "changed",
    "check_binding",
]
