"""What a reader says when nobody asks it: text of many kinds, to fit something on when there is no other.

A text begins with one of the vocabulary's frequent tokens and goes on as the reader's own probabilities have it. So it
is spread as what the reader was trained on, prose, letters, code, lists, tongues, and nobody has to supply it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from blendserve.core import TokenIds
from blendserve.models.forward import Row, append_each
from blendserve.models.kv_cache import KVCache
from blendserve.models.loader import Reader

LENGTH = 128  # tokens of a text
TOGETHER = 32  # texts
FREQUENT = 1 << 14  # tokens of the vocabulary's front


def own_words(
    reader: Reader, tokens: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[TokenIds]:
    """Texts of so many tokens together, the same each time, to rounding; no token in them ends or controls a chat."""
    draw = _Draw(reader)
    ids: list[TokenIds] = []
    while (missing := tokens - LENGTH * len(ids)) > 0:
        columns: list[list[int]] = []
        for column in draw.texts(min(TOGETHER, -(-missing // LENGTH))):
            columns.append(column)
            progress(tokens - max(0, missing - len(columns) * len(column)), tokens)
        ids += zip(*columns, strict=True)
    ids[-1:] = [text[: LENGTH + missing] for text in ids[-1:]]  # missing <= 0
    return ids


class _Draw:
    """Tokens by chance."""

    def __init__(self, reader: Reader) -> None:
        added = getattr(reader.tokenizer, "added_tokens_decoder", {})
        control = {*reader.end_tokens, *(i for i, token in added.items() if token.special)}
        self._adapter = reader.adapter
        self._allowed = torch.ones(reader.adapter.vocab_size)
        self._allowed[[i for i in control if i < len(self._allowed)]] = 0.0
        self._chance = torch.Generator().manual_seed(0)

    def texts(self, n: int) -> Iterator[list[int]]:
        """LENGTH times the next token of n texts."""
        caches = [KVCache(self._adapter, LENGTH) for _ in range(n)]
        said = self._tokens(torch.ones(n, FREQUENT))
        yield said
        for at in range(LENGTH - 1):
            rows = [Row(cache, at, token) for cache, token in zip(caches, said, strict=True)]
            said = self._tokens(append_each(self._adapter, rows).float().softmax(dim=-1).cpu())
            yield said

    def _tokens(self, shares: Tensor) -> list[int]:
        """[n, V], V the whole vocabulary or its front -> a token each."""
        width = min(shares.shape[1], len(self._allowed))
        allowed = shares[:, :width] * self._allowed[:width]
        drawn: list[int] = torch.multinomial(allowed, 1, generator=self._chance)[:, 0].tolist()
        return drawn
