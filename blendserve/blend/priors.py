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

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from blendserve.blend.chunk_kv import ChunkComputer
from blendserve.blend.layout import lay_out, preceding_share
from blendserve.blend.prefill import PrefillPlan, blend_prefill
from blendserve.config import BlendConfig
from blendserve.core import Chunk, Prompt, Span, TokenIds, run
from blendserve.errors import CorruptBlob, StoreError
from blendserve.kernels.types import Prior, Ropes
from blendserve.kv import ChunkKV, KVShape, Layers, join_layers, map_layers
from blendserve.models.kv_cache import KVCache
from blendserve.models.kv_model import KVModel
from blendserve.models.model import DecoderModel
from blendserve.registry import FULL_REUSE
from blendserve.store import KVStore, TensorView
from blendserve.store.base import Progress
from blendserve.store.codecs.base import Pair

LayerOf = Callable[[int], Pair]
"""Number of a layer -> keys before RoPE and values [K, S, D] of some tokens there."""

KVOf = Callable[[Sequence[TokenIds]], Iterable[ChunkKV]]
"""Chunks -> the KV of each"""

NAME = "moves2"  # in the place of a codec's; "moves" were maps without `preceding_share`
FIT_TOKENS = 16_384  # more tokens change little
MIN_TOKENS = 2_048  # of fewer no map is fitted
CHUNKS_PER_PROMPT, MAX_PROMPT_TOKENS = 10, 4_096  # chunks of a prompt, and its tokens, at most
PENALTY = 20.0  # per feature of unit size


@dataclass(frozen=True, slots=True, eq=False)
class Priors:
    """The maps of all layers of a model, from the second layer on, in fp32."""

    weights: Layers  # [L - 1, K, 2D, 2D]
    constants: Layers  # [L - 1, K, 2D]

    @classmethod
    def of_nothing(cls, model: KVModel) -> Priors:
        """No deviation at all; as fast as other priors."""
        made = {name: torch.zeros(shape, device=model.device) for name, shape in _shapes(model).items()}
        return cls._of(made, model)

    @classmethod
    def _of(cls, parts: Mapping[str, Tensor], model: KVModel) -> Priors:
        """Priors made of the tensors that a blob has."""
        if model.has_equal_layers:
            return cls(parts["weights"], parts["constants"])
        layers = range(1, model.n_kv_layers)
        return cls(*(tuple(parts[f"{name}.{l}"] for l in layers) for name in ("weights", "constants")))

    def layer(self, l: int) -> Prior:
        """The prior of layer l >= 1."""
        return Prior(self.weights[l - 1], self.constants[l - 1])

    def to_bytes(self) -> bytes:
        """Weights are rounded to bf16."""
        parts = {
            "weights": map_layers(lambda x: x.bfloat16().cpu().contiguous(), self.weights),
            "constants": map_layers(lambda x: x.cpu().contiguous(), self.constants),
        }
        tensors = {
            name if isinstance(part, Tensor) else f"{name}.{l}": x
            for name, part in parts.items()
            for l, x in ([(0, part)] if isinstance(part, Tensor) else enumerate(part, 1))
        }
        return save(tensors)

    @classmethod
    def from_bytes(cls, raw: bytes, model: KVModel) -> Priors:
        """Raises ValueError for bytes that are no priors of this model."""
        try:
            parts = load(raw)
        except SafetensorError as error:
            raise ValueError(f"these are no priors: {error}") from None
        if {name: tuple(x.shape) for name, x in parts.items()} != _shapes(model):
            raise ValueError("these priors are of a model of another shape")
        if not all(bool(x.isfinite().all()) for x in parts.values()):
            raise ValueError("these priors have numbers that are not finite")
        return cls._of({name: x.to(model.device, torch.float32) for name, x in parts.items()}, model)


def _shapes(model: KVModel) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a blob, by name: one of a kind for all layers, or one for each layer if these differ."""
    lead: tuple[int, ...] = (model.n_kv_layers - 1,) if model.has_equal_layers else ()
    found = dict[str, tuple[int, ...]]()
    for l, (heads, *dims) in enumerate(model.kv_shapes[1:2] if lead else model.kv_shapes[1:], 1):
        name = "" if lead else f".{l}"
        shape = (*lead, heads, sum(dims))
        found |= {f"weights{name}": (*shape, sum(dims)), f"constants{name}": shape}
    return found


class StoredPriors:
    """The priors that a store has for one model and chunk context. Thread-safe."""

    def __init__(
        self, model: KVModel, fingerprint: str, store: KVStore, prefix: TokenIds, context: TokenIds
    ) -> None:
        """context: what chunks are computed after."""
        self._kv_model = model
        self._store = store
        digest = xxhash.xxh3_64_hexdigest(str((prefix, context)).encode())
        self._owner = f"{fingerprint}/{digest}"
        self._priors: Priors | None = None
        self._lock = threading.Lock()
        self._is_loaded = False

    def current(self) -> Priors | None:
        """None if the store has none that can be used. The store is asked once."""
        with self._lock:
            if not self._is_loaded:
                with suppress(StoreError):  # out of reach: asked again next time
                    self._priors = self._load()
                    self._is_loaded = True
            return self._priors

    def hash(self) -> bytes | None:
        """The hash of the store's priors; None if it has none. Raises StoreError."""
        return self._store.blobs.current(NAME, self._owner)

    def put(self, priors: Priors) -> None:
        """Store these. Raises StoreError."""
        self._store.blobs.put(NAME, self._owner, priors.to_bytes())
        self._is_loaded = False

    def use(self, priors: Priors | None) -> None:
        """Use these from now on, whatever the store has."""
        with self._lock:
            self._priors = priors
            self._is_loaded = True

    def _load(self) -> Priors | None:
        try:
            hash = self.hash()
            raw = None if hash is None else self._store.blobs.get(hash)
            return None if raw is None else Priors.from_bytes(raw, self._kv_model)
        except (ValueError, CorruptBlob):
            return None


class PriorStore(StoredPriors):
    """The same for a model that can fit some."""

    def __init__(
        self, model: DecoderModel, fingerprint: str, store: KVStore, prefix: TokenIds, context: TokenIds
    ) -> None:
        super().__init__(model, fingerprint, store, prefix, context)
        self._model = model
        self._prefix = prefix
        self._context = context

    def learn(
        self,
        chunks: Sequence[TokenIds],
        progress: Progress = lambda done, total: None,
        alone: KVOf | None = None,
    ) -> None:
        """Fit priors on a corpus and store them, unless the store has some. Arguments as in `fit`. Raises StoreError."""
        if self.current() is None and (made := self.fit(chunks, progress, alone)) is not None:
            self.put(made)

    def fit(
        self,
        chunks: Sequence[TokenIds],
        progress: Progress = lambda done, total: None,
        alone: KVOf | None = None,
    ) -> Priors | None:
        """Fit priors on a corpus, in prompts made of its chunks; None if it is too small.

        `progress(tokens done, tokens in all)`. alone: returns KV of chunks, each computed alone; default: computes it.
        """
        model = self._model
        first = int(self._context == self._prefix)  # the first chunk is exact, then
        prompts = prompts_of(list(dict.fromkeys(chunks)), self._prefix, model.context_limit)
        total = sum(map(len, prompts))
        done = 0
        if total < MIN_TOKENS:
            return None
        alone = alone or ChunkComputer(model, self._context).stream
        fit = LeastSquares(model)
        full = BlendConfig(method="full", **FULL_REUSE)
        for prompt in prompts:
            cache = run(blend_prefill(model, PrefillPlan.of(lay_out(prompt), full))).cache
            kvs = alone([chunk.ids for chunk in prompt.chunks[first:]])
            spans = prompt.spans[first:]
            ropes = model.rope(torch.arange(len(prompt), device=model.device))
            within = [partial(_layer_at, model, cache, ropes, span) for span in spans]
            fit.add(spans, [TensorView(kv).layer for kv in kvs], within)
            done += len(prompt)
            progress(done, total)
        return fit.solve()


def prompts_of(chunks: Sequence[TokenIds], prefix: TokenIds, limit: int) -> list[Prompt]:
    """Chunks in random order, each once: prompts of at most `limit` tokens, FIT_TOKENS of chunks in all."""
    order = torch.randperm(len(chunks), generator=torch.Generator().manual_seed(0)).tolist()
    groups: list[list[TokenIds]] = [[]]
    left = FIT_TOKENS
    room = min(limit, MAX_PROMPT_TOKENS) - len(prefix)
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


def _layer_at(model: DecoderModel, cache: KVCache, ropes: Ropes, span: Span, l: int) -> Pair:
    """Keys before RoPE and values of a prefilled prompt, at these positions. ropes: at all of its positions."""
    here = slice(span.start, span.stop)
    return model.rotate(cache.keys[l][:, here], ropes[l].at(here).inverse), cache.values[l][:, here]


class LeastSquares:
    """Sums of products of x = [stored key | stored value | 1] with itself and with the deviation."""

    def __init__(self, model: KVModel) -> None:
        self._model = model
        self.n_tokens = 0  # of the prompts, up to their last chunk
        shapes = [(heads, sum(dims) + 1) for heads, *dims in model.kv_shapes[1:]]
        self._gram = [torch.zeros(heads, n, n, dtype=torch.float64) for heads, n in shapes]
        self._cross = [torch.zeros(heads, n, n - 1, dtype=torch.float64) for heads, n in shapes]

    def add(self, spans: Sequence[Span], alone: Sequence[LayerOf], within: Sequence[LayerOf]) -> None:
        """Chunks of one prompt: computed alone, and at these places in the prompt when it was prefilled in full."""
        by = torch.cat([torch.full((len(span), 1), preceding_share(span)) for span in spans])
        by = by.to(self._model.device)
        self.n_tokens += spans[-1].stop
        for l in range(1, self._model.n_kv_layers):
            stored, fresh = (
                torch.cat([torch.cat(layer(l), dim=-1) for layer in kv], dim=1).to(by.device).float()
                for kv in (alone, within)
            )
            x = by * torch.cat([stored, torch.ones_like(stored[..., :1])], dim=-1)
            self._gram[l - 1] += (x.mT @ x).cpu()
            self._cross[l - 1] += (x.mT @ (fresh - stored)).cpu()

    def solve(self) -> Priors:
        """The penalty counts features of unit size, of keys and of values, as the ridge of a prompt does."""
        solved = [
            self._solve(*layer).float().to(self._model.device)
            for layer in zip(self._gram, self._cross, self._model.kv_shapes[1:], strict=True)
        ]
        return Priors(join_layers([x[:, :-1] for x in solved]), join_layers([x[:, -1] for x in solved]))

    @staticmethod
    def _solve(gram: Tensor, cross: Tensor, shape: KVShape) -> Tensor:
        """Weights [K, 2D + 1, 2D] of one layer: the ridge solution."""
        n = gram[:, -1:, -1]
        dims = [shape.dim, shape.value_dim]
        mean = gram[:, :-1, -1] / n
        variance = (gram.diagonal(dim1=-2, dim2=-1)[:, :-1] / n - mean**2).clamp(min=1e-12)
        halves = (half.mean(dim=-1, keepdim=True).expand_as(half) for half in torch.split(variance, dims, -1))
        size = torch.cat([*halves], dim=-1).sqrt()
        penalised = gram.clone()
        penalised.diagonal(dim1=-2, dim2=-1)[:, :-1] += PENALTY * size**2
        solved: Tensor = torch.linalg.solve(penalised, cross)
        return solved
