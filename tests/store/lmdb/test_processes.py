"""Several processes on one store: readers beside a writer, two writers, leases, and killed processes."""

from __future__ import annotations

import contextlib
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import filelock
import pytest

from blendserve.errors import StoreUnavailable
from blendserve.store import LMDBStore
from blendserve.store.policies import LRU
from tests.forked import process
from tests.support.stores import ROOMY, chunk, key_of, read, same
from tests.support.waiting import ManualClock

TIGHT = 12 * chunk(69).n_bytes


def write(line: Connection, path: Path, n_keys: int, cap: int) -> None:
    """Put chunks for ever and send the number of each."""
    with LMDBStore(path, cap, eviction=LRU()) as store:
        n = 0
        while True:
            store.put(key_of(n % n_keys), chunk(40 + n % 30, seed=n % n_keys))
            line.send(n)
            n += 1


def read_all(line: Connection, path: Path, n_keys: int) -> None:
    """Read and check chunks until 60 were found."""
    hits = 0
    with LMDBStore(path, ROOMY, read_only=True) as store:
        while hits < 60:
            for n in range(n_keys):
                kv = read(store, key_of(n))
                assert kv is None or same(kv, chunk(kv.n_tokens, seed=n))
                hits += kv is not None
    line.send("read")


@pytest.mark.parametrize(("n_keys", "cap"), [(7, ROOMY), (40, TIGHT)])
def test_concurrent_readers_read_whole_chunks_and_a_killed_writer_leaves_whole_chunks(
    tmp_path: Path, n_keys: int, cap: int
) -> None:
    """A reported chunk is stored, one that was being put is stored whole or not at all, and the cap holds."""
    dice = random.Random(0)
    for attempt in range(5):
        with (
            process(write, tmp_path, n_keys, cap) as (writer, said),
            LMDBStore(tmp_path, cap, eviction=LRU()) as store,
        ):
            for _ in range(25):
                last = said.recv()
            if attempt == 0:
                with process(read_all, tmp_path, n_keys) as (_, reader):
                    assert reader.recv() == "read"
            for _ in range(dice.randrange(8)):
                last = said.recv()
            writer.kill()
            writer.join()
            with contextlib.suppress(EOFError):
                while said.poll():
                    last = said.recv()
            assert key_of(last % n_keys) in store
            report = store.verify()
            assert report.bad == ()
            assert report.good == 7 if cap == ROOMY else 5 < report.good < 20
            assert store.stats().bytes <= cap
            assert store.put(key_of(99), chunk())
            assert store.delete(key_of(99))


def hold(line: Connection, path: Path) -> None:
    """Stay the writer until a message comes."""
    with filelock.FileLock(path / "writer.lock"):
        line.send("held")
        line.recv()


@pytest.mark.parametrize("ends", ["killed", "done"])
def test_a_second_writer_waits_and_is_refused_while_the_first_one_writes(tmp_path: Path, ends: str) -> None:
    LMDBStore(tmp_path, ROOMY).close()
    with (
        process(hold, tmp_path) as (holder, held),
        LMDBStore(tmp_path, ROOMY, writer_wait_s=0.05) as hasty,
        LMDBStore(tmp_path, ROOMY, writer_wait_s=60) as patient,
    ):
        assert held.recv() == "held"
        with pytest.raises(StoreUnavailable):
            hasty.put(key_of(1), chunk())
        assert key_of(1) not in hasty  # readers do not wait
        holder.kill() if ends == "killed" else held.send("go on")
        patient.put(key_of(1), chunk())
        assert same(read(hasty, key_of(1)), chunk())


def lease(line: Connection, path: Path) -> None:
    with LMDBStore(path, ROOMY) as store:
        line.send(store.lease(key_of(0), 600) is not None)
        line.recv()


def test_a_killed_process_keeps_its_lease_until_it_expires(tmp_path: Path) -> None:
    clock = ManualClock(time.time_ns())
    with LMDBStore(tmp_path, ROOMY, clock=clock) as store:
        with process(lease, tmp_path) as (_, line):
            assert line.recv()
        assert store.lease(key_of(0), 10) is None
        clock.advance(3600)
        assert store.lease(key_of(0), 10) is not None
