"""What is decided without a cluster: counts, shares, hot sets, repeated answers, lost machines, a request's replica."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.config import Config
from blendserve.engine.request import Completed, Event, PrefillDone, TextDelta
from blendserve.errors import ClusterUnavailable, ConfigError, InputError, StoreError
from blendserve.ray import precompute, replicas
from blendserve.ray.cluster import cpus_each, worker_config
from blendserve.ray.precompute import PROBE, PrecomputeActor, precompute_index
from blendserve.ray.replica import REPORT_EXPIRY_S, CacheReports
from blendserve.ray.replicas import ReplicaCount, answer_from
from blendserve.routing import Replica, bounded, ranked
from tests.support.engines import toy_engine

STARTED: Any = PrefillDone(0, 0, None)  # type: ignore[arg-type]
SECRET = "PID 4711 others-command --key"


def test_workers_get_equal_shares() -> None:
    for cpus, free, workers, each in (
        ([8], 8, 2, 4),
        ([0, 4], 4, 2, 2),  # a head that is told to compute nothing
        ([4, 3], 7, 3, 2),  # 4 would be 2 and 2; 3, one
        ([2, 2], 4, 3, 1),
        ([8, 8], 3, 2, 1),  # the others are in use
        ([2], 2, 3, 0),
        ([8], 1, 2, 0),
    ):
        assert cpus_each(cpus, free, workers) == each, (cpus, free, workers)


def test_numbers_of_replicas() -> None:
    assert ReplicaCount.parse("2").options(4) == {"num_replicas": 2}
    bounds = {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 8}
    assert ReplicaCount.parse("1-4").options(8) == {"autoscaling_config": bounds}
    for wrong in ("0", "-1", "0-2", "4-1", "two", "1-", "1.5", ""):
        with pytest.raises(InputError):
            ReplicaCount.parse(wrong)


def test_a_report_expires_unless_the_replica_repeats_it() -> None:
    reports, chunks = CacheReports(), frozenset({b"a", b"b"})

    def cached(now: float, **report: Any) -> frozenset[bytes]:
        return reports.cached_chunks({"one": report}, now)["one"]

    first: dict[str, Any] = {"version": 1, "cached_chunks": chunks}
    assert cached(0.0) == frozenset()
    assert [cached(100.0 + s, **first) for s in (0.0, REPORT_EXPIRY_S)] == [chunks, chunks]
    assert cached(100.1 + REPORT_EXPIRY_S, **first) == frozenset()
    assert cached(100.2 + REPORT_EXPIRY_S, **{**first, "version": 2}) == chunks
    assert reports.cached_chunks({"another": {}}, 300.0) == {"another": frozenset()}
    assert cached(300.0, **{**first, "version": 2}) == chunks  # a new replica of that name


ENDED = ["RayActorError", "NodeDiedError", "ObjectLostError", "OutOfMemoryError"]  # of Ray's exceptions


class RayError(Exception):
    """Of Ray's exceptions, the base."""


ERRORS = SimpleNamespace(RayError=RayError, **{name: type(name, (RayError,), {}) for name in ENDED})
Attempt = tuple[list[Event], Exception | None]


class Handle:
    """A deployment's handle: each attempt sends these events, and then raises the error, if there is one."""

    def __init__(self, attempts: Sequence[Attempt]) -> None:
        self._attempts, self.answer = list(attempts), self
        self.options: Any = lambda stream: self
        self.remote: Any = lambda request: self
        self.cancel: Any = lambda: None

    async def __aiter__(self) -> AsyncIterator[Event]:
        events, error = self._attempts.pop(0)
        for event in events:
            yield event
        if error:
            raise error


@patch.object(replicas, "PAUSE_S", 0.0)
def received(*attempts: Attempt) -> tuple[str, list[type[Event]]]:
    """What the client receives: the text, and the kinds of the other events."""
    request: Any = None

    async def ask() -> list[Event]:
        return [event async for event in answer_from(Handle(attempts), ERRORS, request)]

    events = asyncio.run(ask())
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    return text, [type(event) for event in events if not isinstance(event, TextDelta)]


def events(text: str, cuts: Sequence[int] = (3,)) -> list[Event]:
    """A whole answer, in pieces."""
    answer: Any = SimpleNamespace(text=text)
    at = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [STARTED, *(TextDelta(text[a:b]) for a, b in pairwise(at)), Completed(answer)]


CUTS = st.lists(st.integers(0, 40), max_size=6)
DEATHS = st.lists(st.tuples(CUTS, st.integers(0, 8), st.sampled_from(ENDED)), max_size=replicas.ATTEMPTS - 1)


@given(st.text(max_size=30), DEATHS, CUTS)
def test_an_answer_that_several_replicas_began_is_sent_once(
    text: str, deaths: list[tuple[list[int], int, str]], cuts: list[int]
) -> None:
    ended = [(events(text, cut)[:-1][:n], getattr(ERRORS, kind)(SECRET)) for cut, n, kind in deaths]
    assert received(*ended, (events(text, cuts), None)) == (text, [PrefillDone, Completed])


@pytest.mark.parametrize(
    "attempts",
    [
        [(events("Paris")[:-1], ERRORS.NodeDiedError()), (events("Part"), None)],
        [(events("Paris")[:-1], ERRORS.NodeDiedError()), (events("Par"), None)],
        [([STARTED], ERRORS.RayActorError())] * replicas.ATTEMPTS,
    ],
    ids=["another answer", "early end", "too many deaths"],
)
def test_another_answer_is_an_error_and_not_a_second_answer(attempts: list[Attempt]) -> None:
    with pytest.raises(ClusterUnavailable):
        received(*attempts)


def test_the_clients_error_has_no_text_of_rays(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ClusterUnavailable) as found:
        received(([STARTED], RayError(SECRET)))
    assert (SECRET in repr(found.value), SECRET in caplog.text) == (False, True)
    ours = RayError("more")
    ours.__cause__ = InputError("too long")
    with pytest.raises(InputError):
        received(([STARTED], ours))


class Died(RayError):
    """An actor's process has ended."""


class Ray:
    """A cluster that runs a call when it is waited for; `deaths`: calls that end their actor's process."""

    exceptions = SimpleNamespace(RayError=RayError, RayActorError=Died)

    def __init__(self, deaths: Sequence[int] = (), error: Exception | None = None, rooms: int = 99) -> None:
        """rooms: for actors, ever."""
        self.deaths, self.error, self.rooms = deaths, error, rooms
        self.calls = list[tuple[int, list[Any]]]()  # the actor's number and the batch, [] for its start
        self.alive, self.actors = set[int](), count(1)

    def new_actor(self) -> Any:
        call = SimpleNamespace(remote=partial(self.called, number := next(self.actors)))
        return SimpleNamespace(ready=call, compute=call, number=number)

    def called(self, actor: int, batch: list[Any] = []) -> int:  # noqa: B006
        self.alive.add(actor)
        self.calls.append((actor, batch))
        return len(self.calls) - 1

    def wait(self, calls: list[int], timeout: float | None) -> tuple[list[int], list[int]]:
        ended = [call for call in calls if self.calls[call][0] <= self.rooms]
        assert ended or timeout is not None
        return sorted(ended)[:1], []

    def get(self, call: int) -> Any:
        actor, batch = self.calls[call]
        if call in self.deaths or actor not in self.alive:
            self.alive.discard(actor)
            raise Died
        if self.error and batch:
            raise RayError("the task failed") from self.error
        return SimpleNamespace(computed=len(batch))

    def kill(self, actor: Any) -> None:
        self.alive.discard(actor.number)


def mapped(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> int:
    """Chunks computed by two actors of nine batches of one chunk."""
    monkeypatch.setattr(precompute, "import_ray", lambda: ray)
    batches: list[Any] = [[(i,)] for i in range(9)]
    return sum(report.computed for _, report in precompute.compute_batches(ray.new_actor, 2, batches))


def test_batches_of_a_dead_actor_are_left_and_others_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mapped(Ray(), monkeypatch) == 9
    assert mapped(Ray(deaths=[0]), monkeypatch) == 9  # at its start
    first = 2  # call: after two starts
    assert mapped(Ray(deaths=[first]), monkeypatch) == 7  # with both of its batches
    assert mapped(Ray(deaths=[first, first + 2]), monkeypatch) == 5  # both actors
    assert mapped(Ray(deaths=[first], rooms=2), monkeypatch) == 7  # the other one goes on alone


def test_an_error_of_a_worker_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError):
        mapped(Ray(error=StoreError()), monkeypatch)


def test_a_cluster_without_room_for_a_worker_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for deaths, rooms in (([], 0), ([2, 4], 2)):
        with pytest.raises(ClusterUnavailable):
            mapped(Ray(deaths, rooms=rooms), monkeypatch)


def test_workers_refuse_a_store_that_they_cannot_share_and_another_model(tmp_path: Path) -> None:
    with toy_engine() as alone:
        with pytest.raises(ConfigError):
            precompute_index(alone, tmp_path, 2)
        PrecomputeActor(lambda: alone, alone.blender.key(PROBE)).compute([])
        with pytest.raises(ConfigError):
            PrecomputeActor(lambda: alone, alone.blender.key((*PROBE, 1))).compute([])


def test_a_worker_finds_the_indexs_store_from_any_folder(tmp_path: Path) -> None:
    assert worker_config(Config(), tmp_path / "index").store.path == tmp_path / "index" / "kv"
    named = Config(store={"location": "kv-0"})
    assert worker_config(named, tmp_path / "index").store.path == Path.cwd() / "kv-0"


# The choice of a replica: a bound, a home, and nothing moved that need not be

CHUNKS = st.frozensets(st.integers(0, 40).map(lambda i: i.to_bytes(28, "big")), max_size=8)
NAMES = st.lists(st.text("abcdef", min_size=1, max_size=6), min_size=1, max_size=9, unique=True)


@st.composite
def clusters(draw: st.DrawFn) -> list[Replica]:
    return [Replica(name, draw(CHUNKS), draw(st.integers(0, 30))) for name in draw(NAMES)]


def cold(names: list[str]) -> list[Replica]:
    return [Replica(name) for name in names]


@given(CHUNKS, clusters(), st.floats(1.0, 4.0))
def test_no_replica_gets_more_than_a_bounded_share_however_hot_it_is(
    chunks: frozenset[bytes], replicas: list[Replica], slack: float
) -> None:
    loads = {r.name: r.load for r in replicas}
    load = loads[ranked(chunks, replicas, slack)[0]]
    fair = (sum(loads.values()) + 1) / len(loads)
    assert load + 1 <= math.ceil(slack * fair)


@given(CHUNKS, clusters())
def test_within_the_bound_no_replica_has_more_of_the_chunks(
    chunks: frozenset[bytes], replicas: list[Replica]
) -> None:
    hits = {r.name: sum(chunk in r.cached_chunks for chunk in chunks) for r in replicas}
    loads = [replica.load for replica in replicas]
    bound, (best, *others) = bounded(sum(loads), min(loads), len(loads)), ranked(chunks, replicas)
    assert hits[best] == max(hits[r.name] for r in replicas if r.load < bound)
    assert sorted([best, *others]) == sorted(hits)  # each replica once


@given(CHUNKS, NAMES, st.randoms())
def test_the_same_chunks_have_one_home_in_any_order(
    chunks: frozenset[bytes], names: list[str], random: object
) -> None:
    shuffled = sorted(chunks, key=lambda _: random.random())  # type: ignore[attr-defined]
    others = sorted(names, key=lambda _: random.random())  # type: ignore[attr-defined]
    assert ranked(shuffled, cold(others)) == ranked(sorted(chunks), cold(names))


@given(st.lists(CHUNKS, max_size=20), NAMES.filter(lambda names: len(names) > 1))
def test_who_goes_moves_its_own_requests_alone(requests: list[frozenset[bytes]], names: list[str]) -> None:
    before = [ranked(chunks, cold(names))[0] for chunks in requests]
    after = [ranked(chunks, cold(names[1:]))[0] for chunks in requests]
    assert all(a == b for a, b in zip(before, after, strict=True) if a != names[0])


def test_homes_are_spread() -> None:
    names = [f"replica {i}" for i in range(4)]
    counts = Counter(ranked([f"chunk {i}".encode()], cold(names))[0] for i in range(4000))
    assert all(abs(counts[name] - 1000) < 5 * math.sqrt(4000 * 0.25 * 0.75) for name in names)
