"""What becomes of an answer whose replica ends, by each way that Ray tells of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from blendserve.engine.queued import Event, Piece, Started
from blendserve.errors import ClusterUnavailable, InputError
from blendserve.workers.cluster import Share, import_ray
from blendserve.workers.replicas import Replicas

STARTED: Any = Started(0, None, None)  # type: ignore[arg-type]
SECRET = "PID 4711 others-command --key"


@pytest.fixture
def errors(share: Share) -> Any:
    """Ray's own, imported as a cluster imports it."""
    return import_ray().exceptions


class Ends:
    """In place of a deployment's handle: each answer begins, and ends in the next of these errors, or well."""

    def __init__(self, errors: Sequence[Exception]) -> None:
        self._errors, self.answer = list(errors), self

    def options(self, stream: bool) -> Ends:
        return self

    def remote(self, request: Any, keys: frozenset[bytes]) -> Ends:
        return self

    def cancel(self) -> None:
        """Nothing runs."""

    async def __aiter__(self) -> AsyncIterator[Event]:
        yield STARTED
        yield Piece("Par")
        if self._errors:
            raise self._errors.pop(0)
        yield Piece("is")


def answered(monkeypatch: pytest.MonkeyPatch, *errors: Exception) -> str:
    """The text that whoever asked has got."""
    monkeypatch.setattr("blendserve.workers.replicas.replace", lambda request, seconds: request)
    replicas: Any = Replicas.__new__(Replicas)
    replicas._ray, replicas._handle = import_ray(), Ends(errors)

    async def ask() -> str:
        request: Any = type("Request", (), {"seconds": 0.0})()
        return "".join([e.text async for e in replicas.answer(request, frozenset()) if isinstance(e, Piece)])

    return asyncio.run(ask())


def test_one_that_ended_is_asked_again(errors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (errors.ActorDiedError(), errors.OutOfMemoryError(SECRET)):
        assert answered(monkeypatch, error) == "Paris"


def test_what_ray_says_is_for_the_log(
    errors: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ClusterUnavailable, match="log says why") as found:
        answered(monkeypatch, errors.RaySystemError(SECRET))
    assert SECRET not in str(found.value)
    assert SECRET in caplog.text


def test_an_error_of_ours_is_told_as_it_is(errors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    error = errors.RayError("more")
    error.__cause__ = InputError("too long")
    with pytest.raises(InputError, match="too long"):
        answered(monkeypatch, error)
