"""What a prefill takes, by which of its chunks were found: the engine's cost model (blend/work.py), from counts alone.

Chunks have one size C and stand behind a prefix of P tokens; the question's Q tokens come last. A missing chunk's rows
all run; of the found tokens a share is recomputed, at places that see a mean number of keys. The first chunk, if it was
found, is exact: its tokens count for the share, and need no recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence

from blendserve.simulate.config import ComputeConfig, CorpusConfig, RequestsConfig


class Work:
    """Seconds of prefills of one kind of prompt."""

    def __init__(self, compute: ComputeConfig, corpus: CorpusConfig, requests: RequestsConfig) -> None:
        self._compute, self._chunk = compute, corpus.chunk_tokens
        self._prefix, self._question = requests.prefix_tokens, requests.question_tokens

    def counts(self, found: Sequence[bool]) -> tuple[int, float, float, int]:
        """Passes, rows, (row, key) pairs and loaded tokens of a prompt, by whether each chunk was found."""
        size, prefix, question = self._chunk, self._prefix, self._question
        n, n_found = len(found), sum(found)
        length = prefix + n * size + question
        rows, pairs = float(question), _keys(length - question, question)
        if n_found < n:
            for i, there in enumerate(found):
                if not there:
                    rows += size
                    pairs += _keys(prefix + i * size, size)
        reusable = n_found - found[0]
        chosen = min(round(self._compute.ratio * n_found * size), reusable * size)
        if chosen:
            at = sum(i for i, there in enumerate(found) if there)  # the first counts 0
            rows += chosen
            pairs += chosen * (prefix + at / reusable * size + (size + 1) / 2)
        scored = self._compute.scoring_pass and 0 < chosen < reusable * size
        if scored:
            rows, pairs = rows + question, pairs + question * length
        return 1 + scored, rows, pairs, prefix + n_found * size

    def prefill(self, found: Sequence[bool]) -> float:
        """Seconds, with all that was found in memory and decoded."""
        passes, rows, pairs, loaded = self.counts(found)
        c = self._compute
        return passes * c.per_pass + rows * c.per_row + pairs * c.per_pair + loaded * c.per_loaded


def _keys(before: int, rows: int) -> float:
    """Pairs of rows side by side behind so many tokens: each sees itself and all before it."""
    return rows * before + rows * (rows + 1) / 2
