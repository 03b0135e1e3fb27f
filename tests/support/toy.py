"""A small Llama of random weights: says nothing sensible, but goes through everything that a real reader goes through.

For scripts that try the machinery and not the answers. Its weights are the same in every process.
"""

from __future__ import annotations

from typing import Any

import torch

from blendserve.models.loader import LoadedModel, end_tokens, fingerprint
from blendserve.models.model import DecoderModel
from blendserve.models.sources import bundled_folder

HEAD_DIM = 32


def toy_llama(vocab_size: int, context: int, layers: int = 4, heads: int = 4, kv_heads: int = 2) -> Any:
    """A random Llama in fp32 for prompts of up to `context` tokens."""
    import transformers as tf

    config = tf.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=heads * HEAD_DIM,
        intermediate_size=2 * heads * HEAD_DIM,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=context,
        initializer_range=0.1,  # larger than usual: attention must not be flat, or nothing would depend on position
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = tf.LlamaForCausalLM(config)
    return model.eval()


def toy_reader(context: int = 2048) -> LoadedModel:
    """The same behind the bundled reader's tokenizer. Raises ModelError where that is not installed."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bundled_folder("smollm2-135m"))
    model = toy_llama(len(tokenizer), context)
    return LoadedModel(
        "tiny", DecoderModel.of(model), tokenizer, fingerprint(model), end_tokens(model, tokenizer)
    )
