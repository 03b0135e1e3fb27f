"""Correction priors: how the KV of a corpus's chunks deviates when other chunks precede it (ours).

A chunk's KV is computed alone, and differs after other text. A part of the difference is the same whatever that text
is. It is fitted once, on prompts made of the corpus itself, as one linear map per layer and kv head, from a token's
stored key and value to its deviation:

    expected (fresh - stored)  =  preceding_share ([key before RoPE | value]  W + c)     least squares, penalised
    preceding_share           =  tokens before the chunk / tokens up to its end

A chunk in front has hardly other text to attend to, and deviates half as much as a late one (research/decisions.md). The
first layer's KV depends on its token alone and never deviates. A store keeps the maps as a blob, under the hash of their
content (store/blobs.py), one for each model and chunk context.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from blendserve.blend.chunk_kv import ChunkComputer
from blendserve.blend.layout import lay_out, preceding_share
from blendserve.blend.prefill import blend_prefill
from blendserve.config import BlendConfig
from blendserve.core import Chunk, ChunkKV, Prompt, Span, TokenIds, run
from blendserve.errors import CorruptBlob, StoreError
from blendserve.kernels.types import Prior
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel
from blendserve.registry import FULL_REUSE
from blendserve.store import KVStore

NAME = "moves2"  # in the place of a codec's; "moves" were maps without `preceding_share`
FIT_TOKENS = 16_384  # more tokens change little
MIN_TOKENS = 2_048  # of fewer no map is fitted
CHUNKS_PER_PROMPT, MAX_PROMPT_TOKENS = 10, 4_096  # chunks of a prompt, and its tokens, at most
PENALTY = 20.0  # per feature of unit size

Progress = Callable[[int, int], None]


class Priors:
    """The maps of all layers of a reader."""

    def __init__(
        self, weights: Tensor, constants: Tensor, explained: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        """weights [L - 1, K, 2D, 2D] and constants [L - 1, K, 2D], fp32, from the second layer on.

        explained: share of the variance of the deviations, of keys and of values; mean over layers.
        """
        self._weights, self._constants, self.explained = weights, constants, explained

    @classmethod
    def of_nothing(cls, adapter: DecoderModel) -> Priors:
        """No deviation at all; as fast as other priors."""
        shape = adapter.n_layers - 1, adapter.n_kv_heads, 2 * adapter.head_dim
        weights = torch.zeros(*shape, shape[-1], device=adapter.device)
        return cls(weights, torch.zeros(shape, device=adapter.device))

    def layer(self, l: int) -> Prior:
        """Of layer l >= 1."""
        return Prior(self._weights[l - 1], self._constants[l - 1])

    def to_bytes(self) -> bytes:
        """Weights are rounded to bf16."""
        parts = {"weights": self._weights.bfloat16().cpu(), "constants": self._constants.cpu()}
        about = {"explained": " ".join(f"{share:.3f}" for share in self.explained)}
        return save({name: x.contiguous() for name, x in parts.items()}, about)

    @classmethod
    def from_bytes(cls, raw: bytes, adapter: DecoderModel) -> Priors:
        """Raises ValueError for bytes that are no priors of this model."""
        try:
            parts, about = load(raw), json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
            keys, values = map(float, about["__metadata__"]["explained"].split())
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"these are no priors: {error}") from None
        shape = adapter.n_layers - 1, adapter.n_kv_heads, 2 * adapter.head_dim
        wanted = {"weights": (*shape, shape[-1]), "constants": shape}
        if {name: tuple(x.shape) for name, x in parts.items()} != wanted:
            raise ValueError("these priors are of a model of another shape")
        weights, constants = (parts[name].to(adapter.device, torch.float32) for name in wanted)
        return cls(weights, constants, (keys, values))


class PriorStore:
    """The priors of one model and chunk context in a store. Thread-safe."""

    def __init__(
        self, adapter: DecoderModel, fingerprint: str, store: KVStore, prefix: TokenIds, context: TokenIds
    ) -> None:
        """context: what chunks are computed after."""
        self._adapter, self._store = adapter, store
        self._prefix, self._context = prefix, context
        digest = xxhash.xxh3_64_hexdigest(str((prefix, context)).encode())
        self._owner = f"{fingerprint}/{digest}"
        self._priors: Priors | None = None
        self._lock, self._is_loaded = threading.Lock(), False

    def current(self) -> Priors | None:
        """None if the store has none that can be used. The store is asked once."""
        with self._lock:
            if not self._is_loaded:
                with suppress(StoreError):  # out of reach: asked again next time
                    self._priors, self._is_loaded = self._load(), True
            return self._priors

    def hash(self) -> bytes | None:
        """The hash of the store's priors; None if it has none. Raises StoreError."""
        return self._store.blobs.current(NAME, self._owner)

    def learn(self, chunks: Sequence[TokenIds], progress: Progress = lambda done, total: None) -> bool:
        """Fit priors on a corpus and store them, unless the store has some -> whether it has now. Raises StoreError."""
        if self.current() is None and (made := self.fit(chunks, progress)) is not None:
            self._store.blobs.put(NAME, self._owner, made.to_bytes())
            self._is_loaded = False
        return self.current() is not None

    def fit(self, chunks: Sequence[TokenIds], progress: Progress = lambda done, total: None) -> Priors | None:
        """Priors of a corpus; None if it is too small."""
        return fit_priors(self._adapter, self._prefix, self._context, chunks, progress)

    def use(self, priors: Priors | None) -> None:
        """Use these from now on, whatever the store has."""
        with self._lock:
            self._priors, self._is_loaded = priors, True

    def _load(self) -> Priors | None:
        try:
            hash = self.hash()
            raw = None if hash is None else self._store.blobs.get(hash)
            return None if raw is None else Priors.from_bytes(raw, self._adapter)
        except (ValueError, CorruptBlob):
            return None


def prompts_of(chunks: Sequence[TokenIds], prefix: TokenIds, limit: int) -> list[Prompt]:
    """Chunks in random order, each once: prompts of at most `limit` tokens, FIT_TOKENS of chunks in all."""
    order = torch.randperm(len(chunks), generator=torch.Generator().manual_seed(0)).tolist()
    groups: list[list[TokenIds]] = [[]]
    left, room = FIT_TOKENS, min(limit, MAX_PROMPT_TOKENS) - len(prefix)
    for ids in (chunks[n] for n in order):
        if left <= 0:
            break
        if not ids or len(ids) > room:
            continue
        if len(groups[-1]) == CHUNKS_PER_PROMPT or sum(map(len, groups[-1])) + len(ids) > room:
            groups.append([])
        groups[-1].append(ids)
        left -= len(ids)
    return [Prompt(prefix, tuple(map(Chunk, group)), ()) for group in groups if len(group) > 1]


def fit_priors(
    adapter: DecoderModel,
    prefix: TokenIds,
    context: TokenIds,
    chunks: Sequence[TokenIds],
    progress: Progress = lambda done, total: None,
) -> Priors | None:
    """Learn from chunks in prompts made of them; None if they are too few.

    context: what chunks are computed behind. `progress(tokens done, tokens in all)`.
    """
    prompts = prompts_of(list(dict.fromkeys(chunks)), prefix, adapter.context_limit)
    total, done = sum(map(len, prompts)), 0
    if total < MIN_TOKENS:
        return None
    computer, sums = ChunkComputer(adapter, context), _Sums(adapter)
    for prompt in prompts:
        sums.add(*_deviations(adapter, prompt, computer, first=int(context == prefix)))
        done += len(prompt)
        progress(done, total)
    return sums.solve()


def _deviations(
    adapter: DecoderModel, prompt: Prompt, computer: ChunkComputer, first: int
) -> tuple[slice, list[ChunkKV], KVCache]:
    """The chunks from `first` on, which do not stand where they are computed: where, alone, and in full prefill."""
    layout = lay_out(prompt)
    cache = run(blend_prefill(adapter, prompt, layout, BlendConfig(method="full", **FULL_REUSE))).cache
    alone = list(computer.stream([chunk.ids for chunk in prompt.chunks[first:]]))
    return slice(prompt.spans[first].start, prompt.spans[-1].stop), alone, cache


class _Sums:
    """What least squares need: products of [stored key | stored value | 1] with themselves and with deviations."""

    def __init__(self, adapter: DecoderModel) -> None:
        self._adapter = adapter
        size, n = 2 * adapter.head_dim, adapter.n_layers - 1
        self._gram = torch.zeros(n, adapter.n_kv_heads, size + 1, size + 1, dtype=torch.float64)
        self._cross = torch.zeros(n, adapter.n_kv_heads, size + 1, size, dtype=torch.float64)
        self._square = torch.zeros(n, adapter.n_kv_heads, size, dtype=torch.float64)

    def add(self, here: slice, chunks: Sequence[ChunkKV], cache: KVCache) -> None:
        """Chunks, and what they are at these places of a prompt that was prefilled in full."""
        ends = list(accumulate((kv.n_tokens for kv in chunks), initial=here.start))
        places = torch.tensor([preceding_share(Span(*edges)) for edges in pairwise(ends)])
        by = places.repeat_interleave(torch.tensor([kv.n_tokens for kv in chunks]))[:, None]
        by = by.to(self._adapter.device)
        ropes = self._adapter.rope(torch.arange(here.start, here.stop, device=self._adapter.device))
        for l in range(1, self._adapter.n_layers):
            keys = self._adapter.rotate(cache.keys[l][:, here], ropes[l].inverse)
            fresh = torch.cat([keys, cache.values[l][:, here]], dim=-1).float()
            stored = torch.cat([torch.cat([kv.keys[l], kv.values[l]], dim=-1) for kv in chunks], dim=1)
            stored = stored.to(fresh.device).float()
            x = by * torch.cat([stored, torch.ones_like(stored[..., :1])], dim=-1)
            self._gram[l - 1] += (x.mT @ x).cpu()
            moved = fresh - stored
            self._cross[l - 1] += (x.mT @ moved).cpu()
            self._square[l - 1] += moved.square().sum(dim=1).cpu()

    def solve(self) -> Priors:
        """Keys are of unit size in it, and values, as in the ridge of a prompt."""
        gram, cross, dim = self._gram, self._cross, self._adapter.head_dim
        n = gram[..., -1:, -1]
        mean = gram[..., :-1, -1] / n
        spread = (gram.diagonal(dim1=-2, dim2=-1)[..., :-1] / n - mean**2).clamp(min=1e-12)
        size = spread.reshape(*spread.shape[:2], 2, dim).mean(dim=-1).sqrt().repeat_interleave(dim, dim=-1)
        penalised = gram.clone()
        penalised.diagonal(dim1=-2, dim2=-1)[..., :-1] += PENALTY * size**2
        solved = torch.linalg.solve(penalised, cross)
        found = solved.float().to(self._adapter.device)
        return Priors(
            found[..., :-1, :].contiguous(), found[..., -1, :].contiguous(), self._explained(solved)
        )

    def _explained(self, solved: Tensor) -> tuple[float, float]:
        left = self._square - (2 * solved * self._cross - solved * (self._gram @ solved)).sum(dim=-2)
        shape = len(left), -1, 2, self._adapter.head_dim
        left, there = (x.reshape(shape).sum(dim=(1, 3)) for x in (left, self._square))
        keys, values = (1 - left / there.clamp(min=1e-12)).mean(dim=0).tolist()
        return keys, values
