"""A chunk that is used while it comes: its layers, as a transfer brings them, and who waits for one of them."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from blendserve.store.codecs.base import Buffer
from blendserve.store.record import Header


class Arrival:
    """Of one chunk. Who brings it says `begin` and `add`, who wants a layer waits. Safe to share between threads."""

    def __init__(self) -> None:
        self.begun: Future[None] = Future()  # its header is here; never fails
        self._header: Header | None = None
        self._segments: list[Buffer] = []
        self._ended = False
        self._changed = threading.Condition()

    @property
    def header(self) -> Header | None:
        """Of the record that is coming; it may still become another one's."""
        return self._header

    @property
    def whole(self) -> bool:
        header = self._header
        return header is not None and len(self._segments) == header.shape.n_layers

    def begin(self, header: Header) -> None:
        """A record begins to come: the first one, or another level in place of it."""
        with self._changed:
            self._header, self._segments = header, []
            if not self.begun.done():
                self.begun.set_result(None)
            self._changed.notify_all()

    def add(self, segment: Buffer) -> None:
        """Its next layer, which was checked."""
        with self._changed:
            self._segments.append(segment)
            self._changed.notify_all()

    def end(self) -> None:
        """Nothing that is not here is worth waiting for."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def segment(self, header: Header, l: int, seconds: float) -> Buffer | None:
        """Layer l of the record with this very header, within so many seconds; None where it does not come."""

        def decided() -> bool:
            return self._ended or self._header is not header or l < len(self._segments)

        with self._changed:
            self._changed.wait_for(decided, max(0.0, seconds))
            here = self._header is header and l < len(self._segments)
            return self._segments[l] if here else None
