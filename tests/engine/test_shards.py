"""Shares of a corpus: by content alone, disjoint, together everything; two processes at once, into one store."""

from __future__ import annotations

from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from blendserve.config import Config
from blendserve.core import Passage
from blendserve.engine.engine import Engine
from blendserve.models.toy import toy_reader
from blendserve.store import LMDBStore, share_of
from tests.support.blending import assert_near
from tests.support.forked import process
from tests.support.stores import read

CAP = 1 << 30
PASSAGES = [Passage(f"Passage {n} says {n * n}, and nothing beside it.") for n in range(12)]
TWICE = [*PASSAGES, *PASSAGES[::3]]


@given(st.lists(st.integers(0, 10**6), max_size=20).map(tuple), st.integers(1, 9))
def test_a_chunks_share_is_one_of_n_and_its_own(ids: tuple[int, ...], n: int) -> None:
    assert 0 <= share_of(ids, n) < n
    assert share_of(list(ids), n) == share_of(ids, n)
    assert share_of(ids, 1) == 0


def test_shares_are_about_equal_and_never_move() -> None:
    shares = [share_of((n, n + 1, 7), 4) for n in range(4000)]
    assert all(900 < shares.count(i) < 1100 for i in range(4))
    assert "".join(map(str, shares[:8])) == "02212122"  # what was begun goes on alike in a later version


def precompute(line: Connection, path: Path, i: int) -> None:
    with Engine(Config(), toy_reader(), LMDBStore(path, CAP)) as engine:
        line.send("ready")
        line.recv()
        report = engine.precompute(TWICE, (i, 2))
        line.send((report.computed, engine.missing(TWICE, (i, 2))))


def test_two_processes_fill_one_store_side_by_side(tmp_path: Path) -> None:
    with ExitStack() as stack:
        lines = [stack.enter_context(process(precompute, tmp_path, i))[1] for i in range(2)]
        assert [line.recv() for line in lines] == ["ready"] * 2
        for line in lines:
            line.send("go")
        done = [line.recv() for line in lines]
    with Engine(Config(), toy_reader(), LMDBStore(tmp_path, CAP)) as engine:
        chunks = [engine.prompts.chunk(passage).ids for passage in PASSAGES]
        mine = [sum(share_of(ids, 2) == i for ids in chunks) for i in range(2)]
        assert 0 < mine[0] < len(chunks)
        assert [missing for _, missing in done] == [0, 0]
        assert all(
            n <= computed <= n + 1 for n, (computed, _) in zip(mine, done, strict=True)
        )  # and the prefix
        assert engine.precompute(TWICE).computed == 0
        assert engine.store.verify().bad == ()
        assert engine.store.stats().chunks == len(chunks) + 1 == engine.store.stats().pins
        alone = engine.blender.computer(engine.prompts.kv_context)
        for ids in chunks:
            kv = read(engine.store, engine.blender.key(ids))
            assert kv is not None
            assert_near(kv.values, alone.compute([ids])[0].values, 1e-5)


def test_a_share_that_was_begun_goes_on(tmp_path: Path) -> None:
    with Engine(Config(), toy_reader(), LMDBStore(tmp_path, CAP)) as engine:
        mine = [p for p in PASSAGES if share_of(engine.prompts.chunk(p).ids, 2) == 1]
        engine.precompute(mine[:1])
        assert engine.missing(PASSAGES[::-1], (1, 2)) == len(mine) - 1
        assert engine.precompute(PASSAGES[::-1], (1, 2)).computed == len(mine) - 1
