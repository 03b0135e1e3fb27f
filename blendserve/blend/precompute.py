"""Single flight: missing chunks are computed once and stored, ahead of requests (precompute) or after one (write-back).

Threads and processes that share a store take a lease before they compute a chunk (`KVStore.lease`). A lease expires, so a
process that dies blocks nothing; it lasts several times as long as computing is expected to take.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from blendserve.blend.chunk_kv import ChunkComputer, ChunkKeys, chunk_shape, in_stacks
from blendserve.blend.donors import DonorIndex
from blendserve.core import Steps, TokenIds
from blendserve.errors import StoreCircuitOpen, StoreError
from blendserve.fetch.fetcher import KVFetcher
from blendserve.fetch.write_queue import write_behind
from blendserve.kv import ChunkKV
from blendserve.store import ChunkKey, ChunkRecord, Miss, open_view, read_record
from blendserve.store.base import Progress
from blendserve.store.codecs.base import Codec
from blendserve.store.view import decode

MIN_LEASE_S = 30.0
LEASE_MARGIN = 4.0  # times the expected computing time: a process has other work, too
BACKGROUND_MARGIN = 40.0  # the same after a request: while others run, such work has a tenth of the time
MIN_WAIT_S = 1.0
POLL_S = 0.1  # between two looks for chunks that other processes compute
FIRST_TOKEN_S = 0.02  # computing time of a token until one has been measured
MEAN_WEIGHT = 0.5  # of the last run in the running mean

OnLeased = Literal["wait", "skip", "compute"]
"""What to do about a chunk that another process is computing: wait for it, leave it out, or compute it as well."""


@dataclass(frozen=True, slots=True)
class MissingChunk:
    """A chunk that a request missed, to be stored."""

    ids: TokenIds
    kv: ChunkKV | None = None  # where the request has computed it
    is_damaged: bool = False  # whether a stored record is to be replaced


@dataclass(frozen=True, slots=True)
class PrecomputeReport:
    """What a precompute run did."""

    chunks: int  # distinct ones asked for
    computed: int
    skipped: int  # stored before, or by other processes meanwhile
    tokens: int  # of the computed ones
    bytes: int
    seconds: float
    left: int = 0  # that other processes are computing


@dataclass(frozen=True, slots=True)
class PrecomputeEstimate:
    """What a precompute run would compute and store."""

    chunks: int
    tokens: int
    bytes: int  # as stored, about
    seconds: float  # of computing, about


@dataclass(slots=True)
class PrecomputeRun:
    """Counts of a precompute run that is under way."""

    progress: Progress | None
    total: int = 0  # tokens of missing chunks
    done: int = 0  # of those, tokens that are stored by now
    start: float = field(default_factory=time.perf_counter)
    computed: int = 0  # chunks, by this process
    tokens: int = 0
    bytes: int = 0

    def count(self, chunks: int, tokens: int, n_bytes: int) -> None:
        """Chunks that this process computed."""
        self.computed += chunks
        self.tokens += tokens
        self.bytes += n_bytes

    def advance(self, tokens: int) -> None:
        """Tokens stored by any process."""
        self.done += tokens
        if self.progress and tokens:
            self.progress(self.done, self.total)

    def report(self, distinct: int, left: int) -> PrecomputeReport:
        skipped = distinct - self.computed - left
        seconds = time.perf_counter() - self.start
        return PrecomputeReport(distinct, self.computed, skipped, self.tokens, self.bytes, seconds, left)


class ChunkWriter:
    """Computes and stores the chunks of one namespace. Thread-safe. Methods raise StoreError; stored chunks stay."""

    def __init__(
        self,
        fetcher: KVFetcher,
        chunks: ChunkComputer,
        key: ChunkKeys,
        codec: Codec,
        indexes: Sequence[DonorIndex],
    ) -> None:
        """codec: of stored chunks. indexes: told of each chunk that is stored."""
        self.chunks = chunks
        self.codec = codec
        self.key = key
        self._fetcher = fetcher
        self._store = fetcher.store
        self._indexes = indexes
        self._token_s = FIRST_TOKEN_S

    def missing(self, chunks: Iterable[TokenIds]) -> list[TokenIds]:
        """The distinct chunks that are not stored, in order."""
        keys = {self.key(ids): ids for ids in chunks if ids}
        stored = self._fetcher.locate(keys, remote=True)
        return [ids for key, ids in keys.items() if key not in stored]

    def estimate(self, chunks: Iterable[TokenIds], seconds: Callable[[int], float]) -> PrecomputeEstimate:
        """Return what `precompute` would add to the store for these chunks. seconds: of computing one of n tokens."""
        lengths = [len(ids) for ids in self.missing(chunks)]
        n_bytes = sum(self.expected_bytes(length) for length in lengths)
        return PrecomputeEstimate(len(lengths), sum(lengths), n_bytes, sum(map(seconds, lengths)))

    def delete(self, chunks: Iterable[TokenIds]) -> int:
        """Delete chunks and their copies -> number deleted."""
        return self.delete_keys({self.key(ids) for ids in chunks})

    def delete_keys(self, keys: Collection[ChunkKey], wait: bool = True) -> int:
        """The same by key. wait: as of KVStore.delete."""
        self._fetcher.forget(keys)
        try:
            return self._store.delete(keys, wait)
        finally:
            self._fetcher.deleted(keys)  # also what a request has read meanwhile

    def write_back(self, missing: Iterable[MissingChunk]) -> Steps[int]:
        """Compute and store chunks that a request missed -> number stored.

        Skips chunks that the store does not admit, that another process is computing, or that are stored by now. Stores
        nothing while the store cannot be written, which was logged; `failed_writes` of the fetcher counts these chunks.
        """
        chunks = list(missing)
        try:
            return (yield from self._write_back(chunks))
        except StoreCircuitOpen:
            self._fetcher.failed_writes += len(chunks)
            return 0
        except StoreError:
            self._fetcher.failed_writes += len(chunks)
            raise

    def _write_back(self, missing: Iterable[MissingChunk]) -> Steps[int]:
        admitted = {chunk.ids: chunk for chunk in missing if self._admits(chunk.ids)}
        damaged = {self.key(ids) for ids, chunk in admitted.items() if chunk.is_damaged}
        with self._lease(admitted, damaged, BACKGROUND_MARGIN) as granted:
            # The lease may have found that nothing can be written now.
            leased = [ids for ids in granted if self._admits(ids)]
            n_stored = sum(self._put(kv) for ids in leased if (kv := admitted[ids].kv))
            todo = [ids for ids in leased if not admitted[ids].kv]
            start = time.perf_counter()
            for stack in in_stacks(todo, self.chunks.stack_tokens):
                n_stored += sum(map(self._put, (yield from self.chunks.steps(stack))))
            self._measured(start, sum(map(len, todo)))
            return n_stored

    def precompute(
        self, chunks: Sequence[TokenIds], progress: Progress | None = None, on_leased: OnLeased = "wait"
    ) -> PrecomputeReport:
        """Compute, store and pin every chunk that is not stored; each is safe as soon as it is stored.

        Chunks that another process is computing are waited for no longer than computing them would take. `progress(tokens
        stored, tokens in all)`.
        """
        todo = self.missing(chunks)
        run = PrecomputeRun(progress, sum(map(len, todo)))
        self._store.pin(map(self.key, set(chunks) - set(todo)))  # a request may have stored some, unpinned
        leased = left = self._compute(todo, run, anyway=on_leased == "compute")
        deadline = time.monotonic() + max(MIN_WAIT_S, self._token_s * sum(map(len, leased)))
        while left and on_leased == "wait":
            time.sleep(POLL_S)
            missing = self.missing(left)
            run.advance(sum(map(len, left)) - sum(map(len, missing)))
            left = self._compute(missing, run, anyway=time.monotonic() >= deadline)
        if leased and not left:
            self._store.pin(map(self.key, leased))
        return run.report(len({ids for ids in chunks if ids}), len(left))

    def precompute_one(self, ids: TokenIds, on_leased: Literal["skip", "compute"]) -> Steps[bool]:
        """Compute, store and pin one chunk unless it is stored -> whether it is left to another process."""
        if not self.missing([ids]):
            self._store.pin([self.key(ids)])
            return False
        with self._lease([ids]) as leased:
            if leased or on_leased == "compute":
                self._put((yield from self.chunks.steps([ids]))[0], pin=True)
        return bool(self.missing([ids]))

    def _compute(self, todo: Sequence[TokenIds], run: PrecomputeRun, anyway: bool) -> list[TokenIds]:
        """Compute, store and pin chunks -> the ones that other processes compute. anyway: compute these as well."""
        computing = deque[TokenIds]()
        left = list[TokenIds]()
        start = time.perf_counter()
        before = run.tokens
        most = self.chunks.stack_tokens
        with ExitStack() as leases:

            def mine() -> Iterator[TokenIds]:
                for stack in in_stacks(todo, most):  # leased in one round trip
                    leased = leases.enter_context(self._lease(stack))
                    left.extend([] if anyway else (ids for ids in stack if ids not in leased))
                    computing.extend(stack if anyway else leased)
                    yield from stack if anyway else leased

            fresh = ((self.key(kv.ids), kv) for kv in self.chunks.stream(mine()))
            with closing(write_behind(self._store, self.codec, fresh, most)) as stored:
                for n_bytes in stored:
                    ids = computing.popleft()
                    self._added(ids)
                    run.count(1, len(ids), n_bytes)
                    run.advance(len(ids))
        self._measured(start, run.tokens - before)
        return self.missing(left)

    def expected_bytes(self, n_tokens: int) -> int:
        """Bytes of a chunk of that many tokens, as stored."""
        return self.codec.expected_bytes(self.chunks.model.chunk_bytes(n_tokens))

    def as_computed(self, chunks: Sequence[TokenIds]) -> Iterator[ChunkKV]:
        """The KV of chunks as computing them gives it: read where this machine keeps the very numbers, else computed."""
        read = {ids: kv for ids in chunks if (kv := self._read_exactly(ids))}
        computed = self.chunks.stream(ids for ids in chunks if ids not in read)
        return (read.get(ids) or next(computed) for ids in chunks)

    def stored_bytes(self) -> dict[ChunkKey, int]:
        """Bytes of each stored chunk of the namespace."""
        infos = self._store.describe(self._store.keys(self.key.namespace))
        return {key: info.n_bytes for key, info in infos.items()}

    def _read_exactly(self, ids: TokenIds) -> ChunkKV | None:
        """A stored chunk's KV; None for a chunk that is not stored here, is damaged, or was coded with a loss."""
        store = self._fetcher.local
        with suppress(StoreError):
            record = read_record(store, self.key(ids))
            shape = chunk_shape(self.chunks.model, len(ids))
            view = open_view(record, store.blobs.get, shape) if record else Miss("absent")
            if record and not isinstance(view, Miss) and view.is_lossless:
                return decode(record)
        return None

    def _admits(self, ids: TokenIds) -> bool:
        return self._store.admits(self.key(ids), self.expected_bytes(len(ids)))

    @contextmanager
    def _lease(
        self, chunks: Iterable[TokenIds], damaged: Collection[ChunkKey] = (), margin: float = LEASE_MARGIN
    ) -> Iterator[list[TokenIds]]:
        """The chunks that are leased to this thread within the block: neither stored whole, nor leased by others."""
        keys = {self.key(ids): ids for ids in chunks}
        expected_s = self._token_s * sum(map(len, keys.values()))
        granted = self._store.lease([*keys], max(MIN_LEASE_S, margin * expected_s)) if keys else set()
        try:
            stored = self._store.contains(granted) - set(damaged)
            yield [ids for key, ids in keys.items() if key in granted - stored]
        finally:
            self._store.release(granted)

    def _put(self, kv: ChunkKV, pin: bool = False) -> bool:
        key = self.key(kv.ids)
        is_stored = self._store.put(key, ChunkRecord.encode(key, kv, self.codec), pin)
        self._added(kv.ids)
        return is_stored

    def _added(self, ids: TokenIds) -> None:
        """A chunk was stored."""
        self._fetcher.forget([self.key(ids)])
        for index in self._indexes:
            index.add(ids)

    def _measured(self, start: float, n_tokens: int) -> None:
        """Computing these tokens began at `start`."""
        if n_tokens:
            self._token_s += MEAN_WEIGHT * ((time.perf_counter() - start) / n_tokens - self._token_s)
