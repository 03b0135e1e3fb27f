"""A finished request holds no memory: no kept error nor view keeps its KV cache until the garbage collector runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from blendserve.config import BlendConfig
from blendserve.core import Prompt
from blendserve.models.kv_cache import KVCache
from blendserve.store import ChunkKey, KVStore, LMDBStore, MemoryStore
from blendserve.store.ahead import ReadAhead
from blendserve.store.codecs.base import SLOW
from blendserve.store.kdn.adapt import TEXT, Offer, Situation
from blendserve.store.layered import LayeredStore
from blendserve.store.network.arrival import Arrival
from blendserve.store.view import RecordView
from tests.support.damages import relabelled
from tests.support.peers import BLEND, Service, blender, delivered, last_two
from tests.support.stores import flip, tamper
from tests.support.waiting import eventually

CAP = 2**26
HELD: list[Any] = [KVCache, Arrival, RecordView]
Made = list["weakref.ref[Any]"]


@pytest.fixture
def tracked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Every object of these classes that is made from now on. The collector does not run."""
    found: Made = []

    def note(cls: Any) -> None:
        begin = cls.__init__

        def noted(self: Any, *args: Any, **options: Any) -> None:
            found.append(weakref.ref(self))
            begin(self, *args, **options)

        monkeypatch.setattr(cls, "__init__", noted)

    for cls in HELD:
        note(cls)
    gc.disable()
    yield found
    gc.enable()


def become_free(tracked: Made) -> None:
    assert tracked
    eventually(lambda: not any(ref() for ref in tracked))


def troubles(store: KVStore, prompt: Prompt, blend: BlendConfig = BLEND) -> set[str]:
    return {why.kind for why in blender(store).run(prompt, blend).report.unusable}


@pytest.mark.parametrize("kind", ["", SLOW, "corrupt", "unreachable"])
@pytest.mark.parametrize("method", ["blend", "auto"])
def test_of_a_delivered_chunk(
    service: Service, prompt: Prompt, kind: str, method: str, tracked: Made
) -> None:
    late = last_two(prompt)

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if key in late and kind == "unreachable":
            raise ConnectionError
        part[-1] ^= key in late and kind == "corrupt"

    def rule(offers: Sequence[Offer], now: Situation, going_on: str | None = None) -> str:
        return TEXT if kind == SLOW else "raw"

    with delivered(service, before, rule) as (store, _):
        kinds = troubles(store, prompt, BlendConfig.model_validate({"method": method}))
        become_free(tracked)
    assert kinds == ({kind} if kind else set())


@pytest.mark.parametrize("kind", ["", "corrupt", "codec"])
@pytest.mark.parametrize("place", ["here", "layered", "read ahead"])
def test_of_a_stored_chunk(tmp_path: Path, prompt: Prompt, kind: str, place: str, tracked: Made) -> None:
    """One chunk is damaged, or of a codec that is not installed."""
    with LMDBStore(tmp_path, CAP) as store:
        of = blender(store)
        of.writer.precompute([chunk.ids for chunk in prompt.chunks])
    key = of.key(prompt.chunks[1].ids)
    if kind == "corrupt":
        tamper(tmp_path, flip(b"h" + key, 20))
    elif kind == "codec":
        name = (24, "8s", b"unknown")
        tamper(
            tmp_path,
            lambda txn: txn.put(b"h" + key, relabelled(key, bytes(txn.get(b"h" + key) or b""), name)),
        )
    tracked.clear()
    opened: KVStore = LMDBStore(tmp_path, CAP)
    if place != "here":
        opened = LayeredStore(MemoryStore(CAP), opened) if place == "layered" else ReadAhead(opened, CAP)
    with opened:
        blender(opened).prefetch(prompt, BLEND)
        kinds = troubles(opened, prompt)
        become_free(tracked)
    assert kinds == ({kind} if kind else set())
