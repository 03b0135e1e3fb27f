"""Several processes on one store: readers beside a writer, two writers, and a writer that is killed."""

from __future__ import annotations

import contextlib
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from blendserve.errors import StoreUnavailable
from blendserve.store import LMDBStore
from blendserve.store.policies import LRU
from tests.support.forked import process, run
from tests.store.helpers import chunk, key_of, read, same
from tests.store.lmdb.processes import CAP, fill, hold, read_all, tokens_of, write

TIGHT = 12 * chunk(tokens_of(29)).n_bytes


def test_chunks_outlive_the_process_that_put_them(tmp_path: Path) -> None:
    run(fill, tmp_path, 3)
    with LMDBStore(tmp_path, CAP, read_only=True) as store:
        assert store.verify().good == 3
        assert same(read(store, key_of(2)), chunk(tokens_of(2), seed=2))
        with pytest.raises(StoreUnavailable, match="reading only"):
            store.put(key_of(5), chunk())


@pytest.mark.parametrize(("n_keys", "cap"), [(7, CAP), (40, TIGHT)])
def test_readers_read_whole_chunks_while_another_process_writes(
    tmp_path: Path, n_keys: int, cap: int
) -> None:
    with process(write, tmp_path, n_keys, cap) as (_, writer):
        assert writer.recv() == 0
        with (
            process(read_all, tmp_path, n_keys, 0.4) as (one, first),
            process(read_all, tmp_path, n_keys, 0.4) as (other, second),
        ):
            assert first.recv() > 50
            assert second.recv() > 50
            one.join()
            other.join()
            assert (one.exitcode, other.exitcode) == (0, 0)


@pytest.mark.parametrize(("n_keys", "cap"), [(7, CAP), (40, TIGHT)])
def test_a_killed_writer_leaves_whole_chunks_and_no_lock(tmp_path: Path, n_keys: int, cap: int) -> None:
    """What was reported as put is there; what was being put is there whole or not at all; the cap holds."""
    dice = random.Random(0)
    for _ in range(5):
        with (
            process(write, tmp_path, n_keys, cap) as (writer, said),
            LMDBStore(tmp_path, cap, eviction=LRU()) as store,
        ):
            for _ in range(25):
                last = said.recv()
            time.sleep(dice.random() / 50)
            writer.kill()
            writer.join()
            assert key_of(last_of(said, last) % n_keys) in store
            report = store.verify()
            assert report.bad == ()
            assert report.good == 7 if cap == CAP else 5 < report.good < 20
            assert store.stats().bytes <= cap
            assert store.put(key_of(99), chunk())
            assert store.delete(key_of(99))


def last_of(said: Connection, last: int) -> int:
    """The last number that a killed writer still sent."""
    with contextlib.suppress(EOFError):
        while said.poll():
            last = said.recv()
    return last


def test_a_second_writer_waits_then_is_refused(tmp_path: Path) -> None:
    LMDBStore(tmp_path, CAP).close()
    with process(hold, tmp_path) as (holder, held), LMDBStore(tmp_path, CAP, writer_wait_s=0.2) as store:
        assert held.recv() == "held"
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="another writer"):
            store.put(key_of(1), chunk())
        assert 0.15 < time.monotonic() - began < 2
        assert key_of(1) not in store  # reading is not held up
        holder.kill()
        holder.join()
        store.put(key_of(1), chunk())
        assert same(read(store, key_of(1)), chunk())


def test_a_writer_gets_its_turn_when_the_other_is_done(tmp_path: Path) -> None:
    LMDBStore(tmp_path, CAP).close()
    with process(hold, tmp_path) as (_, held), LMDBStore(tmp_path, CAP, writer_wait_s=20) as store:
        assert held.recv() == "held"
        held.send("thanks")
        store.put(key_of(1), chunk())
        assert key_of(1) in store


def test_what_one_process_read_another_does_not_evict(tmp_path: Path) -> None:
    """Uses are written when a store closes, so they count for the next writer, whoever that is."""
    cap = 3 * chunk(10).n_bytes
    with LMDBStore(tmp_path, cap, eviction=LRU()) as store:
        for n in range(3):
            store.put(key_of(n), chunk(10))
    run(read_once, tmp_path)
    with LMDBStore(tmp_path, cap, eviction=LRU()) as store:
        store.put(key_of(3), chunk(10))
        assert [n for n in range(4) if key_of(n) in store] == [0, 2, 3]
        assert store.stats().hits == 1


def read_once(_: object, path: Path) -> None:
    with LMDBStore(path, CAP) as store:
        read(store, key_of(0))
