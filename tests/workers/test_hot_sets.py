"""What a replica said counts until it is too old, by the router's own clock."""

from __future__ import annotations

from blendserve.workers.hot_sets import EXPIRY_S, HotSets

CHUNKS = frozenset({b"a", b"b"})


def said(number: int) -> dict[str, object]:
    return {"told": number, "hot": CHUNKS}


def test_a_word_expires_unless_it_is_said_again() -> None:
    hot = HotSets()
    assert hot.of("one", said(1), 100.0) == CHUNKS
    assert hot.of("one", said(1), 100.0 + EXPIRY_S) == CHUNKS
    assert hot.of("one", said(1), 100.1 + EXPIRY_S) == frozenset()
    assert hot.of("one", said(2), 100.2 + EXPIRY_S) == CHUNKS


def test_who_has_said_nothing_has_nothing() -> None:
    assert HotSets().of("new", {}, 0.0) == frozenset()


def test_a_replica_that_comes_again_under_its_name_is_believed_again() -> None:
    hot = HotSets()
    hot.of("one", said(1), 0.0)
    hot.keep({"another"})
    assert hot.of("one", said(1), 2 * EXPIRY_S) == CHUNKS
