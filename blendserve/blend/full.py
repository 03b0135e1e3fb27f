"""Ordinary prefill by the borrowed model itself: the baseline to beat, the oracle to equal, and the fallback.

The fallback is for a model that the gate refuses: it answers by its own forward alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from blendserve.config import DecodeConfig
from blendserve.core import TokenIds
from blendserve.engine.generation import sample
from blendserve.models.adapter import Adapter


@torch.inference_mode()
def model_logits(adapter: Adapter, ids: TokenIds) -> Tensor:
    """`model.forward` as a user would call it -> logits [V] for the token after the prompt."""
    inputs = torch.tensor([ids], device=adapter.device)
    output = cast(Any, adapter.model)(input_ids=inputs, use_cache=True, logits_to_keep=1)
    return cast(Tensor, output.logits[0, -1])


@dataclass(frozen=True, slots=True)
class Forward:
    """What one `model.forward` leaves."""

    logits: Tensor  # [2, V], after the last but one token and after the last
    keys: Tensor  # [L, K, T, D], after RoPE
    values: Tensor  # [L, K, T, D]


@torch.inference_mode()
def model_forward(adapter: Adapter, ids: TokenIds, nudge: int | None = None) -> Forward:
    """The model's own forward over these tokens.

    nudge: a seed; every number of the embeddings is then off by one rounding step of the dtype, up or down by chance.
    """
    from transformers import DynamicCache

    model = cast(Any, adapter.model)
    embedded = model.get_input_embeddings()(torch.tensor([ids], device=adapter.device))
    if nudge is not None:
        generator = torch.Generator().manual_seed(nudge)
        sign = 2 * torch.randint(0, 2, embedded.shape, generator=generator) - 1
        eps = torch.finfo(embedded.dtype).eps
        embedded = (embedded.float() * (1 + eps * sign.to(embedded.device))).to(embedded.dtype)
    cache = DynamicCache()  # of nothing but full layers: windows are masks, and nothing is dropped
    output = model(inputs_embeds=embedded, past_key_values=cache, use_cache=True, logits_to_keep=2)
    keys, values = (torch.stack([getattr(x, part)[0] for x in cache.layers]) for part in ("keys", "values"))
    return Forward(output.logits[0], keys, values)


def model_generate(adapter: Adapter, ids: TokenIds, config: DecodeConfig, end: Set[int]) -> Iterator[int]:
    """Run the prompt through the model's own forward and cache; the iterator goes on as decode.generate does."""
    from transformers import DynamicCache

    model = cast(Any, adapter.model)
    cache = DynamicCache(config=model.config)

    def forward(feed: TokenIds) -> Tensor:
        with torch.inference_mode():
            inputs = torch.tensor([feed], device=adapter.device)
            output = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cast(Tensor, output.logits[0, -1])

    return sample(forward(ids), config, end, lambda _, token: forward((token,)))
