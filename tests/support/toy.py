"""A small Llama of random weights, the same in every process. All that a real model needs is used."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from blendserve.models.loader import LoadedModel, end_tokens, fingerprint
from blendserve.models.model import DecoderModel
from blendserve.models.sources import bundled_folder


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
    """The same behind the bundled model's tokenizer. Raises ModelError where that is not installed."""
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder("smollm2-135m"))
    model = toy_llama(len(tokenizer), context)
    decoder, ends = DecoderModel.of(model), end_tokens(model, tokenizer)
    return LoadedModel("tiny", decoder, tokenizer, fingerprint(model), ends)
