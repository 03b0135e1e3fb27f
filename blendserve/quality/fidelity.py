"""How far a method's distribution is from full prefill's along an answer: the package's one definition of fidelity.

Each method is asked, over its own cache, for its logits at each decision of the same answer:

    KL(full || method) at   the prompt's end | answer token 1 | ... | answer token n      (the last one decides to stop)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import torch
from torch import Tensor

from blendserve.models.forward import Row
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel
from blendserve.models.runner import append_each
from blendserve.quality.target import Loss

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
    """Logits [n, V] at each of the n decisions that led to `answer`, an end token included if it has one.

    `first` [V]: the prompt's own logits; `at`: tokens of the prompt. What the cache holds after them is overwritten.
    step: `append_each` with the model's own weights, or `decode_each` with the weights of decoding.
    """
    rows = decisions(cache, at, answer)
    return torch.cat([first[None], step(decoder, rows)]) if rows else first[None]


def decisions(cache: KVCache, at: int, answer: Sequence[int]) -> list[Row]:
    """The rows whose logits decide the second and each later token of an answer behind `at` tokens."""
    return [Row(cache, at + i, token) for i, token in enumerate(answer[:-1])]


def kl(reference: Tensor, other: Tensor) -> list[float]:
    """KL(reference || other) in nats of each row of logits [n, V]; never below zero."""
    p, q = (torch.log_softmax(logits.double(), dim=-1) for logits in (reference, other))
    values: list[float] = (p.exp() * (p - q)).sum(dim=-1).clamp(min=0).tolist()
    return values


def choices(full: Tensor, end: Set[int]) -> list[int]:
    """The likeliest token of each row of logits [n, V]; the least end token in place of any."""
    found: list[int] = full.argmax(dim=-1).tolist()
    return [min(end) if token in end else token for token in found]


def loss(
    full: Tensor, method: Tensor, answer: Sequence[int], end: Set[int], temperature: float = 0.0
) -> Loss:
    """Loss of an answer [n] that a method gave, from both logits [n, V] at its decisions; temperature 0: greedily.

    end: the end tokens, of which an answer has the least. Where it was sampled, agreement is the mean of sum(min(p, q)),
    the probability that a best coupling agrees.
    """
    if not temperature:
        agreement = torch.tensor(choices(full, end)).eq(torch.tensor(answer)).double().mean()
    else:
        p, q = (torch.softmax(logits.double() / temperature, dim=-1) for logits in (full, method))
        agreement = torch.minimum(p, q).sum(dim=-1).mean()
    kls = kl(full, method)
    return Loss(min(1.0, float(agreement)), sum(kls) / len(kls))
