"""Unless the link is slow all chunks come over one connection, in step with the prefill; what has to have happened before
is an event, never a time."""

from __future__ import annotations

import socket
import threading
from contextlib import nullcontext

import pytest
import torch

from blendserve.bench.link import Link, Weather
from blendserve.core import Prompt
from blendserve.delivery.catalogue import Catalogue
from blendserve.store import ChunkKey, KVStore
from blendserve.store.base import REMOTE, Coming, TimeSaved
from blendserve.store.kdn.adapt import quickest
from blendserve.store.kdn.client import Client
from blendserve.store.kdn.collection import MOST_IN_STEP, Collection, Entry
from blendserve.store.kdn.download import Wanted, Watch, download, download_in_step
from blendserve.store.kdn.store import KdnStore
from tests.delivery.helpers import LEVELS, NAME, PATIENT_S, Known, Liar, Service, settings
from tests.delivery.paced import (
    BLEND,
    HEADER,
    LAYERS,
    Steps,
    blender,
    delivered,
    late_key,
    whole,
)

SAVED = TimeSaved(1e6)  # so long that no silence is worth noticing


class Asked:
    """Chunks that were asked for so far, and the most of which not all had gone."""

    def __init__(self, n: int) -> None:
        """n: at a time, of which it is told."""
        self._going, self.most, self._n = set[ChunkKey](), 0, n
        self._lock, self.all = threading.Lock(), threading.Event()

    def __call__(self, key: ChunkKey, l: int) -> None:
        with self._lock:
            (self._going.discard if l == LAYERS - 1 else self._going.add)(key)
            self.most = max(self.most, len(self._going))
        if self.most >= self._n:
            self.all.set()


def test_all_chunks_come_in_step_with_the_prefill(service: Service, prompt: Prompt) -> None:
    """No layer of any chunk goes before all are under way, and none before the prefill wants it."""
    steps, asked, in_time = Steps(), Asked(len(prompt.chunks) + 1), []

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        asked(key, l)
        if l >= 0:
            in_time.append(asked.all.wait(PATIENT_S / 2) and steps.reached(l))

    with delivered(service, before, quickest, saved=SAVED) as (store, paced):
        weighed(store, 1.0)
        done = blender(store, steps).run(prompt, BLEND)
    assert in_time == [True] * (len(prompt.chunks) + 1) * LAYERS
    assert set(paced.asked.values()) == {1}
    assert done.report.tiers == {REMOTE: len(prompt.chunks)}
    assert torch.equal(done.prefilled.logits, whole(service, prompt, rule=quickest))


def test_over_a_slow_link_two_are_under_way(service: Service, prompt: Prompt) -> None:
    asked = Asked(2)

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        asked(key, l)
        assert l == HEADER or asked.all.wait(PATIENT_S / 2)

    with delivered(service, before, quickest, saved=SAVED) as (store, _):
        weighed(store, 5.0)
        done = blender(store).run(prompt, BLEND)
    assert asked.most == 2
    assert done.report.tiers == {REMOTE: len(prompt.chunks)}


def test_what_is_cut_goes_on_where_that_was(service: Service, prompt: Prompt) -> None:
    """Every connection lets through less than all of them."""
    with (
        Link(service.port) as link,
        KdnStore(settings(f"http://127.0.0.1:{link.port}"), quickest, saved=SAVED) as store,
    ):
        list(store.keys())
        weighed(store, 1.0)
        before, whole_bytes = link.down.n_bytes, in_all(store, prompt)
        link.weather = Weather(cut_after=whole_bytes * 2 // 3)
        done = blender(store).run(prompt, BLEND)
        assert whole_bytes < link.down.n_bytes - before < 1.5 * whole_bytes
    assert done.report.tiers == {REMOTE: len(prompt.chunks)}
    assert torch.equal(done.prefilled.logits, whole(service, prompt, rule=quickest))


@pytest.mark.parametrize("trouble", ["damaged", "cut"])
@pytest.mark.parametrize("at", [HEADER, 0, LAYERS - 1])
def test_what_does_not_come_right_is_asked_for_again(
    service: Service, prompt: Prompt, trouble: str, at: int
) -> None:
    """In the middle of a prefill, too, which begins anew. A cut connection is resumed once, and that is cut as well."""
    late, troubled = late_key(prompt), list[int]()

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if key == late and l == at and len(troubled) < (2 if trouble == "cut" else 1):
            troubled.append(l)
            if trouble == "cut":
                raise ConnectionError
            part[-1] ^= 1

    with delivered(service, before, quickest, saved=SAVED) as (store, paced):
        weighed(store, 1.0)
        done = blender(store).run(prompt, BLEND)
    assert max(paced.asked.values()) > 1
    assert done.report.tiers == {REMOTE: len(prompt.chunks)}
    assert torch.equal(done.prefilled.logits, whole(service, prompt, rule=quickest))


def test_they_are_what_each_is_alone_and_none_where_one_is_to_come_otherwise(
    service: Service, made: tuple[KVStore, Collection]
) -> None:
    entries = Catalogue(made[0]).directory(made[1])
    watch, client = Watch(nullcontext, lambda n: None, PATIENT_S), Client(settings(service.url))
    looks = list[str]()

    def wanted(key: ChunkKey, entry: Entry, n: int, then: str = "") -> Wanted:
        def next_word(word: str, left: int) -> str:
            looks.append(word)
            return then or word

        return Wanted(key, LEVELS[n % 2], entry.bodies[n % 2], next_word)

    several = [wanted(key, entry, n) for n, (key, entry) in enumerate(entries.items())]
    together = download_in_step(client, several, watch)
    alone = [download(client, one, {one.word: one.n_bytes}, watch) for one in several]
    assert together == alone
    assert {one.word for one in several} == set(LEVELS)
    looks.clear()
    several[1] = wanted(several[1].key, entries[several[1].key], 1, "raw")
    assert download_in_step(client, several, watch) is None
    assert len(looks) == len(several)  # behind the first layer


@pytest.mark.parametrize("times", [1.0, 5.0])
def test_none_is_withdrawn_of_a_call_that_is_for_all(service: Service, prompt: Prompt, times: float) -> None:
    """Even one that has not begun, as others' have all connections."""
    withdrawn = list[ChunkKey | None]()
    with KdnStore(settings(service.url), quickest, workers=1, saved=SAVED) as store:
        keys = list(store.keys())
        weighed(store, times)

        def meanwhile(coming: Coming) -> None:
            withdrawn.append(coming.withdraw(dict.fromkeys(keys, 0.0)))
            go_on.set()

        go_on = threading.Event()
        store._connection.begin(lambda _: go_on.wait(PATIENT_S))
        with store.reading() as snapshot:
            snapshot.expect(keys, meanwhile)
            came = [key for key in keys if snapshot.get(key)]
    assert withdrawn == [None if times == 1.0 else keys[-1]]
    assert times != 1.0 or came == keys


def test_a_service_that_does_not_do_it_is_asked_for_each(service: Service, prompt: Prompt) -> None:
    def speak(line: socket.socket, path: str) -> None:
        reply = service.http.get(service.url + path.replace("/layers", "/none"))
        length = len(reply.content)
        line.sendall(f"HTTP/1.1 {reply.status_code} x\r\nContent-Length: {length}\r\n\r\n".encode())
        line.sendall(reply.content)

    with Liar(speak) as peer, KdnStore(settings(peer.url), quickest, saved=SAVED) as store:
        list(store.keys())
        weighed(store, 1.0)
        done = blender(store).run(prompt, BLEND)
    assert sum("/layers" in asked for asked in peer.requests) == 1
    assert done.report.tiers == {REMOTE: len(prompt.chunks)}


@pytest.mark.parametrize(("n", "status"), [(0, 404), (MOST_IN_STEP, 200), (MOST_IN_STEP + 1, 400)])
def test_a_call_is_for_some_chunks(service: Service, n: int, status: int) -> None:
    key = service.http.get(f"/collections/{NAME}/directory").content[:28].hex()
    chunks = ",".join([f"{key}:raw"] * n)
    assert service.http.get(f"/collections/{NAME}/layers?chunks={chunks}").status_code == status


def weighed(store: KdnStore, times: float) -> None:
    """All chunks take so many times as long to come as one takes to be computed, and none is worth that."""
    entries = store._known[1].values() if store._known else []
    n_bytes, tokens = sum(e.bodies[-1] for e in entries), max(e.n_tokens for e in entries)
    store._pace = Known(n_bytes / (times * tokens * SAVED.per_token))


def in_all(store: KdnStore, prompt: Prompt) -> int:
    """Bytes of the prompt's chunks and its prefix at the smallest level."""
    assert store._known
    of = blender(store)
    keys = {of.key(prompt.prefix, ()), *(of.key(chunk.ids) for chunk in prompt.chunks)}
    return sum(store._known[1][key].bodies[-1] for key in keys)
