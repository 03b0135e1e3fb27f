"""Decoding by one native call a step, where a model's forms have kernels; else the layer loop (forward.py) decodes.

Both give the same bits in bf16, and the same numbers to rounding in fp32, where the loop's linear layers are torch's. The
first step of a model runs both and compares them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from blendserve.kernels import team
from blendserve.kernels.cpu.decode_step import DecodeStep, unsupported
from blendserve.kernels.cpu.isa import LEVELS, Level
from blendserve.kernels.verify import cpu_status
from blendserve.models.adapter import Adapter
from blendserve.models.kv_cache import KVCache

CHECKED = (0, 299)  # positions of the comparison
TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-4}  # of the largest logit


@dataclass(frozen=True, slots=True)
class Row:
    """A token to run, and where its KV goes."""

    cache: KVCache
    at: int
    token: int


class NativeDecoder:
    """A model's decoding steps. One thread at a time."""

    def __init__(self, adapter: Adapter, step: DecodeStep) -> None:
        self._adapter, self._step = adapter, step
        self._tables = adapter.rope_tables[1]
        self._threads = StepThreads(torch.get_num_threads)

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Row]) -> Tensor:
        """Run up to MAX_ROWS tokens, of one request or of several, append their KV -> logits [B, V]."""
        adapter = self._adapter
        hidden = adapter.embed(torch.tensor([row.token for row in rows]))
        ropes = adapter.rope(torch.tensor([row.at for row in rows]))
        tables = [ropes[l] for l in self._tables]
        caches = [(row.cache.keys, row.cache.values, row.at) for row in rows]
        return adapter.scale_logits(self._threads.run(lambda: self._step(hidden, tables, caches)))


Loop = Callable[[Adapter, Sequence[Row]], Tensor]  # the layer loop -> logits [B, V]

_bound: WeakKeyDictionary[Adapter, tuple[NativeDecoder | None, str]] = WeakKeyDictionary()


def native_decoder(adapter: Adapter, loop: Loop) -> tuple[NativeDecoder | None, str]:
    """The decoder and what it runs, or None and the reason why the layer loop decodes; found once for each model."""
    if adapter not in _bound:
        _bound[adapter] = None, "being compared with the layer loop"
        _bound[adapter] = _bind(adapter, loop)
    return _bound[adapter]


def _bind(adapter: Adapter, loop: Loop) -> tuple[NativeDecoder | None, str]:
    if adapter.device.type != "cpu":
        return None, f"the model is on {adapter.device}"
    level = _level(adapter.dtype)
    if level is None:
        return None, f"no native kernels for {adapter.dtype} on this CPU"
    try:
        weights = adapter.decode_weights()
    except ValueError as missing:
        return None, str(missing)
    if reason := unsupported(level, weights):
        return None, reason
    decoder = NativeDecoder(adapter, DecodeStep(level, weights, adapter.rope_tables[0]))
    error = _difference(adapter, decoder, loop)
    if not error <= TOLERANCE[adapter.dtype]:
        return None, f"logits differ from the layer loop's by {error:.2g} of the largest"
    return decoder, f"one {level.title} call a step"


def _level(dtype: torch.dtype) -> Level | None:
    """The widest instruction set whose kernels are right here."""
    name = str(dtype).removeprefix("torch.")
    levels = [x for x in LEVELS.values() if x.dtype == name and "decode_step" in x.sources]
    return next((level for level in reversed(levels) if cpu_status(level).active), None)


@torch.inference_mode()
def _difference(adapter: Adapter, decoder: NativeDecoder, loop: Loop) -> float:
    """Largest difference to the layer loop's logits over random KV, as a share of the largest logit; KV included."""
    n = min(CHECKED[-1], adapter.context_limit - 1)
    caches = [KVCache(adapter, n + 1) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for part in (caches[0].keys, caches[0].values):
        part.copy_(torch.randn(part.shape, generator=generator))
    caches[1].keys.copy_(caches[0].keys)
    caches[1].values.copy_(caches[0].values)
    worst = 0.0
    for at in (CHECKED[0], n):
        mine, other = (Row(cache, at, 1 + at % 7) for cache in caches)
        want, got = loop(adapter, [mine]), decoder([other])
        pairs = ((want, got), *((getattr(caches[0], x), getattr(caches[1], x)) for x in ("keys", "values")))
        for a, b in pairs:
            worst = max(worst, float((a - b).abs().max() / a.abs().max().clamp_min(1e-9)))
            worst = worst if bool(torch.isfinite(b).all()) else float("inf")
    return worst


class StepThreads:
    """How many threads a step takes: all, or fewer while other processes make that faster.

    Every PAUSE seconds one step runs with half or twice as many, and the faster number stays. No result depends on it.
    """

    PAUSE = 0.25  # seconds between trials
    GAIN = 0.95  # of the usual time that a trial must take at most

    def __init__(
        self, all_threads: Callable[[], int], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._all, self._clock = all_threads, clock
        self.threads = all_threads()
        self._recent: deque[float] = deque(maxlen=5)
        self._trial_at = clock() + self.PAUSE
        self._tries_more = False

    def run(self, step: Callable[[], Tensor]) -> Tensor:
        """One step, with the threads that serve now or with those that are tried."""
        most, began = self._all(), self._clock()
        self.threads = min(self.threads, most)
        is_trial = len(self._recent) == self._recent.maxlen and began >= self._trial_at and most > 1
        threads = self._tried(most) if is_trial else self.threads
        with team.at_most(threads):
            out = step()
        elapsed = self._clock() - began
        if not is_trial:
            self._recent.append(elapsed)
            return out
        self._trial_at = self._clock() + self.PAUSE
        if elapsed < self.GAIN * sorted(self._recent)[len(self._recent) // 2]:
            self.threads = threads
            self._recent.clear()
        return out

    def _tried(self, most: int) -> int:
        """Half and twice as many in turns, where there are such."""
        self._tries_more = self.threads == 1 or (self.threads < most and not self._tries_more)
        return min(most, self.threads * 2) if self._tries_more else self.threads // 2
