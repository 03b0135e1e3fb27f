"""What the workers' code decides without a cluster: counts, shares, hot sets, repeated answers, lost machines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from threading import Event as Signal
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.config import BlendConfig, Config, DecodeConfig
from blendserve.core import Prompt
from blendserve.engine.queued import Event, Finished, Piece, Started
from blendserve.errors import ClusterUnavailable, ConfigError, InputError, StoreError
from blendserve.workers import replicas, watch
from blendserve.workers.cluster import cpus_each, worker_config
from blendserve.workers.hot_sets import EXPIRY_S, HotSets
from blendserve.workers.precompute import PROBE, PrecomputeActor, precompute_index
from blendserve.workers.replica import RoutedRequest
from blendserve.workers.replicas import ReplicaCount, answer_from
from blendserve.workers.watch import watched
from tests.support.engines import toy_engine

STARTED: Any = Started(0, None, None)  # type: ignore[arg-type]
SECRET = "PID 4711 others-command --key"


def finished(text: str) -> Any:
    answer: Any = SimpleNamespace(text=text)
    return Finished(answer)


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


def test_a_hot_set_expires_unless_the_replica_reports_it_again() -> None:
    hot, chunks = HotSets(), frozenset({b"a", b"b"})
    assert hot.of("new", {}, 0.0) == frozenset()
    for number, seconds, expected in (
        (1, 0.0, chunks),
        (1, EXPIRY_S, chunks),
        (1, EXPIRY_S + 0.1, frozenset()),
    ):
        assert hot.of("one", {"told": number, "hot": chunks}, 100.0 + seconds) == expected
    assert hot.of("one", {"told": 2, "hot": chunks}, 100.2 + EXPIRY_S) == chunks
    hot.keep({"another"})
    assert hot.of("one", {"told": 2, "hot": chunks}, 300.0) == chunks  # a new replica of that name


ENDED = ["RayActorError", "NodeDiedError", "ObjectLostError", "OutOfMemoryError"]  # of Ray's exceptions
RayError = type("RayError", (Exception,), {})
ERRORS = SimpleNamespace(RayError=RayError, **{name: type(name, (RayError,), {}) for name in ENDED})
Attempt = tuple[list[Event], Exception | None]


class Handle:
    """A deployment's handle: each attempt sends these events, and then raises the error, if there is one."""

    def __init__(self, attempts: Sequence[Attempt]) -> None:
        self._attempts, self.answer = list(attempts), self
        self.options: Any = lambda stream: self
        self.remote: Any = lambda request, keys: self
        self.cancel: Any = lambda: None

    async def __aiter__(self) -> AsyncIterator[Event]:
        events, error = self._attempts.pop(0)
        for event in events:
            yield event
        if error:
            raise error


@pytest.fixture(autouse=True, scope="module")
def without_pauses() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "PAUSE_S", 0.0)
        yield


def received(*attempts: Attempt) -> tuple[str, list[type[Event]]]:
    """What the client receives: the text, and the kinds of the other events."""
    request = RoutedRequest(Prompt((), (), ()), (), BlendConfig(), DecodeConfig(), "", "", 0.0, 0.0)

    async def ask() -> list[Event]:
        return [e async for e in answer_from(Handle(attempts), ERRORS, request, frozenset())]

    events = asyncio.run(ask())
    text = "".join(event.text for event in events if isinstance(event, Piece))
    return text, [type(event) for event in events if not isinstance(event, Piece)]


def events(text: str, cuts: Sequence[int] = (3,)) -> list[Event]:
    """A whole answer, in pieces."""
    at = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [STARTED, *(Piece(text[a:b]) for a, b in pairwise(at)), finished(text)]


CUTS = st.lists(st.integers(0, 40), max_size=6)
DEATHS = st.lists(st.tuples(CUTS, st.integers(0, 8), st.sampled_from(ENDED)), max_size=replicas.ATTEMPTS - 1)


@given(st.text(max_size=30), DEATHS, CUTS)
def test_an_answer_that_several_replicas_began_is_sent_once(
    text: str, deaths: list[tuple[list[int], int, str]], cuts: list[int]
) -> None:
    ended = [(events(text, cut)[:-1][:n], getattr(ERRORS, kind)(SECRET)) for cut, n, kind in deaths]
    assert received(*ended, (events(text, cuts), None)) == (text, [Started, Finished])


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


@pytest.mark.parametrize(
    ("answers", "patience_s", "expected"),
    [
        ([False, False, True], 60.0, None),  # a machine returns
        ([True] * 20, 0.0, None),  # rows are slow
        ([False] * 10**6, 0.05, ClusterUnavailable),
        ([], 0.0, StoreError),  # an error of the rows
    ],
)
def test_a_cluster_without_a_machine_is_waited_for(
    answers: list[bool],
    patience_s: float,
    expected: type[Exception] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first row comes at once, and the second after the last of these answers."""
    monkeypatch.setattr(watch, "LOOK_S", 0.001)
    monkeypatch.setattr(watch, "PATIENCE_S", patience_s)
    back, left = Signal(), iter(answers)

    def rows() -> Iterator[dict[str, Any]]:
        yield {"row": 0}
        if expected is StoreError:
            raise StoreError
        back.wait()
        yield {"row": 1}

    def possible() -> bool:
        if (answer := next(left, None)) is None:
            back.set()
        return answer is not False

    seen = watched(rows(), possible)
    assert next(seen) == {"row": 0}
    with pytest.raises(expected) if expected else nullcontext():
        assert list(seen) == [{"row": 1}]
    back.set()


def test_workers_refuse_a_store_that_they_cannot_share_and_another_model(tmp_path: Path) -> None:
    with toy_engine() as alone:
        with pytest.raises(ConfigError):
            precompute_index(alone, tmp_path, 2)
        PrecomputeActor(lambda: alone, alone.blender.key(PROBE))
        with pytest.raises(ConfigError):
            PrecomputeActor(lambda: alone, alone.blender.key(PROBE, ()))


def test_a_worker_finds_the_indexs_store_from_any_folder(tmp_path: Path) -> None:
    assert worker_config(Config(), tmp_path / "index").store.path == tmp_path / "index" / "kv"
    named = Config(store={"path": "kv-0"})
    assert worker_config(named, tmp_path / "index").store.path == Path.cwd() / "kv-0"
