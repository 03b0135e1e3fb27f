"""The KV of a chunk: keys and values of every layer, or a recurrent layer's state map. Shape letters as in core.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

from blendserve.core import TokenIds


class KVShape(NamedTuple):
    """What one layer keeps of a token: K keys of D numbers each, and K values."""

    heads: int  # K
    dim: int  # D
    value_dim: int  # of a value; D in most models

    @property
    def numbers(self) -> int:
        """The number of all keys and values of a token."""
        return self.heads * (self.dim + self.value_dim)


Layers: TypeAlias = "torch.Tensor | tuple[torch.Tensor, ...]"
"""A tensor [K, C, D] of each layer: one [L, K, C, D] if their shapes are equal, else L of them."""


def join_layers(layers: Sequence[torch.Tensor]) -> Layers:
    """The tensors of all layers, [K, C, D] each."""
    return torch.stack(tuple(layers)) if len({x.shape for x in layers}) == 1 else tuple(layers)


def stacked(layers: Layers) -> torch.Tensor:
    """Return layers as one tensor [L, K, C, D]. Raises ValueError for layers that differ in shape."""
    if isinstance(layers, torch.Tensor):
        return layers
    raise ValueError("these layers differ in shape")


def map_layers(change: Callable[[torch.Tensor], torch.Tensor], layers: Layers) -> Layers:
    """The layers after `change`, which is given all of them at once if their shapes are equal: [..., C, D]."""
    return change(layers) if isinstance(layers, torch.Tensor) else tuple(map(change, layers))


@dataclass(frozen=True, slots=True)
class ChunkKV:
    """One chunk's KV cache, independent of where the chunk will stand. Filled by blend/chunk_kv.py, kept by store/."""

    keys: Layers  # [L, K, C, D], before RoPE
    values: Layers  # [L, K, C, D]
    ids: TokenIds = field(default=(), kw_only=True)  # [C], or () if unknown; codecs use them
    recurrent: frozenset[int] = field(default=frozenset(), kw_only=True)
    """Layers that have a state map of the chunk instead (models/recurrent.py): [H, R, .], whatever C is."""

    @property
    def n_layers(self) -> int:
        return len(self.keys)

    @property
    def n_tokens(self) -> int:
        return int(next(x for l, x in enumerate(self.keys) if l not in self.recurrent).shape[1])

    @property
    def n_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for side in (self.keys, self.values) for x in side)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> ChunkKV:
        """The KV after `change` of its tensors, [..., C, D]."""
        sides = (map_layers(change, side) for side in (self.keys, self.values))
        return ChunkKV(*sides, recurrent=self.recurrent)

    def tokens(self, start: int, stop: int) -> ChunkKV:
        """A part of its tokens, as views; with state maps all or none of them. Raises ValueError for a part of those."""
        if not self.recurrent:
            return self.map(lambda x: x[..., start:stop, :])
        if start == stop:
            return ChunkKV(*map(self._none, (self.keys, self.values)), recurrent=self.recurrent)
        if (start, stop) != (0, self.n_tokens):
            raise ValueError("a state map is of a whole chunk")
        return self

    def _none(self, side: Layers) -> Layers:
        """No tokens, and the state in front of all."""
        each = enumerate(side)
        return tuple(torch.zeros_like(x) if l in self.recurrent else x[:, :0] for l, x in each)

    @classmethod
    def joined(cls, parts: Sequence[ChunkKV]) -> ChunkKV:
        """All tokens of these, in memory of its own, with the state maps of the last one."""
        recurrent = parts[-1].recurrent

        def join(side: Sequence[Layers]) -> Layers:
            layers = enumerate(zip(*side, strict=True))
            return join_layers([x[-1] if l in recurrent else torch.cat(x, dim=1) for l, x in layers])

        sides = ([getattr(part, side) for part in parts] for side in ("keys", "values"))
        return cls(*map(join, sides), recurrent=recurrent)
