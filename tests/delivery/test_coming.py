"""A prefill uses layers while they come. A peer sends each when a test lets it: events order everything, never times."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from blendserve.blend.blender import Blender
from blendserve.config import BlendConfig, StoreConfig, changed
from blendserve.core import Prompt
from blendserve.errors import ChunkLost
from blendserve.fetch import KVFetcher
from blendserve.fetch.copies import open_copies
from blendserve.fetch.incoming import ChunkRequest, IncomingChunk
from blendserve.fetch.kdn.manifest import Collection
from blendserve.fetch.plan import Candidate, LinkState, Plan
from blendserve.fetch.transfer import TransferOptions
from blendserve.kdn.catalogue import Catalogue
from blendserve.store import ChunkKey, KVStore, MemoryStore
from blendserve.store.base import REMOTE
from blendserve.store.bounded import Deadline
from tests.support import peers
from tests.support.engines import toy_reader as reader
from tests.support.peers import LAYERS, PATIENT_S, Service, Steps, blender, check, delivered, last_two
from tests.support.waiting import ManualClock, eventually

AUTO = BlendConfig(method="auto")
Published = tuple[KVStore, Collection]


@pytest.fixture(scope="module")
def late(prompt: Prompt) -> ChunkKey:
    """The last chunk."""
    return last_two(prompt)[1]


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> set[ChunkKey]:
    """Every chunk that is here whole."""
    found: set[ChunkKey] = set()
    add = IncomingChunk.add

    def noted(self: IncomingChunk, segment: Any) -> None:
        add(self, segment)
        found.update([self.key] * self.is_whole)

    monkeypatch.setattr(IncomingChunk, "add", noted)
    return found


@pytest.mark.parametrize("policy", ["query", "deviation"])
def test_a_prefill_reaches_a_layer_before_the_peer_sends_it(
    service: Service, prompt: Prompt, policy: Any
) -> None:
    blend, late, steps, in_time = BlendConfig(method="blend", policy=policy), last_two(prompt), Steps(), []

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if key in late and l >= 0:
            in_time.append(steps.reached(l))

    with delivered(service, before) as (store, paced):
        of = blender(store, steps)
        done = of.run(prompt, blend)
        remote = of.fetcher.stats().remote
        assert remote
        assert remote.hits == len(prompt.chunks)
    assert in_time == [True] * 2 * LAYERS
    check(done, prompt, blend)
    assert (done.report.tiers, done.report.unusable) == ({REMOTE: len(prompt.chunks)}, ())
    assert set(paced.asked.values()) == {1}


@pytest.mark.parametrize("trouble", ["cut", "damaged", "level", "deadline"])
def test_a_chunk_that_fails_in_the_middle_of_a_prefill_costs_no_other(
    service: Service,
    prompt: Prompt,
    late: ChunkKey,
    trouble: str,
    arrived: set[ChunkKey],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layer 0 of the last chunk was used, and all other chunks are here: none of them is fetched again."""
    n, steps = len(prompt.chunks), Steps()
    troubled, over = threading.Event(), threading.Event()
    left: Any = Deadline.left
    if trouble == "deadline":
        monkeypatch.setattr(
            Deadline, "left", property(lambda self: 0.0 if troubled.is_set() else left.fget(self))
        )

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if key != late or (l < 1 and not troubled.is_set()):
            return
        if trouble == "deadline":
            over.wait()
        elif not troubled.is_set():
            assert steps.reached(1)
            eventually(lambda: len(arrived) == n - 1)
            troubled.set()
        if trouble == "cut":
            raise ConnectionError
        part[-1] ^= trouble == "damaged" and l == 1

    def before_layer(l: int) -> None:
        if trouble == "deadline" and not troubled.is_set():
            eventually(lambda: len(arrived) == n - 1)
            troubled.set()
        steps(l)

    def choose(todo: Sequence[Candidate], link: LinkState, current: str | None = None) -> Plan:
        return Plan("int8" if trouble == "level" and troubled.is_set() else "raw", len(todo))

    with delivered(service, before, {"level": "auto"}) as (store, paced):
        done = blender(store, before_layer, TransferOptions(plan=choose)).run(prompt, peers.BLEND)
        over.set()
        came = n - (trouble != "level")
    assert troubled.is_set()
    assert {times for key, times in paced.asked.items() if key != late} == {1}
    check(done, prompt, late="int8" if trouble == "level" else "")
    assert done.report.tiers == {REMOTE: came}
    kinds = {"damaged": ["corrupt"], "level": []}.get(trouble, ["unreachable"])
    assert [why.kind for why in done.report.unusable] == kinds
    assert (done.report.chunks_corrupt, len(done.missing)) == (trouble == "damaged", n - came)


def test_a_cache_keeps_no_more_than_what_came(service: Service, prompt: Prompt, late: ChunkKey) -> None:
    """Request 1 loses the last chunk in its middle, request 2 gets it, request 3 finds everything in memory."""
    steps, again, clock = Steps(), threading.Event(), ManualClock()

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if key == late and l == 2 and not again.is_set():
            assert steps.reached(2)
            part[0] ^= 1

    with delivered(service, before, clock=clock) as (inner, _):
        copies = open_copies(StoreConfig(memory_bytes=2**28), reader().adapter.device)
        of = blender(inner, steps, fetcher=KVFetcher(inner, copies=copies))
        assert of.run(prompt, peers.BLEND).report.chunks_corrupt == 1
        again.set()
        clock.advance(60)  # after a failure, a chunk is not asked for at once
        n = len(prompt.chunks)
        for tiers in ({REMOTE: 1, "memory": n - 1}, {"memory": n}):
            done = of.run(prompt, peers.BLEND)
            check(done, prompt)
            assert done.report.tiers == tiers


def requests(prompt: Prompt, *keys: ChunkKey) -> list[ChunkRequest]:
    of = blender(MemoryStore(1))
    sizes = {of.key(chunk.ids): len(chunk) for chunk in prompt.chunks}
    return [ChunkRequest(key, sizes[key]) for key in keys]


@pytest.mark.parametrize("how", ["the fetch ends", "another chunk is lost"])
def test_a_thread_that_waits_for_a_layer_is_released_when(
    service: Service, prompt: Prompt, late: ChunkKey, how: str
) -> None:
    first = blender(MemoryStore(1)).key(prompt.chunks[0].ids)
    cut, over = threading.Event(), threading.Event()

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if l == 2:
            (over if key == late else cut).wait()
            part[0] ^= key == first

    with delivered(service, before) as (store, _), ThreadPoolExecutor(1) as pool:
        with KVFetcher(store).fetch(requests(prompt, late, first)) as fetch:
            view, other = fetch.views[late], fetch.views[first]
            view.layer(1)
            waits = pool.submit(view.layer, 2)
            if how != "the fetch ends":
                cut.set()
                with pytest.raises(ChunkLost) as lost:
                    other.layer(LAYERS - 1)
                with pytest.raises(ChunkLost):
                    waits.result(PATIENT_S / 2)
                over.set()
                fetch.drop(lost.value)
                assert fetch.misses[first].kind == "corrupt"
                assert fetch.views[late].layer(LAYERS - 1)
        if how == "the fetch ends":
            with pytest.raises(ChunkLost):
                waits.result(PATIENT_S / 2)
        over.set()
        cut.set()


def test_two_threads_read_the_same_layers(service: Service, prompt: Prompt, late: ChunkKey) -> None:
    here, both = peers.local(prompt), threading.Barrier(2)
    keys = [late, here.key(prompt.chunks[0].ids)]

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if l >= 0:
            both.wait(PATIENT_S)  # in turns: both chunks are in transit

    asked = requests(prompt, *keys)
    with (
        delivered(service, before) as (store, _),
        KVFetcher(here.store).fetch(asked) as near,
        ThreadPoolExecutor(2) as pool,
        KVFetcher(store).fetch(asked) as fetch,
    ):
        pairs = [(fetch.views[key], near.views[key]) for key in keys]

        def is_same(_: int) -> bool:
            layers = [(coming.layer(l), stored.layer(l)) for l in range(LAYERS) for coming, stored in pairs]
            return all(torch.equal(a, b) for one, other in layers for a, b in zip(one, other, strict=True))

        assert list(pool.map(is_same, range(2))) == [True, True]


# All chunks interleaved, over one connection


class Going:
    """Chunks that were begun and not sent whole: the most at one time. `all` is set once n are begun."""

    def __init__(self, n: int) -> None:
        self._going, self.most, self._n = set[ChunkKey](), 0, n
        self._lock, self.all = threading.Lock(), threading.Event()

    def __call__(self, key: ChunkKey, l: int) -> None:
        with self._lock:
            (self._going.discard if l == LAYERS - 1 else self._going.add)(key)
            self.most = max(self.most, len(self._going))
        if self.most >= self._n:
            self.all.set()


def link(made: Published, times: float = 1.0) -> peers.Known:
    """A link over which all chunks need `times` the seconds that computing the longest of them needs."""
    entries = Catalogue(made[0]).directory(made[1]).values()
    n_bytes, tokens = sum(e.bodies[-1] for e in entries), max(e.n_tokens for e in entries)
    return peers.Known(n_bytes / (times * tokens * 100.0))


def auto(store: KVStore, steps: Callable[[int], None] = lambda l: None, compute: bool = True) -> Blender:
    return blender(store, steps, TransferOptions(compute=compute), costs=peers.SLOW)


@pytest.mark.parametrize(("times", "together"), [(1.0, True), (5.0, False)])
def test_over_a_fast_link_all_chunks_come_interleaved_with_the_prefill_and_over_a_slow_one_two_at_a_time(
    service: Service, made: Published, prompt: Prompt, times: float, together: bool
) -> None:
    n = len(prompt.chunks) if together else 2
    steps, going, in_time = Steps(), Going(n), list[bool]()

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        going(key, l)
        if l >= 0:
            in_time.append(going.all.wait(PATIENT_S / 2) and (not together or steps.reached(l)))

    blend = AUTO if together else peers.BLEND
    with delivered(service, before, {"level": peers.LEVELS[1]}, link=link(made, times)) as (store, paced):
        done = auto(store, steps).run(prompt, blend)
    assert all(in_time)
    assert (going.most, set(paced.asked.values())) == (n, {1})
    assert done.report.tiers == {REMOTE: len(prompt.chunks)}
    check(done, prompt, changed(blend, method=done.report.method), level="int8")


@pytest.mark.parametrize("trouble", ["damaged", "cut"])
@pytest.mark.parametrize("at", [peers.HEADER, 0, LAYERS - 1])
def test_an_interleaved_chunk_that_fails_is_asked_for_again(
    service: Service, made: Published, prompt: Prompt, late: ChunkKey, trouble: str, at: int
) -> None:
    """In the middle of a prefill, too, which starts anew. A cut connection is resumed once; that is cut as well."""
    troubled = list[int]()

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if key == late and l == at and len(troubled) < (2 if trouble == "cut" else 1):
            troubled.append(l)
            if trouble == "cut":
                raise ConnectionError
            part[-1] ^= 1

    with delivered(service, before, {"level": "auto"}, link=link(made)) as (store, paced):
        done = auto(store, compute=False).run(prompt, AUTO)
    assert max(paced.asked.values()) > 1
    assert done.report.tiers == {REMOTE: len(prompt.chunks)}
    check(done, prompt, changed(AUTO, method=done.report.method), level="int8")
