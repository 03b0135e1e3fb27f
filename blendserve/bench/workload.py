"""A prompt of real text whose chunks and question have exactly as many tokens as asked for.

The text is the Python language reference, from a place that the seed chooses. Speed does not depend on what it says, but
tokenising does depend on its being text.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from blendserve.config import PromptConfig
from blendserve.core import Passage, Prompt, TokenIds
from blendserve.engine.prompt import PromptBuilder
from blendserve.errors import InputError
from blendserve.models.loader import LoadedModel
from blendserve.retrieve import language_reference

TRIES = 40  # starts of a piece
LONGEST = 16  # characters a token, at most


@dataclass(frozen=True)
class Workload:
    """One question over some passages."""

    prompts: PromptBuilder
    passages: tuple[Passage, ...]
    question: str

    def draw(self) -> Prompt:
        """The prompt, tokenised anew each time: what a request begins with."""
        return self.prompts.build(self.question, self.passages)

    @cached_property
    def prompt(self) -> Prompt:
        """The same, tokenised once."""
        return self.draw()

    @property
    def chunks(self) -> list[TokenIds]:
        return [chunk.ids for chunk in self.prompt.chunks]


def make_workload(
    model: LoadedModel, chunks: int, chunk_tokens: int, suffix_tokens: int | None, seed: int
) -> Workload:
    """Make chunks of one prompt. Without a suffix each chunk has to fit the context, not all of them together.

    Raises InputError when they do not fit, or are too small to hold any text.
    """
    prompts = PromptBuilder(model.tokenizer, PromptConfig())
    together = chunk_tokens if suffix_tokens is None else chunks * chunk_tokens + suffix_tokens
    check_room(model, len(prompts.prefix) + together, "the prompt")
    source = "\n\n".join(document.text for document in language_reference())
    rng = random.Random(seed)
    at = rng.randrange(len(source))

    def piece(count: Callable[[str], int], n: int, what: str) -> str:
        """The next stretch of text that counts exactly n tokens, and is no chunk yet."""
        nonlocal at
        for _ in range(TRIES):
            size = LONGEST * (n + 16)
            found = _fill(count, (source[at:] + source * (1 + size // len(source)))[:size].lstrip(), n)
            at = (at + len(found or "") + 1 + rng.randrange(64)) % len(source)
            if found and found not in texts:
                return found
        raise InputError(
            f"no text makes {what} of {n} tokens for this model's tokenizer and prompt: ask for more"
        )

    texts: dict[str, None] = {}  # no two alike: a chunk is stored once
    while len(texts) < chunks:
        texts[piece(lambda t: len(prompts.chunk(Passage(t))), chunk_tokens, "a chunk")] = None
    question = ""
    if suffix_tokens is not None:
        question = piece(lambda t: len(prompts.build(t, ()).suffix), suffix_tokens, "the suffix")
    return Workload(prompts, tuple(Passage(t) for t in texts), question)


def check_room(model: LoadedModel, tokens: int, what: str) -> None:
    """Raises InputError when the tokens exceed the model's context."""
    limit = model.decoder.context_limit
    if tokens > limit:
        raise InputError(
            f"{what} would have {tokens:,} tokens, the context of model {model.name!r} has {limit:,}: ask for less"
        )


def _fill(count: Callable[[str], int], text: str, n: int) -> str | None:
    """A beginning of `text` that counts n, None where the count leaps over it."""
    near = bisect_left(range(1, len(text)), n, key=lambda length: count(text[:length])) + 1
    lengths = range(max(1, near - 8), min(len(text), near + 64))
    return next((text[:length] for length in lengths if count(text[:length]) == n), None)
