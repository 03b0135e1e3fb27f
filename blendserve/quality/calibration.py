"""The losses of one index at each ratio, as measured by calibration. A store keeps them as a blob: no text, no tokens.

Whatever changes the answers changes the owner under which they are stored: model, prompt, policy, correction and its
prior, codec, number of passages. So an old calibration is not found any more. One serves every target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Literal

import xxhash
from pydantic import TypeAdapter

from blendserve.errors import CorruptBlob
from blendserve.quality.target import RATIOS, Loss
from blendserve.store import KVStore

KIND = "quality"  # in the place of a codec's name
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


@dataclass(frozen=True, slots=True)
class CalibrationStore:
    """The calibration of one index, model and way of blending in a store."""

    store: KVStore
    owner: str

    @classmethod
    def of(cls, store: KVStore, index: str, fingerprint: str, *settings: object) -> CalibrationStore:
        """settings: whatever changes the answers."""
        return cls(store, f"{fingerprint}/{xxhash.xxh3_64_hexdigest(repr((index, settings)).encode())}")

    def load(self) -> Calibration | None:
        """None if there is none that can be read. Raises StoreUnavailable."""
        hash = self.store.blobs.current(KIND, self.owner)
        try:
            raw = None if hash is None else self.store.blobs.get(hash)
            return None if raw is None else Calibration.from_bytes(raw)
        except (ValueError, CorruptBlob):
            return None

    def save(self, calibration: Calibration) -> None:
        """Store a calibration in the place of the one before. Raises StoreError."""
        before = self.store.blobs.current(KIND, self.owner)
        now = self.store.blobs.put(KIND, self.owner, calibration.to_bytes())
        if before not in (None, now):
            self.store.blobs.delete(before)
