"""Decoding by one native call a step, where a model's forms have kernels; else the layer loop (forward.py) decodes.

Both give the same bits in bf16, and the same numbers to rounding in fp32, where the loop's linear layers are torch's. The
first step of a model runs both and compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from blendserve.kernels.cpu.decoder import DecodeStep, unsupported
from blendserve.kernels.cpu.isa import LEVELS, Level
from blendserve.kernels.selfcheck import cpu_status
from blendserve.models.forward import Row, run_rows
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel
from blendserve.models.native_weights import decode_weights
from blendserve.models.threads import StepThreads

CHECKED = (0, 299)  # positions of the comparison
TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-4}  # of the largest logit
INT8_TOLERANCE = 0.2  # of int8 weights, at the first position


class NativeDecoder:
    """A model's decoding steps. One thread at a time."""

    def __init__(self, model: DecoderModel, step: DecodeStep) -> None:
        self._model, self._step = model, step
        self._tables = model.rope_tables[1]
        self._threads = StepThreads(torch.get_num_threads)

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Row]) -> Tensor:
        """Run up to MAX_ROWS tokens, of one request or of several, append their KV -> logits [B, V]."""
        model = self._model
        hidden = model.embed(torch.tensor([row.token for row in rows]))
        ropes = model.rope(torch.tensor([row.at for row in rows]))
        tables = [ropes[l] for l in self._tables]
        caches = [(row.cache.keys, row.cache.values, row.at) for row in rows]
        return model.scale_logits(self._threads.run(lambda: self._step(hidden, tables, caches)))


Loop = Callable[[DecoderModel, Sequence[Row]], Tensor]  # the layer loop -> logits [B, V]

Bound = tuple[NativeDecoder | None, str]

_bound: WeakKeyDictionary[DecoderModel, dict[bool, Bound]] = WeakKeyDictionary()


def native_decoder(model: DecoderModel, int8: bool = False, loop: Loop = run_rows) -> Bound:
    """The decoder and what it runs, or None and the reason why the layer loop decodes; found once for each model.

    int8: over a copy of the weights in int8, which approximates the model: half the bytes of bf16.
    """
    bound = _bound.setdefault(model, {})
    if int8 not in bound:
        bound[int8] = _bind(model, int8, loop)
    return bound[int8]


def _bind(model: DecoderModel, int8: bool, loop: Loop) -> Bound:
    if model.device.type != "cpu":
        return None, f"the model is on {model.device}"
    level = _level(model.dtype)
    if level is None:
        return None, f"no native kernels for {model.dtype} on this CPU"
    try:
        weights = decode_weights(model)
    except ValueError as missing:
        return None, str(missing)
    if reason := unsupported(level, weights):
        return None, reason
    decoder = NativeDecoder(model, DecodeStep(level, weights, model.rope_tables[0], int8))
    error = _difference(model, decoder, loop, CHECKED[:1] if int8 else CHECKED)
    if not error <= (INT8_TOLERANCE if int8 else TOLERANCE[model.dtype]):
        return None, f"logits differ from the layer loop's by {error:.2g} of the largest"
    return decoder, f"one {level.title} call a step" + (" over int8 weights" if int8 else "")


def _level(dtype: torch.dtype) -> Level | None:
    """The widest instruction set whose kernels are right here."""
    name = str(dtype).removeprefix("torch.")
    levels = [x for x in LEVELS.values() if x.dtype == name and "decode_step" in x.sources]
    return next((level for level in reversed(levels) if cpu_status(level).active), None)


@torch.inference_mode()
def _difference(model: DecoderModel, decoder: NativeDecoder, loop: Loop, positions: Sequence[int]) -> float:
    """Largest difference to the layer loop's logits over random KV, as a share of the largest logit; KV included."""
    n = min(CHECKED[-1], model.context_limit - 1)  # the last position of the comparison
    caches = [KVCache(model, n + 1) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for part in (caches[0].keys, caches[0].values):
        part.copy_(torch.randn(part.shape, generator=generator))
    caches[1].keys.copy_(caches[0].keys)
    caches[1].values.copy_(caches[0].values)
    worst = 0.0
    for at in (min(position, n) for position in positions):
        mine, other = (Row(cache, at, 1 + at % 7) for cache in caches)
        want, got = loop(model, [mine]), decoder([other])
        pairs = ((want, got), *((getattr(caches[0], x), getattr(caches[1], x)) for x in ("keys", "values")))
        for a, b in pairs:
            worst = max(worst, float((a - b).abs().max() / a.abs().max().clamp_min(1e-9)))
            worst = worst if bool(torch.isfinite(b).all()) else float("inf")
    return worst
