"""Any history of a store with another machine's behind it, read through a fetcher.

A chunk in reach is found, a chunk that this machine has seen may be found, every other one has a miss with a reason, and
no bytes are ever wrong.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blendserve.errors import CorruptRecord, StoreUnavailable
from blendserve.fetch.copies import Copies
from blendserve.fetch.fetcher import Fetch
from blendserve.fetch.incoming import FAILED_S, ChunkRequest
from blendserve.fetch.tiered import REST_S, TieredStore
from blendserve.store.key import ChunkKey
from tests.support.places import KEYS, REMOTE_STORES, Tiered, content, explore, put
from tests.support.stores import UNIT, FaultyStore, cache, copy_of, has, same

SELF, OTHER = 0, 1  # handles: the store under test, and another machine's
TOKENS = 10

keys, handles = st.sampled_from(KEYS), st.sampled_from([SELF, SELF, OTHER])
some_keys = st.lists(keys, min_size=1, max_size=3, unique=True)
PUTS = st.tuples(
    keys, st.sampled_from([False, False, True]), st.sampled_from(["put", "put", "uncoded", "behind"])
)


@dataclass
class OpenFetch:
    """A fetch that stays open over steps."""

    fetch: Fetch
    stack: ExitStack
    may: set[ChunkKey]  # chunks that it may give
    deleted: set[ChunkKey] = field(default_factory=set)  # here, since the opening


class FetchMachine(RuleBasedStateMachine):
    def __init__(self, kind: type[Tiered], copies: float, folder: Path) -> None:
        """copies: bytes of a cache of decoded chunks."""
        super().__init__()
        self.place, self.copies = kind(folder), copies
        self.clock = self.place.clock
        self.there, self.seen = set[ChunkKey](), set[ChunkKey]()  # on the other machine; here, too
        self.broken = set[ChunkKey]()  # that were damaged there at any time
        self.failed: dict[ChunkKey, float] = {}  # damaged chunks, which are not read again until then
        self.well_at = 0.0  # from when on the other machine is asked
        self.open()

    def open(self) -> None:
        self.store = self.place.open()
        self.fetcher = self.place.fetcher(self.store, Copies([cache(self.copies)] if self.copies else []))
        self.handles = [self.store, self.place.other()]
        self.fetches: list[OpenFetch] = []

    def close(self) -> None:
        self.close_fetches()
        self.fetcher.close()
        for handle in self.handles:
            handle.close()

    @property
    def far(self) -> FaultyStore:
        assert self.place.far is not None
        return self.place.far

    # Writing

    @initialize(some=st.lists(PUTS, max_size=4))
    def fill(self, some: list[tuple[ChunkKey, bool, str]]) -> None:
        self.put(some, SELF)

    @rule(some=st.lists(PUTS, min_size=1, max_size=4), who=handles)
    def put(self, some: list[tuple[ChunkKey, bool, str]], who: int) -> None:
        for key, is_pinned, how in some:
            reached, pin = who == OTHER or not self.far.down, is_pinned or how == "behind"
            try:
                stored = put(self.handles[who], key, content(key), pin, how, self.place)
            except StoreUnavailable:
                assert not self.place.near
                assert not reached
                continue
            self.fetcher.flush()
            assert stored or not reached
            if who == OTHER:
                self.far.damaged.discard(key)
            elif stored:
                self.fetcher.forget([key])  # as a blender does
                self.failed.pop(key, None)
                if self.place.near:
                    self.seen.add(key)
            if reached:
                self.there.add(key)
                assert self.handles[OTHER].describe([key])[key].pinned or not pin

    @rule(key=keys, who=handles)
    def delete(self, key: ChunkKey, who: int) -> None:
        here = who == SELF and self.place.near is not None and has(self.place.near, key)
        if who == SELF:
            self.fetcher.forget([key])
        try:
            assert self.handles[who].delete([key]) == (here or key in self.there)
        except StoreUnavailable:
            assert who == SELF
            assert self.far.down
        else:
            self.there.discard(key)
            self.far.damaged.discard(key)
        if who == SELF:
            self.fetcher.forget([key])
            self.failed.pop(key, None)
            self.seen.discard(key)
            for opened in self.fetches:
                opened.deleted.add(key)
            assert self.place.near is None or not has(self.place.near, key)

    # Reading

    @rule(some=some_keys)
    def check(self, some: list[ChunkKey], changed: frozenset[ChunkKey] = frozenset()) -> None:
        """changed: chunks that another machine stored or deleted since they were prefetched."""
        near = self.place.near
        must = near.contains(some) if near else set()
        if not self.far.down and self.clock.now >= self.well_at:
            must |= {key for key in some if key in self.there - self.far.damaged - changed}
        must -= {key for key, until in self.failed.items() if until > self.clock.now}
        must |= near.contains(some) if near else set()
        may = self.there | self.seen | changed
        with self.fetcher.fetch([ChunkRequest(key, TOKENS) for key in some]) as fetch:
            for key in some:
                assert self.look(fetch, key, may) or key not in must
        self.fetcher.flush()

    def look(self, fetch: Fetch, key: ChunkKey, may: set[ChunkKey], keep: bool = True) -> bool:
        """Whether a chunk is found, and right. keep: it may be here afterwards."""
        assert (key in fetch.views) != (key in fetch.misses)
        if key in fetch.misses:
            miss = fetch.misses[key]
            assert miss.detail or miss.kind == "absent"
            if miss.kind == "corrupt":
                assert key in self.broken
                self.failed[key] = self.clock.now + FAILED_S
            return False
        try:
            assert same(copy_of(fetch.views[key]), content(key))
        except CorruptRecord as error:
            fetch.drop(error)
            return False
        assert key in may
        assert fetch.source[key]
        if keep:
            self.seen.add(key)
        return True

    @precondition(lambda self: not self.far.down)
    @rule(some=some_keys, change=st.sampled_from(["", "put", "delete"]), closed=st.booleans(), who=handles)
    def prefetch(self, some: list[ChunkKey], change: str, closed: bool, who: int) -> None:
        """This machine or another one may change a chunk between the prefetch and the request."""
        hold = self.fetcher.prefetch([ChunkRequest(key, TOKENS) for key in some])
        if closed:
            hold.close()
        if change == "put":
            self.put([(some[0], False, "put")], who)
        elif change == "delete":
            self.delete(some[0], who)
        self.check(some, frozenset(some[:1] if change and who == OTHER else ()))
        hold.close()

    @precondition(lambda self: len(self.fetches) < 3 and not self.far.down)
    @rule()
    def open_fetch(self) -> None:
        stack = ExitStack()
        fetch = stack.enter_context(self.fetcher.fetch([]))
        self.fetches.append(OpenFetch(fetch, stack, self.there | self.seen))

    @precondition(lambda self: self.fetches)
    @rule(n=st.integers(0, 2), key=keys)
    def read_in_fetch(self, n: int, key: ChunkKey) -> None:
        """What it was at any moment since the opening."""
        opened = self.fetches[n % len(self.fetches)]
        opened.may |= self.there | self.seen
        opened.fetch.extend([ChunkRequest(key, TOKENS)])
        self.look(opened.fetch, key, opened.may, key not in opened.deleted)

    @precondition(lambda self: self.fetches)
    @rule()
    def close_fetches(self) -> None:
        for opened in self.fetches:
            opened.stack.close()
        self.fetches = []
        self.fetcher.flush()

    # Faults, processes, time

    @rule(seconds=st.sampled_from([0.3, 1.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: self.place.lasts)
    @rule()
    def reopen(self) -> None:
        self.close()
        self.failed.clear()
        self.open()

    @rule(down=st.booleans(), latency_s=st.sampled_from([0.0, 0.2]), damaged=st.sets(keys, max_size=1))
    def far_changes(self, down: bool, latency_s: float, damaged: set[ChunkKey]) -> None:
        if self.far.down and not down:
            self.well_at = self.clock.now + REST_S
        self.far.down, self.far.latency_s = down, latency_s
        self.far.damaged |= damaged & self.there
        self.broken |= self.far.damaged

    # What always holds

    @invariant()
    def the_local_store_keeps_its_cap_and_the_remote_one_its_chunks(self) -> None:
        self.clock.advance(0.001)
        near = self.place.near
        if near and isinstance(self.store, TieredStore):
            stats, remote = near.stats(), self.store.stats().remote
            assert stats.bytes <= stats.cap_bytes
            assert remote is not None
            assert (remote.waiting_bytes, remote.dropped) == (0, 0)
        assert set(self.handles[OTHER].keys()) == self.there

    def teardown(self) -> None:
        self.close_fetches()
        self.clock.advance(FAILED_S + REST_S)
        self.check(KEYS)
        self.close()
        self.place.close()


@pytest.mark.parametrize(("kind", "units"), [("tiered", 0), ("tiered", 2), ("alone", 2)])
def test_any_history(kind: str, units: int, tmp_path: Path) -> None:
    """units: the chunks that copies have room for."""
    explore(partial(FetchMachine, REMOTE_STORES[kind], units * UNIT), tmp_path)
