"""The losses of one index at each ratio, as measured by calibration. A store keeps them as a blob: no text, no tokens.

Whatever changes the answers changes the owner under which they are stored: model, prompt, policy, correction and its
prior, codec. So an old calibration is not found any more. One calibration serves every target.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Literal

import xxhash
from pydantic import TypeAdapter

from blendserve.core import Passage
from blendserve.errors import CorruptBlob
from blendserve.quality.target import RATIOS, Loss
from blendserve.store import KVStore

KIND = "quality"  # in the place of a codec's name
PROMPTS = 128
QUOTED_WORDS = 12  # of a passage without a title
GROWTH = 1.5  # of an index, in passages, that voids its calibration


@dataclass(frozen=True, slots=True)
class Calibration:
    """Losses by ratio, of the same prompts in the same order."""

    losses: dict[float, tuple[Loss, ...]]
    passages: int  # of the index
    asked: Literal["made", "given"]  # where the questions are from
    digest: str = ""  # of the questions
    seconds: dict[str, float] = field(default_factory=dict)  # of all prefills, by ratio and "full"
    made: str = field(default_factory=lambda: date.today().isoformat())

    @classmethod
    def empty(cls, passages: int, asked: Literal["made", "given"]) -> Calibration:
        return cls(dict.fromkeys(RATIOS, ()), passages, asked)

    @property
    def prompts(self) -> int:
        """Number of prompts."""
        return min(map(len, self.losses.values()))

    def continues(self, questions: Sequence[str], passages: int) -> bool:
        """Whether these questions begin with the measured ones, and the index has not grown too much."""
        return self.fits(passages) and self.digest == digest(questions[: self.prompts])

    def with_prompt(
        self, losses: Mapping[float, Loss], seconds: Mapping[str, float], digest: str = ""
    ) -> Calibration:
        """The calibration with one more prompt. digest: of all questions."""
        more = {ratio: (*of, losses[ratio]) for ratio, of in self.losses.items()}
        return replace(
            self,
            losses=more,
            digest=digest,
            seconds={n: self.seconds.get(n, 0.0) + s for n, s in seconds.items()},
        )

    def fits(self, passages: int) -> bool:
        """Whether the index has not grown too much since."""
        return passages <= GROWTH * self.passages

    @classmethod
    def load(cls, store: KVStore, owner: str) -> Calibration | None:
        """Read an owner's calibration from a store; None if there is none that can be read. Raises StoreUnavailable."""
        hash = store.blobs.current(KIND, owner)
        try:
            raw = None if hash is None else store.blobs.get(hash)
            return None if raw is None else cls.from_bytes(raw)
        except (ValueError, CorruptBlob):
            return None

    def save(self, store: KVStore, owner: str) -> None:
        """Store the calibration in the place of the owner's one before. Raises StoreError."""
        before = store.blobs.current(KIND, owner)
        now = store.blobs.put(KIND, owner, self.to_bytes())
        if before not in (None, now):
            store.blobs.delete(before)

    def to_bytes(self) -> bytes:
        return RECORD.dump_json(self)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Calibration:
        """Raises ValueError for anything but a calibration."""
        made = RECORD.validate_json(raw)
        if set(made.losses) != set(RATIOS) or len(set(map(len, made.losses.values()))) > 1:
            raise ValueError("its losses are incomplete")
        return made


RECORD = TypeAdapter(Calibration)


def digest(questions: Sequence[str]) -> str:
    """A hash of questions, which a calibration does not keep; "" for none."""
    return xxhash.xxh3_64_hexdigest("\0".join(questions).encode()) if questions else ""


def owner_of(index: str, fingerprint: str, *settings: object) -> str:
    """Return the name of a calibration in a store. settings: whatever changes the answers."""
    return f"{fingerprint}/{xxhash.xxh3_64_hexdigest(repr((index, settings)).encode())}"


def make_questions(passages: Sequence[Passage]) -> Iterator[str]:
    """Yield a question about each passage, in random order: of its title or, without one, of words in its middle."""
    for n in random.Random(0).sample(range(len(passages)), len(passages)):
        passage = passages[n]
        words = passage.text.split()
        start = max(0, (len(words) - QUOTED_WORDS) // 2)
        quoted = " ".join(words[start : start + QUOTED_WORDS])
        yield f"What is said about {passage.title}?" if passage.title else f'Which passage says "{quoted}"?'
