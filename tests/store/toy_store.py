"""A store kind as it would be added: this file, and one line in the registry. It ends with the process."""

from __future__ import annotations

from pathlib import Path

from blendserve.config import PlaceConfig
from blendserve.store import MemoryStore
from blendserve.store.policies import Policies


class ToyStore(MemoryStore):
    """Chunks in memory."""

    kind = "toy"

    @classmethod
    def from_config(
        cls, config: PlaceConfig, path: Path | None, read_only: bool, policies: Policies
    ) -> ToyStore:
        return cls(config.cap_bytes, *policies)
