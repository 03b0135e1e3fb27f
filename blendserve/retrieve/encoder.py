"""The contract of a sentence encoder: windows of text -> vectors.

bert.py                   BERT with mean or CLS pooling on a CPU, over packed tokens
sentence_transformers.py  every other model, and the reference for bert.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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
    dtype: str
    yield_point: Callable[[], None]  # called between small parts of the work

    @property
    def batch_tokens(self) -> int:
        """Maximum number of tokens in one batch, which bounds the memory."""

    def encode(self, windows: Sequence[Window], is_question: bool) -> np.ndarray:
        """[n, dimension] float32, not normalised; fastest if windows of equal length are adjacent.

        is_question: some models put another prompt before questions than before passages.
        """
