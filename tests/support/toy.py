"""A small Llama of random weights, the same in every process. All that a real model needs is used."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from blendserve.models.loader import LoadedModel, end_tokens, fingerprint
from blendserve.models.model import DecoderModel
from blendserve.models.tokenizer import Tokenizer
from tests.support.tokenizers import bundled_tokenizer


def toy_llama(vocab_size: int, context: int, layers: int = 4, heads: int = 4, kv_heads: int = 2) -> Any:
    """In fp32, for prompts of up to `context` tokens."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32 * heads,
        intermediate_size=64 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        initializer_range=0.1,  # larger than usual: attention must not be flat, or nothing would depend on position
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def toy_model(context: int = 2048) -> LoadedModel:
    """The same behind the bundled model's tokenizer, as the loader makes it. Raises ModelError where it is missing."""
    tokenizer = Tokenizer.of(bundled_tokenizer())
    return loaded(toy_llama(len(tokenizer), context), tokenizer)


def loaded(model: Any, tokenizer: Any) -> LoadedModel:
    """Return a model behind this tokenizer as the loader would, under the name tiny."""
    decoder = DecoderModel.of(model)
    return LoadedModel("tiny", decoder, tokenizer, fingerprint(model), end_tokens(model, tokenizer))
