"""Drafts of an answer's next tokens by prompt lookup: what followed the answer's last tokens before, in prompt or answer.

A decoding step runs a draft's tokens as further rows, and the sampler draws from each row as it would have drawn without
a draft: tokens are kept up to the first that the draft did not foresee, so the answer is the same. (Prompt lookup
decoding, Saxena 2023, as in transformers' `prompt_lookup_num_tokens`; there a draft has one fixed length.)
"""

from __future__ import annotations

from collections.abc import Sequence

NGRAMS = 3, 2  # tokens that must match, the longer first: matches of one token are mostly wrong
# Tokens of a draft: in a native step 4 rows cost little more than one, and 8 more than 4.
SHORT, LONG = 3, 7
LONG_SHARE = 0.7  # of recent drafts' tokens that were right, for long drafts
MIN_SHARE = 0.1  # below it a draft costs more than it saves
RETRY = 16  # steps between short drafts while the share is below the minimum
WEIGHT = 0.25  # of the last draft in the share


class Drafter:
    """Drafts for one answer. Their length follows the share of tokens that were right."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._ids = list(prompt)
        self._following = {n: self._index(n) for n in NGRAMS}  # n-gram -> place of the token after its latest
        self._share = 0.5
        self._steps = 0  # since the last draft

    def _index(self, n: int) -> dict[tuple[int, ...], int]:
        ngrams = zip(*(self._ids[i:] for i in range(n)), strict=False)
        return dict(zip(ngrams, range(n, len(self._ids)), strict=False))

    def push(self, token: int) -> None:
        """Add the answer's next token."""
        for n, following in self._following.items():
            if len(self._ids) >= n:
                following[tuple(self._ids[-n:])] = len(self._ids)
        self._ids.append(token)

    def draft(self, room: int) -> list[int]:
        """Guess at most `room` tokens that may follow, perhaps none."""
        self._steps += 1
        if self._share < MIN_SHARE and self._steps < RETRY:
            return []
        length = min(room, LONG if self._share >= LONG_SHARE else SHORT)
        for n, following in self._following.items():
            if place := following.get(tuple(self._ids[-n:])):
                self._steps = 0
                return self._ids[place : place + length]
        return []

    def judge(self, n_drafted: int, n_right: int) -> None:
        """Learn how many tokens of the last draft were right."""
        if n_drafted:
            self._share += WEIGHT * (n_right / n_drafted - self._share)
