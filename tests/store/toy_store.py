"""A store kind as it would be added: this file, and one line in the registry. It ends with the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blendserve.config import PlaceConfig
from blendserve.store import MemoryStore, Snapshot
from blendserve.store.policies import Policies
from blendserve.store.wrapped import WrappedStore


class ToyStore(WrappedStore):
    """Chunks in memory, and a count of how often they were looked for."""

    persistent = needs_folder = False
    snapshots = 0

    @classmethod
    def from_config(
        cls, config: PlaceConfig, path: Path | None, read_only: bool, policies: Policies
    ) -> ToyStore:
        return cls(MemoryStore(config.cap_bytes, *policies))

    @contextmanager
    def reading(self) -> Iterator[Snapshot]:
        self.snapshots += 1
        with self._store.reading() as snapshot:
            yield snapshot
