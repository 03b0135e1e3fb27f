"""The losses of one index at each ratio, as measured by calibration. A store keeps them as a blob: no text, no tokens.

Whatever changes the answers changes the owner under which they are stored: model, prompt, policy, correction and its
prior, codec, number of passages. So an old calibration is not found any more. One serves every target.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date

import xxhash

from blendserve.errors import CorruptBlob
from blendserve.quality.target import RATIOS, Loss
from blendserve.store import KVStore

KIND = "quality"  # in the place of a codec's name
GROWTH = 1.5  # of an index, in passages, that voids its calibration


@dataclass(frozen=True, slots=True)
class Calibration:
    """Losses by ratio, of the same prompts in the same order."""

    losses: Mapping[float, Sequence[Loss]]
    passages: int  # of the index
    asked: str  # made | given: where the questions are from
    seconds: Mapping[str, float] = field(default_factory=dict)  # of all prefills, by ratio and "full"
    made: str = field(default_factory=lambda: date.today().isoformat())

    @classmethod
    def empty(cls, passages: int, asked: str) -> Calibration:
        return cls(dict.fromkeys(RATIOS, ()), passages, asked)

    @property
    def prompts(self) -> int:
        """Number of prompts."""
        return min(map(len, self.losses.values()))

    def with_prompt(self, losses: Mapping[float, Loss], seconds: Mapping[str, float]) -> Calibration:
        """With one more prompt."""
        return Calibration(
            {ratio: (*of, losses[ratio]) for ratio, of in self.losses.items()},
            self.passages,
            self.asked,
            {name: self.seconds.get(name, 0.0) + s for name, s in seconds.items()},
        )

    def fits(self, passages: int) -> bool:
        """Whether the index has not grown too much since."""
        return passages <= GROWTH * self.passages

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Calibration:
        """Raises ValueError for anything but a calibration."""
        try:
            values = json.loads(raw)
            losses = {float(r): tuple(Loss(*map(float, x)) for x in of) for r, of in values["losses"].items()}
            made = cls(**{**values, "losses": losses})
            is_whole = set(losses) == set(RATIOS) and len(set(map(len, losses.values()))) == 1
            finite = all(0.0 <= x.agreement <= 1.0 and x.kl >= 0.0 for of in losses.values() for x in of)
            if not (is_whole and finite and isinstance(made.passages, int) and isinstance(made.asked, str)):
                raise ValueError("its losses are incomplete")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no calibration: {error}") from None
        return made


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
        """In the place of the one before. Raises StoreError."""
        before = self.store.blobs.current(KIND, self.owner)
        now = self.store.blobs.put(KIND, self.owner, calibration.to_bytes())
        if before not in (None, now):
            self.store.blobs.delete(before)
