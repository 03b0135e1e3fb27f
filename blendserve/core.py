"""The nouns of the pipeline, each with the stage that fills it, and the alphabet of shapes.

    question -> retrieve -> store (load KV) -> blend (prefill) -> decode -> answer

Shape letters, used in every signature and trailing comment of the package:

    L layers      T prompt tokens    C chunk tokens    S active (recomputed) rows
    H query heads K kv heads         D head dim        E hidden size    V vocabulary
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from math import isnan
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

TokenIds = tuple[int, ...]
PLAIN_SUFFIX = 16  # last tokens of a plain prompt, which are always computed
MOVED = ("reused", "corrected", "near_duplicate")  # states of KV that was computed at another position

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
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)  # JSON values, for filters


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
class PassageFilter:
    """Which passages a search may find."""

    min_score: float = -1.0  # least similarity to the question
    # of the document's metadata: a value, or one of a list
    filter: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] | None = (
        None  # the metadata field `tags` of its document has one of these; None: any
    )

    @property
    def conditions(self) -> list[tuple[str, Sequence[Any]]]:
        """Fields of metadata, each with values of which the document must have one."""
        own = {name: each if isinstance(each, list) else [each] for name, each in self.filter.items()}
        return [*own.items(), *([] if self.tags is None else [("tags", self.tags)])]


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
    """Tokens that a prompt has in common with a stored chunk, its donor. Filled by blend/runs.py."""

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
        spans = []
        at = len(self.prefix)
        for chunk in self.chunks:
            spans.append(Span(at, at + len(chunk)))
            at += len(chunk)
        return tuple(spans)

    def __len__(self) -> int:
        return len(self.prefix) + sum(len(c) for c in self.chunks) + len(self.suffix)


@dataclass(frozen=True, slots=True)
class QualityReport:
    """The state of a quality target for the passages of an answer. Filled by quality/controller.py."""

    status: str  # no evidence yet | not yet proven | kept | answered exactly
    min_agreement: float  # the target: least mean share of full prefill's tokens
    ratio: float | None  # that serves; None: answers are exact
    prompts: int  # that were compared with full prefill, by weight
    agreement: float | None = None  # their mean, at this ratio
    interval: tuple[float, float] | None = None  # of the mean
    worse: float | None = None  # share of them on which full reuse is nearer to full prefill

    @property
    def summary(self) -> str:
        """One line."""
        if self.ratio is None:
            return f"{self.status}: no ratio keeps {self.min_agreement:g} of full prefill's tokens, {self.prompts} checks"
        if self.agreement is None:
            return f"{self.status}; ratio {self.ratio:g}"
        kept = f"{self.agreement:.2f} of full prefill's tokens, {self.prompts} checks"
        return f"{self.status}: {kept}; ratio {self.ratio:g}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "summary": self.summary}


@dataclass(frozen=True, slots=True)
class PromptSpan(Span):
    """A span of a prompt whose tokens started from the same KV. Filled by blend/report.py.

    A chunk that was found in a plain prompt is a passage, and what stands between chunks is text.
    """

    kind: str  # prefix | kept | passage | text | suffix
    state: str  # exact | kept | reused | corrected | near_duplicate | computed
    reason: str  # why the prefix, passage, text or suffix started from what it did, as a sentence
    chunk: int | None = None  # number of the passage
    begins_chunk: bool = False
    # of the passage: hit | absent | corrupt | unreachable | slow link | codec | level | tables
    lookup: str = ""
    source: str = ""  # of KV, used or not: memory | local | remote | computed | near
    recomputed: TokenIds = ()  # positions that the policy chose; none unless it is moved
    is_lossy: bool = False  # exact, but for the loss of its codec
    seeks_donors: bool = False  # whether other chunks were searched for text of the passage
    donor: str = ""  # key in hex of the stored chunk that these tokens were found in
    missing_head: int = 0  # tokens before these in what they were read from
    missing_tail: int = 0  # tokens after these in what they were read from
    learnt: bool = False  # whether the donor was learnt from earlier prompts

    @property
    def is_read(self) -> bool:
        """Whether it started from any KV."""
        return self.state != "computed"

    @property
    def is_moved(self) -> bool:
        """Whether it started from KV that was computed at another position, or after other text."""
        return self.state in MOVED

    @property
    def n_as_read(self) -> int:
        """Tokens that were not recomputed."""
        return len(self) - len(self.recomputed)


class Count:
    """A count of a report: a sum over the spans of its layout, which reads like an attribute."""

    def __init__(self, counts: Callable[[PromptSpan], bool], size: Callable[[PromptSpan], int] = len) -> None:
        """counts: whether a span counts. size: what it adds."""
        self._counts = counts
        self._size = size

    def __get__(self, report: BlendReport, owner: type[BlendReport]) -> int:
        return sum(self._size(span) for span in report.layout if self._counts(span))


@dataclass(frozen=True, slots=True)
class BlendReport:
    """What was reused, what was recomputed and why: the layout of a prompt, printed. Every answer carries one.

    Filled by blend/report.py. Each token is of one kind: exact (the prefix, cached or computed first, and the first
    chunk), kept (of a conversation, as a blended prompt before had it), reused, recomputed (chosen by the policy),
    computed (nothing stored: missing, corrupt or not looked for) or suffix.
    """

    method: str
    policy: str
    correction: str
    ratio: float  # asked for
    reason: str  # why nothing was blended; "" when something was
    layout: tuple[PromptSpan, ...]  # ascending; they cover the prompt
    bytes_loaded: int
    cost: float  # row-layers run through the model (dense, selection and refining passes included) / (T * L)
    prior: bool = False  # whether the correction started from what the corpus has shown (blend/priors.py)
    quality: QualityReport | None = None  # None: no target chose the ratio
    tokens_refined: int = 0  # part of tokens_reused: recomputed after the first token (blend/refine.py)
    full_prefill_s: float | None = None  # estimate for the same prompt; None: method full, or no cost model
    scores: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """[T], by which the policy chose, NaN where it gave none; None: it scores nothing"""

    tokens_prompt = Count(lambda span: True)
    tokens_exact = Count(lambda span: span.state == "exact")
    tokens_first = Count(lambda span: span.state == "exact" and span.kind == "passage")
    tokens_kept = Count(lambda span: span.state == "kept")
    tokens_reused = Count(lambda span: span.is_moved, lambda span: span.n_as_read)
    tokens_recomputed = Count(lambda span: span.is_moved, lambda span: len(span.recomputed))
    tokens_computed = Count(lambda span: not span.is_read and span.kind != "suffix")
    tokens_suffix = Count(lambda span: span.kind == "suffix")
    tokens_lossy = Count(lambda span: span.is_lossy)
    chunks = Count(lambda span: span.begins_chunk, lambda span: 1)
    chunks_hit = Count(lambda span: span.begins_chunk and span.lookup == "hit", lambda span: 1)
    chunks_corrupt = Count(lambda span: span.begins_chunk and span.lookup == "corrupt", lambda span: 1)
    chunks_missing = Count(
        lambda span: span.begins_chunk and span.lookup not in ("", "hit", "corrupt"), lambda span: 1
    )

    @property
    def exact(self) -> bool:
        """Whether the first token is full prefill's, up to rounding: no token's KV is approximate."""
        return self.tokens_reused + self.tokens_kept + self.tokens_lossy == 0

    @property
    def blended(self) -> bool:
        """Whether any token's KV came from a chunk that does not stand where it was computed."""
        return self.tokens_reused > 0

    @property
    def share_recomputed(self) -> float:
        """Recomputed share of the tokens of the chunks that were found; compare it with `ratio`."""
        n_found = self.tokens_reused + self.tokens_recomputed + self.tokens_first
        return self.tokens_recomputed / n_found if n_found else 0.0

    @property
    def tiers(self) -> dict[str, int]:
        """Number of chunk hits by source."""
        hits = (span for span in self.layout if span.begins_chunk and span.lookup == "hit")
        return dict(Counter(span.source for span in hits))

    @property
    def unusable(self) -> list[dict[str, Any]]:
        """The missing and corrupt chunks that may be in the store."""
        lost = [s for s in self.layout if s.begins_chunk and s.lookup not in ("", "hit", "absent")]
        return [{"chunk": span.chunk, "kind": span.lookup, "reason": span.reason} for span in lost]

    @property
    def near(self) -> list[dict[str, Any]]:
        """What other stored chunks have of each missing or corrupt chunk; empty unless that was looked for."""
        rows = []
        for chunk, group in groupby((s for s in self.layout if s.seeks_donors), key=lambda span: span.chunk):
            spans = list(group)
            used = [span for span in spans if span.is_read]
            n_stored = sum(map(len, used))
            tokens = {"tokens_stored": n_stored, "tokens_fresh": sum(map(len, spans)) - n_stored}
            donors = list(dict.fromkeys(span.donor for span in used))
            rows.append({"chunk": chunk, "donors": donors, **tokens, "reason": spans[0].reason})
        return rows

    @property
    def spans(self) -> list[dict[str, Any]]:
        """The tokens of a plain prompt that started from stored chunks."""
        names = ("start", "stop", "donor", "missing_head", "missing_tail", "learnt")
        found = [span for span in self.layout if span.donor and span.lookup == "hit" and span.is_read]
        return [{name: getattr(span, name) for name in names} for span in found]

    @property
    def states(self) -> list[tuple[str, int]]:
        """States in the order of the prompt, each with how many tokens in a row have it."""
        states = [span.state for span in self.layout for _ in range(len(span))]
        for position in (at for span in self.layout for at in span.recomputed):
            states[position] = "recomputed"
        return [(state, len(list(run))) for state, run in groupby(states)]

    def explain(self) -> dict[str, Any]:
        """State and score of every token, and each part of the prompt with its reason, as JSON."""
        scores = None
        parts = []
        if self.scores is not None:
            scores = [None if isnan(score) else float(f"{score:.4g}") for score in self.scores.tolist()]
        for (kind, chunk), group in groupby(self.layout, key=lambda span: (span.kind, span.chunk)):
            spans = list(group)
            tier = next((span.source for span in spans if span.is_read), None)
            found = [span for span in spans if span.donor and span.is_read]
            donors = [{"start": span.start, "stop": span.stop, "key": span.donor} for span in found]
            part = {"kind": kind, "passage": chunk, "start": spans[0].start, "stop": spans[-1].stop}
            parts.append({**part, "tier": tier, "reason": spans[0].reason, "donors": donors})
        return {"states": self.states, "scores": scores, "parts": parts}

    def to_dict(self) -> dict[str, Any]:
        """Fields, counts and properties as JSON, without what is as long as the prompt: see `explain`."""
        derived = {name for name, value in vars(BlendReport).items() if isinstance(value, Count | property)}
        names = derived.union(each.name for each in fields(self)) - {"layout", "scores", "states"}
        quality = self.quality.to_dict() if self.quality else None
        return {**{name: getattr(self, name) for name in sorted(names)}, "quality": quality}
