"""The chunks of one request: which level each is to come by, as its turn comes, and what was learnt from those before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeAlias

from blendserve.config import KdnConfig
from blendserve.errors import CorruptRecord, StoreVersion, unraised
from blendserve.store.codecs.base import SLOW, UNREACHABLE, Buffer, Undecodable
from blendserve.store.kdn.adapt import TEXT, Offer, Rule, Situation, comes_in_step, outlasts
from blendserve.store.kdn.client import Client
from blendserve.store.kdn.collection import MOST_IN_STEP, Collection, Directory, Entry
from blendserve.store.kdn.download import LEFT, Delivered, Wanted, Watch, download, download_in_step
from blendserve.store.kdn.guard import Guard
from blendserve.store.kdn.moq_reader import MoqReader, broadcast_of
from blendserve.store.kdn.pace import Pace
from blendserve.store.key import ChunkKey
from blendserve.store.network.arrival import Arrival
from blendserve.store.record import Header
from blendserve.store.request_reads import TimeSaved

LEAST_SILENCE_S = 0.05  # and twice the round trip
RELAY = 0.5  # of the deadline: the rest is for asking the service
SILENCE = 0.03  # of what computing the request's chunks takes: what waiting for a dead link may cost

Reply: TypeAlias = "Delivered | CorruptRecord | StoreVersion | Undecodable | None"


class Fetch:
    """A network/snapshot.py Source."""

    def __init__(
        self,
        config: KdnConfig,
        rule: Rule,
        pace: Pace,
        look: Callable[[Client], tuple[Collection, Directory]],
        tables: Callable[[bytes, float], bytes | None],
        relay: MoqReader | None = None,
        early: bool = True,
        known: Callable[[], tuple[Collection, Directory] | None] = lambda: None,
        saved: TimeSaved | None = None,
    ) -> None:
        """relay: asked first, where there is one. early: let layers be used before all of a chunk is here. known: what
        `look` would find, where it needs no call. saved: until `expect` says otherwise."""
        self._relay, self._early, self._known = relay, early, known
        self._arrivals: dict[ChunkKey, Arrival] = {}
        self._config, self._rule, self._pace, self._look = config, rule, pace, look
        self.tables, self._saved = tables, saved
        self._now = pace.clock.monotonic
        self._start = self._now()
        self._levels: tuple[str, ...] = ()
        self._entries: dict[ChunkKey, Entry] = {}  # of chunks that are still to come
        self._expected: list[ChunkKey] = []  # that are not among them yet
        self._bytes_left: dict[ChunkKey, int] = {}  # of those under way
        self._one_call = False  # reads all of them
        self._guard = Guard(lambda: pace.n_bytes, self._patience)
        self._watch = Watch(pace.transfer, pace.arrived, config.deadline_s)
        self._lock = threading.Lock()

    def expect(self, keys: Sequence[ChunkKey], saved: TimeSaved | None) -> None:
        """These are asked for together."""
        with self._lock:
            self._saved = saved or self._saved
            self._expected += keys

    def read(self, client: Client, keys: Sequence[ChunkKey]) -> list[Reply]:
        collection, directory = self._look(client)
        self._take(collection, directory)
        entries = {key: directory.get(key) for key in keys}
        came = self._in_step(client, {key: e for key, e in entries.items() if e}) if len(keys) > 1 else {}
        return [came.get(key) or self._one(client, key, collection, entry) for key, entry in entries.items()]

    def _take(self, collection: Collection, directory: Directory) -> None:
        """What is expected is there, or it is not."""
        with self._lock:
            self._levels = collection.levels
            self._entries |= {key: e for key in self._expected if (e := directory.get(key))}
            self._expected = []

    def in_step(self) -> bool:
        known, saved = self._known(), self._saved
        if known is None or saved is None or self._relay or not self._early:
            return False
        self._take(*known)
        with self._lock:
            seconds = [saved.per_token * entry.n_tokens for entry in self._entries.values()]
        rate = self._pace.bytes_per_s()
        fits = 0 < len(seconds) <= MOST_IN_STEP
        self._one_call = fits and comes_in_step(self._left()[0], rate, max(seconds))
        return self._one_call

    def begun(self) -> None:
        self._guard.busy = True

    def arrival(self, key: ChunkKey) -> Arrival | None:
        if not self._early:
            return None
        arrival = self._arrivals[key] = Arrival()
        return arrival

    def outlasts(self, key: ChunkKey, seconds: float) -> bool:
        if self._one_call or key not in self._entries:
            return False
        n_bytes, decoding = self._left()
        return outlasts(n_bytes, self._pace.bytes_per_s(), seconds + decoding)

    def cancel(self, key: ChunkKey) -> None:
        with self._lock:
            self._entries.pop(key)

    def _left(self) -> tuple[int, float]:
        """Bytes that are still to come, by the levels of the moment, and seconds to decode them."""
        with self._lock:
            left = dict(self._entries)
            under_way = dict(self._bytes_left)
        n_bytes, seconds = sum(under_way.values()), 0.0
        for key, entry in left.items():
            if key not in under_way:
                sizes = self._sizes(entry)
                word = self._choose(key, entry, sizes, None)
                n_bytes += sizes.get(word, 0)
                seconds += self._pace.decoding(word) * entry.n_tokens
        return n_bytes, seconds

    def checked(self, key: ChunkKey, reply: Reply) -> tuple[Header, list[Buffer]]:
        """Raises CorruptRecord, StoreVersion, Undecodable."""
        if isinstance(reply, Exception):
            raise unraised(reply)
        assert reply is not None
        return reply.header, reply.segments

    def _in_step(self, client: Client, entries: Mapping[ChunkKey, Entry]) -> Mapping[ChunkKey, Delivered]:
        """Those that are worth it, over one connection; none where they do not come so, and each is to be asked for."""
        wanted = [self._wanted(key, entry) for key, entry in entries.items()]
        wanted = [chunk for chunk in wanted if chunk.word in self._levels]
        if len(wanted) < 2 or sum(chunk.n_bytes for chunk in wanted) > self._config.in_flight_mb * 1e6:
            return {}
        self._bytes_left.update((chunk.key, chunk.n_bytes) for chunk in wanted)
        with self._guarded(client):
            came = download_in_step(client, wanted, self._watch)
        if came is None:
            return {}
        for chunk in wanted:
            self._done(chunk.key)
        return {chunk.key: found for chunk, found in zip(wanted, came, strict=True)}

    def _one(self, client: Client, key: ChunkKey, collection: Collection, entry: Entry | None) -> Reply:
        if entry is None:
            return None
        wanted, sizes = self._wanted(key, entry), self._sizes(entry)
        if wanted.word not in sizes:
            self._done(key)
            return Undecodable(LEFT, SLOW)
        if wanted.n_bytes > self._config.in_flight_mb * 1e6:
            return Undecodable("it is larger than one transfer may be", UNREACHABLE)
        self._bytes_left[key] = wanted.n_bytes
        start = self._now()
        try:
            reply = self._from_relay(collection, key, wanted.word, wanted.n_bytes)
            if reply is None:
                with self._guarded(client):
                    reply = download(client, wanted, sizes, self._watch)
        except StoreVersion as error:
            return unraised(error)
        finally:
            self._done(key)
        if isinstance(reply, Delivered):
            self._pace.last_bytes_per_s = sizes[reply.word] / max(1e-9, self._now() - start)
        return reply

    def _wanted(self, key: ChunkKey, entry: Entry) -> Wanted:
        """By the level that is chosen now, TEXT where it is not to come."""
        sizes = self._sizes(entry)
        word = self._choose(key, entry, sizes, None)
        arrival = self._arrivals.get(key) or Arrival()
        return Wanted(key, word, sizes.get(word, 0), partial(self._go_on, key, entry, sizes), arrival)

    def _from_relay(self, collection: Collection, key: ChunkKey, word: str, n_bytes: int) -> Reply:
        if self._relay is None or self._relay.resting:
            return None
        path, seconds = broadcast_of(collection), min(self._patience(), RELAY * self._config.deadline_s)
        with self._pace.transfer():
            return self._relay.chunk(path, key, word, n_bytes, self._pace.arrived, seconds)

    def _go_on(self, key: ChunkKey, entry: Entry, sizes: dict[str, int], word: str, left: int) -> str:
        self._bytes_left[key] = left
        return self._choose(key, entry, {**sizes, word: left}, word)

    def _choose(self, key: ChunkKey, entry: Entry, sizes: dict[str, int], going_on: str | None) -> str:
        if self._guard.silent:
            return TEXT
        tokens, saved = entry.n_tokens, self._saved
        text = [Offer(TEXT, 0, saved.of(key, tokens))] if saved else []
        offers = [*text, *(Offer(w, n, self._pace.decoding(w) * tokens) for w, n in sizes.items())]
        now = Situation(
            bytes_per_s=self._pace.bytes_per_s(),
            last_bytes_per_s=self._pace.last_bytes_per_s,
            wanted=self._config.ttft_ms / 1e3,
            share=tokens / max(tokens, self._tokens_left),
            spent=self._now() - self._start,
        )
        return self._rule(offers, now, going_on)

    def _guarded(self, client: Client) -> AbstractContextManager[None]:
        """Where computing can be weighed against it, a link that has died is waited for once in a request."""

        def give_up() -> None:
            self._pace.silence()
            client.cut()

        return nullcontext() if self._saved is None else self._guard.transfer(give_up)

    def _patience(self) -> float:
        """Seconds of silence: a small part of what computing all would take, where that is known."""
        if self._saved is None:
            return self._config.deadline_s
        worth = max(LEAST_SILENCE_S, SILENCE * self._saved.per_token * self._tokens_left)
        return min(self._config.deadline_s, worth + 2 * self._pace.round_trip)

    @property
    def _tokens_left(self) -> int:
        """Of the request, that are still to come."""
        with self._lock:
            return sum(entry.n_tokens for entry in self._entries.values())

    def _done(self, key: ChunkKey) -> None:
        with self._lock:
            self._entries.pop(key, None)
            self._bytes_left.pop(key, None)
            self._arrivals.pop(key, None)

    def _sizes(self, entry: Entry) -> dict[str, int]:
        """Bytes of a chunk's body by level."""
        return dict(zip(self._levels, entry.bodies, strict=True))
