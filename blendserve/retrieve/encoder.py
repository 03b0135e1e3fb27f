"""What turns windows of text into vectors: the contract.

bert.py     a BERT with mean or CLS pooling on a CPU, over packed tokens, in bf16 where that is faster
library.py  every other model, and the reference for the first: sentence-transformers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Window(NamedTuple):
    """A piece of text that fits the encoder, tokenised once."""

    text: str
    ids: np.ndarray  # [n] int32, without special tokens


class Encoder(Protocol):
    """A sentence encoder."""

    tokenizer: Tokenizer  # neither truncates nor pads
    dimension: int
    max_tokens: int  # of what the model reads
    overhead: int  # tokens of it that are not the window's: special ones and the model's own prompt
    dtype: str
    between: Callable[[], None]  # called between small parts of what it computes

    @property
    def batch_tokens(self) -> int:
        """How many tokens are read at once, so that memory is bounded."""

    def encode(self, windows: Sequence[Window], of_question: bool) -> np.ndarray:
        """[n, dimension] float32, vectors of any length; fastest for windows of equal length side by side.

        of_question: else of passages; some models put another prompt before each.
        """
