"""Plain prompts over tiny models: copies of chunks in a client's own text."""

from __future__ import annotations

from dataclasses import dataclass

from blendserve.blend.blender import Blender, Prefilled
from blendserve.config import BlendConfig
from blendserve.core import Prompt, TokenIds
from tests.support.blending import check_report, some_ids

CHUNKS = [some_ids(n, 1) for n in (64, 70, 81, 100)]
A, B, C, D = CHUNKS
TEXT, END = some_ids(20, 2), some_ids(30, 3)
PARAGRAPHS = [
    " ".join(f"In {place} the {thing} number {i} is kept behind the {thing} of {place}." for i in range(12))
    for place, thing in (("Ravenna", "lamp"), ("Oslo", "boat"), ("Quito", "clock"), ("Leeds", "loom"))
]
BLEND = BlendConfig(method="blend", policy="none", correction="none")


@dataclass(frozen=True)
class Copy:
    """A chunk in a prompt, with other tokens at its ends."""

    ids: TokenIds
    head: int = 0
    tail: int = 0

    @property
    def text(self) -> TokenIds:
        inner = self.ids[self.head : len(self.ids) - self.tail]
        return (*other(self.ids[: self.head]), *inner, *other(self.ids[len(self.ids) - self.tail :]))


def other(ids: TokenIds) -> TokenIds:
    """Another token in the place of each."""
    return tuple(3 + (i - 2) % 94 for i in ids)


def plain(*parts: TokenIds | Copy) -> Prompt:
    """A client's own prompt."""
    return Prompt.plain(tuple(i for part in parts for i in (part.text if isinstance(part, Copy) else part)))


def ask(by: Blender, prompt: Prompt, blend: BlendConfig = BLEND) -> Prefilled:
    done = by.run(prompt, blend)
    check_report(done.report, prompt)
    return done


def donors_of(done: Prefilled) -> list[str]:
    return [span["donor"] for span in done.report.spans]
