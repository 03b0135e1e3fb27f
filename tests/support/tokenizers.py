"""The bundled model's tokenizer, and small ones of other kinds."""

from __future__ import annotations

from functools import cache
from typing import Any

import tokenizers as tk
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from blendserve.models.sources import bundled_folder


@cache
def bundled_tokenizer() -> Any:
    """Byte-level BPE. Fails with the loader's own message when the package is not installed."""
    return AutoTokenizer.from_pretrained(bundled_folder("smollm2-135m"))


def spaced_tokenizer(words: str) -> Any:
    """Like SentencePiece: words carry their leading space, and decoding drops the very first one."""
    vocabulary = {f"▁{word}": i for i, word in enumerate(dict.fromkeys(words.split()))}
    model = tk.Tokenizer(tk.models.WordLevel(vocabulary, unk_token=next(iter(vocabulary))))
    model.pre_tokenizer = tk.pre_tokenizers.Metaspace()
    model.decoder = tk.decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=model)
