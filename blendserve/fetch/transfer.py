"""The remote chunks of one prompt: transfer threads read them; the prompt's thread computes, decodes or waits.

    transfer threads   next chunks by plan() -> source -> IncomingChunk: begin, add, add, ...
    prompt's thread    compute the last chunk if the CPU is the faster one; else decode a layer; else wait
    prefill            waits for each layer of the chunks that are still in transit

The prefill begins when everything that is missing is in transit. A layer that does not come raises ChunkLost; `finish`
then waits until nothing is in transit. A prompt waits no longer than the source's deadline, and gives a link up before
that on which no byte comes for a small part of what computing would take.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

from blendserve.errors import ChunkLost, StoreError
from blendserve.fetch.incoming import ChunkRequest, IncomingChunk, IncomingChunks, keep_level
from blendserve.fetch.link import StallDetector
from blendserve.fetch.plan import LevelPlanner, PendingChunk, Plan, plan
from blendserve.fetch.source import RemoteSource
from blendserve.kv import ChunkKV
from blendserve.store import ChunkKey, ChunkRecord, Miss, open_view
from blendserve.store.bounded import Deadline
from blendserve.store.codecs.base import SLOW, UNREACHABLE, Buffer, ChunkShape, Tables
from blendserve.store.record import Header
from blendserve.store.view import RecordView

POLL_S = 0.005
WAITING = 0.9  # of the deadline; the rest is for interrupting, and for checking what arrived
MIN_STALL_S = 0.05  # and twice the round trip
STALL = 0.03  # of what stored KV saves: what waiting for a dead link may cost
MAX_ASKED = 4  # times that a chunk is asked for: with others, alone, at another level, and once more
PREFETCHES = 2  # transfers at a time for queued prompts

Compute = Callable[[ChunkRequest], ChunkKV]
ShapeOf = Callable[[int], ChunkShape]  # the shape of a chunk of so many tokens, in the model

log = logging.getLogger(__name__)


class Remote:
    """A source, and what its transfers share."""

    def __init__(self, source: RemoteSource, planner: LevelPlanner = plan, early_start: bool = True) -> None:
        """early_start: whether a prefill begins while the last chunks are in transit."""
        self.source = source
        self.planner = planner
        self.early_start = early_start
        self.incoming = IncomingChunks(source.link.clock.monotonic)
        self.pool = ThreadPoolExecutor(source.workers, thread_name_prefix="blendserve-fetch")
        self.prefetch_pool = ThreadPoolExecutor(PREFETCHES, thread_name_prefix="blendserve-prefetch")

    def prefetch(self, absent: Callable[[], Sequence[ChunkRequest]]) -> Transfer:
        """The transfer of a queued prompt, started in another thread, which also calls `absent`; close it."""
        transfer = Transfer(self, lambda hash: None, pool=self.prefetch_pool)
        self.prefetch_pool.submit(lambda: transfer.add(absent()))
        return transfer

    def close(self) -> None:
        for pool in (self.pool, self.prefetch_pool):
            pool.shutdown(wait=False, cancel_futures=True)


class Transfer:
    """The remote chunks of one prompt. Threads may share it; close it at the end."""

    def __init__(
        self,
        remote: Remote,
        tables: Tables,
        compute: Compute | None = None,
        pool: ThreadPoolExecutor | None = None,
        shape_of: ShapeOf | None = None,
    ) -> None:
        """tables: those on this machine. compute: see KVFetcher.fetch. pool: runs the source's transfers.

        shape_of: of the model; a chunk of another shape is a miss. None accepts every shape.
        """
        self._remote = remote
        self._source = remote.source
        self._incoming = remote.incoming
        self._pool = pool or remote.pool
        self._local_tables = tables
        self._shape_of = shape_of
        self._compute = compute
        self._link = self._source.link
        self._changed = self._incoming.changed
        self._clock = self._link.clock.monotonic
        self.deadline = Deadline(WAITING * self._source.deadline_s, self._clock)
        self.chunks: dict[ChunkKey, IncomingChunk] = {}
        self.misses: dict[ChunkKey, Miss] = {}  # of this prompt alone: others may have the chunk
        self.computed: dict[ChunkKey, ChunkKV] = {}
        self._requests: dict[ChunkKey, ChunkRequest] = {}
        self._views: dict[ChunkKey, RecordView] = {}
        self._decoded: set[ChunkKey] = set()
        self._begun_s = self._clock()
        self._stall = StallDetector(self._link)
        self._may_run_parallel = False
        self._may_start_early = remote.early_start
        self._is_prefilling = self._is_over = self._is_lost = False

    # The prompt's thread

    def add(self, requests: Sequence[ChunkRequest]) -> None:
        """Start to transfer more chunks. Waits only while the source reads its directory again."""
        asked = {r.key: r for r in requests}  # a chunk that a prompt has twice has one user
        self._requests |= asked
        self._may_run_parallel = True
        new = []
        absent = Miss("absent")
        for request in asked.values():
            if self._is_over:
                self.misses[request.key] = Miss(UNREACHABLE, "the link was given up in this request")
            elif isinstance(found := self._incoming.find(request.key), Miss):
                self.misses[request.key] = found
            elif found:
                self._use(found)
            else:
                new.append(request)
        try:
            with self.deadline.waiting():
                sizes = self._source.sizes(new) if new else {}
        except StoreError as error:
            sizes = {}
            absent = Miss(UNREACHABLE, error.public_message)
        for request in new:
            if request.key in sizes:
                self._use(self._incoming.create(request.key, sizes[request.key]))
            else:
                self.misses[request.key] = absent
        self._submit()

    def run(self) -> None:
        """Transfer until the prefill may begin."""
        while not self._may_begin():
            if not (self._compute_last() or self._decode_next()):
                self._wait()
                self._check_link()
        self._is_prefilling = True

    def finish(self) -> None:
        """Wait, after ChunkLost, until nothing is in transit."""
        self._is_lost = self._may_start_early = False
        self.run()

    def get(self, key: ChunkKey) -> RecordView | Miss:
        """Return a chunk after `run`. Reading a layer that is in transit waits for it."""
        chunk = self.chunks.get(key)
        if key in self.misses or chunk is None:
            return self.misses.get(key) or Miss("absent")
        header = chunk.header
        if chunk.miss or header is None:
            return chunk.miss or Miss(UNREACHABLE, "it did not arrive")
        view = self._views.get(key)
        if view is None or view.version is not header:
            read = partial(self._segment, chunk, header)
            record = ChunkRecord(key, header, read, chunk.report, trusted=True)
            shape = self._shape_of(self._requests[key].n_tokens) if self._shape_of else None
            found = open_view(record, self._tables, shape)
            if isinstance(found, Miss):
                self.misses[key] = found
                return found
            view = self._views[key] = found
        return view

    @property
    def has_failed(self) -> bool:
        """Whether some chunks could not be reached."""
        ends = [*self.misses.values(), *(chunk.miss for chunk in self.chunks.values())]
        return any(miss and miss.kind == UNREACHABLE for miss in ends)

    def close(self) -> None:
        """Give up the chunks in transit that no other prompt uses."""
        with self._changed:
            self._is_over = self._is_lost = True
            unused = [chunk for chunk in self.chunks.values() if self._incoming.release(chunk)]
            is_cut = any(chunk.is_started and not chunk.is_done for chunk in unused)
            for chunk in unused:
                chunk.end(Miss(UNREACHABLE, "its request has ended"))
            for chunk in self.chunks.values():
                if chunk.on_layer == self._replan:
                    chunk.on_layer = keep_level
            self._changed.notify_all()
        self.chunks = {}
        self._views.clear()  # their records refer back to this
        if is_cut:
            self._source.interrupt(late=False)

    def _tables(self, hash: bytes) -> bytes | None:
        """Raises CorruptBlob, StoreUnavailable."""
        with suppress(StoreError):
            if raw := self._local_tables(hash):
                return raw
        with self.deadline.waiting():
            return self._source.blobs.get(hash, self.deadline.left)

    def _use(self, chunk: IncomingChunk) -> None:
        with self._changed:
            if self._is_over:  # closed meanwhile
                self._incoming.release(chunk)
            else:
                self.chunks[chunk.key] = chunk

    def _undecided(self) -> list[IncomingChunk]:
        """Return the chunks in transit and those still to be requested, in order."""
        decided = self.misses.keys() | self.computed.keys()
        return [chunk for key, chunk in self.chunks.items() if key not in decided and not chunk.is_done]

    def _todo(self) -> list[IncomingChunk]:
        """Return the chunks still to be requested."""
        return [] if self._is_over else [chunk for chunk in self._undecided() if not chunk.is_started]

    def _may_begin(self) -> bool:
        with self._changed:
            return all(chunk.header and self._may_start_early for chunk in self._undecided())

    def _compute_last(self) -> bool:
        """Compute the last chunk that is not asked for, if the plan gives it to the CPU."""
        with self._changed:
            todo = self._todo()
            if not self._compute or not todo or self._link.rate is None:
                return False
            found = self._plan(todo)
            if found.n_skipped or found.n_fetched >= len(todo):
                return False
            key = todo[-1].key
            self._leave(todo[-1:])
        self.computed[key] = self._compute(self._requests[key])
        return True

    def _decode_next(self) -> bool:
        """Decode a layer of a chunk that is here, before the prefill asks for it."""
        if not self._may_start_early:
            return False
        for key in [key for key, chunk in self.chunks.items() if chunk.is_whole and key not in self._decoded]:
            with suppress(StoreError):  # raised again when the layer is read
                view = self.get(key)
                if isinstance(view, RecordView) and view.decode_ahead():
                    return True
            self._decoded.add(key)
        return False

    def _wait(self) -> None:
        """Wait a moment for anything to arrive."""
        with self._changed, self.deadline.waiting():
            if self._undecided():
                self._changed.wait(min(POLL_S, self.deadline.left))

    # The prefill

    def _segment(self, chunk: IncomingChunk, header: Header, l: int) -> Buffer:
        """Return layer l of this very record, as soon as it has arrived. Raises ChunkLost."""
        while True:
            with self._changed:
                if chunk.header is header and l < len(chunk.segments):
                    return chunk.segments[l]
                if chunk.is_done or chunk.header is not header or self._is_lost or chunk.key in self.misses:
                    self._is_lost = True
                    raise ChunkLost(chunk.key)
                with self.deadline.waiting():
                    self._changed.wait(min(POLL_S, self.deadline.left))
            self._check_link()

    def _check_link(self) -> None:
        """Give up what has not arrived when the deadline is over, or no byte comes."""
        with self._changed:
            is_late = self.deadline.left <= 0
            left = self._undecided()
            is_stalled = self._stall.is_stalled(self._patience(), self._is_prefilling)
            if not left or not (is_late or is_stalled):
                return
        why = self._source.interrupt(late=is_late)
        if not is_late:
            self._link.forget_rate()
            why = f"no byte came for {self._stall.silent_s * 1e3:.0f} ms"
        with self._changed:
            self._is_over = True
            self.misses |= {chunk.key: Miss(UNREACHABLE, why) for chunk in left if not chunk.is_done}
            self._changed.notify_all()

    def _patience(self) -> float:
        """Return how long to wait without a byte: a small part of what stored KV saves, if layers arrive one by one."""
        left = [self._requests[chunk.key].saved_s for chunk in self._undecided()]
        saved = [seconds for seconds in left if seconds is not None]
        if not self._source.max_parallel or len(saved) < len(left) or not left:
            return self._source.deadline_s
        worth = max(MIN_STALL_S, STALL * sum(saved))
        return min(self._source.deadline_s, worth + 2 * self._link.round_trip_s)

    # Transfer threads

    def _submit(self) -> None:
        """Start transfers, up to the source's number. The link has its first chunks before the CPU computes the last."""
        for _ in range(self._source.workers):
            if batch := self._next():
                self._pool.submit(self._work, batch)

    def _work(self, batch: list[IncomingChunk]) -> None:
        while batch:
            try:
                self._source.transfer(batch)
            except Exception as error:  # a bug must not keep a prompt waiting
                log.exception("a transfer failed")
                for chunk in batch:
                    chunk.end(Miss(UNREACHABLE, f"its transfer failed ({type(error).__name__}): see the log"))
            self._end(batch)
            batch = self._next()

    def _next(self) -> list[IncomingChunk]:
        """Return the chunks to request next, marked as started; none if nothing is left to request now."""
        with self._changed:
            while todo := self._todo():
                found = self._plan(todo)
                again = next((chunk for chunk in todo if chunk.n_asked), None)
                if again:
                    return self._start([again], again.level or found.level)
                if found.n_skipped:
                    self._skip(todo[: found.n_skipped], found)
                    continue
                is_busy = any(chunk.is_started for chunk in self._undecided())
                leaves_some = found.n_fetched < len(todo)
                if not found.n_fetched or (leaves_some and is_busy and self._source.batch_bytes):
                    return []  # the CPU may compute them before what is in transit is here
                return self._start(self._batch(todo[: found.n_fetched], found), found.level)
            return []

    def _start(self, batch: list[IncomingChunk], level: str) -> list[IncomingChunk]:
        for chunk in batch:
            chunk.start(level, self._patience(), self._replan)
        return batch

    def _plan(self, todo: Sequence[IncomingChunk]) -> Plan:
        candidates = [self._candidate(chunk) for chunk in todo]
        state = replace(
            self._link.state,
            n_pending=sum(chunk.n_left for chunk in self._undecided() if chunk.is_started),
            wanted_s=self._source.wanted_s,
            spent_s=self._clock() - self._begun_s,
            may_compute=self._compute is not None,
            may_run_parallel=self._may_run_parallel and len(todo) <= self._source.max_parallel,
        )
        first_saved_s = candidates[0].saved_s
        if first_saved_s is not None and first_saved_s <= 0 and state.rate is not None:
            return Plan(next(iter(candidates[0].sizes)), 0, n_skipped=1)
        return self._remote.planner(candidates, state, None)

    def _candidate(self, chunk: IncomingChunk) -> PendingChunk:
        request = self._requests[chunk.key]
        return PendingChunk(chunk.sizes, request.n_tokens, request.saved_s, request.compute_s)

    def _batch(self, todo: list[IncomingChunk], found: Plan) -> list[IncomingChunk]:
        """Return the first chunks for one transfer: all of them in parallel, or as many as fit in a batch."""
        sizes = [chunk.sizes[found.level] for chunk in todo]
        self._may_run_parallel = False  # what is left, or comes again, comes alone
        if found.is_parallel and sum(sizes) <= self._source.in_flight_bytes:
            return todo
        n = 1
        while n < len(todo) and sum(sizes[: n + 1]) <= self._source.batch_bytes:
            n += 1
        return todo[:n]

    def _skip(self, chunks: Sequence[IncomingChunk], found: Plan) -> None:
        saved_s = sum(self._requests[chunk.key].saved_s or 0.0 for chunk in chunks)
        ms = f"{found.seconds * 1e3:.0f} ms, and to save {saved_s * 1e3:.0f} ms"
        why = Miss(SLOW, f"fetching was estimated to take {ms}")
        self.misses |= dict.fromkeys([chunk.key for chunk in chunks], why)
        self._leave(chunks)
        self._changed.notify_all()

    def _leave(self, chunks: Sequence[IncomingChunk]) -> None:
        """Drop chunks that this prompt does not use."""
        for chunk in chunks:
            self._incoming.release(self.chunks.pop(chunk.key))

    def _replan(self, chunk: IncomingChunk) -> None:
        """Choose the level of a chunk in transit again, once."""
        if (level := chunk.level) is None or chunk.is_restarted or self._is_over:
            return
        candidate = replace(self._candidate(chunk), sizes={**chunk.sizes, level: chunk.n_left})
        chunk.level = self._remote.planner(
            [candidate], replace(self._link.state, round_trip_s=0.0), level
        ).level
        chunk.is_restarted = chunk.level != level

    def _end(self, batch: Sequence[IncomingChunk]) -> None:
        """Request again, alone, what a transfer left undone; remember damaged chunks."""
        with self._changed:
            for chunk in batch:
                if not chunk.is_done and (chunk.n_asked >= MAX_ASKED or self._is_over):
                    chunk.end(Miss(UNREACHABLE, "it did not arrive"))
                elif chunk.miss and chunk.miss.kind == "corrupt":
                    self._incoming.refuse(chunk.key, chunk.miss.detail)
                chunk.is_started = chunk.is_done
        if sum(not chunk.is_done for chunk in batch) > 1:
            self._submit()
