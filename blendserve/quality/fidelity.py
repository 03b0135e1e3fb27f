"""How far a method's distribution is from full prefill's along an answer: the package's only definition of fidelity.

Each method computes, over its own cache, the logits at each decision of the same answer:

    KL(full || method) at   the prompt's end | answer token 1 | ... | answer token n      (the last one decides to stop)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor

from blendserve.blend.blender import Blender, Prefilled
from blendserve.blend.prefill import PassResult
from blendserve.config import BlendConfig, DecodeConfig
from blendserve.core import Prompt, Steps, TokenIds
from blendserve.errors import StoreError
from blendserve.models.forward import Row, append, feed
from blendserve.models.kv_cache import KVCache
from blendserve.models.loader import LoadedModel
from blendserve.models.model import DecoderModel
from blendserve.models.runner import DecodeRunner, append_each, decode_each
from blendserve.quality.target import NO_WORSE, Loss

Append = Callable[[DecoderModel, Sequence[Row]], Tensor]
"""Run rows, append their KV -> logits [B, V]"""


def forced(
    decoder: DecoderModel,
    cache: KVCache,
    at: int,
    first: Tensor,
    answer: Sequence[int],
    step: Append = append_each,
) -> Tensor:
    """Return logits [n, V] at each of the n decisions that led to `answer`, an end token included if it has one.

    `first` [V]: the prompt's own logits; `at`: tokens of the prompt. What the cache holds after them is overwritten.
    step: `append_each` with the model's own weights, or `decode_each` with the weights of decoding.
    """
    rows = decisions(cache, at, answer)
    return torch.cat([first[None], step(decoder, rows)]) if rows else first[None]


def decisions(cache: KVCache, at: int, answer: Sequence[int]) -> list[Row]:
    """Return the rows whose logits decide the second and each later token of an answer after `at` tokens."""
    return [Row(cache, at + i, token) for i, token in enumerate(answer[:-1])]


def kl(reference: Tensor, other: Tensor) -> list[float]:
    """Compute KL(reference || other) in nats of each row of logits [n, V]; never below zero."""
    p, q = (torch.log_softmax(logits.double(), dim=-1) for logits in (reference, other))
    values: list[float] = (p.exp() * (p - q)).sum(dim=-1).clamp(min=0).tolist()
    return values


def choices(full: Tensor, end: Set[int]) -> list[int]:
    """Return the likeliest token of each row of logits [n, V]; the least end token in place of any."""
    found: list[int] = full.argmax(dim=-1).tolist()
    return [min(end) if token in end else token for token in found]


def loss(
    full: Tensor, method: Tensor, answer: Sequence[int], end: Set[int], temperature: float = 0.0
) -> Loss:
    """Compute the loss of an answer [n] that a method gave, from both logits [n, V] at its decisions.

    end: the end tokens, of which an answer has the least. Without a temperature the answer is greedy. Of a sampled one,
    agreement is the mean of sum(min(p, q)), the probability that a best coupling agrees.
    """
    if not temperature:
        agreement = torch.tensor(choices(full, end)).eq(torch.tensor(answer)).double().mean()
    else:
        p, q = (torch.softmax(logits.double() / temperature, dim=-1) for logits in (full, method))
        agreement = torch.minimum(p, q).sum(dim=-1).mean()
    kls = kl(full, method)
    return Loss(min(1.0, float(agreement)), sum(kls) / len(kls))


class Verified(NamedTuple):
    """The result of comparing an answer with full prefill."""

    loss: Loss
    tokens: TokenIds  # of the answer, with an end token if it has one
    full: TokenIds  # what full prefill would have chosen in the place of each


class Verifier:
    """Compares answers to one prompt with full prefill, which it runs once."""

    def __init__(
        self,
        model: LoadedModel,
        blender: Blender,
        prompt: Prompt,
        decode: DecodeConfig,
        in_short_steps: bool = False,
    ) -> None:
        """in_short_steps: run full prefill in parts and answers layer by layer, as requests may wait for a step."""
        self._model = model
        self._blender = blender
        self._prompt = prompt
        self._decode = decode
        self._in_short_steps = in_short_steps
        self._full: PassResult | None = None
        self._of_full: tuple[TokenIds, Tensor] | None = None  # its answer, and its logits along it

    def prefill(self, blend: BlendConfig) -> Steps[Prefilled]:
        """Prefill by a method into a cache with room for the answer. Raises StoreError."""
        return (yield from self._blender.prefill(self._prompt, blend, self._cache()))

    def full(self) -> Steps[PassResult]:
        """Run full prefill, or return what it returned before."""
        if self._full is None and self._in_short_steps:
            cache = self._cache()
            self._full = PassResult(cache, (yield from feed(self._model.decoder, cache, self._prompt.ids)))
        elif self._full is None:
            self._full = (yield from self.prefill(BlendConfig(method="full"))).result
        return self._full

    def _cache(self) -> KVCache:
        return KVCache(self._model.decoder, len(self._prompt) + self._decode.answer_tokens)

    def verify(self, done: Prefilled, answer: TokenIds | None = None) -> Steps[Verified]:
        """Compare an answer over this prefill's cache. answer: as `with_end` has it; None: the greedy one is made."""
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

    def measure(self, blends: Sequence[BlendConfig]) -> Steps[list[Loss]]:
        """Compare methods with full prefill along its own answer, and with full reuse -> the loss of each.

        Raises StoreError, also for a chunk that is not stored.
        """
        losses: list[Loss] = []
        for blend in (blends[0].with_values(method="reuse"), *blends):
            done = yield from self.prefill(blend)
            if done.missing:
                raise StoreError("a chunk of the prompt has been evicted: raise store.cap_gb")
            losses.append((yield from self.along_full(done)))
        reuse, *others = losses
        return [loss._replace(is_worse=loss.kl > reuse.kl + NO_WORSE) for loss in others]

    def along_full(self, done: Prefilled) -> Steps[Loss]:
        """Compare a prefill with full prefill along full prefill's own answer."""
        full = yield from self.full()
        if self._of_full is None:
            answer = yield from self.greedy(full)
            self._of_full = answer, (yield from self._forced(full.cache, full.logits, answer, append_each))
        answer, along = self._of_full
        if len(done.to_refine):
            done = yield from done.refine(self._model.decoder, self._prompt.ids)
        own = yield from self._forced(done.result.cache, done.result.logits, answer, decode_each)
        end = self._model.end_tokens
        return loss(along, own, choices(own, end), end)

    def verify_served(self, blend: BlendConfig, tokens: TokenIds) -> Steps[Verified]:
        """Compare an answer that these settings gave, as `with_end` has it. Raises StoreError."""
        done = yield from self.prefill(blend)
        return (yield from self.verify(done, tokens))

    def _forced(self, cache: KVCache, first: Tensor, answer: TokenIds, step: Append) -> Steps[Tensor]:
        """Run `forced`; a layer a step, if steps are short and weights the model's own."""
        decoder = self._model.decoder
        n = len(self._prompt)
        if self._in_short_steps and not (step is decode_each and decoder.decodes_in_int8):
            rows = decisions(cache, n, answer)
            return torch.cat([first[None], (yield from append(decoder, rows))]) if rows else first[None]
        yield
        return forced(decoder, cache, n, first, answer, step)

    def greedy(self, result: PassResult) -> Steps[TokenIds]:
        """Generate the likeliest answer over this prefill's cache, as `with_end` has it."""
        model = self._model
        n = len(self._prompt)
        most = self._decode.answer_tokens
        runner = DecodeRunner.over(model.decoder, result.cache, n, most)
        tokens: list[int] = []
        token = int(result.logits.argmax())
        while token not in model.end_tokens:
            tokens.append(token)
            yield
            if len(tokens) == most:
                break
            token = int(runner.step(n + len(tokens) - 1, [token])[0].argmax())
        return with_end(model, tuple(tokens), self._decode)


def with_end(model: LoadedModel, tokens: TokenIds, decode: DecodeConfig) -> TokenIds:
    """Return an answer's tokens, with an end token unless it has the maximum length. Never empty."""
    return tokens if len(tokens) == decode.answer_tokens else (*tokens, min(model.end_tokens))
