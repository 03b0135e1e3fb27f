"""Prefill and decoding by transformers' own model: baseline, test oracle, and fallback for models that fail the gate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from blendserve.core import TokenIds
from blendserve.kv import Layers, join_layers
from blendserve.models.model import DecoderModel


class Forward(NamedTuple):
    """Logits and KV of one `model.forward`."""

    logits: Tensor  # [2, V], after the last but one token and after the last
    keys: Layers  # [L, K, T, D], after RoPE
    values: Layers  # [L, K, T, D]


@torch.inference_mode()
def model_forward(model: DecoderModel, ids: TokenIds, nudge: int | None = None) -> Forward:
    """The model's own forward over these tokens.

    nudge: a seed; every number of the embeddings is then off by one rounding step of the dtype, up or down by chance.
    """
    reference = cast(Any, model.reference)
    cache = full_cache(model)
    inputs = {"input_ids": torch.tensor([ids], device=model.device), **cache_argument(reference, cache)}
    with _nudged(reference.get_input_embeddings(), nudge):
        output = reference(**inputs, use_cache=True, logits_to_keep=2)
    return Forward(output.logits[0], *kv_of(model, cache))


@contextmanager
def _nudged(embeddings: nn.Module, seed: int | None) -> Iterator[None]:
    def nudge(module: nn.Module, ids: Any, embedded: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed or 0)
        sign = 2 * torch.randint(0, 2, embedded.shape, generator=generator) - 1
        eps = torch.finfo(embedded.dtype).eps
        return (embedded.float() * (1 + eps * sign.to(embedded.device))).to(embedded.dtype)

    if seed is None:
        yield
        return
    hook = embeddings.register_forward_hook(nudge)
    try:
        yield
    finally:
        hook.remove()


def full_cache(model: DecoderModel) -> Any:
    """A cache for the model's own forward that drops nothing: windows are masks. Recurrent layers need their own kind."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    if not model.recurrent:
        return DynamicCache()
    cache = DynamicCache(config=model.config)
    if not model.family.side_by_side:
        cache.layers = [x if l in model.recurrent else DynamicLayer() for l, x in enumerate(cache.layers)]
    return cache


def kv_of(model: DecoderModel, cache: Any) -> tuple[Layers, Layers]:
    """The keys after RoPE and values [L, K, T, D] of transformers' own cache; K is 0 in a recurrent layer."""
    parts = ("values", "keys") if model.family.latent else ("keys", "values")  # latents are its cache's keys
    layers = [cache.layers[model.own_layer(l)] for l in range(model.n_kv_layers)]
    none = layers[model.attention_layer].keys[0][:0, :, :1]
    keys, values = (
        join_layers([none if l in model.recurrent else getattr(x, part)[0] for l, x in enumerate(layers)])
        for part in parts
    )
    return keys, values


class OwnDecoding:
    """The model's own forward over its own cache, a part of the tokens at a time."""

    def __init__(self, model: DecoderModel) -> None:
        from transformers import DynamicCache  # seconds to import

        self._model = cast(Any, model.reference)
        self._device = model.device
        self._cache = cache_argument(self._model, DynamicCache(config=self._model.config))

    @torch.inference_mode()
    def feed(self, ids: TokenIds) -> Tensor:
        """Run these tokens behind all earlier ones -> logits [V] after the last one."""
        inputs = torch.tensor([ids], device=self._device)
        output = self._model(input_ids=inputs, **self._cache, use_cache=True, logits_to_keep=1)
        return cast(Tensor, output.logits[0, -1])


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """The cache as an argument of a transformers model, which was renamed from past_key_values in version 5.24."""
    inner = model.model if isinstance(model, TextTower) else model
    return {"cache" if "cache" in signature(inner.forward).parameters else "past_key_values": cache}


class TextTower(nn.Module):
    """The text model of a checkpoint that reads pictures too, as a causal model. The vision modules are dropped."""

    def __init__(self, checkpoint: Any) -> None:
        super().__init__()
        self.model = checkpoint.model.language_model
        self.lm_head = checkpoint.lm_head
        self.config: Any = checkpoint.config.get_text_config()
        self.generation_config = checkpoint.generation_config

    def forward(self, logits_to_keep: int = 0, **inputs: Any) -> Any:
        """input_ids or inputs_embeds, and what transformers' models take -> its output, with logits [1, S, V]"""
        output = self.model(**inputs)
        logits: Tensor = self.lm_head(output.last_hidden_state[:, -logits_to_keep:])
        logits = logits * getattr(self.config, "output_multiplier", 1.0)
        cap = getattr(self.config, "final_logit_softcapping", None)
        output["logits"] = logits if cap is None else cap * (logits / cap).tanh()
        return output

    def get_input_embeddings(self) -> nn.Module:
        embeddings: nn.Module = self.model.get_input_embeddings()
        return embeddings
