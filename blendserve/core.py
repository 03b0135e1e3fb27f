"""The nouns of the pipeline, each with the stage that fills it, and the alphabet of shapes.

    question -> retrieve -> store (load KV) -> blend (prefill) -> decode -> answer

Shape letters, used in every signature and trailing comment of the package:

    L layers      T prompt tokens    C chunk tokens    S active (recomputed) rows
    H query heads K kv heads         D head dim        E hidden size    V vocabulary
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from itertools import groupby
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import torch

TokenIds = tuple[int, ...]
PLAIN_SUFFIX = 16  # last tokens of a plain prompt, which are always computed

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
"""Work that yields before every layer of a model and returns a T, or between other parts that take some milliseconds.
The caller may run something else there, and cancels the work by `close()`: every `with` and `finally` inside is left."""


def run(steps: Steps[T]) -> T:
    """Drive the work to its end, without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


@dataclass(frozen=True, slots=True)
class Document:
    """A text as the user brought it. Filled by retrieve/documents.py or by the caller."""

    text: str
    title: str = ""
    id: str = ""  # "" = derived from title and text


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a document that becomes one chunk. Filled by retrieve/chunker.py; `score` by retrieve/index.py."""

    text: str
    title: str = ""
    id: str = ""
    doc_id: str = ""
    score: float | None = None  # cosine similarity to the question, None when the caller brought the passage

    @property
    def chunk_text(self) -> str:
        """Return the text of its chunk: title and text, without space around them."""
        return "\n".join(part.strip() for part in (self.title, self.text) if part.strip())


@dataclass(frozen=True, slots=True)
class Chunk:
    """The unit of reuse: the token ids of one passage, tokenised alone. Filled by engine/prompt.py."""

    ids: TokenIds
    passage: Passage | None = None

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open range of prompt positions [start, stop)."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Run(NamedTuple):
    """Tokens that a prompt has in common with a stored chunk, its donor. Filled by blend/match.py and blend/near.py."""

    span: Span  # in the prompt, or in a chunk of it
    donor: bytes  # its key
    offset: int  # where they start in the donor
    n_after: int  # tokens of the donor behind them
    is_learnt: bool = False  # whether the donor was learnt from earlier prompts (engine/learn.py)

    @property
    def n_donor(self) -> int:
        """Tokens of the donor."""
        return self.offset + len(self.span) + self.n_after


@dataclass(frozen=True, slots=True)
class Prompt:
    """[ prefix | chunk 0 | chunk 1 | ... | suffix ] as token ids. Filled by engine/prompt.py.

    A plain prompt is a client's own text. It has one chunk if stored ones were found in it (`runs`): the text from the
    first one to the last. That chunk is no passage, and is never stored.
    """

    prefix: TokenIds
    chunks: tuple[Chunk, ...]
    suffix: TokenIds
    is_plain: bool = False
    runs: tuple[Run, ...] = ()  # of a plain prompt: ascending, in prompt positions, none overlapping
    texts: tuple[Span, ...] = ()  # of a plain prompt: its client's texts, ascending; no template, no answers

    @classmethod
    def plain(cls, ids: TokenIds, runs: tuple[Run, ...] = (), texts: tuple[Span, ...] = ()) -> Prompt:
        """A plain prompt in which these runs were found, all in front of its last PLAIN_SUFFIX tokens."""
        if not runs:
            n_prefix = max(0, len(ids) - PLAIN_SUFFIX)
            return cls(ids[:n_prefix], (), ids[n_prefix:], True, (), texts)
        start, stop = runs[0].span.start, runs[-1].span.stop
        return cls(ids[:start], (Chunk(ids[start:stop]),), ids[stop:], True, runs, texts)

    @property
    def ids(self) -> TokenIds:
        return (*self.prefix, *(i for chunk in self.chunks for i in chunk.ids), *self.suffix)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Where each chunk stands."""
        spans, at = [], len(self.prefix)
        for chunk in self.chunks:
            spans.append(Span(at, at + len(chunk)))
            at += len(chunk)
        return tuple(spans)

    def __len__(self) -> int:
        return len(self.prefix) + sum(len(c) for c in self.chunks) + len(self.suffix)


@dataclass(frozen=True, slots=True)
class Unusable:
    """A stored chunk that could not be used, and why. Filled by blend/layout.py."""

    chunk: int  # its number in the prompt
    kind: str  # corrupt | unreachable | slow link | codec | level | tables
    reason: str


@dataclass(frozen=True, slots=True)
class NearChunk:
    """A chunk that was not stored, and what stored ones have of it. Filled by blend/report.py."""

    chunk: int  # its number in the prompt
    donors: tuple[str, ...]  # keys in hex; none where nothing stored has anything of it
    tokens_stored: int  # that were read from donors; the policy may recompute some of them
    tokens_fresh: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReusedSpan:
    """Tokens of a plain prompt that started from a stored chunk's KV. Filled by blend/report.py."""

    start: int  # in the prompt
    stop: int
    donor: str  # the chunk's key in hex
    missing_head: int  # tokens of the chunk in front of these
    missing_tail: int  # and behind them; some may be among the prompt's last ones, which are computed
    learnt: bool  # whether the chunk was learnt from earlier prompts


@dataclass(frozen=True, slots=True)
class QualityReport:
    """What is promised of the answers to an index's questions, and what checks say. Filled by quality/controller.py."""

    target: str
    ratio: float | None  # that keeps it; None: answers are exact
    basis: str  # how many prompts and checks it was chosen by
    status: str  # kept | not yet known | raised to ... | answered exactly ... | off
    estimate: float | None = None  # of what the target limits, by checks since the last change of the ratio
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class BlendReport:
    """What was reused, what was recomputed and why. Filled by blend/blender.py; every answer carries one.

    The tokens of a prompt fall into six kinds that add up to it: exact (the prefix, cached or computed first, and the
    first chunk), kept (a conversation's, as a blended prompt before had them), reused, recomputed (chosen by the policy),
    computed (nothing stored: missing, corrupt or not looked for) and suffix.
    """

    method: str
    policy: str
    correction: str
    ratio: float  # asked for
    reason: str  # why nothing was blended; "" when something was
    chunks: int  # of a plain prompt, the stored ones that were found in it
    chunks_hit: int
    chunks_missing: int
    chunks_corrupt: int
    tokens_prompt: int
    tokens_exact: int
    tokens_first: int  # part of tokens_exact: the first chunk's
    tokens_reused: int
    tokens_recomputed: int
    tokens_computed: int
    tokens_suffix: int
    bytes_loaded: int
    cost: float  # row-layers run through the model (dense, selection and refining passes included) / (T * L)
    exact: bool  # whether the first token is full prefill's, up to rounding: no token's KV is approximate
    unusable: tuple[Unusable, ...] = ()  # missing and corrupt chunks that may be in the store
    # Of the chunks hit, how many came from where; "computed": here, while others were transferred.
    tiers: Mapping[str, int] = field(default_factory=dict)
    near: tuple[NearChunk, ...] = ()  # what others have of missing and corrupt chunks; () unless looked for
    tokens_kept: int = 0
    prior: bool = False  # whether the correction started from what the corpus has shown (blend/priors.py)
    spans: tuple[ReusedSpan, ...] = ()  # of a plain prompt
    quality: QualityReport | None = None  # None: no target was set
    tokens_refined: int = 0  # part of tokens_reused: recomputed after the first token (blend/refine.py)
    full_prefill_s: float | None = None  # estimate for the same prompt; None: method full, or no cost model

    @property
    def blended(self) -> bool:
        """Whether any token's KV came from a chunk that does not stand where it was computed."""
        return self.tokens_reused > 0

    @property
    def share_recomputed(self) -> float:
        """Recomputed share of the tokens of the chunks that were found; compare it with `ratio`."""
        found = self.tokens_reused + self.tokens_recomputed + self.tokens_first
        return self.tokens_recomputed / found if found else 0.0

    def to_dict(self) -> dict[str, Any]:
        derived = {"blended": self.blended, "share_recomputed": self.share_recomputed}
        listed = {
            name: [asdict(chunk) for chunk in getattr(self, name)] for name in ("unusable", "near", "spans")
        }
        return {**derived, **asdict(self), **listed}


class Reason(str, Enum):
    """Why a part of a prompt starts from what it does; `Part.reason` says it in a sentence."""

    SUFFIX = "suffix"  # computed for every request
    STORED = "stored"  # used where it was computed
    KEPT = "kept"  # of a conversation, as a blended prompt before had it
    MOVED = "moved"  # stored, and used in another place
    COMPUTED = "computed"  # alone, in this request, while other chunks came from another machine
    NEAR = "near"  # stored chunks have text of it, which is used
    NO_DONOR = "no donor"  # not stored, nor is any text of it
    DONOR_UNUSABLE = "donor unusable"  # not stored; a chunk that has text of it could not be used
    UNUSABLE = "unusable"  # stored, and damaged or not decodable here
    SHORT = "short"  # stored, and computed: a short chunk's KV is far from what it is in a prompt
    UNUSED = "unused"  # stored, but the method does not use it in this place
    NOT_STORED = "not stored"
    NOT_LOOKED_UP = "not looked up"


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a prompt: its prefix, a passage, or its suffix. Filled by blend/report.py.

    Of a plain prompt, each stored chunk that was found in it is a passage, and what stands between them is text.
    """

    kind: str  # prefix | kept | passage | text | suffix
    passage: int | None  # its number, of a passage
    span: Span
    tier: str  # where its KV was read from; "" where none was used
    code: Reason  # why its KV was used, or why not
    reason: str  # the same as a sentence
    donors: tuple[tuple[Span, str], ...] = ()  # stretches that came from other chunks, and their keys in hex


@dataclass(frozen=True, slots=True, eq=False)
class Explanation:
    """What each token of a prompt started from, and why. Filled by blend/report.py; the report has its sums."""

    parts: tuple[Part, ...]
    states: torch.Tensor  # [T] uint8, numbers in STATES
    scores: (
        torch.Tensor | None
    )  # [T], by which the policy chose; NaN where it gave none. None: it scores nothing

    STATES: ClassVar[tuple[str, ...]] = (
        "exact",
        "reused",
        "corrected",
        "near_duplicate",
        "recomputed",
        "computed",
        "kept",
    )

    @property
    def runs(self) -> list[tuple[str, int]]:
        """States in the order of the prompt, each with how many tokens in a row have it."""
        return [(self.STATES[state], len(list(run))) for state, run in groupby(self.states.tolist())]


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
    explanation: Explanation | None = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "tokens": len(self.token_ids),
            "passages": [asdict(p) for p in self.passages],
            "report": self.report.to_dict(),
            "timings": self.timings.to_dict(),
        }
