"""Any history of puts, deletions, damage, failures, prefetches: a fetch gives what is stored, or says why not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from blendserve.core import ChunkKV
from blendserve.fetch import KVFetcher
from blendserve.fetch.copies import Copies
from blendserve.fetch.fetcher import ChunkRequest
from blendserve.store import KVStore, LayeredStore, LMDBStore, MemoryStore
from tests.support.stores import CAP, UNIT, FaultyStore, cache, chunk, copy_of, key_of, put_kv, same
from tests.support.waiting import ManualClock

N = 4
Event = tuple[str, int]
EVENTS = [
    "put near",
    "put far",
    "put both",
    "delete",
    "damage far",
    "far down",
    "far up",
    "wait",
    "prefetch",
    "fetch",
]


class History:
    """A local store before a faulty remote one, caches, and what each place holds."""

    def __init__(self, folder: Path, caches: Sequence[float], held: bool) -> None:
        self.clock = ManualClock()
        self.near, self.far = LMDBStore(folder, CAP), FaultyStore(MemoryStore(CAP), self.clock)
        self.store = LayeredStore(self.near, self.far, prefetch_bytes=CAP, clock=self.clock)
        copies = Copies([cache(size * UNIT, name=f"cache {n}") for n, size in enumerate(caches)])
        self.fetcher = KVFetcher(self.store, copies=copies, held_bytes=CAP if held else 0)
        self.kept: dict[int, ChunkKV] = {}  # every place that has a chunk has these bytes
        self.prefetched: set[int] = set()  # since the last fetch: absent ones may have been stored since

    def do(self, what: str, n: int) -> None:
        key, kv = key_of(n), self.kept.get(n, chunk(10, seed=n))
        if what.startswith("put"):
            places: list[KVStore] = [self.near] if what != "put far" else []
            places += [self.far] if what != "put near" else []
            if self.far.down and self.far in places:
                return
            self.kept[n] = kv
            for place in places:
                put_kv(place, key, kv)
        elif what == "delete" and not self.far.down:
            self.fetcher.forget([key])
            self.store.delete([key])
            self.kept.pop(n, None)
        elif what == "damage far":
            self.far.damaged.add(key)
        elif what in ("far down", "far up"):
            self.far.down = what == "far down"
        elif what == "wait":
            self.clock.advance(100)
        elif what == "prefetch":
            self.fetcher.prefetch([ChunkRequest(key, 10)]).close()
            self.prefetched.add(n)

    def fetch(self) -> None:
        """Check the bytes of every view, and the reason of every miss."""
        with self.fetcher.fetch([ChunkRequest(key_of(n), 10) for n in range(N)]) as fetch:
            for n in range(N):
                key = key_of(n)
                assert (key in fetch.views) != (key in fetch.misses)
                if key in fetch.views:
                    assert same(copy_of(fetch.views[key]), self.kept[n])
                    assert fetch.source[key]
                    continue
                miss = fetch.misses[key]
                assert miss.detail or miss.kind == "absent"
                if miss.kind == "absent":
                    assert n not in self.kept or n in self.prefetched
        self.prefetched.clear()
        self.store.flush()

    def close(self) -> None:
        self.fetcher.close()
        self.store.close()


@given(
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, N - 1)), max_size=30),
    st.lists(st.sampled_from([0.5, 1.0, 3.0]), max_size=2),
    st.booleans(),
)
def test_a_fetch_gives_what_is_stored_or_says_why_not(
    events: Sequence[Event], caches: Sequence[float], held: bool
) -> None:
    with TemporaryDirectory() as folder:
        history = History(Path(folder), caches, held)
        for what, n in [*events, ("fetch", 0)]:
            history.fetch() if what == "fetch" else history.do(what, n)
        history.close()


def test_a_fetch_that_is_open_makes_no_copy_of_a_deleted_chunk(tmp_path: Path) -> None:
    history = History(tmp_path, [2.0], False)
    history.do("put both", 0)
    with history.fetcher.fetch([]) as fetch:
        history.do("delete", 0)
        fetch.extend([ChunkRequest(key_of(0), 10)])
        for view in fetch.views.values():
            copy_of(view)
    assert history.fetcher.resident() == frozenset()
    history.fetch()
    history.close()


def test_a_store_that_cannot_be_read_is_a_miss_of_every_chunk() -> None:
    store = FaultyStore(MemoryStore(CAP))
    put_kv(store, key_of(0), chunk(10))
    store.down = True
    with KVFetcher(store).fetch([ChunkRequest(key_of(n), 10) for n in range(2)]) as fetch:
        assert {miss.kind for miss in fetch.misses.values()} == {"unreachable"}
        assert not fetch.views
