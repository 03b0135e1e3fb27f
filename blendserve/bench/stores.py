"""Stores around a store: one that is timed, one that is slow, and codecs with tables for a bench."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from blendserve.config import Config
from blendserve.engine.calibration import chunks_of, fit
from blendserve.engine.own_words import own_words
from blendserve.engine.prompt import PromptBuilder
from blendserve.models.loader import Reader
from blendserve.registry import CODECS, parse_codec
from blendserve.retrieve import read_documents
from blendserve.store import ChunkView, KVStore, MemoryStore, Reads
from blendserve.store.codecs.base import Codec
from blendserve.store.wrapped import WrappedStore


class TimedStore(WrappedStore):
    """Adds up how long look-ups take; with a rate, reads no faster than so many bytes a second."""

    def __init__(self, store: KVStore, bytes_per_s: float | None = None) -> None:
        super().__init__(store)
        self.seconds, self.bytes_per_s = 0.0, bytes_per_s

    @contextmanager
    def reading(self) -> Iterator[Reads]:
        with self._store.reading() as snapshot:
            yield cast(Reads, _TimedSnapshot(snapshot, self))

    def timed(self, call: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.seconds += time.perf_counter() - start


class _TimedSnapshot:
    def __init__(self, snapshot: Reads, store: TimedStore) -> None:
        self._snapshot, self._store = snapshot, store

    def expect(self, *args: Any) -> None:
        self._store.timed(self._snapshot.expect, *args)

    def get(self, key: Any) -> Any:
        view = self._store.timed(self._snapshot.get, key)
        slow = view is not None and self._store.bytes_per_s is not None
        return _SlowChunk(view, self._store.bytes_per_s or 0.0) if slow else view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._snapshot, name)


@dataclass(frozen=True, slots=True)
class _SlowChunk:
    """A chunk whose layers take as long as their bytes at a rate."""

    view: ChunkView
    bytes_per_s: float

    @property
    def n_layers(self) -> int:
        return self.view.n_layers

    @property
    def n_tokens(self) -> int:
        return self.view.n_tokens

    @property
    def n_bytes(self) -> int:
        return self.view.n_bytes

    @property
    def raw_bytes(self) -> int:
        return self.view.raw_bytes

    @property
    def version(self) -> Hashable:
        return self.view.version

    def layer(self, l: int) -> tuple[Tensor, Tensor]:
        start = time.perf_counter()
        keys, values = self.view.layer(l)
        due = start + self.view.n_bytes / self.view.n_layers / self.bytes_per_s
        time.sleep(max(0.0, due - time.perf_counter()))
        return keys, values


class CodecTables:
    """Codecs at the levels of one run; the tables of each are fitted once."""

    def __init__(
        self, reader: Reader, prompts: PromptBuilder, fit_tokens: int, text: Path | None = None
    ) -> None:
        """text: file or folder that tables are fitted on; None = text sampled from the model."""
        self._reader, self._prompts, self._fit_tokens, self._text = reader, prompts, fit_tokens, text
        self._tables: dict[str, bytes] = {}

    def codec(self, word: str) -> Codec:
        """Raises CorpusError, InputError."""
        name, level = parse_codec(word)
        codec: Codec = CODECS.load(name).with_tables(level, self.tables(word))
        return codec

    def tables(self, word: str) -> bytes:
        """b"" for a codec that needs none."""
        name, _ = parse_codec(word)
        if name not in self._tables and CODECS.load(name).needs_tables:
            store = MemoryStore(1 << 30)
            hash = fit(name, self._chunks(), self._reader, self._prompts, store)
            self._tables[name] = store.blobs.get(hash) or b""
        return self._tables.get(name, b"")

    def write_with(self, word: str, store: KVStore) -> Codec:
        """The codec to write with; `store` has its tables then."""
        if tables := self.tables(word):
            store.blobs.put(parse_codec(word)[0], self._reader.fingerprint, tables)
        return self.codec(word)

    def _chunks(self) -> Sequence[tuple[int, ...]]:
        if self._text is None:
            return own_words(self._reader, self._fit_tokens)
        return chunks_of(read_documents(self._text), self._fit_tokens, Config(), self._prompts)
