"""KV of prompt prefixes, in memory only: the engine's own prefix, and conversations.

    [ system | turn 1 | turn 2 | ... | instruction | chunk 0 | chunk 1 | ... | question ]
      prefix: exact; computed once, then reused      blended after it

A prefix is never stored: a conversation depends on its order, and the engine's own prefix takes milliseconds to compute.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch

from blendserve.blend.chunk_kv import ChunkComputer
from blendserve.core import ChunkKV, Steps, TokenIds


@dataclass(frozen=True, slots=True)
class PrefixKV:
    """The exact KV of a prompt's prefix."""

    kv: ChunkKV
    reused: int  # tokens of it that were not computed for this prompt


class PrefixCache:
    """The engine's own prefix, which is never evicted, and the latest other prefixes. Thread-safe."""

    def __init__(self, own: ChunkComputer, cap_bytes: int = 0) -> None:
        """own: computes chunks after the engine's own prefix. cap_bytes: limit of all other prefixes."""
        self._own, self.cap_bytes = own, cap_bytes
        self._cached: OrderedDict[tuple[str, TokenIds], ChunkKV] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, namespace: str, ids: TokenIds, known: PrefixKV | None = None) -> Steps[PrefixKV]:
        """The KV of a prefix: the longest beginning that is cached, and the rest computed after it.

        Only prefixes of the same namespace, and the engine's own, are reused. known: of a beginning of these ids, by an
        earlier call for the same prompt.
        """
        own = yield from self._own.prepare()
        if ids == self._own.context:
            return PrefixKV(own, len(ids))
        n, cached = self._longest(namespace, ids)
        kv, n_reused = cached or own, n
        if known and known.kv.n_tokens >= n:
            n, kv, n_reused = known.kv.n_tokens, known.kv, known.reused
        kv = ChunkKV(kv.keys[:, :, :n], kv.values[:, :, :n])
        if n < len(ids):
            new = (yield from ChunkComputer(self._own.model, ids[:n], kv).steps([ids[n:]]))[0]
            kv = ChunkKV(torch.cat([kv.keys, new.keys], 2), torch.cat([kv.values, new.values], 2))
        self._add((namespace, ids), kv)
        return PrefixKV(kv, n_reused)

    def n_cached(self, namespace: str, ids: TokenIds) -> int:
        """How many tokens at the beginning of a prompt are cached."""
        return self._longest(namespace, ids)[0]

    def _longest(self, namespace: str, ids: TokenIds) -> tuple[int, ChunkKV | None]:
        """Tokens in common with the cached prefix that has most, and its KV; None = the engine's own."""
        n, kv = _n_common(ids, self._own.context), None
        with self._lock:
            cached = list(self._cached.items())
        for (owner, other), other_kv in cached:
            if owner == namespace and (m := _n_common(ids, other)) > n:
                n, kv = m, other_kv
        return n, kv

    @property
    def n_bytes(self) -> int:
        """Of all prefixes but the engine's own."""
        return sum(kv.n_bytes for kv in self._cached.values())

    def _add(self, key: tuple[str, TokenIds], kv: ChunkKV) -> None:
        with self._lock:
            if key not in self._cached and 0 < kv.n_bytes <= self.cap_bytes:
                namespace, ids = key
                for owner, other in list(self._cached):  # earlier turns, which it begins with
                    if owner == namespace and ids[: len(other)] == other:
                        del self._cached[owner, other]
                # A copy: a view would hold a longer prefix in memory.
                self._cached[key] = ChunkKV(kv.keys.clone(), kv.values.clone())
            if key in self._cached:
                self._cached.move_to_end(key)
            while self.n_bytes > self.cap_bytes:
                self._cached.popitem(last=False)


def _n_common(a: TokenIds, b: TokenIds) -> int:
    """Length of the longest common beginning."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
