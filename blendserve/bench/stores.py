"""A fetcher that is timed, and codecs with tables for a bench."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from blendserve.config import Config
from blendserve.engine.codec_fit import chunks_of, fit, self_generated_text
from blendserve.engine.prompt import PromptBuilder
from blendserve.fetch.fetcher import Fetch, KVFetcher
from blendserve.fetch.incoming import ChunkRequest
from blendserve.fetch.transfer import Compute
from blendserve.models.loader import LoadedModel
from blendserve.registry import CODECS, parse_codec
from blendserve.retrieve import read_documents
from blendserve.store import KVStore, MemoryStore
from blendserve.store.codecs.base import Codec


class TimedFetcher(KVFetcher):
    """Adds up how long prompts wait before their prefill begins."""

    seconds = 0.0

    @contextmanager
    def fetch(self, requests: Sequence[ChunkRequest], compute: Compute | None = None) -> Iterator[Fetch]:
        start = time.perf_counter()
        with super().fetch(requests, compute) as fetch:
            self.seconds += time.perf_counter() - start
            yield fetch


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
