"""How near a prefill is to full prefill, without any label: teacher-forced KL, and agreement of the answers.

Full prefill answers greedily; every other method is asked, over its own cache, for its distribution at each decision of
that answer:

    KL(full || method) at   the prompt's end | answer token 1 | ... | answer token n      (the last one decides to stop)

The first of them is the first-token KL, their mean the mean KL, in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blendserve.evaluate.metrics import f1
from blendserve.models.forward import Row
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel
from blendserve.models.runner import append_each


def forced(
    adapter: DecoderModel,
    cache: KVCache,
    at: int,
    first: Tensor,
    answer: Sequence[int],
    step: Callable[[DecoderModel, Sequence[Row]], Tensor] = append_each,
) -> Tensor:
    """Logits [n, V] at each of the n decisions that led to `answer`, an end token included if it has one.

    `first` [V]: the prompt's own logits; `at`: tokens of the prompt. What the cache holds after them is overwritten.
    step: `append_each` with the model's own weights, or `decode_each` with the weights of decoding.
    """
    if len(answer) < 2:
        return first[None]
    return torch.cat(
        [first[None], step(adapter, [Row(cache, at + i, token) for i, token in enumerate(answer[:-1])])]
    )


def kl(reference: Tensor, other: Tensor) -> list[float]:
    """KL(reference || other) in nats of each row of logits [n, V]; never below zero."""
    p, q = (torch.log_softmax(logits.double(), dim=-1) for logits in (reference, other))
    values: list[float] = (p.exp() * (p - q)).sum(dim=-1).clamp(min=0).tolist()
    return values


def nll(logits: Tensor, ids: Sequence[int]) -> float:
    """Mean negative log-likelihood, in nats, of the tokens `ids` [n] by logits [n, V]."""
    chosen = torch.tensor(ids, device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits.double(), chosen))


def agreement(answer: str, reference: str) -> float:
    """F1 of an answer with full prefill's as its gold; two equal answers agree, even on nothing."""
    return 1.0 if answer == reference else f1(answer, [reference])
