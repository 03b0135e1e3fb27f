"""Any model of sentence-transformers, run by that library; also the reference for bert.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from blendserve.retrieve.encoder import Window

BATCH_SIZE = 32  # texts


class SentenceTransformersEncoder:
    """A SentenceTransformer as an Encoder."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError for a slow tokenizer, and whatever the library raises."""
        self._model: Any = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        self.yield_point: Callable[[], None] = lambda: None
        tokenizer = self._model.tokenizer
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError("it has no fast tokenizer, whose offsets are needed to cut long passages")
        self.tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.dimension = int(self._model.get_embedding_dimension() or 0)
        self.max_tokens = int(self._model.max_seq_length or tokenizer.model_max_length)
        prompts = [self._prompt(is_question) for is_question in (False, True)]
        prompt_tokens = [len(self.tokenizer.encode(p, add_special_tokens=False).ids) for p in prompts]
        self.overhead = max(prompt_tokens) + int(tokenizer.num_special_tokens_to_add())
        self.batch_tokens = BATCH_SIZE * self.max_tokens
        self.dtype = str(self._model.dtype).removeprefix("torch.")

    def encode(self, windows: Sequence[Window], is_question: bool) -> np.ndarray:
        """See Encoder; the library tokenises the texts again."""
        self.yield_point()
        texts, prompt = [window.text for window in windows], self._prompt(is_question)
        vectors = self._model.encode(texts, prompt=prompt, batch_size=BATCH_SIZE, show_progress_bar=False)
        return np.asarray(vectors, np.float32).reshape(len(texts), self.dimension)

    def _prompt(self, is_question: bool) -> str:
        return (self._model.prompts or {}).get("query" if is_question else "document") or ""
