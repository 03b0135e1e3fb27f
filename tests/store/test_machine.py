"""Any history of puts, reads, leases, faults, damage and other processes, on every kind of store.

A kind of one place must do exactly what the model does. A kind with another machine behind it must give a chunk that is
in reach, may give one that it has seen, and never gives wrong bytes.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from blendserve.core import ChunkKV
from blendserve.errors import StoreUnavailable
from blendserve.store import Reads
from blendserve.store.key import ChunkKey, namespace_tag
from blendserve.store.layered import LayeredStore
from tests.support.damages import BYTES, SWAPPED, Damage
from tests.support.stores import (
    EVERY_KIND,
    KEYS,
    STORES,
    TENANT,
    FaultyStore,
    LookUp,
    Place,
    content,
    has,
    look_up,
    put,
    same,
)
from tests.support.waiting import eventually, is_blocked

SELF, OTHER = 0, 1  # handles: the store under test, and another process's
REST_S = 1.0  # a far store that failed is left alone for it
NOTE_S = 60.0  # uses are written after it
FAILED_S = 10.0  # a damaged chunk of a server is not read again for it

Put = tuple[ChunkKey, int, int, bool, str]  # chunk, tokens, revision, pin, way
EXAMPLES = max(40, settings().max_examples * 2 // 5)
PHASES = tuple(Phase) if EXAMPLES > 40 else (Phase.generate,)  # shrinking a history takes minutes
DAMAGED = st.sampled_from(BYTES) | st.just(SWAPPED)
TENANTS = {key for key in KEYS if key.startswith(namespace_tag(TENANT))}
keys, handles = st.sampled_from(KEYS), st.sampled_from([SELF, SELF, OTHER])
PUTS = st.tuples(
    keys,
    st.integers(0, 25),
    st.integers(0, 1),
    st.sampled_from([False, False, True]),
    st.sampled_from(["put", "put", "put", "another key's", "uncoded", "behind"]),
)


@dataclass
class OpenSnapshot:
    """A snapshot that stays open over steps, and the model when it was opened."""

    snapshot: Reads
    stack: ExitStack
    who: int
    chunks: dict[ChunkKey, ChunkKV]
    since: int  # changes before it
    may: set[ChunkKey]  # chunks of another machine that it may give
    deleted: set[ChunkKey] = field(default_factory=set)  # here, since the opening
    seen: dict[ChunkKey, ChunkKV | None] = field(default_factory=dict)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self, kind: type[Place], folder: Path) -> None:
        super().__init__()
        self.place = kind(folder)
        self.model, self.clock = self.place.model(), self.place.clock
        self.snapshots: list[OpenSnapshot] = []
        self.damaged: dict[ChunkKey, Damage] = {}
        self.ever_damaged = False
        self.doubtful: dict[tuple[int, ChunkKey], float] = {}  # not read again until then
        self.there, self.seen = set[ChunkKey](), set[ChunkKey]()  # on the other machine; here, too
        self.well_at = 0.0  # from when on the other machine is asked
        self.dropped = 0
        self.open()

    def open(self) -> None:
        self.store = self.place.open()
        self.handles = [self.store, self.place.other() if self.place.shared else self.store]
        self.noted = [self.clock.now] * 2
        self.held: list[tuple[ChunkKey, int]] = []  # and the handle

    def close(self) -> None:
        self.close_snapshots()
        for who in (SELF, OTHER):
            self.handles[who].close()
            self.model.write_notes(who)

    def writes(self, who: int) -> None:
        """A handle is about to write, its notes first if they are written with it."""
        if self.model.notes_with_writes:
            self.model.write_notes(who)

    def handle(self, who: int) -> int:
        self.clock.advance(0.001)
        return who if self.place.shared else SELF

    @property
    def far(self) -> FaultyStore:
        assert self.place.far is not None
        return self.place.far

    @property
    def reachable(self) -> bool:
        return not self.far.down and self.clock.now >= self.well_at

    # Writing

    @initialize(some=st.lists(PUTS, max_size=4))
    def fill(self, some: list[Put]) -> None:
        self.put(some, SELF)

    @rule(some=st.lists(PUTS, min_size=1, max_size=4), who=handles)
    def put(self, some: list[Put], who: int) -> None:
        for key, tokens, revision, pin, how in some:
            self.put_one(self.handle(who), key, content(key, tokens, revision), pin or how == "behind", how)

    @precondition(lambda self: self.model.chunks)
    @rule(n=st.integers(0, 5), revisions=st.sampled_from([(0,), (1,), (2, 3)]), who=handles)
    def put_again(self, n: int, revisions: tuple[int, ...], who: int) -> None:
        """Replace, or mend, a chunk that is stored, and may be held in a tier, by one of its size."""
        key = sorted(self.model.chunks)[n % len(self.model.chunks)]
        n_tokens = self.model.chunks[key].n_tokens
        for revision in revisions:
            self.put_one(self.handle(who), key, content(key, n_tokens, revision), False, "put")
            self.read([key], SELF)

    def put_one(self, who: int, key: ChunkKey, kv: ChunkKV, pin: bool, how: str) -> None:
        if self.place.far:
            self.put_far(key, pin, how, who)
            return
        size = self.place.size(kv, how == "uncoded")
        if self.model.notes_with_writes and how == "put" and not self.place.codec.coding.level:
            is_wanted = key in self.model.chunks or self.model.victims(key, size) is not None
            assert self.handles[who].admits(key, size) == is_wanted
        stored = self.model.put(who, key, kv, size, pin)
        assert put(self.handles[who], key, kv, pin, how, self.place) == stored
        if stored:
            self.is_stored(key, who)
        for victim in self.damaged.keys() - self.model.chunks.keys():
            del self.damaged[victim]

    def put_far(self, key: ChunkKey, pin: bool, how: str, who: int) -> None:
        kv, reached = content(key), who == OTHER or not self.far.down
        try:
            stored = put(self.handles[who], key, kv, pin, how, self.place)
        except StoreUnavailable:
            assert not self.place.near
            assert not reached
            return
        self.flush()
        assert stored or not reached
        if who == OTHER:
            self.far.damaged.discard(key)
        elif stored and self.place.near:
            self.seen.add(key)
        if reached:
            self.there.add(key)
            self.is_stored(key, who)
            assert self.handles[OTHER].describe([key])[key].pinned or not pin

    def is_stored(self, key: ChunkKey, who: int) -> None:
        """Storing mends a chunk and ends a lease on it."""
        self.damaged.pop(key, None)
        self.doubtful.pop((who, key), None)
        _, owner = self.model.leases.get(key, (0, None))
        if owner is not None and (self.place.ends_any_lease or owner is self.handles[who]):
            self.model.release(key, owner)

    @rule(key=keys, who=handles)
    def delete(self, key: ChunkKey, who: int) -> None:
        who = self.handle(who)
        if self.place.far:
            self.delete_far(key, who)
            return
        self.writes(who)
        assert self.handles[who].delete([key]) == self.model.delete(key)
        self.damaged.pop(key, None)

    def delete_far(self, key: ChunkKey, who: int) -> None:
        here = who == SELF and self.place.near is not None and has(self.place.near, key)
        try:
            assert self.handles[who].delete([key]) == (here or key in self.there)
        except StoreUnavailable:
            assert who == SELF
            assert self.far.down
        else:
            self.there.discard(key)
            self.far.damaged.discard(key)
        if who == SELF:
            self.seen.discard(key)
            for opened in self.snapshots:
                opened.deleted.add(key)
            assert self.place.near is None or not has(self.place.near, key)

    @precondition(lambda self: not self.place.far)
    @rule(some=st.lists(keys, min_size=1, max_size=3, unique=True), pinned=st.booleans(), who=handles)
    def pin(self, some: list[ChunkKey], pinned: bool, who: int) -> None:
        who, found = self.handle(who), {key for key in some if key in self.model.chunks}
        self.writes(who)
        assert self.handles[who].pin(some, pinned) == len(found)
        self.model.pins = self.model.pins | found if pinned else self.model.pins - found

    # Reading

    @rule(some=st.lists(keys, min_size=1, max_size=3, unique=True), who=handles)
    def read(self, some: list[ChunkKey], who: int) -> None:
        who = self.handle(who)
        if self.place.far:
            self.read_far(some)
            return
        with self.handles[who].reading() as snapshot:
            snapshot.expect(some)
            for key in some:
                self.check(look_up(snapshot, key), self.model.chunks.get(key), key, who)
        self.end_reading(who)

    def check(self, got: LookUp, want: ChunkKV | None, key: ChunkKey, who: int) -> None:
        """One look-up in a place of its own: the chunk as it should be, or damage that is told."""
        self.model.note(who, key, got.found)
        damage = self.damaged.get(key)
        if self.clock.now < self.doubtful.get((who, key), 0.0) and not got.corrupt and got.kv is None:
            return
        if damage and not damage.readable:
            assert got.corrupt
            if not self.place.frozen:
                self.doubtful[who, key] = self.clock.now + FAILED_S
        else:
            assert not got.corrupt
            assert got.kv is None if want is None else same(got.kv, want)

    def end_reading(self, who: int) -> None:
        """Notes are written once a minute."""
        if self.clock.now - self.noted[who] > NOTE_S:
            self.model.write_notes(who)
            self.noted[who] = self.clock.now

    def read_far(self, some: list[ChunkKey], changed: frozenset[ChunkKey] = frozenset()) -> None:
        """changed: chunks that another machine stored or deleted since they were read ahead."""
        near = self.place.near
        must = near.contains(some) if near else set()
        if self.reachable:
            must |= {key for key in some if key in self.there - self.far.damaged - changed}
        may = self.there | self.seen | changed
        try:
            with self.store.reading() as snapshot:
                snapshot.expect(some)
                for key in some:
                    got = look_up(snapshot, key)
                    assert not got.corrupt or key in self.far.damaged | changed
                    assert got.found or key not in must
                    self.check_far(key, got, may)
        except StoreUnavailable:
            assert not near
            assert self.far.down
        self.flush()

    def check_far(
        self, key: ChunkKey, got: LookUp, may: set[ChunkKey], deleted: Collection[ChunkKey] = ()
    ) -> None:
        if got.kv:
            assert key in may
            assert same(got.kv, content(key))
        if got.kv and self.place.near and key not in deleted:
            self.seen.add(key)

    @precondition(lambda self: self.place.far and not self.far.down)
    @rule(
        some=st.lists(keys, min_size=1, max_size=3, unique=True),
        change=st.sampled_from(["", "put", "delete"]),
    )
    def read_ahead(self, some: list[ChunkKey], change: str) -> None:
        """Another machine may change a chunk between reading ahead and the request."""
        self.handle(SELF)
        self.store.prefetch(some)
        if change == "put":
            self.put_far(some[0], False, "put", OTHER)
        elif change == "delete":
            self.delete_far(some[0], OTHER)
        self.read_far(some, frozenset(some[:1] if change else ()))

    @precondition(lambda self: self.place.far and not self.far.down)
    @rule(some=st.lists(keys, min_size=2, max_size=2, unique=True), first=st.booleans())
    def delete_while_reading(self, some: list[ChunkKey], first: bool) -> None:
        """A chunk that is deleted while a request reads it stays deleted."""
        self.handle(SELF)
        with self.store.reading() as snapshot:
            snapshot.expect(some)
            self.check_far(some[0], look_up(snapshot, some[0]), self.there | self.seen)
            if first:
                look_up(snapshot, some[1])
            self.delete_far(some[1], SELF)
            look_up(snapshot, some[1])
        self.flush()
        with self.store.reading() as snapshot:
            assert look_up(snapshot, some[1]).kv is None

    @precondition(lambda self: len(self.snapshots) < 3 and not (self.place.far and self.far.down))
    @rule(who=handles)
    def open_snapshot(self, who: int) -> None:
        who = SELF if self.place.far else self.handle(who)
        stack = ExitStack()
        snapshot = stack.enter_context(self.handles[who].reading())
        chunks, since = dict(self.model.chunks), len(self.model.history)
        self.snapshots.append(OpenSnapshot(snapshot, stack, who, chunks, since, self.there | self.seen))

    @precondition(lambda self: self.snapshots)
    @rule(n=st.integers(0, 2), key=keys)
    def read_in_snapshot(self, n: int, key: ChunkKey) -> None:
        """What it was at the opening, or, on another machine, at any moment since; the same when asked again."""
        self.clock.advance(0.001)
        opened = self.snapshots[n % len(self.snapshots)]
        if self.place.far:
            opened.may |= self.there | self.seen
            self.check_far(key, look_up(opened.snapshot, key), opened.may, opened.deleted)
            return
        if self.place.frozen:
            self.check(look_up(opened.snapshot, key), opened.chunks.get(key), key, opened.who)
            return
        got, again = look_up(opened.snapshot, key), key in opened.seen
        possible = [opened.chunks.get(key), *(kv for k, kv in self.model.history[opened.since :] if k == key)]
        if again:
            possible = [opened.seen[key]]
        else:
            self.model.note(opened.who, key, got.found)
        opened.seen[key] = got.kv
        assert got.kv is None or any(want is not None and same(got.kv, want) for want in possible)
        assert got.kv is not None or None in possible or self.ever_damaged

    @precondition(lambda self: self.snapshots)
    @rule()
    def close_snapshots(self) -> None:
        for opened in self.snapshots:
            opened.stack.close()
            self.end_reading(opened.who)
        self.snapshots = []
        self.flush()

    # Leases

    @precondition(lambda self: self.place.leases)
    @rule(key=keys, seconds=st.sampled_from([0.5, 30.0, 600.0]), who=handles)
    def lease(self, key: ChunkKey, seconds: float, who: int) -> None:
        """One handle gets it: until it is released, the chunk is stored, or its time is over."""
        who = self.handle(who)
        far = self.place.far is not None and who == SELF
        if far and not self.far.down and not self.reachable:
            self.clock.advance(REST_S)
        if far and not self.reachable:
            if self.place.near:
                assert self.store.lease([key], seconds)  # others cannot be asked
            return
        seconds = seconds if self.place.leases_end_by_clock else 600.0
        self.writes(who)
        granted = self.handles[who].lease([key], seconds)
        assert granted == ({key} if self.model.lease(key, seconds, self.handles[who]) else set())
        self.held += [(key, who)] if granted else []

    @precondition(lambda self: self.held and not (self.place.far and self.far.down))
    @rule(n=st.integers(0, 5))
    def release(self, n: int) -> None:
        self.clock.advance(0.001)
        key, who = self.held[n % len(self.held)]
        if self.model.leases.get(key, (0, None))[1] is self.handles[who]:
            self.writes(who)
        for _ in range(2):
            self.handles[who].release([key])
        self.model.release(key, self.handles[who])
        self.flush()

    # Faults, processes, time

    @rule(seconds=st.sampled_from([0.3, 1.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(min(seconds, self.place.longest_pause_s))

    @precondition(lambda self: self.place.reopens)
    @rule()
    def reopen(self) -> None:
        self.close()
        self.doubtful.clear()
        self.open()

    @precondition(lambda self: self.place.damageable)
    @rule(key=keys, data=st.data())
    def damage(self, key: ChunkKey, data: st.DataObject) -> None:
        """Another program changes the records of a chunk."""
        if key in self.damaged or key not in self.model.chunks or not self.model.chunks[key].n_tokens:
            return
        damage = data.draw(DAMAGED | st.sampled_from(self.place.damages), "damage")
        self.close()
        self.place.damage(key, damage)
        self.damaged[key], self.ever_damaged = damage, True
        self.doubtful.clear()
        self.open()
        self.verify()

    @precondition(lambda self: self.place.far)
    @rule(down=st.booleans(), latency_s=st.sampled_from([0.0, 0.2]), damaged=st.sets(keys, max_size=1))
    def far_changes(self, down: bool, latency_s: float, damaged: set[ChunkKey]) -> None:
        if self.far.down and not down:
            self.well_at = self.clock.now + REST_S
        self.far.down, self.far.latency_s = down, latency_s
        self.far.damaged |= damaged & self.there

    @precondition(lambda self: self.place.far and self.place.near and not self.far.down)
    @rule(some=st.permutations(KEYS), pin=st.booleans())
    def far_is_slow(self, some: list[ChunkKey], pin: bool) -> None:
        """A full write queue drops what a request leaves; a pinned chunk waits for room."""
        if self.place.write != "back":  # type: ignore[attr-defined]
            return
        self.handle(SELF)
        self.flush()
        self.far.gate.clear()
        for key in some[:2]:
            put(self.store, key, content(key), False, "put", self.place)
        arguments = self.store, some[2], content(some[2]), pin, "put", self.place
        last = threading.Thread(target=put, args=arguments)
        last.start()
        eventually(lambda: is_blocked(last) or not last.is_alive())
        self.far.gate.set()
        last.join()
        self.flush()
        self.dropped += not pin
        self.seen |= set(some[:3])
        for key in some[: 3 if pin else 2]:
            self.there.add(key)
            self.is_stored(key, SELF)
            assert has(self.handles[OTHER], key)
        if pin:
            assert self.handles[OTHER].describe(some[2:3])[some[2]].pinned

    def flush(self) -> None:
        if isinstance(self.store, LayeredStore):
            self.store.flush()

    # What always holds

    @precondition(lambda self: not self.place.far)
    @invariant()
    def statistics_equal_the_model(self) -> None:
        """Of the whole store, and of a tenant, who sees its own chunks and look-ups alone."""
        model = self.model
        for namespace, own in ((None, set(KEYS)), (TENANT, TENANTS)):
            stats, chunks = self.store.stats(namespace), model.chunks.keys() & own
            assert set(self.store.keys(namespace)) == chunks
            assert (stats.chunks, stats.pins) == (len(chunks), len(model.pins & own))
            assert stats.bytes == sum(model.sizes[key] for key in chunks)
            assert stats.tokens == sum(model.chunks[key].n_tokens for key in chunks)
            assert stats.raw_bytes == sum(model.chunks[key].n_bytes for key in chunks)
            assert stats.evictions == (None if namespace else model.evictions)
            assert not (namespace and stats.tiers)
            if not self.ever_damaged:
                for counter in ("hits", "misses"):
                    assert getattr(stats, counter) == model.counted(SELF, counter, own)
        found = {key: (x.n_tokens, x.n_bytes, x.pinned) for key, x in self.store.describe(KEYS).items()}
        expected = {
            key: (kv.n_tokens, model.sizes[key], key in model.pins) for key, kv in model.chunks.items()
        }
        for key in self.damaged:  # told or left out, by what is damaged
            found.pop(key, None)
            del expected[key]
        assert found == expected

    @precondition(lambda self: self.place.far)
    @invariant()
    def own_store_keeps_its_cap(self) -> None:
        near = self.place.near
        if near and isinstance(self.store, LayeredStore):
            stats, remote = near.stats(), self.store.stats().remote
            assert stats.bytes <= stats.cap_bytes
            assert remote is not None
            assert (remote.waiting_bytes, remote.dropped) == (0, self.dropped)
        assert set(self.handles[OTHER].keys()) == self.there

    @precondition(lambda self: not self.place.far)
    @rule()
    def verify(self) -> None:
        report = self.store.verify()
        assert [key for key, _ in report.bad] == sorted(key.hex() for key in self.damaged)
        assert report.good == len(self.model.chunks) - len(self.damaged)

    def teardown(self) -> None:
        self.close_snapshots()
        self.clock.advance(FAILED_S + REST_S)
        if self.place.far:
            self.read_far(KEYS)
        else:
            self.verify()
            self.read(KEYS, SELF)
        self.close()
        self.place.close()


@pytest.mark.usefixtures("toy_codec")
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_any_history(kind: str, tmp_path: Path) -> None:
    made: list[Path] = []

    def machine() -> StoreMachine:
        if made:
            shutil.rmtree(made[-1], ignore_errors=True)
        made.append(tmp_path / str(len(made)))
        made[-1].mkdir()
        return StoreMachine(STORES[kind], made[-1])

    options = settings(max_examples=EXAMPLES, stateful_step_count=30, phases=PHASES)
    run_machine(machine, settings=options)  # type: ignore[arg-type]
