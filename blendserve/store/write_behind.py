"""Chunks written to a store in another thread, while the next ones are computed.

    this thread      compute 0, 1 | compute 2, 3                       | compute 4, 5 ...
    writing thread                | code, write 0 | code, write 1      | code, write 2 ...

Each put is the store's own transaction, as it would be here: a kill loses what was not written yet, and nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from blendserve.core import ChunkKV
from blendserve.errors import StoreError
from blendserve.kernels.cuda.staging import CopyStream, HostCopy
from blendserve.store.base import KVStore
from blendserve.store.codecs.base import Codec
from blendserve.store.key import ChunkKey
from blendserve.store.record import ChunkRecord


@dataclass(frozen=True, slots=True)
class _Write:
    """A put that is under way."""

    tokens: int
    n_bytes: int
    put: Future[bool]


def write_behind(
    store: KVStore,
    codec: Codec,
    chunks: Iterable[tuple[ChunkKey, ChunkKV]],
    most_tokens: int,
    stream: CopyStream | None = None,
) -> Generator[int, None, None]:
    """Encode and put the chunks, pinned and in order -> the bytes of each, as soon as it is stored.

    Of what was computed, at most `most_tokens`, or one chunk, waits to be written. What waits when the caller or `chunks`
    stops early is still written: close the iterator then. stream: of copies to the host, by default the device's own.
    Raises StoreError; what was stored stays.
    """
    waiting: deque[_Write] = deque()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="blendserve-write") as pool:
        try:
            for key, kv in chunks:
                put = pool.submit(_put, store, codec, key, HostCopy(kv, stream))
                waiting.append(_Write(kv.n_tokens, kv.n_bytes, put))
                while _is_over(waiting, most_tokens):
                    yield _done(waiting.popleft())
            while waiting:
                yield _done(waiting.popleft())
        except StoreError:
            pool.shutdown(cancel_futures=True)  # the next ones would fail alike
            raise


def _put(store: KVStore, codec: Codec, key: ChunkKey, copy: HostCopy) -> bool:
    return store.put(key, ChunkRecord.encode(key, copy.arrived(), codec), pin=True)


def _is_over(waiting: deque[_Write], most_tokens: int) -> bool:
    """Whether the first is to be waited for, or need not be."""
    if not waiting:
        return False
    return waiting[0].put.done() or (len(waiting) > 1 and sum(w.tokens for w in waiting) > most_tokens)


def _done(write: _Write) -> int:
    write.put.result()
    return write.n_bytes
