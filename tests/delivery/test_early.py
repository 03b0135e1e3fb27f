"""A prefill that begins while the last chunks' layers are still coming. A peer sends each layer when a test lets it go:
what has to have happened before is an event, never a time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
import torch

from blendserve.blend import slow_link
from blendserve.config import BlendConfig, TiersConfig
from blendserve.core import Prompt
from blendserve.errors import LeftBehind
from blendserve.store import ChunkKey, MemoryStore
from blendserve.store.base import REMOTE, Coming
from blendserve.store.codecs.int8 import Int8
from blendserve.store.kdn.adapt import TEXT, Offer, Situation
from blendserve.store.kdn.download import LEFT
from blendserve.store.network.connection import Call, Connection
from blendserve.store.network.deadline import Deadline
from blendserve.store.policies import Always
from blendserve.store.tiers import TieredStore, tiers_for
from tests.delivery.helpers import PATIENT_S, Service
from tests.delivery.paced import (
    BLEND,
    LAYERS,
    Steps,
    blender,
    delivered,
    last_two,
    late_key,
    local,
    whole,
)
from tests.engine.helpers import reader

LOOK_S = 0.002


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call[Any]]:
    """Every transfer that was begun."""
    found: list[Call[Any]] = []
    begin = Connection.begin

    def noted(self: Connection, job: Any, reading: bool = False) -> Call[Any]:
        call: Call[Any] = begin(self, job, reading)
        if reading:
            found.append(call)
        return call

    monkeypatch.setattr(Connection, "begin", noted)
    return found


def all_but_one(calls: Sequence[Call[Any]]) -> None:
    """Wait until they are here."""
    while sum(call.future.done() for call in calls) < len(calls) - 1:
        time.sleep(LOOK_S)


@pytest.mark.parametrize("policy", ["query", "deviation"])
def test_a_layer_is_reached_before_it_was_sent_and_the_bits_are_those_of_chunks_that_were_all_here(
    service: Service, prompt: Prompt, policy: Any
) -> None:
    blend, late, steps, in_time = BlendConfig(method="blend", policy=policy), last_two(prompt), Steps(), []

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if key in late and l >= 0:
            in_time.append(steps.reached(l))

    with delivered(service, before) as (store, paced):
        done = blender(store, steps).run(prompt, blend)
        assert store._traffic.counts()["hits"] == len(prompt.chunks) + 1
    assert in_time == [True] * 2 * LAYERS
    assert torch.equal(done.prefilled.logits, whole(service, prompt, blend))
    assert done.report.tiers == {REMOTE: len(prompt.chunks)}
    assert not done.report.unusable
    assert set(paced.asked.values()) == {1}


@pytest.mark.parametrize("seed", range(3))
def test_in_whatever_order_layers_come(service: Service, prompt: Prompt, seed: int) -> None:
    turns = [key for key in last_two(prompt) for _ in range(LAYERS)]
    random.Random(seed).shuffle(turns)
    at, turn = [0], threading.Condition()

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if key in turns and l >= 0:
            with turn:
                turn.wait_for(lambda: turns[at[0]] == key, PATIENT_S)
                at[0] += 1
                turn.notify_all()

    with delivered(service, before) as (store, _):
        done = blender(store).run(prompt, BLEND)
    assert torch.equal(done.prefilled.logits, whole(service, prompt))


Trouble = Literal["cut", "damaged", "slow", "level", "deadline"]


@pytest.mark.parametrize("trouble", ["cut", "damaged", "slow", "level", "deadline"])
def test_what_does_not_come_as_it_had_begun_to_is_left_behind_and_nothing_else_asked_for_again(
    service: Service,
    prompt: Prompt,
    trouble: Trouble,
    calls: list[Call[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the middle of the prefill: layer 0 of the last chunk was used, and all others are here."""
    late, steps, troubled, over, n = (
        late_key(prompt),
        Steps(),
        threading.Event(),
        threading.Event(),
        len(prompt.chunks),
    )
    left = Deadline.left.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(slow_link.Link, "probe", lambda *_: None)  # which would ask for more
    if trouble == "deadline":
        monkeypatch.setattr(Deadline, "left", property(lambda self: 0.0 if troubled.is_set() else left(self)))

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if key != late or (l < 1 and not troubled.is_set()):
            return
        if trouble == "deadline":
            over.wait()
        elif not troubled.is_set():
            assert steps.reached(1)
            all_but_one(calls)
            troubled.set()
        if trouble == "cut":
            raise ConnectionError
        part[-1] ^= trouble == "damaged" and l == 1

    def before_layer(l: int) -> None:
        if trouble == "deadline" and not troubled.is_set():
            all_but_one(calls)
            troubled.set()
        steps(l)

    def rule(offers: Sequence[Offer], now: Situation, going_on: str | None = None) -> str:
        then = {"slow": TEXT, "level": "int8"}.get(trouble, "raw")
        return then if troubled.is_set() else "raw"

    with delivered(service, before, rule) as (store, paced):
        done = blender(store, before_layer).run(prompt, BLEND)
        hits = store._traffic.counts()["hits"]
        over.set()
    assert troubled.is_set()
    assert {times for key, times in paced.asked.items() if key != late} == {1}
    here, of = local(prompt, n - 1)
    if trouble == "level":
        here.write_by(Int8())
        of.precompute([prompt.chunks[-1].ids])
    assert torch.equal(done.prefilled.logits, of.run(prompt, BLEND).prefilled.logits)
    came = n - (trouble != "level")
    assert hits == came + 1
    assert (done.report.tiers, done.report.chunks_hit) == ({REMOTE: came}, came)
    kinds = {"cut": "unreachable", "deadline": "unreachable", "damaged": "corrupt", "slow": "slow link"}
    expected = [] if trouble == "level" else [kinds[trouble]]
    assert [why.kind for why in done.report.unusable] == expected
    assert done.report.chunks_corrupt == (trouble == "damaged")
    assert len(done.absent) == n - came


def test_where_nothing_came_the_link_is_looked_at_again(
    service: Service, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was seen of it may have been a busy machine: the next request is not to take it for dead."""
    sampled: list[ChunkKey] = []
    monkeypatch.setattr(slow_link.Link, "probe", lambda self, store, keys: sampled.extend(keys))

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if key and l == 1:
            raise ConnectionError

    with delivered(service, before) as (store, _):
        made = blender(store)
        done = made.run(prompt, BLEND)
    assert {why.kind for why in done.report.unusable} == {"unreachable"}
    assert sampled == [made.key(chunk.ids) for chunk in prompt.chunks]


def test_a_tier_in_front_keeps_no_more_than_what_came(service: Service, prompt: Prompt) -> None:
    """The first request loses the last chunk in its middle, the second one gets it, the third has all in memory."""
    late, steps, again = late_key(prompt), Steps(), threading.Event()

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if key == late and l == 2 and not again.is_set():
            assert steps.reached(2)
            part[0] ^= 1

    with delivered(service, before) as (inner, _):
        tiers = tiers_for(TiersConfig(memory_bytes=2**28), Always(), reader().adapter.device)
        with TieredStore(inner, tiers) as store:
            of = blender(store, steps)
            assert of.run(prompt, BLEND).report.chunks_corrupt == 1
            again.set()
            inner._failed.forget(late)
            for tier in (REMOTE, "memory"):
                done = of.run(prompt, BLEND)
                assert torch.equal(done.prefilled.logits, whole(service, prompt))
                assert tier in done.report.tiers


def begun(coming: Coming) -> None:
    while coming.wait(LOOK_S) and not coming.begin():
        pass


@pytest.mark.parametrize("how", ["the snapshot ends", "another one is left behind"])
def test_who_waits_for_a_layer_is_let_go_when(service: Service, prompt: Prompt, how: str) -> None:
    prefix, late = blender(MemoryStore(1)).key(prompt.prefix, ()), late_key(prompt)
    slow, over = threading.Event(), threading.Event()

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if l == 2:
            (over if key == late else slow).wait()

    def rule(offers: Sequence[Offer], now: Situation, going_on: str | None = None) -> str:
        return TEXT if slow.is_set() else "raw"

    with delivered(service, before, rule) as (store, _), ThreadPoolExecutor(1) as pool:
        with store.reading() as snapshot:
            snapshot.expect([late, prefix], begun)
            view, other = snapshot.get(late), snapshot.get(prefix)
            assert view is not None
            assert other is not None
            view.layer(1)
            waits = pool.submit(view.layer, 2)
            if how != "the snapshot ends":
                slow.set()
                with pytest.raises(LeftBehind):
                    other.layer(LAYERS - 1)
                with pytest.raises(LeftBehind):
                    waits.result(PATIENT_S / 2)
                assert snapshot.get(prefix) is None
                assert str(snapshot.undecodable[prefix]) == LEFT
        with pytest.raises(LeftBehind):
            waits.result(PATIENT_S / 2)
        assert store._traffic.counts()["hits"] == 0
        over.set()
        slow.set()


def test_two_threads_have_the_same_layers(service: Service, prompt: Prompt) -> None:
    here, _ = local(prompt, len(prompt.chunks))
    keys = [late_key(prompt), blender(here).key(prompt.prefix, ())]
    both = threading.Barrier(2)

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if l >= 0:
            both.wait(PATIENT_S)  # in turns: both are under way

    with (
        delivered(service, before) as (store, _),
        store.reading() as snapshot,
        here.reading() as near,
        ThreadPoolExecutor(2) as pool,
    ):
        snapshot.expect(keys, begun)
        pairs = [(snapshot.get(key), near.get(key)) for key in keys]

        def same(_: int) -> bool:
            return all(
                coming and stored and torch.equal(a, b)
                for l in range(LAYERS)
                for coming, stored in pairs
                for a, b in zip(coming.layer(l), stored.layer(l), strict=True)  # type: ignore[union-attr]
            )

        assert list(pool.map(same, range(2))) == [True, True]


def test_waiting_for_a_layer_is_not_taken_for_reading_it(
    service: Service, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes: of the loader's time waiting is taken off, and added to what the link took."""
    late, deadlines, held = late_key(prompt), [], 0.05

    class Noted(Deadline):
        def __init__(self, seconds: float) -> None:
            super().__init__(seconds)
            deadlines.append(self)

    monkeypatch.setattr("blendserve.store.network.snapshot.Deadline", Noted)
    steps = Steps()

    def before(key: ChunkKey, l: int, part: bytearray) -> None:
        if key == late and l == LAYERS - 1:
            assert steps.reached(l)
            while not deadlines[0]._waiting:
                time.sleep(LOOK_S)
            time.sleep(held)

    with delivered(service, before) as (store, _):
        of = blender(store, steps)
        done = of.run(prompt, BLEND)
    tokens = len(prompt) - len(prompt.suffix)
    reading = (of._load_rate.seconds_per_token or 0.0) * tokens
    assert reading <= done.prefilled.seconds_reading - held * 0.99
    far = (of._link._rate.seconds_per_token or 0.0) * sum(map(len, prompt.chunks))
    assert far >= 0.99 * deadlines[0].waited > held / 2
