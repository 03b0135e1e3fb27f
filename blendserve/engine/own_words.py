"""What a reader says when nobody asks it: text of many kinds, to fit something on when there is no other.

A text begins with one of the vocabulary's frequent tokens and goes on as the reader's own probabilities have it. So it
is spread as what the reader was trained on, prose, letters, code, lists, tongues, and nobody has to supply it. Every
other text stands behind a few passages about nothing in particular, no part of it, and is more like what is retrieved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from blendserve.core import TokenIds
from blendserve.engine.prompt import PRIMER
from blendserve.engine.tokens import without_control
from blendserve.models.forward import Row
from blendserve.models.kv_cache import KVCache
from blendserve.models.loader import LoadedModel
from blendserve.models.runner import append, append_each

LENGTH = 128  # tokens of a text
TOGETHER = 32  # texts
FREQUENT = 1 << 14  # tokens of the vocabulary's front


def own_words(
    reader: LoadedModel, tokens: int, progress: Callable[[int, int], None] = lambda done, total: None
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

    def __init__(self, reader: LoadedModel) -> None:
        added = getattr(reader.tokenizer, "added_tokens_decoder", {})
        control = {*reader.end_tokens, *(i for i, token in added.items() if token.special)}
        self._adapter = reader.adapter
        self._allowed = torch.ones(reader.adapter.vocab_size)
        self._allowed[[i for i in control if i < len(self._allowed)]] = 0.0
        self._chance = torch.Generator().manual_seed(0)
        passages = primer_ids(reader)
        self._passages = KVCache(self._adapter, len(passages))
        if passages:
            append(self._adapter, self._passages, 0, passages)

    def texts(self, n: int) -> Iterator[list[int]]:
        """LENGTH times the next token of n texts, of which every other one stands behind the passages."""
        starts = [self._passages.capacity * (text % 2) for text in range(n)]
        caches = [self._cache_behind(start) for start in starts]
        said = self._tokens(torch.ones(n, FREQUENT))
        yield said
        for at in range(LENGTH - 1):
            texts = zip(caches, starts, said, strict=True)
            rows = [Row(cache, start + at, token) for cache, start, token in texts]
            said = self._tokens(append_each(self._adapter, rows).float().softmax(dim=-1).cpu())
            yield said

    def _cache_behind(self, start: int) -> KVCache:
        """Room for a text behind so many tokens of the passages, whose KV is in it."""
        cache = KVCache(self._adapter, start + LENGTH)
        cache.keys[:, :, :start] = self._passages.keys[:, :, :start]
        cache.values[:, :, :start] = self._passages.values[:, :, :start]
        return cache

    def _tokens(self, shares: Tensor) -> list[int]:
        """[n, V], V the whole vocabulary or its front -> a token each."""
        width = min(shares.shape[1], len(self._allowed))
        allowed = shares[:, :width] * self._allowed[:width]
        drawn: list[int] = torch.multinomial(allowed, 1, generator=self._chance)[:, 0].tolist()
        return drawn


def primer_ids(reader: LoadedModel) -> TokenIds:
    """The passages that every other text stands behind: their end, where a text behind them would not fit the reader."""
    text = PRIMER.read_text("utf-8").strip() + "\n\n"
    literally = without_control(reader.tokenizer)
    ids = literally(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    room = reader.adapter.context_limit - LENGTH
    return tuple(ids[max(0, len(ids) - room) :])
