"""KV of prompt prefixes, in memory only: the engine's own prefix, and conversations.

    [ system | turn 1 | turn 2 | ... | instruction | chunk 0 | chunk 1 | ... | question ]
      prefix: computed once, then reused             blended after it

A prefix is never stored: a conversation depends on its order, and the engine's own prefix takes milliseconds to compute.

A plain prompt that was blended is kept with its answer: the next turn goes on from the KV that the answer was made of.
Exact of it is the beginning, up to the first chunk. Methods that are exact use no more.

At the cap, the namespace that occupies most gives up what it used longest ago. So a tenant who sends many conversations
pushes out its own.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from blendserve.blend.chunk_kv import ChunkComputer, placed
from blendserve.core import Steps, TokenIds
from blendserve.kv import ChunkKV
from blendserve.models.kv_cache import KVCache

# of a prefix: its owner and tokens. An owner is a namespace, or one with a scope
Key: TypeAlias = tuple[str, TokenIds]


@dataclass(frozen=True, slots=True)
class PrefixKV:
    """The KV of a prompt's prefix."""

    kv: ChunkKV  # its keys after RoPE
    reused: int  # tokens of it that were not computed for this prompt
    n_exact: int  # tokens at its beginning whose KV is exact

    @property
    def n_kept(self) -> int:
        """The others: of a blended prompt, or computed behind it."""
        return self.kv.n_tokens - self.n_exact

    def beginning(self, n: int) -> PrefixKV:
        """The first n tokens of the prefix, all of them reused."""
        return PrefixKV(self.kv.tokens(0, n), n, min(n, self.n_exact))


class PrefixCache:
    """The engine's own prefix, which is never evicted, and the latest other prefixes. Thread-safe."""

    def __init__(self, own: ChunkComputer, cap_bytes: int = 0) -> None:
        """own: computes chunks after the engine's own prefix. cap_bytes: limit of all other prefixes."""
        self._own = own
        self.cap_bytes = cap_bytes
        self._cached: OrderedDict[Key, PrefixKV] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def get(
        self, owner: str, ids: TokenIds, known: PrefixKV | None = None, exact: bool = True
    ) -> Steps[PrefixKV]:
        """The KV of a prefix: the longest beginning that is cached, and the rest computed after it.

        Only the same owner's prefixes, and the engine's own, are reused. known: of a beginning of these ids, by an
        earlier call for the same prompt. exact: whether KV that is kept from blended prompts is left alone.
        """
        own = yield from self._own.placed_context()
        if ids == self._own.context:
            return PrefixKV(own, len(ids), len(ids))
        n, cached = self._longest(owner, ids, exact)
        prefix = (cached or PrefixKV(own, n, n)).beginning(n)
        if known and known.kv.n_tokens >= n:
            prefix = known
            n = known.kv.n_tokens
        if n < len(ids):
            model = self._own.model
            computer = ChunkComputer(model, ids[:n], prefix.kv, is_moved=False)
            new = (yield from computer.steps([ids[n:]]))[0]
            n_exact = prefix.n_exact if prefix.n_kept else len(ids)
            prefix = replace(prefix, kv=ChunkKV.joined((prefix.kv, placed(model, new, n))), n_exact=n_exact)
            self._add(owner, ids, prefix)
        return prefix

    def keep(self, owner: str, ids: TokenIds, cache: KVCache) -> None:
        """Keep the KV of a blended prompt and its answer, as the request has it. What was cached as exact still is.

        ids: a beginning of the tokens that the request's cache holds.
        """
        if self._own.model.recurrent:
            return  # a state is of all the tokens that ran, and an answer's last one did not
        n, cached = self._longest(owner, ids, exact=False)
        if n < len(ids) <= self.cap_bytes // self._own.model.kv_bytes_per_token:
            kv = cache.beginning(self._own.model, len(ids)).map(torch.Tensor.clone)
            self._add(owner, ids, PrefixKV(kv, n, min(n, cached.n_exact) if cached else n))

    def n_cached(self, owner: str, ids: TokenIds, exact: bool = True) -> int:
        """How many tokens at the beginning of a prompt are cached. exact: as of `get`."""
        return self._longest(owner, ids, exact)[0]

    def _longest(self, owner: str, ids: TokenIds, exact: bool) -> tuple[int, PrefixKV | None]:
        """Tokens in common with the cached prefix that has most, and it; None = the engine's own."""
        n = self._n_common(ids, self._own.context)
        longest = None
        with self._lock:
            for key, prefix in self._cached.items():
                m = self._n_common(ids, key[1]) if key[0] == owner else 0
                if (m := min(m, prefix.n_exact) if exact else m) > n:
                    n = m
                    longest = key
            if longest:
                self._cached.move_to_end(longest)
            return n, self._cached[longest] if longest else None

    def _n_common(self, ids: TokenIds, cached: TokenIds) -> int:
        """Tokens that a prefix can take from a cached one: all it has in common, or with states the whole one or none."""
        n = _n_common(ids, cached)
        return n if n == len(cached) or not self._own.model.recurrent else 0

    @property
    def n_bytes(self) -> int:
        """Bytes of all prefixes but the engine's own."""
        return sum(prefix.kv.n_bytes for prefix in self._cached.values())

    def _add(self, owner: str, ids: TokenIds, prefix: PrefixKV) -> None:
        if prefix.kv.n_bytes > self.cap_bytes:
            return
        with self._lock:
            for key, earlier in list(self._cached.items()):  # turns that it begins with
                if key[0] == owner and ids[: len(key[1])] == key[1] and earlier.n_exact <= prefix.n_exact:
                    del self._cached[key]
            self._cached[owner, ids] = prefix
            self._cached.move_to_end((owner, ids))
            while self.n_bytes > self.cap_bytes:
                del self._cached[self._victim((owner, ids))]

    def _victim(self, new: Key) -> Key:
        """The prefix to evict for a new one: the least recently used of the namespace that occupies most."""
        n_bytes = Counter[str]()
        for key, prefix in self._cached.items():
            n_bytes[_namespace(key)] += prefix.kv.n_bytes
        return max((key for key in self._cached if key != new), key=lambda key: n_bytes[_namespace(key)])


def _namespace(key: Key) -> str:
    """The namespace of a prefix's owner, without the scope."""
    return key[0].partition("\0")[0]


def _n_common(a: TokenIds, b: TokenIds) -> int:
    """Length of the longest common beginning."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
