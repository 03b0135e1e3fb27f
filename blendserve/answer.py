"""What a question gets: the answer, its times and what its sentences rest on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from blendserve.core import BlendReport, Passage, TokenIds


@dataclass(slots=True)
class Timings:
    """Seconds of each stage of one request. Filled by engine/generate.py."""

    retrieve: float = 0.0
    match: float = 0.0  # looking for stored chunks in a plain prompt
    queue: float = 0.0  # behind other requests
    load: float = 0.0  # read, check, rotate, place
    select: float = 0.0  # the policy's own passes
    correct: float = 0.0
    prefill: float = 0.0  # token ids to first-token logits; contains load, select and correct
    ttft: float = 0.0  # question's text to first token
    decode: float = 0.0  # first token to last
    refine: float = 0.0  # part of decode, before the second token
    tokens_per_second: float = 0.0  # of decode
    tokens_per_pass: float = 1.0  # of the model while it decodes: above 1 where drafts were right

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


class TokenLogprob(NamedTuple):
    """The natural logarithm of a token's probability, before penalties, grammar and temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens in its place, the likeliest first


@dataclass(frozen=True, slots=True)
class Citation:
    """A passage that a sentence of an answer rests on. Filled by retrieve/citations.py."""

    start: int  # of the sentence, in characters of the answer
    end: int
    passage: int  # its number in the prompt
    quote_start: int  # of the passage's sentence that says most of it, in characters of the passage
    quote_end: int
    quote: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What a question gets. Filled by engine/generate.py."""

    text: str
    passages: tuple[Passage, ...]
    report: BlendReport
    timings: Timings
    token_ids: TokenIds = field(default=())
    finish_reason: str = "stop"  # stop (end of turn or stop string) | length
    stop_sequence: str | None = None  # the stop string that ended the text
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens, if they were asked for
    citations: tuple[Citation, ...] = ()  # in the order of the text

    @property
    def explanation(self) -> dict[str, Any]:
        """State and score of every prompt token, and the parts of the prompt with their reasons."""
        return self.report.explain()

    def to_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "tokens": len(self.token_ids),
            "passages": [asdict(p) for p in self.passages],
            "citations": [asdict(citation) for citation in self.citations],
            "report": self.report.to_dict(),
            "timings": self.timings.to_dict(),
        }
