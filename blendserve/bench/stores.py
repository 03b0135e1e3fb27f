"""A store whose look-ups are timed, and slowed down on request; codecs with their tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from blendserve.config import Config
from blendserve.engine.codec_fit import chunks_of, fit, self_generated_text
from blendserve.engine.prompt import PromptBuilder
from blendserve.models.loader import LoadedModel
from blendserve.registry import CODECS, parse_codec
from blendserve.retrieve import read_documents
from blendserve.store import ChunkView, KVStore, MemoryStore, Reads
from blendserve.store.codecs.base import Codec
from blendserve.store.wrapped import WrappedStore


class TimedStore(WrappedStore):
    """Sums the seconds of look-ups; with a rate, reads at no more than `bytes_per_s`."""

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
        view, rate = self._store.timed(self._snapshot.get, key), self._store.bytes_per_s
        return view if view is None or rate is None else _SlowChunk(view, rate)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._snapshot, name)


class _SlowChunk:
    """A chunk whose layers come at a rate."""

    def __init__(self, view: ChunkView, bytes_per_s: float) -> None:
        self._view, self._layer_s = view, view.n_bytes / view.n_layers / bytes_per_s

    def layer(self, l: int) -> tuple[Tensor, Tensor]:
        due = time.perf_counter() + self._layer_s
        keys, values = self._view.layer(l)
        time.sleep(max(0.0, due - time.perf_counter()))
        return keys, values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


class CodecTables:
    """Codecs at the levels of one run; the tables of each are fitted once."""

    def __init__(
        self, reader: LoadedModel, prompts: PromptBuilder, fit_tokens: int, text: Path | None = None
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
            return self_generated_text(self._reader, self._fit_tokens)
        return chunks_of(read_documents(self._text), self._fit_tokens, Config(), self._prompts)
