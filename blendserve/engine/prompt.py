"""[ prefix | chunk 0 | chunk 1 | ... | suffix ] as token ids: the one place that renders a chat template.

prefix = chat-template head + system text + earlier turns + instruction;  suffix = question + chat-template tail. Both
come from the reader's own chat template, rendered with sentinels in the place of texts and split there. Every part is
tokenised alone and joined as ids, so a chunk's ids never depend on its neighbours. Passages, questions and turns cannot
smuggle in control tokens: their text is tokenised with special tokens taken literally.

What was retrieved for an earlier turn is not part of the prefix: it would fill the reader's context in a few turns. So a
prefix depends on nothing but its own tokens, and the next turn's begins with almost all of it (prefix_cache.py).

A chunk's KV is computed behind the prefix, or behind less, or behind the prefix and a primer: a few passages about
nothing in particular (primer.txt), so that a chunk is read as one passage among others, as it will be in most prompts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from blendserve.config import KVContext, PromptConfig
from blendserve.core import Chunk, Passage, Prompt, TokenIds
from blendserve.engine.tokens import longest_token, without_control
from blendserve.errors import InputError, ModelUnsupported

PRIMER = Path(__file__).with_name("primer.txt")
PASSAGES, QUESTION = "<<<blendserve-passages>>>", "<<<blendserve-question>>>"
TURN = "<<<blendserve-turn-{}>>>"
LONG = 6  # characters a token: most texts have fewer
CUT = 16  # tokens more, at most, that the beginning of a text may have where it is cut
_SENTINEL = re.compile(r"(<<<blendserve-[a-z0-9-]+>>>)")

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Turn:
    """One message before the last question."""

    role: str  # system, user or assistant
    text: str


@dataclass(frozen=True, slots=True)
class Frame:
    """A prompt without its passages."""

    prefix: TokenIds
    suffix: TokenIds

    def __len__(self) -> int:
        return len(self.prefix) + len(self.suffix)

    def around(self, chunks: Iterable[Chunk]) -> Prompt:
        """The whole prompt; chunks in the order given."""
        return Prompt(self.prefix, tuple(chunks), self.suffix)


class PromptBuilder:
    """Lays out prompts for one reader.

    between: called before a passage is tokenised, so that a job of very many lets others go in between.
    """

    def __init__(self, tokenizer: Any, config: PromptConfig) -> None:
        """Raises ModelUnsupported for a chat template that does not repeat what it is given."""
        self._tokenizer, self._literally, self._config = tokenizer, without_control(tokenizer), config
        self.between: Callable[[], None] = lambda: None
        self._head, self._tail = self._template(())
        self.prefix = self._ids(self._head)
        self.kv_context = self._kv_context(config.kv_context)

    def build(self, question: str, passages: Sequence[Passage], turns: Sequence[Turn] = ()) -> Prompt:
        """The whole prompt; passages in the order given. Raises InputError for turns that the template refuses."""
        return self.frame(question, turns).around(map(self.chunk, passages))

    def at_least(self, texts: Iterable[str], limit: int) -> int:
        """Tokens that these texts have at least, if that is seen to be more than `limit` (>= 0), else 0.

        Estimated by characters; of a text that is long for `limit` tokens, only the beginning is tokenised.
        """
        stripped = [text.strip() for text in texts]
        characters = sum(map(len, stripped))
        longest = self._longest_token if characters > limit else 0
        if longest and characters // longest > limit:
            return characters // longest
        for text in stripped:
            if len(text) > LONG * limit:
                beginning = text[: LONG * (limit + CUT)]
                if (least := len(self._tokens(beginning, literal=True)) - CUT) > limit:
                    return least
        return 0

    def frame(self, question: str, turns: Sequence[Turn] = ()) -> Frame:
        """Everything but the passages. Raises InputError for turns that the template refuses.

        A system turn, which must be the first, takes the place of the configured one.
        """
        head, tail = self._template(turns) if turns else (self._head, self._tail)
        said = {TURN.format(i): turn.text for i, turn in enumerate(turns)}
        prefix = self._ids(head, said) if turns else self.prefix
        return Frame(prefix, self._ids(tail, {QUESTION: " " + question.strip()}))

    def chunk(self, passage: Passage) -> Chunk:
        """A passage as the reader will see it; no text, no tokens."""
        self.between()
        text = shown(passage)
        return Chunk(self._tokens(text + "\n\n", literal=True) if text else (), passage)

    def text_ids(self, text: str) -> TokenIds:
        """The token ids of any text, as it is: no control tokens, nothing stripped."""
        return self._tokens(text, literal=True)

    def chunk_ids(self, passages: Iterable[Passage]) -> list[TokenIds]:
        """The token ids of each passage's chunk."""
        return [self.chunk(p).ids for p in passages]

    @cached_property
    def _longest_token(self) -> int:
        """Characters that a token stands for, at most; 0 where there is no bound."""
        return longest_token(self._tokenizer)

    def _kv_context(self, context: KVContext) -> TokenIds:
        """The tokens that chunk KV is computed behind."""
        if context == "primer":
            primer = self.chunk_ids(Passage(text) for text in PRIMER.read_text("utf-8").split("\n\n"))
            return (*self.prefix, *(i for ids in primer for i in ids))
        # "bos" is the first token of the prefix: BOS, or what this template puts in its place.
        return {"prefix": self.prefix, "bos": self.prefix[:1], "none": ()}[context]

    def _template(self, turns: Sequence[Turn]) -> tuple[str, str]:
        """The chat's text before and after the passages, with sentinels in the place of what people say."""
        places = [TURN.format(i) for i in range(len(turns))]
        messages = [{"role": t.role, "content": place} for t, place in zip(turns, places, strict=True)]
        ours = [self._config.instruction.strip()]
        if not turns or turns[0].role != "system":
            messages.insert(0, {"role": "system", "content": self._config.system})
            ours.append(self._config.system.strip())
        asked = f"{self._config.instruction}\n\n{PASSAGES}Question:{QUESTION}"
        messages.append({"role": "user", "content": asked})
        for attempt in (messages, _without_system(messages)):
            text = self._render(attempt, bool(turns))
            head, _, tail = text.partition(PASSAGES)
            if _SENTINEL.findall(text) == [*places, PASSAGES, QUESTION] and all(t in head for t in ours):
                return head, tail
        if not turns:
            raise ModelUnsupported(
                "the model's chat template loses parts of the prompt: give its tokenizer another chat_template, or none"
            )
        roles = ", ".join(m["role"] for m in messages)
        raise InputError(
            f"the model's chat template cannot hold these turns ({roles}): "
            "begin with at most one system message, then let user and assistant alternate"
        )

    def _render(self, messages: Sequence[Message], names_roles: bool) -> str:
        """By the reader's own template; "" where it refuses the messages."""
        if not getattr(self._tokenizer, "chat_template", None):
            bos = self._tokenizer.bos_token or ""
            if not names_roles:
                return f"{bos}{' '.join(m['content'] for m in messages)}\nAnswer:"
            return bos + "".join(f"{m['role'].title()}: {m['content']}\n" for m in messages) + "Assistant:"
        from jinja2 import TemplateError  # not at the top: only chat templates need it

        try:
            return str(
                self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            )
        except TemplateError:
            return ""

    def _ids(self, template: str, said: Mapping[str, str] | None = None) -> TokenIds:
        """Template text with its control tokens; what people said, by sentinel, without any."""
        ids: list[int] = []
        for part in filter(None, _SENTINEL.split(template)):
            text = (said or {}).get(part)
            ids += self._tokens(part, literal=False) if text is None else self._tokens(text, literal=True)
        return tuple(ids)

    def _tokens(self, text: str, literal: bool) -> TokenIds:
        tokenizer = self._literally if literal else self._tokenizer
        return tuple(tokenizer(text, add_special_tokens=False, split_special_tokens=literal)["input_ids"])


def shown(passage: Passage) -> str:
    """What of a passage stands in a prompt."""
    return "\n".join(part.strip() for part in (passage.title, passage.text) if part.strip())


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """For templates without a system role: its text opens the first user message."""
    system, first, *rest = messages
    return [{"role": first["role"], "content": f"{system['content']}\n\n{first['content']}"}, *rest]
