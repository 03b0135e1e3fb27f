"""An answer that two replicas gave reaches its asker once, or not at all."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.engine.queued import Event, Finished, Piece, Started
from blendserve.errors import ClusterUnavailable
from blendserve.serve.replies import described
from blendserve.workers.replicas import Said

STARTED: Any = Started(0, None, None)  # type: ignore[arg-type]


class _Answer:
    def __init__(self, text: str) -> None:
        self.text = text


def events(text: str, cuts: list[int]) -> list[Event]:
    """A whole answer, in pieces."""
    at = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [Piece(text[a:b]) for a, b in pairwise(at)]
    return [STARTED, *pieces, Finished(_Answer(text))]  # type: ignore[arg-type]


CUTS = st.lists(st.integers(0, 40), max_size=6)


@given(st.text(max_size=30), st.lists(st.tuples(CUTS, st.integers(0, 8)), max_size=3), CUTS)
def test_the_text_is_said_once_however_often_it_was_begun(
    text: str, deaths: list[tuple[list[int], int]], cuts: list[int]
) -> None:
    said = Said()
    given = [event for cut, n in deaths for event in events(text, cut)[:-1][:n]]
    seen = [new for event in (*given, *events(text, cuts)) for new in said.new(event)]
    assert "".join(event.text for event in seen if isinstance(event, Piece)) == text
    assert [type(event) for event in seen if not isinstance(event, Piece)] == [Started, Finished]


def test_another_text_is_an_error_and_not_a_second_answer() -> None:
    said = Said()
    for event in (STARTED, Piece("Paris"), STARTED):
        said.new(event)
    with pytest.raises(ClusterUnavailable, match="goes on differently"):
        said.new(Piece("Pat"))


def test_an_answer_that_ends_early_is_one_too() -> None:
    said = Said()
    said.new(Piece("Paris"))
    said.new(STARTED)
    said.new(Piece("Par"))
    with pytest.raises(ClusterUnavailable):
        said.new(Finished(_Answer("Par")))  # type: ignore[arg-type]


def test_that_no_replica_answers_is_the_server_s_fault() -> None:
    status, body = described(ClusterUnavailable("6 replicas ended"))
    assert (status, body["error"]["code"]) == (503, "replicas_unavailable")
