"""Stored chunks whose KV may serve other text: an index of one namespace's chunks in memory, and their tokens.

A thread of its own builds the index from the store when it is first asked for. This process's writes are added at once,
those of others by a refresh. The index is a hint: tokens are read from the store, and a request's KV from its snapshot.

A donor has the same model, context, dtype and namespace: it is one only if its tokens give its own key.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from blendserve.blend.chunk_kv import ChunkKeys
from blendserve.core import TokenIds
from blendserve.errors import StoreError
from blendserve.fetch.tiered import stores_of
from blendserve.store import ChunkKey, KVStore
from blendserve.store.spans import SpanIndex

IDS_PER_READ = 256  # chunks that a refresh reads the tokens of at a time: some 300 KB of headers
FIRST_WAIT_S = 0.5  # for an index that is being built: enough for some thousand chunks
REFRESH_S = 300.0  # until chunks that other processes store are found
RETRY_S = 10.0  # until a store that did not answer is asked again

Donors = dict[ChunkKey, TokenIds]

log = logging.getLogger(__name__)


class DonorIndex:
    """Keeps an index of the chunks of one namespace like the store. Thread-safe."""

    def __init__(self, store: KVStore, key: ChunkKeys) -> None:
        self._store = store
        self._key = key
        self.index = SpanIndex()
        self._not_donors: set[ChunkKey] = set()  # stored chunks of other contexts
        self._next_refresh = 0.0  # 0: the index is not used yet
        self.is_built = False  # whether the index has had all chunks of the stores
        self._lock = threading.Lock()

    def add(self, ids: TokenIds) -> None:
        """This process has stored a chunk."""
        if self._next_refresh:
            self.index.add([(self._key(ids), self.index.anchors(ids))])

    def read(self, keys: Sequence[ChunkKey]) -> Donors:
        """The tokens of the stored ones; the index forgets the others."""
        donors, is_complete = self._read(keys)
        if is_complete:  # else some may be in a store that did not answer
            self.index.discard(key for key in keys if key not in donors)
        return donors

    def refresh(self) -> None:
        """Make the index that of the store as it is now. Chunks that cannot be listed or read stay as they are."""
        self._next_refresh = time.monotonic() + REFRESH_S
        before = self.index.keys  # chunks that are added from here on may not be listed, and stay
        stored = set[ChunkKey]()
        is_built = self._ask_stores(
            lambda store: stored.update(filter(self._key.owns, store.keys(self._key.namespace)))
        )
        if is_built:
            self.index.discard(before - stored)
            self._not_donors &= stored
        new = sorted(stored - self.index.keys - self._not_donors)
        for some in (new[at : at + IDS_PER_READ] for at in range(0, len(new), IDS_PER_READ)):
            donors, is_complete = self._read(some)
            self.index.add((key, self.index.anchors(ids)) for key, ids in donors.items())
            self._not_donors |= set(some if is_complete else ()) - donors.keys()
            is_built &= is_complete
        self.is_built |= is_built
        if not is_built:
            self._next_refresh = time.monotonic() + RETRY_S

    def refresh_if_due(self) -> None:
        """Refresh the index in the background; the first caller waits a moment for it."""
        now = time.monotonic()
        with self._lock:
            is_first = not self._next_refresh
            is_due = now >= self._next_refresh
            if is_due:
                self._next_refresh = now + REFRESH_S
        if is_due:
            thread = threading.Thread(target=self.refresh, name="blendserve-donors", daemon=True)
            thread.start()
            if is_first:
                thread.join(FIRST_WAIT_S)

    def _read(self, keys: Sequence[ChunkKey]) -> tuple[Donors, bool]:
        """Stored chunks of this context with their tokens, and whether every store answered."""
        found: Donors = {}

        def read(store: KVStore) -> None:
            left = [key for key in keys if key not in found]
            infos = store.describe(left) if left else {}
            found.update({key: ids for key, info in infos.items() if self._key(ids := info.token_ids) == key})

        return found, self._ask_stores(read)

    def _ask_stores(self, read: Callable[[KVStore], None]) -> bool:
        """Read from the local and the remote store -> whether both answered."""
        is_complete = True
        for store in stores_of(self._store):
            try:
                read(store)
            except StoreError as error:
                log.debug("some chunks are not searched for stored text, as %s", error)
                is_complete = False
        return is_complete
