"""Any history of puts, reads, leases, damage and other processes: every kind of store does exactly what the model does.

tests/fetch/test_machine.py has histories of a store with another machine's behind it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from blendserve.errors import CorruptRecord
from blendserve.kv import ChunkKV
from blendserve.store import Snapshot
from blendserve.store.key import ChunkKey, namespace_tag
from blendserve.store.view import decode
from tests.support.damages import DAMAGES, Damage
from tests.support.places import EVERY_KIND, KEYS, STORES, TENANT, Place, StoreModel, content, explore, put
from tests.support.stores import same

SELF, OTHER = 0, 1  # handles: the store under test, and another process's
NOTE_S = 60.0  # uses are written after it

Put = tuple[ChunkKey, int, int, bool, str]  # chunk, tokens, revision, pin, way
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

    snapshot: Snapshot
    stack: ExitStack
    who: int
    chunks: dict[ChunkKey, ChunkKV]
    since: int  # changes before it


class StoreMachine(RuleBasedStateMachine):
    def __init__(self, kind: type[Place], folder: Path) -> None:
        super().__init__()
        self.place = kind(folder)
        self.clock = self.place.clock
        self.model = StoreModel(self.place.cap, self.clock, self.place.server)
        self.snapshots: list[OpenSnapshot] = []
        self.damaged: dict[ChunkKey, Damage] = {}
        self.ever_damaged = False
        self.open()

    def open(self) -> None:
        self.store = self.place.open()
        self.handles = [self.store, self.place.other() if self.place.lasts else self.store]
        self.noted = [self.clock.now] * 2
        self.held: list[tuple[ChunkKey, int]] = []  # and the handle

    def close(self) -> None:
        self.close_snapshots()
        for who in (SELF, OTHER):
            self.handles[who].close()
            self.model.write_notes(who)

    def writes(self, who: int) -> None:
        """A handle is about to write, its notes first if they are written with it."""
        if not self.model.server:
            self.model.write_notes(who)

    def handle(self, who: int) -> int:
        self.clock.advance(0.001)
        return who if self.place.lasts else SELF

    # Writing

    @rule(some=st.lists(PUTS, min_size=1, max_size=4), who=handles)
    def put(self, some: list[Put], who: int) -> None:
        for key, tokens, revision, is_pinned, how in some:
            who, kv, pin = self.handle(who), content(key, tokens, revision), is_pinned or how == "behind"
            size = self.place.size(kv, how == "uncoded")
            if how == "put":
                _, fits = self.model.victims(key, size)
                assert self.handles[who].admits(key, size) == (key in self.model.chunks or fits)
            stored = self.model.put(who, key, kv, size, pin)
            assert put(self.handles[who], key, kv, pin, how, self.place) == stored
            if stored:  # it mends the chunk and ends the lease on it
                self.damaged.pop(key, None)
                self.model.leases.pop(key, None)
            for victim in self.damaged.keys() - self.model.chunks.keys():
                del self.damaged[victim]

    @rule(key=keys, who=handles)
    def delete(self, key: ChunkKey, who: int) -> None:
        who = self.handle(who)
        self.writes(who)
        assert self.handles[who].delete([key]) == self.model.delete(key)
        self.damaged.pop(key, None)

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
        store = self.handles[who]
        with store.snapshot() as snapshot:
            for key in some:
                self.check(self.look_up(snapshot, key, who), self.model.chunks.get(key), key)
        self.end_reading(who)

    def end_reading(self, who: int) -> None:
        """Notes are written once a minute."""
        if self.clock.now - self.noted[who] > NOTE_S:
            self.model.write_notes(who)
            self.noted[who] = self.clock.now

    def look_up(self, snapshot: Snapshot, key: ChunkKey, who: int) -> ChunkKV | CorruptRecord | None:
        """Read a whole chunk. It counts as a use unless its header is damaged or absent."""
        record = None
        try:
            record = snapshot.get(key)
            return None if record is None else decode(record, self.handles[who].blobs.get)
        except CorruptRecord as error:
            return error
        finally:
            self.model.note(who, key, record is not None)

    def check(self, got: ChunkKV | CorruptRecord | None, want: ChunkKV | None, key: ChunkKey) -> None:
        """The chunk as it should be, or damage that is told."""
        damage = self.damaged.get(key)
        if damage and not damage.readable:
            assert isinstance(got, CorruptRecord)
        else:
            assert got is None if want is None else isinstance(got, ChunkKV) and same(got, want)

    @precondition(lambda self: len(self.snapshots) < 3)
    @rule(who=handles)
    def open_snapshot(self, who: int) -> None:
        who, stack = self.handle(who), ExitStack()
        snapshot = stack.enter_context(self.handles[who].snapshot())
        chunks, since = dict(self.model.chunks), len(self.model.history)
        self.snapshots.append(OpenSnapshot(snapshot, stack, who, chunks, since))

    @precondition(lambda self: self.snapshots)
    @rule(n=st.integers(0, 2), key=keys)
    def read_in_snapshot(self, n: int, key: ChunkKey) -> None:
        """What it was at the opening, or, on a server, at any moment since."""
        self.clock.advance(0.001)
        opened = self.snapshots[n % len(self.snapshots)]
        got = self.look_up(opened.snapshot, key, opened.who)
        if not self.place.server:
            self.check(got, opened.chunks.get(key), key)
            return
        possible = [opened.chunks.get(key), *(kv for k, kv in self.model.history[opened.since :] if k == key)]
        kv = got if isinstance(got, ChunkKV) else None
        assert kv is None or any(want is not None and same(kv, want) for want in possible)
        assert kv is not None or None in possible or self.ever_damaged

    @precondition(lambda self: self.snapshots)
    @rule()
    def close_snapshots(self) -> None:
        for opened in self.snapshots:
            opened.stack.close()
            self.end_reading(opened.who)
        self.snapshots = []

    # Leases

    @rule(key=keys, seconds=st.sampled_from([0.5, 30.0, 600.0]), who=handles)
    def lease(self, key: ChunkKey, seconds: float, who: int) -> None:
        """One handle gets it: until it is released, the chunk is stored, or its time is over."""
        who = self.handle(who)
        seconds = 600.0 if self.place.server else seconds
        self.writes(who)
        granted = self.handles[who].lease([key], seconds)
        assert granted == ({key} if self.model.lease(key, seconds, self.handles[who]) else set())
        self.held += [(key, who)] if granted else []

    @precondition(lambda self: self.held)
    @rule(n=st.integers(0, 5))
    def release(self, n: int) -> None:
        self.clock.advance(0.001)
        key, who = self.held[n % len(self.held)]
        if self.model.leases.get(key, (0, None))[1] is self.handles[who]:
            self.writes(who)
        for _ in range(2):
            self.handles[who].release([key])
        self.model.release(key, self.handles[who])

    # Faults, processes, time

    @rule(seconds=st.sampled_from([0.3, 1.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(min(seconds, self.place.longest_pause_s))

    @precondition(lambda self: self.place.lasts)
    @rule()
    def reopen(self) -> None:
        self.close()
        self.open()

    @precondition(lambda self: self.place.lasts)
    @rule(key=keys, n=st.integers(0, 99))
    def damage(self, key: ChunkKey, n: int) -> None:
        """Another program changes the records of a chunk: in another way after every change, as drawn ways repeat."""
        if key in self.damaged or key not in self.model.chunks or not self.model.chunks[key].n_tokens:
            return
        # a layer too many stays there
        ways = [one for one in DAMAGES if not (one.readable and self.place.server)]
        damage = ways[(7 * len(self.model.history) + n) % len(ways)]
        self.close()
        self.place.damage(key, damage)
        self.damaged[key], self.ever_damaged = damage, True
        self.open()
        self.verify()
        self.read([key], SELF)

    # What always holds

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

    @rule()
    def verify(self) -> None:
        report = self.store.verify()
        assert [key for key, _ in report.bad] == sorted(key.hex() for key in self.damaged)
        assert report.good == len(self.model.chunks) - len(self.damaged)

    def teardown(self) -> None:
        self.close_snapshots()
        self.verify()
        self.read(KEYS, SELF)
        self.close()
        self.place.close()


@pytest.mark.usefixtures("toy_codec")
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_any_history(kind: str, tmp_path: Path) -> None:
    explore(partial(StoreMachine, STORES[kind]), tmp_path)
