"""First logits and a KV cache -> tokens -> text, streamed.

Each step runs one row through the layers and writes its KV into the room that prefill left: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blendserve.blend.cache import KVCache
from blendserve.config import DecodeConfig
from blendserve.engine.steps import step
from blendserve.gpu.graphs import Step, Steps, worthwhile
from blendserve.models.adapter import Adapter


def generate(
    adapter: Adapter, cache: KVCache, length: int, logits: Tensor, config: DecodeConfig, end: Set[int]
) -> Iterator[int]:
    """Yield token ids until an end token (not yielded) or `max_new_tokens`; on a GPU, out of a graph where that pays.

    `length`: tokens already in the cache; `logits` [V]: for the first new token.
    """
    run: Step = partial(step, adapter, cache)
    if worthwhile(adapter, config.max_new_tokens):
        run = Steps(adapter, cache, run)
    return sample(logits, config, end, lambda made, token: run(length + made, token))


def sample(
    logits: Tensor, config: DecodeConfig, end: Set[int], advance: Callable[[int, int], Tensor]
) -> Iterator[int]:
    """The loop itself; `advance(n, token)` runs the n-th new token, from 0 -> logits [V] for the next."""
    sampler = Sampler(config)
    for made in range(config.max_new_tokens):
        token = sampler(logits)
        if token in end:
            return
        yield token
        if made + 1 < config.max_new_tokens:
            logits = advance(made, token)


COLDEST = 1e-6  # temperatures below it are 0: logits divided by them are no numbers


class Sampler:
    """Logits [V] -> a token id: greedy at temperature 0, else nucleus sampling (arXiv 1904.09751) from a seed."""

    def __init__(self, config: DecodeConfig) -> None:
        self._config = config
        self._generator = torch.Generator().manual_seed(config.seed)

    def __call__(self, logits: Tensor) -> int:
        if self._config.temperature < COLDEST:
            return int(logits.argmax())
        probabilities = torch.softmax(logits.float().cpu() / self._config.temperature, dim=-1)
        ranked, order = probabilities.sort(descending=True)
        dropped = ranked.cumsum(0) - ranked >= self._config.top_p
        dropped[0] = False  # not even by a top_p that float32 has no number for
        ranked[dropped] = 0.0
        return int(order[torch.multinomial(ranked, 1, generator=self._generator)])


class TextStream:
    """Token ids in, valid text out: characters split over tokens and possible stop strings are held back."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = [s for s in stop if s]
        self._ids: list[int] = []
        self._start = 0  # ids before this one are decoded and done with
        self._done = 0  # characters of decode(ids[start:]) that were taken
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that this token completes, perhaps ""."""
        self._ids.append(token)
        text = self._decode(self._ids[self._start :])
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._held += text[self._done :]
        # The next token is decoded together with this one, as its leading space may depend on it.
        self._start = len(self._ids) - 1
        self._done = len(self._decode(self._ids[self._start :]))
        return self._release(final=False)

    def flush(self) -> str:
        """What was held back for a stop string that did not come."""
        return self._release(final=True)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _release(self, final: bool) -> str:
        found = [(at + len(s), at) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:  # the one that ends first stops the text, however the text fell into tokens
            self.stopped = True
            out, self._held = self._held[: min(found)[1]], ""
            return out
        keep = 0 if final else max((_overlap(self._held, s) for s in self._stop), default=0)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
