"""The KV cache of one request: allocated once, written by the prefill, appended to by decoding, never copied.

keys, values  [L, K, T + new tokens, D], keys after RoPE at their true positions; of a pool [slots, L, K, tokens, D]

Where layers differ in K and D, each has a tensor of its own; a layer that reads the KV of an earlier one has that one's.
A recurrent layer has a state instead, behind the prompt and behind the latest token.

Fresh memory costs more than what is written to it: the system clears it page by page, which takes several times as long
as filling it. So the memory of the last cache that is not referred to any more is kept, one in a process.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blendserve.errors import ConfigError
from blendserve.kv import ChunkKV, Layers, map_layers
from blendserve.models.memory import available_on
from blendserve.models.model import DecoderModel
from blendserve.models.recurrent import RecurrentState

ALIGNMENT = 64  # bytes
MAX_EXCESS = 4  # times what is asked for: more memory is not held for it
LEAST_TOKENS = 256  # of a slot, without which a server is of no use
SPARE = 0.25  # of the bytes asked for; memory that is not touched costs nothing

Memory = NDArray[np.uint8]
_kept: deque[Memory] = deque(maxlen=1)

log = logging.getLogger(__name__)


class KVCache:
    """Room for `capacity` tokens; position p of the prompt is in place p."""

    def __init__(self, model: DecoderModel, capacity: int) -> None:
        memory = recycled_empty((_numbers(model, capacity),), model.dtype, model.device)
        self.keys, self.values = _layers(memory, model, (), capacity)
        self.capacity = capacity
        self._states: dict[int, dict[int, RecurrentState]] = {}

    @classmethod
    def over(cls, keys: Layers, values: Layers) -> KVCache:
        """A cache over existing memory: keys, values [L, K, capacity, D]."""
        cache = cls.__new__(cls)
        cache.keys = keys
        cache.values = values
        cache.capacity = int(keys[0].shape[1])
        cache._states = {}
        return cache

    def write(self, l: int, at: Tensor | slice, keys: Tensor, values: Tensor) -> None:
        """Put rotated keys and values [K, S, D] of layer l at these positions."""
        self.keys[l][:, at] = keys
        self.values[l][:, at] = values

    def state(self, l: int, at: int) -> RecurrentState:
        """Recurrent layer l's state behind the first `at` tokens. Raises KeyError if it is not kept."""
        return self._states[l][at]

    def keep_state(self, l: int, at: int, state: RecurrentState) -> None:
        """Keep the state behind `at` tokens, beside that of the prefill, from which answers may be decoded again."""
        states = self._states.setdefault(l, {})
        for other in [*states][1:]:
            del states[other]
        states[at] = state

    def forget_states(self) -> None:
        """Another prompt follows."""
        self._states = {}

    def beginning(self, model: DecoderModel, n: int) -> ChunkKV:
        """The first n tokens of the layers that keep KV, as views; keys after RoPE."""
        kept = slice(model.n_kv_layers)
        return ChunkKV(self.keys[kept], self.values[kept]).tokens(0, n)

    def copy(self, other: KVCache, n: int) -> None:
        """Take over the first n tokens of another cache, and the states behind its prompt."""
        for ours, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for mine, its in zip(ours, theirs, strict=True):
                mine[:, :n] = its[:, :n]
        first = {l: next(iter(states.items())) for l, states in other._states.items()}
        self._states = {l: {at: state} for l, (at, state) in first.items()}

    @property
    def n_bytes(self) -> int:
        """The bytes of the layers that keep KV."""
        each = {x.data_ptr(): x for side in (self.keys, self.values) for x in side}.values()
        return sum(x.numel() * x.element_size() for x in each)

    def fill(self, number: float, start: int = 0) -> None:
        """Set all KV from position `start` on."""
        for side in (self.keys, self.values):
            map_layers(lambda x: x[..., start:, :].fill_(number), side)


class CachePool:
    """One block of memory cut into `n` slots of `n_tokens`; a slot is one request's cache. For one thread."""

    def __init__(self, model: DecoderModel, n: int, n_tokens: int) -> None:
        memory = torch.empty(n * _numbers(model, n_tokens), dtype=model.dtype, device=model.device)
        self.keys, self.values = _layers(memory, model, (n,), n_tokens)
        self.caches = slots(self.keys, self.values)
        self._free = self.caches[::-1]
        self.n = n
        self.n_tokens = n_tokens

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def acquire(self) -> KVCache:
        """A slot as a cache; its former content is not read. Raises IndexError when none is free."""
        return self._free.pop()

    def release(self, cache: KVCache) -> None:
        """Free its slot. Raises ValueError for a slot that is free."""
        if cache in self._free:
            raise ValueError("this slot is free already")
        self._free.append(cache)


def tokens_of_slots(model: DecoderModel, n: int, wanted: int | None) -> int:
    """Return how many tokens each of n slots has room for.

    That is `wanted`, or by default the model's context; no more than the context, and by default no more than fill half
    of the available memory. Raises ConfigError where `wanted`, or a default of LEAST_TOKENS, does not fit.
    """
    context = model.context_limit
    available = available_on(model.device)
    per_token = n * _numbers(model, 1) * model.dtype.itemsize
    fitting = available // 2 // max(1, per_token)
    tokens = min(context, max(fitting, LEAST_TOKENS) if wanted is None else wanted)
    if tokens * per_token > available:
        raise ConfigError(
            f"settings 'serve.slots' and 'serve.slot_tokens' cannot be {n} and {tokens}: their KV takes "
            f"{tokens * per_token // 10**6} MB, and {available // 10**6} MB are available: lower them",
            setting="serve.slots" if wanted is None else "serve.slot_tokens",
        )
    if wanted is None and tokens < context:
        text = "a request has room for %d tokens of the model's %d, as %d MB are available for %d slots (serve.slots)"
        log.warning(text, tokens, context, available // 10**6, n)
    return tokens


def slots(keys: Layers, values: Layers) -> list[KVCache]:
    """The caches of keys and values [slots, L, K, tokens, D], or of as many layers [slots, K, tokens, D]."""

    def cache(n: int) -> KVCache:
        return KVCache.over(*(map_layers(lambda x: x[n], side) for side in (keys, values)))

    return [cache(n) for n in range(len(keys if isinstance(keys, Tensor) else keys[0]))]


def _numbers(model: DecoderModel, n_tokens: int) -> int:
    """How many numbers the keys and values of n_tokens are."""
    return n_tokens * sum(shape.numbers for shape in model.kv_shapes)


def _layers(
    memory: Tensor, model: DecoderModel, lead: tuple[int, ...], n_tokens: int
) -> tuple[Layers, Layers]:
    """A block of memory as keys and values of all layers, with the dims `lead` in front."""
    if model.has_equal_layers and model.n_kv_layers == model.n_layers:
        heads, dim, _ = model.kv_shapes[0]
        keys, values = memory.view(2, *lead, model.n_layers, heads, n_tokens, dim)
        return keys, values
    shapes = [(*lead, shape.heads, n_tokens, dim) for shape in model.kv_shapes for dim in shape[1:]]
    parts = torch.split(memory, [math.prod(shape) for shape in shapes])
    made = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    keys, values = (tuple(made[2 * source + i] for source in model.kv_sources) for i in (0, 1))
    return keys, values


def recycled_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate as torch.empty does; on a CPU in kept memory, if there is enough, kept again after its last view."""
    if device.type != "cpu":  # torch keeps a GPU's memory itself
        return torch.empty(shape, dtype=dtype, device=device)
    n_bytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(0, dtype=np.uint8)
    with suppress(IndexError):
        memory = _kept.pop()
    if not n_bytes <= memory.size <= MAX_EXCESS * n_bytes:  # too small, or far too large
        raw = np.empty(int((1 + SPARE) * n_bytes) + ALIGNMENT, dtype=np.uint8)
        memory = raw[-raw.ctypes.data % ALIGNMENT :]
    view = memory[:n_bytes]
    weakref.finalize(view, _kept.append, memory).atexit = False
    return torch.from_numpy(view).view(dtype).view(shape)  # its storage refers to `view`
