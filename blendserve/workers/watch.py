"""Rows that workers make, on a cluster that may lose all its machines: Ray waits for another one in silence, for ever."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from blendserve.errors import ClusterUnavailable

PATIENCE_S = 60.0
LOOK_S = 1.0


def watched(rows: Iterator[dict[str, Any]], possible: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """The same rows. possible: whether the cluster has a machine for any worker; asked while no row comes.

    Raises ClusterUnavailable where it has had none for PATIENCE_S, and what `rows` raises.
    """
    found: SimpleQueue[dict[str, Any] | BaseException | None] = SimpleQueue()
    Thread(target=_read, args=(rows, found.put), daemon=True).start()
    since: float | None = None
    while True:
        try:
            row = found.get(timeout=LOOK_S)
        except Empty:
            since = None if possible() else _lost(since)
            continue
        if row is None:
            return
        if isinstance(row, BaseException):
            raise row
        yield row


def _lost(since: float | None) -> float:
    """When it was lost. Raises ClusterUnavailable where that is too long ago."""
    now = time.monotonic()
    if since is None:
        logging.getLogger(__name__).warning(
            "no machine of the Ray cluster has room for a worker any more: waiting %.0f seconds for one",
            PATIENCE_S,
        )
    elif now - since > PATIENCE_S:
        raise ClusterUnavailable(
            "no machine of the Ray cluster has room for a worker any more: what was computed is stored; add one "
            "(ray start --address ...), and the same command goes on from there"
        )
    return now if since is None else since


def _read(
    rows: Iterator[dict[str, Any]], put: Callable[[dict[str, Any] | BaseException | None], None]
) -> None:
    try:
        for row in rows:
            put(row)
    except BaseException as error:  # the reader's to raise
        put(error)
    put(None)
