"""Logits -> tokens -> text -> an Answer with its timings, whoever runs the steps.

`Generation` is given the logits of one token after the other and keeps everything that an answer needs. A Python caller
pulls pieces of text out of an `AnswerStream`, which runs a step for each token; the scheduler pushes what its own steps,
for many requests at a time, have brought. Each step runs one row through the layers and writes its KV into the room that
prefill left: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from blendserve.config import DecodeConfig
from blendserve.core import Answer, BlendReport, Explanation, Timings
from blendserve.engine.request import Plan
from blendserve.models.kv_cache import KVCache
from blendserve.models.model import DecoderModel
from blendserve.models.replay import Step, decoding_steps


class Generation:
    """One answer in the making: `take` logits until `answer` is there."""

    def __init__(
        self, plan: Plan, report: BlendReport, explanation: Explanation, tokenizer: Any, end: Set[int]
    ) -> None:
        self.plan, self.report, self.explanation = plan, report, explanation
        self.answer: Answer | None = None
        self.ttft = 0.0  # seconds from the request to its first token
        self.gap = 0.0  # seconds between the last two tokens
        self._end = end
        self._sampler = Sampler(plan.decode)
        self._text = TextStream(tokenizer, plan.decode.stop)
        self._said = ""
        self._tokens: list[int] = []
        self._token_at: float | None = None  # of the last one, in seconds since the request came

    @property
    def last(self) -> tuple[int, int]:
        """Position and id of the last token, which the next step runs."""
        return len(self.plan.prompt) + len(self._tokens) - 1, self._tokens[-1]

    def take(self, logits: Tensor) -> str:
        """Choose the next token from logits [V] -> the text that it completes, perhaps ""."""
        token = self._sampler(logits)
        self._note_time()
        if token in self._end:
            return self._close("", "stop")
        self._tokens.append(token)
        piece = self._text.push(token)
        if self._text.stopped:
            return self._close(piece, "stop")
        if len(self._tokens) == self.plan.decode.max_new_tokens:
            return self._close(piece, "length")
        self._said += piece
        return piece

    def _note_time(self) -> None:
        now = self.plan.clock.elapsed()
        if self._token_at is None:
            self.ttft = now
        else:
            self.gap = now - self._token_at
        self._token_at = now

    def _close(self, piece: str, reason: str) -> str:
        piece += self._text.flush()
        self._said += piece
        tokens, timings = tuple(self._tokens), self._timings()
        self.answer = Answer(
            self._said, self.plan.passages, self.report, timings, tokens, reason, self.explanation
        )
        return piece

    def _timings(self) -> Timings:
        seconds, n = self.plan.clock.seconds, len(self._tokens)
        decode = self.plan.clock.elapsed() - self.ttft
        rate = (n - 1) / decode if n > 1 else 0.0
        stages = {
            stage: seconds[stage] for stage in ("retrieve", "queue", "load", "select", "correct", "prefill")
        }
        return Timings(**stages, ttft=self.ttft, decode=decode, tokens_per_second=rate)


class AnswerStream:
    """An answer on its way: iterate for pieces of text, then call `answer()`; or call it at once."""

    def __init__(self, generation: Generation, logits: Tensor, run: Step, at_end: Callable[[], None]) -> None:
        """The first token is chosen here, from logits [V]; `run` makes the others, `at_end` follows the last one."""
        self.passages, self.report = generation.plan.passages, generation.report
        first = generation.take(logits)
        self.ttft = generation.ttft
        self._generation, self._at_end = generation, at_end
        self._pieces = self._run(first, run)

    def __iter__(self) -> Iterator[str]:
        """Pieces of valid text. Leaving early is safe: iterate again to go on, or drop the stream to cancel the rest."""
        return self._pieces

    def answer(self) -> Answer:
        """The whole answer, once the stream has ended (this runs it to its end)."""
        for _ in self:
            pass
        assert self._generation.answer is not None
        return self._generation.answer

    def _run(self, piece: str, run: Step) -> Iterator[str]:
        while True:
            if piece:
                yield piece
            if self._generation.answer:
                break
            piece = self._generation.take(run(*self._generation.last))
        del run  # and with it the cache
        self._at_end()


def generate(
    adapter: DecoderModel, cache: KVCache, length: int, logits: Tensor, config: DecodeConfig, end: Set[int]
) -> Iterator[int]:
    """Token ids alone, until an end token (not among them) or `max_new_tokens`.

    `length`: tokens already in the cache; `logits` [V]: for the first new token.
    """
    run = decoding_steps(adapter, cache, length, config.max_new_tokens)
    return sample(logits, config, end, lambda made, token: run(length + made, token))


def sample(
    logits: Tensor, config: DecodeConfig, end: Set[int], advance: Callable[[int, int], Tensor]
) -> Iterator[int]:
    """The loop itself; `advance(n, token)` runs the n-th new token, from 0 -> logits [V] for the next."""
    sampler = Sampler(config)
    for made in range(config.max_new_tokens):
        token = sampler(logits)
        if token in end:
            return
        yield token
        if made + 1 < config.max_new_tokens:
            logits = advance(made, token)


COLDEST = 1e-6  # temperatures below it are 0: logits divided by them are no numbers


class Sampler:
    """Logits [V] -> a token id: greedy at temperature 0, else nucleus sampling (arXiv 1904.09751) from a seed."""

    def __init__(self, config: DecodeConfig) -> None:
        self._config = config
        self._generator = torch.Generator().manual_seed(config.seed)

    def __call__(self, logits: Tensor) -> int:
        if self._config.temperature < COLDEST:
            return int(logits.argmax())
        probabilities = torch.softmax(logits.float().cpu() / self._config.temperature, dim=-1)
        ranked, order = probabilities.sort(descending=True)
        dropped = ranked.cumsum(0) - ranked >= self._config.top_p
        dropped[0] = False  # not even by a top_p that float32 has no number for
        ranked[dropped] = 0.0
        return int(order[torch.multinomial(ranked, 1, generator=self._generator)])


class TextStream:
    """Token ids in, valid text out: characters split over tokens and possible stop strings are held back."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = [s for s in stop if s]
        self._ids: list[int] = []
        self._start = 0  # ids before this one are decoded and done with
        self._done = 0  # characters of decode(ids[start:]) that were taken
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that this token completes, perhaps ""."""
        self._ids.append(token)
        text = self._decode(self._ids[self._start :])
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._held += text[self._done :]
        # The next token is decoded together with this one, as its leading space may depend on it.
        self._start = len(self._ids) - 1
        self._done = len(self._decode(self._ids[self._start :]))
        return self._release(final=False)

    def flush(self) -> str:
        """What was held back for a stop string that did not come."""
        return self._release(final=True)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _release(self, final: bool) -> str:
        found = [(at + len(s), at) for s in self._stop if (at := self._held.find(s)) >= 0]
        if found:  # the one that ends first stops the text, however the text fell into tokens
            self.stopped = True
            out, self._held = self._held[: min(found)[1]], ""
            return out
        keep = 0 if final else max((_overlap(self._held, s) for s in self._stop), default=0)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
