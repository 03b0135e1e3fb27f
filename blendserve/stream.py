"""An answer on its way: tokens to text, and the figures of the whole request at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from blendserve.config import DecodeConfig
from blendserve.core import Answer, BlendReport, Passage, Timings
from blendserve.engine.generation import TextStream
from blendserve.timing import Clock


class AnswerStream:
    """An answer on its way: iterate for pieces of text, then call `answer()`; or call it at once."""

    def __init__(
        self,
        tokenizer: Any,
        passages: tuple[Passage, ...],
        report: BlendReport,
        source: Iterator[int],
        decode: DecodeConfig,
        clock: Clock,
        at_end: Callable[[], None],
    ) -> None:
        self.passages = passages
        self.report = report
        self._clock, self._at_end = clock, at_end
        self._max_new_tokens = decode.max_new_tokens
        self._text = TextStream(tokenizer, decode.stop)
        self._said = ""
        self._tokens: list[int] = []
        self._source = source
        first = next(self._source, None)
        self.ttft = clock.elapsed()  # seconds
        self._pieces = self._run(first)
        self._answer: Answer | None = None

    def __iter__(self) -> Iterator[str]:
        """Pieces of valid text. Leaving early is safe: iterate again to go on, or drop the stream to cancel the rest."""
        return self._pieces

    def _run(self, token: int | None) -> Iterator[str]:
        while token is not None:
            self._tokens.append(token)
            if piece := self._text.push(token):
                self._said += piece
                yield piece
            token = None if self._text.stopped else next(self._source, None)
        if rest := self._text.flush():
            self._said += rest
            yield rest
        self._answer = self._finish()
        self._at_end()

    def answer(self) -> Answer:
        """The whole answer, once the stream has ended (this runs it to its end)."""
        for _ in self:
            pass
        assert self._answer is not None
        return self._answer

    def _finish(self) -> Answer:
        decode_s = self._clock.elapsed() - self.ttft
        seconds, n = self._clock.seconds, len(self._tokens)
        timings = Timings(
            retrieve=seconds["retrieve"],
            load=seconds["load"],
            select=seconds["select"],
            correct=seconds["correct"],
            prefill=seconds["prefill"],
            ttft=self.ttft,
            decode=decode_s,
            tokens_per_second=(n - 1) / decode_s if n > 1 else 0.0,
        )
        full = n == self._max_new_tokens and not self._text.stopped
        return Answer(
            text=self._said,
            passages=self.passages,
            report=self.report,
            timings=timings,
            token_ids=tuple(self._tokens),
            finish_reason="length" if full else "stop",
        )
