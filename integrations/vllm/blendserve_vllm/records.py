"""Stored chunks and the heads of a rank; what ranks must agree on; the KV of rows, kept in memory.

A record holds all heads. Each rank of tensor parallelism reads its own, and scores with all. A rank that left out a chunk
that others use would wait for them forever in the next reduction, so chunks are read whole, and agreed on, before a job
of several ranks begins. One rank alone reads layer by layer, and starts again without a chunk that turns out damaged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial

import torch
from torch import Tensor
from vllm.distributed import get_tp_group

from blendserve.blend.runs import donor_requests
from blendserve.config import Config
from blendserve.core import Prompt, Span, TokenIds
from blendserve.errors import ConfigError, StoreError
from blendserve.fetch import open_storage
from blendserve.fetch.fetcher import Fetch, KVFetcher
from blendserve.kernels.ops import rotate
from blendserve.kv import ChunkKV, join_layers
from blendserve.models.kv_model import KVModel
from blendserve.registry import CODECS, PLAIN_CODECS, parse_codec
from blendserve.store import ChunkKey, ChunkRecord, ChunkView, KVStore, Miss, TensorView
from blendserve.store.codecs.base import Codec, Pair

PREFIX_BYTES = 256 << 20  # of KV of prompts' beginnings, which the scoring pass reads


@lru_cache(maxsize=4)
def storage(config: Config, device: torch.device) -> tuple[KVStore, KVFetcher]:
    """The store that the settings name, opened once in a process. Raises StoreUnavailable, StoreVersion."""
    return open_storage(config.store, None, device)


class Ranks:
    """This process among those of tensor parallelism."""

    def __init__(self, n_kv_heads: int) -> None:
        """n_kv_heads: of the model, all ranks together. Ranks share a head where there are fewer."""
        group = get_tp_group()
        self.n, self.rank = group.world_size, group.rank_in_group
        self._group, self._n_kv_heads = group, n_kv_heads

    @property
    def kv_heads(self) -> slice:
        """This rank's part of the model's kv heads."""
        start = self.rank * self._n_kv_heads // self.n
        return slice(start, start + max(1, self._n_kv_heads // self.n))

    def own(self, view: ChunkView) -> ChunkView:
        """The same chunk with this rank's heads."""
        if self.n == 1:
            return view

        def read(l: int) -> Pair:
            keys, values = view.layer(l)
            return keys[self.kv_heads], values[self.kv_heads]

        sizes = view.n_layers, view.n_tokens, view.n_bytes, view.raw_bytes
        return ChunkView(*sizes, view.version, read, view.in_memory, view.is_placed, view.is_lossless)

    def gather_kv(self, x: Tensor) -> Tensor:
        """Keys or values [K, ...] of all heads, from this rank's."""
        if self.n == 1:
            return x
        copies = max(1, self.n // self._n_kv_heads)
        return self.gather(x)[::copies].contiguous() if copies > 1 else self.gather(x)

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' x, one after another in its first dim."""
        return self._group.all_gather(x.contiguous(), dim=0) if self.n > 1 else x

    def part(self, x: Tensor) -> Tensor:
        """This rank's share of the columns of x [S, H * D]."""
        return x.chunk(self.n, dim=1)[self.rank]

    def sum(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(x) if self.n > 1 else x

    def agree(self, mine: Sequence[bool]) -> list[bool]:
        """Which are true on all ranks."""
        if self.n == 1 or not mine:
            return list(mine)
        flags = torch.tensor(mine, dtype=torch.int32)
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MIN, group=self._group.cpu_group)
        return [bool(flag) for flag in flags.tolist()]


class Records:
    """Reads and writes the chunks of one store. Raises what `storage` raises, and ConfigError."""

    def __init__(self, config: Config, device: torch.device, ranks: Ranks) -> None:
        self.store, self.fetcher = storage(config, device)
        self._ranks = ranks
        name, level = parse_codec(config.store.codec)
        made = CODECS.load(name)
        if made.needs_tables:
            raise ConfigError(
                f"store.codec={name} needs tables, which vLLM's model cannot fit: use {' or '.join(PLAIN_CODECS)}",
                setting="store.codec",
            )
        self._codec: Codec = made.with_tables(level)

    @contextmanager
    def fetch(self, prompt: Prompt) -> Iterator[Fetch]:
        """The chunks of a prompt's runs, as far as every rank can read them."""
        with self.fetcher.fetch(donor_requests(prompt, None)) as fetch:
            if self._ranks.n > 1:
                keys = list(dict.fromkeys(run.donor for run in prompt.runs))
                copies = [self.copy(fetch, key) for key in keys]
                readable = self._ranks.agree([view is not None for view in copies])
                for key, view, is_readable in zip(keys, copies, readable, strict=True):
                    fetch.views.pop(key, None)
                    if is_readable and view:
                        fetch.views[key] = view
                        fetch.misses.pop(key, None)
                    else:
                        fetch.misses.setdefault(key, Miss("unreachable", "another rank cannot read it"))
            yield fetch

    def put(self, key: ChunkKey, kv: ChunkKV) -> None:
        """Store a chunk, on the first rank. Raises StoreError."""
        if self._ranks.rank == 0:
            self.store.put(key, ChunkRecord.encode(key, kv, self._codec), pin=True)

    def copy(self, fetch: Fetch, key: ChunkKey) -> TensorView | None:
        """All of a chunk in memory; None if it cannot be read."""
        try:
            view = fetch.views[key]
            layers = [[x.clone() for x in view.layer(l)] for l in range(view.n_layers)]
        except (KeyError, StoreError):
            return None
        return TensorView(ChunkKV(*(join_layers(side) for side in zip(*layers, strict=True))))


class Capture:
    """The KV of rows of a pass, all heads, by position."""

    def __init__(self, model: KVModel, ranks: Ranks, start: int, stop: int) -> None:
        """model: of all heads. start, stop: positions to keep."""
        self._model, self._ranks, self._start = model, ranks, start
        empty = partial(torch.empty, dtype=getattr(model, "dtype", None), device=model.device)
        n = stop - start
        self.keys = [empty(shape.heads, n, shape.dim) for shape in model.kv_shapes]
        self.values = [empty(shape.heads, n, shape.value_dim) for shape in model.kv_shapes]

    def add(self, l: int, at: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keep layer l at positions [S], this rank's heads [K, S, D]; those before the first kept one are left out."""
        is_kept = at >= self._start
        where = (at[is_kept] - self._start).to(self._model.device)
        for kept, x in ((self.keys, keys), (self.values, values)):
            kept[l][:, where] = self._ranks.gather_kv(x)[:, is_kept.to(x.device)]

    def placed(self) -> ChunkKV:
        """The kept KV, with keys after RoPE."""
        return ChunkKV(join_layers(self.keys), join_layers(self.values))

    def layer(self, span: Span, l: int) -> Pair:
        """Keys before RoPE and values of layer l at these positions."""
        rope = self._model.rope(torch.arange(span.start, span.stop, device=self._model.device))[l]
        keys, values = (
            x[l][:, span.start - self._start : span.stop - self._start] for x in (self.keys, self.values)
        )
        return rotate(keys.contiguous(), rope.inverse, self._model.rotary), values

    def chunk(self, ids: TokenIds) -> ChunkKV:
        """The kept KV with keys before RoPE: a chunk to store."""
        span = Span(self._start, self._start + len(ids))
        sides = zip(*(self.layer(span, l) for l in range(len(self.keys))), strict=True)
        return ChunkKV(*(join_layers([x.cpu() for x in side]) for side in sides), ids=ids)


class Prefixes:
    """KV of prompts' beginnings, the last ones used, up to PREFIX_BYTES."""

    def __init__(self) -> None:
        self._views = OrderedDict[TokenIds, TensorView]()

    def get(self, ids: TokenIds) -> TensorView | None:
        if ids in self._views:
            self._views.move_to_end(ids)
        return self._views.get(ids)

    def add(self, ids: TokenIds, kv: ChunkKV) -> TensorView:
        view = self._views[ids] = TensorView(kv, is_placed=True)
        while len(self._views) > 1 and sum(view.n_bytes for view in self._views.values()) > PREFIX_BYTES:
            self._views.popitem(last=False)
        return view
