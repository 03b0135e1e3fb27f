"""A finished request holds no memory: no kept error nor view keeps its KV cache until the garbage collector runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from blendserve.core import Prompt
from blendserve.fetch import KVFetcher, TieredStore
from blendserve.fetch.incoming import IncomingChunk
from blendserve.fetch.plan import LinkState, PendingChunk, Plan, plan
from blendserve.fetch.source import StoreSource
from blendserve.models.kv_cache import KVCache
from blendserve.store import ChunkKey, ChunkRecord, KVStore, LMDBStore, MemoryStore, read_record
from blendserve.store.codecs.base import SLOW as SLOW_LINK
from blendserve.store.codecs.base import Coding
from blendserve.store.view import RecordView
from tests.support.peers import BLEND, SLOW, Published, blender, delivered, some_key
from tests.support.stores import flip, tamper
from tests.support.waiting import eventually

CAP = 2**26
HELD: list[Any] = [KVCache, IncomingChunk, RecordView]
Made = list["weakref.ref[Any]"]


@pytest.fixture
def tracked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Every object of these classes that is made from now on. The collector does not run."""
    found: Made = []

    for cls in HELD:

        def noted(self: Any, *args: Any, begin: Any = cls.__init__, **options: Any) -> None:
            found.append(weakref.ref(self))
            begin(self, *args, **options)

        monkeypatch.setattr(cls, "__init__", noted)
    gc.disable()
    yield found
    gc.enable()


def become_free(tracked: Made) -> None:
    assert tracked
    eventually(lambda: not any(ref() for ref in tracked))


@pytest.mark.parametrize("kind", ["", SLOW_LINK, "corrupt", "unreachable"])
@pytest.mark.parametrize("method", ["blend", "auto"])
def test_of_a_delivered_chunk(made: Published, prompt: Prompt, kind: str, method: str, tracked: Made) -> None:
    bad = some_key()

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if key == bad and kind == "unreachable" and l > 0:  # and again, when it is resumed
            raise ConnectionError
        part[-1] ^= key == bad and kind == "corrupt"

    def skip(todo: Sequence[PendingChunk], link: LinkState, current: str | None = None) -> Plan:
        return Plan("raw", 0, n_skipped=len(todo)) if kind == SLOW_LINK else plan(todo, link, current)

    with delivered(made, before) as (store, _):
        of = blender(store, fetcher=KVFetcher(store, planner=skip), costs=SLOW)
        kinds = {why["kind"] for why in of.run(prompt, BLEND.with_values(method=method)).report.unusable}
        del of
        become_free(tracked)
    assert kinds == ({kind} if kind else set())


@pytest.mark.parametrize("kind", ["", "corrupt", "codec"])
@pytest.mark.parametrize("place", ["local", "tiered", "remote"])
def test_of_a_stored_chunk(tmp_path: Path, prompt: Prompt, kind: str, place: str, tracked: Made) -> None:
    """One chunk is damaged, or of a codec that is not installed."""
    with LMDBStore(tmp_path, CAP) as store:
        of = blender(store)
        of.writer.precompute([chunk.ids for chunk in prompt.chunks])
    key = of.key(prompt.chunks[1].ids)
    if kind == "corrupt":
        tamper(tmp_path, flip(b"h" + key, 20))
    elif kind == "codec":
        with LMDBStore(tmp_path, CAP) as store:
            record = read_record(store, key)
            assert record
            parts = record.shape, Coding("unknown"), record.segments(), record.token_ids
            store.put(key, ChunkRecord.from_segments(key, *parts))
    tracked.clear()
    opened: KVStore = LMDBStore(tmp_path, CAP)
    if place == "tiered":
        opened = TieredStore(MemoryStore(CAP), opened)
    elif place == "remote":
        opened = TieredStore(MemoryStore(0), StoreSource(opened))
    with opened:
        fetcher = KVFetcher(opened, prefetch_bytes=CAP)
        of = blender(opened, fetcher=fetcher)
        hold = of.prefetch(prompt, BLEND)()
        kinds = {why["kind"] for why in of.run(prompt, BLEND).report.unusable}
        hold.close()
        del hold
        become_free(tracked)
    assert kinds == ({kind} if kind else set())
