"""Verifies answers against full prefill, for calibration and for checks of served answers.

full prefill of the prompt (once)  ->  its logits along the answer   |
the method's prefill from the store -> its own answer, its logits    |  -> agreement and KL (quality/fidelity.py)
"""

from __future__ import annotations

from typing import NamedTuple

from blendserve.blend.blender import Blender, Prefilled
from blendserve.blend.prefill import PassResult
from blendserve.config import BlendConfig, DecodeConfig
from blendserve.core import Prompt, Steps, TokenIds
from blendserve.engine.generate import generate
from blendserve.models.forward import feed
from blendserve.models.kv_cache import KVCache
from blendserve.models.loader import LoadedModel
from blendserve.models.runner import decode_each
from blendserve.quality.fidelity import choices, forced, loss
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
        """in_short_steps: whether full prefill runs in parts, as requests may wait for a step of it."""
        self._model, self._blender, self._prompt, self._decode = model, blender, prompt, decode
        self._in_short_steps = in_short_steps
        self._full: PassResult | None = None

    def prefill(self, blend: BlendConfig) -> Steps[Prefilled]:
        """Into a cache with room for the answer. Raises StoreError."""
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
        return KVCache(self._model.decoder, len(self._prompt) + self._decode.max_new_tokens)

    def verify(self, done: Prefilled, answer: TokenIds | None = None) -> Steps[Verified]:
        """An answer over this prefill's cache. answer: as `with_end` has it; None: the greedy one is made."""
        full = yield from self.full()
        decoder, n, first = self._model.decoder, len(self._prompt), done.result.logits
        if len(done.to_refine):
            done = yield from done.refine(decoder, self._prompt.ids)
        if answer is None:
            answer = yield from self.greedy(done.result)
        along = forced(decoder, full.cache, n, full.logits, answer)
        yield
        own = forced(decoder, done.result.cache, n, first, answer, decode_each)
        temperature = 0.0 if self._decode.is_greedy else self._decode.temperature
        end = self._model.end_tokens
        return Verified(loss(along, own, answer, end, temperature), answer, tuple(choices(along, end)))

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
    return tokens if len(tokens) == decode.max_new_tokens else (*tokens, min(model.end_tokens))
