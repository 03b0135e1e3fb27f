"""Any sentence-transformers model, run by that library: for models that bert.py does not serve, and as its reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from blendserve.retrieve.encoder import Window

_BATCH = 32  # texts


class Library:
    """A SentenceTransformer as an Encoder."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        """Raises ValueError for a slow tokenizer, and whatever the library raises."""
        self._model: Any = SentenceTransformer(str(folder), device=device, local_files_only=True)
        self.between: Callable[[], None] = lambda: None
        tokenizer = self._model.tokenizer
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError("it has no fast tokenizer, whose offsets are needed to cut long passages")
        self.tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.dimension = int(self._model.get_embedding_dimension() or 0)
        self.max_tokens = int(self._model.max_seq_length or tokenizer.model_max_length)
        prompts = max(
            len(self.tokenizer.encode(self._prompt(of_question), add_special_tokens=False).ids)
            for of_question in (False, True)
        )
        self.overhead = prompts + int(tokenizer.num_special_tokens_to_add())
        self.batch_tokens = _BATCH * self.max_tokens
        self.dtype = str(self._model.dtype).removeprefix("torch.")

    def encode(self, windows: Sequence[Window], of_question: bool) -> np.ndarray:
        """As Encoder says; the library tokenises the texts again."""
        self.between()
        texts = [window.text for window in windows]
        vectors = self._model.encode(
            texts, prompt=self._prompt(of_question), batch_size=_BATCH, show_progress_bar=False
        )
        return np.asarray(vectors, np.float32).reshape(len(texts), self.dimension)

    def _prompt(self, of_question: bool) -> str:
        return (self._model.prompts or {}).get("query" if of_question else "document") or ""
