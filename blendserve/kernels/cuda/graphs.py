"""Decoding without its launches: one step captured in a CUDA graph, and replayed for every further token.

A step is one row through all layers, hundreds of kernels that take a GPU less time than it takes the host to launch them.
A graph launches them at once. What it replays is fixed, addresses included, so everything that changes from token to
token lies in device memory: the token, its position, and the request's own cache, whose room does not move.

An answer's first tokens are run plainly: whoever says "yes" does not wait for a capture, and what is compiled, proven or
allocated at a first time is done then. Where a step cannot be captured, it goes on plainly, and nobody tries again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from blendserve.blend.cache import KVCache
from blendserve.blend.rows import RowPlan
from blendserve.gpu import attention as by_position
from blendserve.models.adapter import Adapter, AttentionSpec

EAGER = 4  # tokens before the capture, which costs about as much as three of them
WORTH = 16  # tokens of an answer, at most, from which on a capture may pay

Step = Callable[[int, int], Tensor]  # position, token -> logits [V]

log = logging.getLogger(__name__)


def worthwhile(adapter: Adapter, new_tokens: int) -> bool:
    """Whether steps may be captured. A mixture of experts cannot be: what it launches depends on the row."""
    can = adapter.device.type == "cuda" and not adapter.family.experts and not has_failed(adapter)
    return can and new_tokens >= WORTH


class Replayed(Protocol):
    """Work that was captured."""

    def __call__(self) -> Tensor:
        """Do it again -> its result, in the same memory each time."""
        ...


Capture = Callable[[Callable[[], Tensor], torch.device], Replayed]


def captured(work: Callable[[], Tensor], adapter: Adapter, capture: Capture) -> Replayed | None:
    """The work of a reader's step as a graph; None, and never again for this reader, where that cannot be."""
    try:
        return capture(work, adapter.device)
    except RuntimeError as error:  # CUDA's errors are such
        _failed.add(adapter)
        log.warning("decoding goes on without a CUDA graph: %s", str(error).splitlines()[0])
        return None


def has_failed(adapter: Adapter) -> bool:
    """Whether a step of this reader could not be captured."""
    return adapter in _failed


class Steps:
    """The steps of one answer over one cache: plainly at first, then by replay."""

    def __init__(
        self,
        adapter: Adapter,
        cache: KVCache,
        plain: Step,
        capture: Capture | None = None,
    ) -> None:
        """plain: a step as decode.py runs it. capture: makes the graph, by default CUDA's."""
        self._adapter, self._cache, self._plain = adapter, cache, plain
        self._capture = capture or CudaGraph
        self._token, self._at = (torch.zeros(1, dtype=torch.long, device=adapter.device) for _ in range(2))
        self._graph: Replayed | None = None
        self._made = 0

    @torch.inference_mode()
    def __call__(self, at: int, token: int) -> Tensor:
        """Run one token at position `at`, append its KV -> logits [V]; they hold until the next call."""
        self._made += 1
        if self._made <= EAGER or has_failed(self._adapter):
            return self._plain(at, token)
        self._token.fill_(token)
        self._at.fill_(at)
        if self._graph is None:
            for part in (self._cache.keys, self._cache.values):
                part[:, :, at:] = 0  # a weight of 0 does not hide a NaN that memory may hold there
            self._graph = captured(self._step, self._adapter, self._capture)
        return self._plain(at, token) if self._graph is None else self._graph()

    def _step(self) -> Tensor:
        return step_at(self._adapter, self._cache, self._token, self._at)


@torch.inference_mode()
def step_at(adapter: Adapter, cache: KVCache, token: Tensor, at: Tensor) -> Tensor:
    """decode.step for a token [1] at a position [1] that nobody here knows -> logits [V]."""
    ropes = adapter.rope(at)
    hidden = adapter.embed(token)
    for l, spec in enumerate(adapter.specs):
        row = adapter.project(l, hidden)
        cache.write(l, at, adapter.rotate(row.k, ropes[l]), row.v)
        q = adapter.rotate(row.q, ropes[l])
        hidden = adapter.finish(l, hidden, attend_at(q, cache.keys[l], cache.values[l], spec, at))
    return adapter.logits(hidden)[0]


def attend_at(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, at: Tensor) -> Tensor:
    """One row q [H, 1, D] at position `at` [1] that nobody here knows, over keys and values [K, T, D] -> [1, H * D]."""
    plan = RowPlan(at, q.shape[0] // keys.shape[0], spec.window)
    if by_position.takes(q, keys, values, spec, plan):
        return by_position.attend(q, keys, values, spec, plan)
    return attend_all(q, keys, values, spec, at)


def attend_all(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, at: Tensor) -> Tensor:
    """One row q [H, 1, D] at position `at` [1] over all of keys and values [K, T, D] -> [1, H * D].

    Plain torch; keys that the row does not see get no weight, and their values must be finite.
    """
    n_kv, n_keys, dim = keys.shape
    scores = spec.scale * (q.reshape(n_kv, -1, dim) @ keys.transpose(1, 2)).float()  # [K, g, T]
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    position = torch.arange(n_keys, device=q.device)
    hidden = position > at
    if spec.window is not None:
        hidden |= position <= at - spec.window
    weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1).to(q.dtype)
    return (weights @ values).reshape(1, -1)


class CudaGraph:
    """Work captured on a stream of its own, which all captures of a device share: so do their cuBLAS workspaces.

    Raises RuntimeError when it cannot be captured; the calling thread's stream is the same afterwards.
    """

    def __init__(self, work: Callable[[], Tensor], device: torch.device) -> None:
        with _capturing:  # one at a time in a process
            stream, ours = _capture_stream(device), torch.cuda.current_stream(device)
            self._graph = torch.cuda.CUDAGraph()
            stream.wait_stream(ours)
            try:
                with torch.cuda.stream(stream):
                    work()  # for what this stream has not done before
                    self._out = self._captured(work, device)
            finally:
                ours.wait_stream(stream)

    def __call__(self) -> Tensor:
        self._graph.replay()
        return self._out

    def _captured(self, work: Callable[[], Tensor], device: torch.device) -> Tensor:
        """What torch.cuda.graph does, but for waiting for the device and giving back all memory that is not in use."""
        pool = torch.cuda.graph_pool_handle()
        # Only this thread is watched for calls that a capture forbids: others load and compute meanwhile.
        self._graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            try:
                return work()
            finally:
                self._graph.capture_end()
        except RuntimeError:
            with suppress(
                AttributeError, RuntimeError
            ):  # left to itself, the allocator would go on waiting for the end
                torch._C._cuda_endAllocateToPool(device.index, pool)
            raise


_failed: WeakSet[Adapter] = WeakSet()
_capturing = threading.Lock()
_streams: dict[torch.device, torch.cuda.Stream] = {}


def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]
