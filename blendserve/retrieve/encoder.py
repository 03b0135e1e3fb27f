"""Sentence encoders, windows of text -> vectors: the contract, and any model of sentence-transformers.

bert.py has BERT on a CPU without that library, which is its reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from tokenizers import Tokenizer

from blendserve.core import Steps
from blendserve.errors import ModelError
from blendserve.extras import install_hint

BATCH_SIZE = 32  # texts


class Window(NamedTuple):
    """A piece of text that fits the encoder, with its tokens."""

    text: str
    ids: np.ndarray  # [n] int32, without special tokens


class Encoder(Protocol):
    """A sentence encoder."""

    tokenizer: Tokenizer  # neither truncates nor pads
    dimension: int
    max_tokens: int  # context length of the model
    overhead: int  # tokens of a window that are special or belong to the model's own prompt

    @property
    def batch_tokens(self) -> int:
        """Maximum number of tokens in one batch, which bounds the memory."""

    def encode(self, windows: Sequence[Window], is_question: bool) -> Steps[np.ndarray]:
        """[n, dimension] float32, not normalised; fastest if windows of equal length are adjacent.

        is_question: some models put another prompt before questions than before passages.
        """


class SentenceTransformersEncoder:
    """A SentenceTransformer as an Encoder."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError without the library, ValueError for a slow tokenizer, and whatever the library raises."""
        try:
            from sentence_transformers import SentenceTransformer  # start-up: seconds
        except ModuleNotFoundError as error:
            raise ModelError(
                f"it needs the package sentence-transformers: {install_hint('embedders')} ({error})"
            ) from None
        self._model: Any = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
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

    def encode(self, windows: Sequence[Window], is_question: bool) -> Steps[np.ndarray]:
        """See Encoder; the library tokenises the texts again."""
        yield
        texts = [window.text for window in windows]
        prompt = self._prompt(is_question)
        vectors = self._model.encode(texts, prompt=prompt, batch_size=BATCH_SIZE, show_progress_bar=False)
        return np.asarray(vectors, np.float32).reshape(len(texts), self.dimension)

    def _prompt(self, is_question: bool) -> str:
        return (self._model.prompts or {}).get("query" if is_question else "document") or ""
