"""Verifies answers against full prefill, for calibration and for checks of served answers.

full prefill of the prompt (once)  ->  its logits along the answer   |
the method's prefill from the store -> its own answer, its logits    |  -> agreement and KL (quality/fidelity.py)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blendserve.blend.blender import Blender, Prefilled
from blendserve.blend.prefill import PassResult
from blendserve.config import BlendConfig, DecodeConfig
from blendserve.core import Prompt, Steps, TokenIds
from blendserve.engine.generate import generate
from blendserve.models.forward import append, feed
from blendserve.models.kv_cache import KVCache
from blendserve.models.loader import LoadedModel
from blendserve.models.runner import append_each, decode_each
from blendserve.quality.fidelity import Append, choices, decisions, forced, loss
from blendserve.quality.target import Loss


class Verified(NamedTuple):
    """An answer against full prefill."""

    loss: Loss
    tokens: TokenIds  # of the answer, with an end token if it has one
    full: TokenIds  # what full prefill would have chosen in the place of each


class Verifier:
    """Verifies answers to one prompt. Each method's prefill is a blocking or a stepwise piece of work."""

    def __init__(
        self,
        model: LoadedModel,
        blender: Blender,
        prompt: Prompt,
        decode: DecodeConfig,
        in_short_steps: bool = False,
    ) -> None:
        """in_short_steps: whether full prefill runs in parts and an answer by layers: requests may wait for a step."""
        self._model, self._blender, self._prompt, self._decode = model, blender, prompt, decode
        self._in_short_steps = in_short_steps
        self._full: PassResult | None = None

    def prefill(self, blend: BlendConfig) -> Steps[Prefilled]:
        """Prefill into a cache with room for the answer. Raises StoreError."""
        return (yield from self._blender.prefill(self._prompt, blend, self._cache()))

    def full(self) -> Steps[PassResult]:
        """Full prefill, run once."""
        if self._full is None and self._in_short_steps:
            cache = self._cache()
            self._full = PassResult(cache, (yield from feed(self._model.decoder, cache, self._prompt.ids)))
        elif self._full is None:
            self._full = (yield from self.prefill(BlendConfig(method="full"))).result
        return self._full

    def _cache(self) -> KVCache:
        return KVCache(self._model.decoder, len(self._prompt) + self._decode.answer_tokens)

    def verify(self, done: Prefilled, answer: TokenIds | None = None) -> Steps[Verified]:
        """An answer over this prefill's cache. answer: as `with_end` has it; None: the greedy one is made."""
        full = yield from self.full()
        first = done.result.logits
        if len(done.to_refine):
            done = yield from done.refine(self._model.decoder, self._prompt.ids)
        if answer is None:
            answer = yield from self.greedy(done.result)
        along = yield from self._forced(full.cache, full.logits, answer, append_each)
        own = yield from self._forced(done.result.cache, first, answer, decode_each)
        temperature = 0.0 if self._decode.is_greedy else self._decode.temperature
        end = self._model.end_tokens
        return Verified(loss(along, own, answer, end, temperature), answer, tuple(choices(along, end)))

    def _forced(self, cache: KVCache, first: Tensor, answer: TokenIds, step: Append) -> Steps[Tensor]:
        """Logits as `quality/fidelity.py` has them; a layer a step, if steps are short and weights the model's own."""
        decoder, n = self._model.decoder, len(self._prompt)
        if self._in_short_steps and not (step is decode_each and decoder.int8_decoding):
            rows = decisions(cache, n, answer)
            return torch.cat([first[None], (yield from append(decoder, rows))]) if rows else first[None]
        yield
        return forced(decoder, cache, n, first, answer, step)

    def greedy(self, result: PassResult) -> Steps[TokenIds]:
        """The likeliest answer over this prefill's cache, as `with_end` has it."""
        tokens, model, n = list[int](), self._model, len(self._prompt)
        decode = self._decode.with_values(temperature=0.0)
        for token in generate(model.decoder, result.cache, n, result.logits, decode, model.end_tokens):
            tokens.append(token)
            yield
        return with_end(self._model, tuple(tokens), decode)


def with_end(model: LoadedModel, tokens: TokenIds, decode: DecodeConfig) -> TokenIds:
    """An answer's tokens, with an end token unless it has the maximum length. Never empty."""
    return tokens if len(tokens) == decode.answer_tokens else (*tokens, min(model.end_tokens))
