"""A running request: its slot, the tokens so far and their text. What AnswerStream pulls, this is pushed."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch import Tensor

from blendserve.blend.cache import KVCache
from blendserve.core import Answer, BlendReport, Timings
from blendserve.engine.generation import Sampler, TextStream
from blendserve.engine.queued import Finished, Piece, Work
from blendserve.engine.steps import Row
from blendserve.timing import Clock


class Writing:
    """From first logits to the last token."""

    def __init__(
        self, work: Work, cache: KVCache, report: BlendReport, tokenizer: Any, end: Set[int]
    ) -> None:
        self.work, self.cache, self.report = work, cache, report
        self._end = end
        self._sampler = Sampler(work.decode)
        self._text = TextStream(tokenizer, work.decode.stop)
        self._said: list[str] = []
        self._tokens: list[int] = []
        self._ttft = 0.0
        self.since_token = Clock()

    @property
    def row(self) -> Row:
        """The last token, which the next step runs."""
        return Row(self.cache, len(self.work.prompt) + len(self._tokens) - 1, self._tokens[-1])

    def take(self, logits: Tensor) -> bool:
        """Choose the next token from logits [V] and emit its text -> whether the answer goes on."""
        token = self._sampler(logits)
        if not self._tokens:
            self._ttft = self.work.clock.elapsed()
        if token in self._end:
            return self._close("stop")
        self._tokens.append(token)
        self._say(self._text.push(token))
        if self._text.stopped:
            return self._close("stop")
        return len(self._tokens) < self.work.decode.max_new_tokens or self._close("length")

    def _say(self, text: str) -> None:
        if text:
            self._said.append(text)
            self.work.emit(Piece(text))

    def _close(self, reason: str) -> bool:
        self._say(self._text.flush())
        work = self.work
        text, passages, tokens = "".join(self._said), work.passages, tuple(self._tokens)
        work.emit(Finished(Answer(text, passages, self.report, self._timings(), tokens, reason)))
        return False

    def _timings(self) -> Timings:
        seconds, n = self.work.clock.seconds, len(self._tokens)
        decode = self.work.clock.elapsed() - self._ttft
        return Timings(
            retrieve=seconds["retrieve"],
            load=seconds["load"],
            select=seconds["select"],
            correct=seconds["correct"],
            prefill=seconds["prefill"],
            ttft=self._ttft,
            decode=decode,
            tokens_per_second=(n - 1) / decode if n > 1 else 0.0,
        )
