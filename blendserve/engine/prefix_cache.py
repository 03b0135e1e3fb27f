"""Conversations: earlier turns stand in front of this turn's passages, and their KV is kept between turns.

[ system | turn 1 | turn 2 | ... | this turn's opening | chunk 0 | chunk 1 | ... | question ]
  prefix: exact; computed once, then found               blended behind it
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

from blendserve.blend.chunk_kv import ChunkComputer
from blendserve.core import ChunkKV, Steps, TokenIds
from blendserve.models.model import DecoderModel


@dataclass(frozen=True, slots=True)
class PrefixKV:
    """KV of a prompt's prefix that is no chunk of the store: a conversation so far."""

    kv: ChunkKV
    reused: int  # tokens of it that an earlier turn left; the others were computed for this one


class PrefixCache:
    """KV of conversations so far, the latest kept within a number of bytes. Used by the model's thread alone.

    Nothing of it is ever stored on disk: it depends on its order, and would crowd out what does not.
    """

    def __init__(self, adapter: DecoderModel, cap_bytes: int) -> None:
        self._adapter, self._cap = adapter, cap_bytes
        self._kept: OrderedDict[tuple[str, TokenIds], ChunkKV] = OrderedDict()

    def get(self, namespace: str, ids: TokenIds, base: TokenIds, base_kv: ChunkKV) -> Steps[PrefixKV]:
        """The KV of a prefix: the longest beginning that is known, the rest computed behind it, and kept.

        base, base_kv: a beginning that everybody has. Only prefixes of the same namespace are looked at.
        """
        found, kv = _common(ids, base), base_kv
        for (owner, other), known in self._kept.items():
            if owner == namespace and (n := _common(ids, other)) > found:
                found, kv = n, known
        known = ChunkKV(kv.keys[:, :, :found], kv.values[:, :, :found])
        if found < len(ids):
            context_kv = known if found else None
            computer = ChunkComputer(self._adapter, ids[:found], context_kv)
            new = (yield from computer.steps([ids[found:]]))[0]
            known = ChunkKV(torch.cat([known.keys, new.keys], 2), torch.cat([known.values, new.values], 2))
        self._keep((namespace, ids), known)
        return PrefixKV(known, found)

    @property
    def n_bytes(self) -> int:
        """Of all that is kept."""
        return sum(kv.n_bytes for kv in self._kept.values())

    def _keep(self, key: tuple[str, TokenIds], kv: ChunkKV) -> None:
        """A copy of its own: a view would hold a longer prefix in memory."""
        if key not in self._kept:
            self._kept[key] = ChunkKV(kv.keys.clone(), kv.values.clone())
        self._kept.move_to_end(key)
        while self._kept and self.n_bytes > self._cap:
            self._kept.popitem(last=False)


def _common(a: TokenIds, b: TokenIds) -> int:
    """Length of the longest common beginning."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
