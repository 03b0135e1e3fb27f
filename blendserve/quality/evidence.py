"""Evidence of quality: the losses of prompts at each ratio, from calibrations and checks. A store keeps it as a blob.

It has no text and no tokens. It is stored under an owner, a hash of all that changes the answers: model, prompt, policy,
correction, codec. So evidence of other settings is never used. The same evidence is used for every target.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash
from pydantic import TypeAdapter

from blendserve.core import Passage
from blendserve.errors import CorruptBlob
from blendserve.quality.target import RATIOS, Loss
from blendserve.store import KVStore

KIND = "quality"  # in the place of a codec's name
PROMPTS = 128  # that are enough to prove a target
KEPT = 1_000  # prompts, the newest
QUOTED_WORDS = 12  # of a passage
MIDDLE = 0.5
# Places in a passage that further questions quote, so that a small index has enough questions to prove a target.
QUOTED_PLACES = (0.25, 0.75, 0.9, 0.1)


class MeasuredPrompt(NamedTuple):
    """The losses of one prompt."""

    losses: tuple[Loss, ...]  # at each of RATIOS
    passages: int = 0  # of the index then; 0: the passages were the request's own
    question: str = ""  # hash of a calibration's question; "" for an answered request

    def at(self, ratio: float) -> Loss:
        """Return the loss at one of RATIOS."""
        return self.losses[RATIOS.index(ratio)]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Measured prompts, the newest last."""

    samples: tuple[MeasuredPrompt, ...] = ()

    @property
    def losses(self) -> list[list[Loss]]:
        """The losses of all prompts, for each of RATIOS."""
        return [[sample.losses[i] for sample in self.samples] for i in range(len(RATIOS))]

    def weights(self, passages: int) -> list[float]:
        """Return the weight of each prompt for an index of this size: the share of the index that it was drawn from."""
        return [min(1.0, sample.passages / passages) if passages else 1.0 for sample in self.samples]

    def plus(self, sample: MeasuredPrompt) -> Evidence:
        """Return the evidence with one more prompt; beyond KEPT, the oldest one is dropped."""
        return Evidence((*self.samples, sample)[-KEPT:])

    def latest(self, n: int) -> Evidence:
        """Return the evidence of the newest n prompts."""
        return Evidence(self.samples[-n:])

    @classmethod
    def load(cls, store: KVStore, owner: str) -> Evidence | None:
        """Read an owner's evidence from a store; None if there is none that can be read. Raises StoreUnavailable."""
        hash = store.blobs.current(KIND, owner)
        try:
            raw = None if hash is None else store.blobs.get(hash)
            return None if raw is None else cls.from_bytes(raw)
        except (ValueError, CorruptBlob):
            return None

    def save(self, store: KVStore, owner: str) -> None:
        """Store the evidence in place of the owner's earlier one. Raises StoreError."""
        before = store.blobs.current(KIND, owner)
        now = store.blobs.put(KIND, owner, self.to_bytes())
        if before not in (None, now):
            store.blobs.delete(before)

    def to_bytes(self) -> bytes:
        return RECORD.dump_json(self.samples)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Evidence:
        """Raises ValueError for anything but evidence."""
        samples = RECORD.validate_json(raw)
        if any(len(sample.losses) != len(RATIOS) for sample in samples):
            raise ValueError("its losses are incomplete")
        return cls(samples)


RECORD = TypeAdapter(tuple[MeasuredPrompt, ...])
SHIPPED = Path(__file__).with_name("shipped.json")  # of bundled models; scripts/ship_evidence.py writes it


def read_shipped(file: Path) -> dict[str, Evidence]:
    """Read evidence by owner from a file that `write_shipped` wrote."""
    found = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return {owner: Evidence(RECORD.validate_python(samples)) for owner, samples in found.items()}


def write_shipped(file: Path, evidence: Mapping[str, Evidence]) -> None:
    """Write evidence by owner to a file, rounded."""
    made = {owner: json.loads(found.to_bytes(), parse_float=_rounded) for owner, found in evidence.items()}
    file.write_text(json.dumps(made, separators=(",", ":")) + "\n", "utf-8")


def _rounded(number: str) -> float:
    return float(f"{float(number):.4g}")


def hash_of(question: str) -> str:
    """Return a hash of a question: evidence does not keep the text."""
    return xxhash.xxh3_64_hexdigest(question.encode())


def owner_of(index: str, fingerprint: str, *settings: object) -> str:
    """Return the name of evidence in a store. settings: whatever changes the answers."""
    return f"{fingerprint}/{xxhash.xxh3_64_hexdigest(repr((index, settings)).encode())}"


def make_questions(passages: Sequence[Passage]) -> Iterator[str]:
    """Yield questions about passages in random order: one about each passage, then further ones in as many rounds.

    A question asks about a passage's title, or quotes words: without a title from the middle, in later rounds from
    another place each.
    """
    order = random.Random(0).sample(range(len(passages)), len(passages))
    for place in (None, *QUOTED_PLACES):
        for n in order:
            yield _question(passages[n], place)


def _question(passage: Passage, place: float | None) -> str:
    """place: where the quoted words begin, from 0 to 1; None: the title is asked about, if there is one."""
    if place is None and passage.title:
        return f"What is said about {passage.title}?"
    words = passage.text.split()
    start = int(max(0, len(words) - QUOTED_WORDS) * (MIDDLE if place is None else place))
    quoted = " ".join(words[start : start + QUOTED_WORDS])
    return f'Which passage says "{quoted}"?'
