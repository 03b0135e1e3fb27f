"""One request from its queue to the last token of its answer: prefill, sampling, text, timings.

A Python caller pulls pieces of text out of an `AnswerStream`, which runs a decoding step for each token; the scheduler
gives a `TokenSequence` the logits of its own steps, for many requests at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from blendserve.answer import Answer, Citation, Timings, TokenLogprob
from blendserve.blend.blender import Blender, Prefilled
from blendserve.blend.planner import plan_full_prefill
from blendserve.blend.precompute import MissingChunk
from blendserve.blend.prefill import PassResult
from blendserve.config import DecodeConfig
from blendserve.core import Steps, run
from blendserve.engine.drafts import Drafter
from blendserve.engine.grammar import Guide
from blendserve.engine.request import Event, PrefillProgress, PreparedRequest, TextDelta
from blendserve.engine.sampler import Sampler, logprob_of
from blendserve.errors import InputError
from blendserve.fetch.fetcher import Hold
from blendserve.models.forward import read
from blendserve.models.kv_cache import KVCache
from blendserve.models.loader import LoadedModel
from blendserve.models.model import DecoderModel
from blendserve.models.reference import OwnDecoding
from blendserve.models.runner import DecodeRunner
from blendserve.retrieve.citations import Citer

STAGES = ("retrieve", "match", "queue", "load", "select", "correct", "prefill", "refine")  # of a clock
SCORED_ROWS = 64  # of a prompt, whose logits are computed in one step

# position of the first token, tokens -> logits [n, V] after each
Decode = Callable[[int, list[int]], Tensor]


class TokenSequence:
    """One request: after `start`, give `append` the logits of each step until `answer` is set."""

    def __init__(
        self,
        request: PreparedRequest,
        model: LoadedModel,
        prefill: Callable[[TokenSequence], Steps[Prefilled]],
        *,
        tenant: str = "",
        cost: float = 0.0,
        emit: Callable[[Event], None] = lambda event: None,
        prefetch: Callable[[], Hold] | None = None,
        on_answer: Callable[[TokenSequence], None] = lambda sequence: None,
    ) -> None:
        """prefill: into `cache`. cost: tokens that are expected to run through the model. emit: called on the model's
        thread, with the last event Completed or Failed. prefetch: begins to keep KV for its prefill. on_answer: called
        when `answer` is set, while `cache` holds the prompt and all of the answer but its last token.
        """
        self.request = request
        self.model = model
        self.tenant = tenant
        self.cost = cost
        self.emit = emit
        self.queued_at = 0.0  # on the scheduler's clock
        self.is_cancelled = False  # set by its caller; nothing is emitted after that
        self.shows_progress = False  # set by its caller: each layer of the prefill emits PrefillProgress
        self.cache: KVCache | None = None  # by default, the prefill makes one
        self.steps = prefill(self)
        self.layer = -1  # of the prefill, that is next, counted through all passes
        self.preempted_cost = 0.0  # of the requests that preempted its prefill
        self.prefilled: Prefilled | None = None
        self.answer: Answer | None = None
        self.ttft = 0.0  # seconds from the request to its first token
        self.n_new = 0  # tokens of the last step, with an end token
        self.gap_s = 0.0  # mean time of each of them
        self._prefetch = prefetch
        self._on_answer = on_answer
        self._hold: Hold | None = None
        rules = request.rules
        if max(rules.bias, default=0) >= model.decoder.vocab_size:
            raise InputError(f"logit_bias: the model has no token {max(rules.bias)}", setting="logit_bias")
        guide = None if rules.grammar is None else Guide(rules.grammar, model)
        self._sampler = Sampler(request.decode, rules, request.prompt, guide)
        self._end = frozenset[int]() if rules.ignores_end else model.end_tokens
        self._detokenizer = Detokenizer(model.tokenizer, request.decode.stop)
        self._text = ""
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._token_at = 0.0  # of the last one, in seconds since the request came
        self._drafter: Drafter | None = None
        self._draft: list[int] = []  # of the step that runs
        self._n_passes = self._n_sampled = 0  # of the model; tokens, with an end token

    def start(self, prefilled: Prefilled) -> list[TextDelta]:
        """The prefill is done: choose the first token -> what it adds to the answer."""
        self.prefilled = prefilled
        return self.append(prefilled.result.logits)

    def advance(self) -> None:
        """Run one more layer of `steps`. Raises StopIteration at their end, with what they return."""
        next(self.steps)
        self.layer += 1
        if self.shows_progress and self.prefilled is None:
            self.emit(PrefillProgress(self.layer, self.model.decoder.n_layers))

    def copied(self, leader: TokenSequence) -> Prefilled | None:
        """The prefill of a running answer to the same prompt, in `cache`; None if that one cannot be copied now."""
        done = leader.prefilled
        if done is None or leader.cache is None or leader.answer or leader.must_refine or self.cache is None:
            return None
        self.cache.copy(leader.cache, len(self.request.prompt))
        return replace(done, result=replace(done.result, cache=self.cache), missing=())

    @property
    def must_refine(self) -> bool:
        """Whether `refine` has to run before the next step."""
        return self.prefilled is not None and self.answer is None and len(self.prefilled.to_refine) > 0

    def refine(self) -> Steps[Prefilled]:
        """Recompute more of the prompt, in its cache, for the rest of the answer (blend/refine.py)."""
        assert self.prefilled
        with self.request.clock.stage("refine"):
            self.prefilled = yield from self.prefilled.refine(self.model.decoder, self.request.prompt.ids)
        return self.prefilled

    def hold(self) -> None:
        """Keep the KV that its prefill will read, until `release`.

        The scheduler calls both, under its lock: a sequence that is never queued holds nothing.
        """
        self._hold = self._prefetch() if self._prefetch else None

    def release(self) -> None:
        """Free the KV that is kept for its prefill; idempotent."""
        hold, self._hold = self._hold, None
        if hold:
            hold.close()

    def next_tokens(self, draft_room: int = 0) -> tuple[int, list[int]]:
        """What the next step runs: position of the last token; that token, and a draft of at most `draft_room` more."""
        decode = self.request.decode
        room = min(draft_room, decode.answer_tokens - len(self._tokens) - 1)
        if room > 0 and self.request.rules.drafts:
            if self._drafter is None:
                self._drafter = Drafter((*self.request.prompt.ids, *self._tokens))
            self._draft = self._drafter.draft(room)
        return len(self.request.prompt) + len(self._tokens) - 1, [self._tokens[-1], *self._draft]

    def append(self, logits: Tensor) -> list[TextDelta]:
        """Choose the next tokens from logits [n, V] or [V], the last step's -> what they add to the answer.

        One more than were drafted right, or fewer if the answer ends before.
        """
        draft, self._draft = self._draft, []
        deltas = list[TextDelta]()
        self.n_new = 0
        self._n_passes = self._n_passes + 1
        for row, drafted in zip(logits.view(-1, logits.shape[-1]), [*draft, None], strict=True):
            token = self._sampler(row)
            self.n_new = self.n_new + 1
            self._n_sampled = self._n_sampled + 1
            if self._n_sampled == 1:  # before the answer can end
                self.ttft = self._token_at = self.request.clock.elapsed()
            deltas.append(self._add(token, row))
            if self.answer or token != drafted:
                break
        if self._drafter:
            self._drafter.judge(len(draft), self.n_new - 1)
        now = self.request.clock.elapsed()
        self.gap_s = (now - self._token_at) / self.n_new
        self._token_at = now
        return [delta for delta in deltas if delta.text or delta.logprobs]

    def _add(self, token: int, logits: Tensor) -> TextDelta:
        """logits [V]: that the token was chosen from. An end token's is told only behind those of a prompt."""
        rules = self.request.rules
        if rules.reads_only:
            return TextDelta(self._close("", "length"))
        has_ended = token in self._end
        is_told = rules.logprobs is not None and (rules.scores_prompt or not has_ended)
        found = (logprob_of(logits, token, rules.logprobs or 0),) if is_told else ()
        self._logprobs += found
        if has_ended:
            return TextDelta(self._close("", "stop"), found)
        return TextDelta(self._text_of(token), found)

    def _text_of(self, token: int) -> str:
        """The text that a token of the answer completes, perhaps ""."""
        self._tokens.append(token)
        if self._drafter:
            self._drafter.push(token)
        piece = self._detokenizer.push(token)
        if self._detokenizer.stop_sequence is not None:
            return self._close(piece, "stop")
        if len(self._tokens) == self.request.decode.answer_tokens:
            return self._close(piece, "length")
        self._text += piece
        return piece

    def _close(self, piece: str, reason: str) -> str:
        assert self.prefilled
        piece += self._detokenizer.flush()
        self._text += piece
        report = self.prefilled.report
        tokens = tuple(self._tokens)
        passages = self.request.passages
        ended = reason, self._detokenizer.stop_sequence
        logprobs = tuple(self._logprobs)
        details = logprobs, tuple(self._citations())
        self.answer = Answer(self._text, passages, report, self._timings(), tokens, *ended, *details)
        self._on_answer(self)
        return piece

    def _citations(self) -> Iterator[Citation]:
        """The passages that the answer's sentences rest on; a structured answer has no sentences."""
        request = self.request
        if request.passages and not request.rules.grammar:
            yield from Citer(request.passages, request.question).cite(self._text)

    def _timings(self) -> Timings:
        seconds = self.request.clock.seconds
        n = len(self._tokens)
        decode = self.request.clock.elapsed() - self.ttft
        return Timings(
            **{stage: seconds[stage] for stage in STAGES},
            ttft=self.ttft,
            decode=decode,
            tokens_per_second=(n - 1) / decode if n > 1 else 0.0,
            tokens_per_pass=(self._n_sampled - 1) / (self._n_passes - 1) if self._n_passes > 1 else 1.0,
        )


def prefill(sequence: TokenSequence, blender: Blender) -> Steps[Prefilled]:
    """Prefill the sequence's cache as `request.blend` says."""
    request = sequence.request
    cache = sequence.cache or KVCache(blender.model, request.tokens)
    if request.rules.scores_prompt:
        return (yield from _scored_prefill(request, blender.model, cache))
    with request.clock.stage("prefill"):
        done = yield from blender.prefill(request.prompt, request.blend, cache, request.clock)
        quality = request.quality.report if request.quality else None
        return replace(done, report=replace(done.report, quality=quality))


def _scored_prefill(request: PreparedRequest, model: DecoderModel, cache: KVCache) -> Steps[Prefilled]:
    """Full prefill that finds the log probabilities of the prompt's tokens."""
    ids = request.prompt.ids
    n_top = request.rules.logprobs or 0
    found = list[TokenLogprob]()
    with request.clock.stage("prefill"):
        hidden = yield from read(model, cache, ids)
        for start in range(0, len(ids), SCORED_ROWS):
            stop = start + SCORED_ROWS
            logits = model.logits(hidden[start:stop])
            # the last one's next token is the answer's
            pairs = zip(logits, ids[start + 1 : stop + 1], strict=False)
            found += [logprob_of(row, token, n_top) for row, token in pairs]
            yield
    plan = plan_full_prefill(request.prompt, request.blend, "log probabilities of the prompt were asked for")
    return replace(Prefilled.of(plan, PassResult(cache, logits[-1])), logprobs=tuple(found))


def reference_prefill(sequence: TokenSequence, reference: OwnDecoding, why: str) -> Steps[Prefilled]:
    """Prefill by the model's own forward and cache, for a model that may not blend because of `why`."""
    request = sequence.request
    yield from ()
    with request.clock.stage("prefill"):
        result = PassResult(KVCache(sequence.model.decoder, 0), reference.feed(request.prompt.ids))
    return Prefilled.of(plan_full_prefill(request.prompt, request.blend, why), result)


class AnswerStream:
    """An answer that is being generated: iterate for pieces of text, then call `answer()`; or call it at once."""

    def __init__(
        self,
        sequence: TokenSequence,
        decode: Decode | None = None,
        on_end: Callable[[Sequence[MissingChunk]], None] | None = None,
    ) -> None:
        """Prefills, and chooses the first token.

        decode: makes the others; a DecodeRunner over the prefilled cache if None, which runs drafts, too. on_end: called
        after the last one with the chunks that were missing, if any were.
        """
        request = sequence.request
        prefilled = run(sequence.steps)
        self._draft_room = 0
        self.passages = request.passages
        self.report = prefilled.report
        if decode is None:
            cache = prefilled.result.cache
            n_new = request.decode.answer_tokens
            runner = DecodeRunner.over(sequence.model.decoder, cache, len(request.prompt), n_new)
            decode = runner.step
            self._draft_room = runner.draft_room(1)
        first = sequence.start(prefilled)
        self.ttft = sequence.ttft
        self._sequence = sequence
        self._on_end = partial(on_end, prefilled.missing) if on_end and prefilled.missing else None
        self._pieces = self._run(first, decode)

    def __iter__(self) -> Iterator[str]:
        """Pieces of valid text. Leaving early is safe: iterate again to go on, or drop the stream to cancel the rest."""
        return self._pieces

    def answer(self) -> Answer:
        """The whole answer, once the stream has ended (this runs it to its end)."""
        for _ in self:
            pass
        assert self._sequence.answer is not None
        return self._sequence.answer

    def _run(self, first: list[TextDelta], decode: Decode) -> Iterator[str]:
        yield from _texts(first)
        if self._sequence.must_refine:
            run(self._sequence.refine())
        while not self._sequence.answer:
            yield from _texts(self._sequence.append(decode(*self._sequence.next_tokens(self._draft_room))))
        del decode
        self._sequence.prefilled = None  # its memory serves the next request
        if self._on_end:
            self._on_end()


def _texts(deltas: Iterable[TextDelta]) -> Iterator[str]:
    return (delta.text for delta in deltas if delta.text)


def generate(
    model: DecoderModel, cache: KVCache, length: int, logits: Tensor, config: DecodeConfig, end: Set[int]
) -> Iterator[int]:
    """Token ids alone, until an end token (not among them) or `max_new_tokens`.

    `length`: tokens already in the cache; `logits` [V]: for the first new token.
    """
    runner = DecodeRunner.over(model, cache, length, config.answer_tokens)
    sampler = Sampler(config)
    for at in range(length, length + config.answer_tokens):
        token = sampler(logits)
        if token in end:
            return
        yield token
        if at + 1 < length + config.answer_tokens:
            logits = runner.step(at, [token])[0]


class Detokenizer:
    """Token ids in, valid text out: characters split over tokens and possible stop strings are held back."""

    def __init__(self, tokenizer: Any, stop: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = [s for s in stop if s]
        self._ids: list[int] = []
        self._start = 0  # ids before this one are decoded and done with
        self._done = 0  # characters of decode(ids[start:]) that were taken
        self._pending = ""  # may begin a stop string
        self.stop_sequence: str | None = None  # that came

    def push(self, token: int) -> str:
        """The text that this token completes, perhaps ""."""
        self._ids.append(token)
        text = self._decode(self._ids[self._start :])
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._pending += text[self._done :]
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
        found = [(at + len(s), at, s) for s in self._stop if (at := self._pending.find(s)) >= 0]
        if found:  # the one that ends first stops the text, however the text fell into tokens
            _, end, self.stop_sequence = min(found)
            out = self._pending[:end]
            self._pending = ""
            return out
        keep = 0 if final else max((_stop_prefix_len(self._pending, s) for s in self._stop), default=0)
        end = len(self._pending) - keep
        out, self._pending = self._pending[:end], self._pending[end:]
        return out


def _stop_prefix_len(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
