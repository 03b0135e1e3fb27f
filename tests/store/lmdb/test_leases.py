"""Leases in the file: of several processes one computes a chunk, and what a dead one left is free again."""

from __future__ import annotations

import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

from blendserve.blend.single_flight import SingleFlight
from blendserve.store import LMDBStore
from blendserve.store.lmdb import leases
from tests.support.forked import process
from tests.store.helpers import CAP, chunk, key_of


def compute_what_is_free(line: Connection, path: Path) -> None:
    """What precompute does about each chunk, without a reader."""
    computed = 0
    with LMDBStore(path, CAP) as store:
        flight = SingleFlight()
        line.send("ready")
        line.recv()
        for n in range(40):
            if flight.claim(store, {key_of(n): 10}):
                if key_of(n) not in store:
                    store.put(key_of(n), chunk(10, seed=n))
                    computed += 1
                flight.release(key_of(n))
        line.send(computed)


def test_processes_on_one_file_compute_each_chunk_once(tmp_path: Path) -> None:
    with ExitStack() as stack:
        lines = [stack.enter_context(process(compute_what_is_free, tmp_path))[1] for _ in range(3)]
        assert [line.recv() for line in lines] == ["ready"] * 3
        for line in lines:
            line.send("go")
        assert sum(line.recv() for line in lines) == 40


def computing(line: Connection, path: Path) -> None:
    """A process that is killed while it computes."""
    with LMDBStore(path, CAP) as store:
        flight = SingleFlight()
        line.send(bool(flight.claim(store, {key_of(0): 10})))
        line.recv()


def test_a_dead_process_keeps_its_lease_until_that_ends(tmp_path: Path) -> None:
    with LMDBStore(tmp_path, CAP) as store:
        with process(computing, tmp_path) as (_, line):
            assert line.recv()
        assert store.lease(key_of(0), 10) is None
        with store._write() as txn:  # as if time had passed
            assert not leases.take(txn, key_of(0), b"me" * 8, time.time_ns(), 0)
            assert leases.take(txn, key_of(0), b"me" * 8, time.time_ns() + 3600 * 10**9, 0)
