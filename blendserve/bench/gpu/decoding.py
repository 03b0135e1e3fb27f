"""Steps of decoding, launched one kernel after another and replayed from a CUDA graph: the same numbers? in what time?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blendserve.bench.figures import Figures, interleaved, ratios, spread
from blendserve.kernels.cuda.graphs import Capture, CudaGraph, Replayed
from blendserve.models.adapter import Adapter
from blendserve.models.kv_cache import KVCache
from blendserve.models.replay import EAGER, WORTH, Step, is_worthwhile, plain_steps, replayed_steps
from blendserve.timing import Clock

LAUNCHED, REPLAYED = "launched", "replayed"


@dataclass(frozen=True, slots=True)
class Decoded:
    """One answer of given tokens."""

    per_token: float  # seconds, once everything is warm
    capture: float  # seconds of the token that the capture fell on
    logits: Tensor  # [V], after the last token


def measure(adapter: Adapter, context: int, new_tokens: int, repeats: int) -> Figures:
    """Behind a context of random KV. On a CPU, where nothing is captured, the captured step itself is run instead."""
    cache = random_cache(adapter, context, EAGER + 1 + new_tokens)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(adapter.vocab_size, (EAGER + 1 + new_tokens,), generator=draw).tolist()
    capture: Capture = CudaGraph if adapter.device.type == "cuda" else at_once
    calls = {
        LAUNCHED: lambda: run(adapter, plain_steps(adapter, cache), context, tokens),
        REPLAYED: lambda: run(adapter, replayed_steps(adapter, cache, context, capture), context, tokens),
    }
    took = interleaved(calls, repeats)
    seconds = {name: [one.per_token for one in took[name]] for name in took}
    launched, replayed = (took[name][-1].logits for name in (LAUNCHED, REPLAYED))
    return {
        "context": context,
        "captured": is_worthwhile(adapter, WORTH),
        "seconds_per_token": {name: spread(values) for name, values in seconds.items()},
        "faster": ratios(seconds[LAUNCHED], seconds[REPLAYED]),
        "seconds_of_capture": spread([one.capture for one in took[REPLAYED]]),
        "off": float((launched - replayed).abs().max() / launched.abs().max()),  # of the largest logit
    }


def run(adapter: Adapter, advance: Step, context: int, tokens: list[int]) -> Decoded:
    """All tokens behind the context; the first ones, and the capture, before the clock of the others starts."""
    for i in range(EAGER):
        advance(context + i, tokens[i])
    clock = Clock(adapter.device)
    clock.elapsed()  # a GPU has done all that by now
    began = clock.elapsed()
    advance(context + EAGER, tokens[EAGER])
    captured = clock.elapsed()
    for i in range(EAGER + 1, len(tokens)):
        logits = advance(context + i, tokens[i])
        int(logits.argmax())  # as who samples waits for it
    ended = clock.elapsed()
    per_token = (ended - captured) / (len(tokens) - EAGER - 1)
    return Decoded(per_token, captured - began, logits.float().cpu())


@torch.inference_mode()
def random_cache(adapter: Adapter, context: int, more: int) -> KVCache:
    """Room for a context and more, full of noise."""
    cache = KVCache(adapter, context + more)
    for part in (cache.keys, cache.values):
        part.normal_(generator=torch.Generator(adapter.device).manual_seed(0))
    return cache


def at_once(work: Callable[[], Tensor], device: torch.device) -> Replayed:
    """Stands for a capture where there is none."""
    return work
