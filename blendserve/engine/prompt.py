"""[ prefix | chunk 0 | chunk 1 | ... | suffix ] as token ids: the one place that renders a chat template.

prefix = chat-template head + system text + earlier messages + instruction;  suffix = question + chat-template tail. Both
come from the model's own chat template, rendered with sentinels in the place of texts and split there. Every part is
tokenised alone and joined as ids, so a chunk's ids never depend on its neighbours. The texts of passages, questions and
messages cannot contain control tokens: they are tokenised with special tokens as text.

Passages of an earlier turn are not part of the prefix: they would fill the model's context in a few turns. So a prefix
depends on its own tokens alone, and the next turn's prefix begins with almost all of it (blend/prefix_cache.py).

A chunk's KV is computed after the prefix, after less, or after the prefix and a primer: a few passages about nothing in
particular (primer.txt), so that a chunk is read as one passage among others, as it will be in most prompts.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from blendserve.config import KVContext, PromptConfig
from blendserve.core import Chunk, Passage, Prompt, Span, TokenIds
from blendserve.engine.chat import Chat, Tokenized, chat_ids
from blendserve.errors import InputError, ModelUnsupported, PromptTooLong

PRIMER = Path(__file__).with_name("primer.txt")
PASSAGES, QUESTION = "<<<blendserve-passages>>>", "<<<blendserve-question>>>"
MESSAGE = "<<<blendserve-message-{}>>>"
LONG = 6  # characters a token: most texts have fewer
CUT = 16  # tokens that a text, or a piece of it, may have more alone than in a prompt, at most
PIECE = 1024  # tokens: a piece has many more than CUT
_SENTINEL = re.compile(r"(<<<blendserve-[a-z0-9-]+>>>)")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation, before the last question."""

    role: str  # system, user or assistant
    text: str


@dataclass(frozen=True, slots=True)
class PromptFrame:
    """A prompt without its passages."""

    prefix: TokenIds
    suffix: TokenIds

    def __len__(self) -> int:
        return len(self.prefix) + len(self.suffix)

    def with_chunks(self, chunks: Iterable[Chunk]) -> Prompt:
        """The whole prompt; chunks in the order given."""
        return Prompt(self.prefix, tuple(chunks), self.suffix)


class PromptBuilder:
    """Lays out prompts for one model."""

    def __init__(self, tokenizer: Any, config: PromptConfig, kv_context: KVContext = "prefix") -> None:
        """kv_context: what chunk KV is computed after; with prefix, the first chunk of a prompt is exact.

        Raises ModelUnsupported for a chat template that does not repeat what it is given.
        """
        self._tokenizer = tokenizer
        self._literal = literal_tokenizer(tokenizer)
        self._config = config
        self._now = datetime.fromisoformat(config.date)
        self._head, self._tail = self._template(())
        if self._template(())[0] != self._head:
            raise ModelUnsupported(
                "the model's chat template writes other text each time, so no KV after it can be reused: give its "
                "tokenizer another chat_template, or none"
            )
        self.prefix = self._ids(self._head)
        self.kv_context = self._kv_context(kv_context)

    @property
    def writes_date(self) -> bool:
        """Whether the chat template writes a date, which is `prompt.date`."""
        other = copy.copy(self)
        other._now = self._now.replace(year=self._now.year + 1, month=self._now.month % 12 + 1, day=1)
        return other._template(()) != (self._head, self._tail)

    def build(
        self, question: str, passages: Sequence[Passage], history: Sequence[ChatMessage] = ()
    ) -> Prompt:
        """The whole prompt; passages in the order given. Raises InputError for messages that the template refuses."""
        return self.frame(question, history).with_chunks(map(self.chunk, passages))

    def at_least(self, texts: Iterable[str], limit: int) -> int:
        """Tokens that these texts have at least, if that is more than `limit` (>= 0), else 0.

        Short texts are not tokenised. Long ones are tokenised piece by piece, as far as decides it: words may be long.
        """
        stripped = [text.strip() for text in texts]
        n = 0
        piece = LONG * (limit + PIECE)
        if sum(map(len, stripped)) <= LONG * limit:
            return 0
        for text in stripped:
            for at in range(0, len(text), piece):
                n += max(0, len(self._tokens(text[at : at + piece], literal=True)) - CUT)
                if n > limit:
                    return n
        return 0

    def frame(self, question: str, history: Sequence[ChatMessage] = ()) -> PromptFrame:
        """Everything but the passages. Raises InputError for messages that the template refuses.

        A system message, which must be the first, takes the place of the configured one.
        """
        head, tail = self._template(history) if history else (self._head, self._tail)
        said = {MESSAGE.format(i): message.text for i, message in enumerate(history)}
        prefix = self._ids(head, said) if history else self.prefix
        return PromptFrame(prefix, self._ids(tail, {QUESTION: " " + question.strip()}))

    def plain(self, text: Chat | str | TokenIds, room: int | None = None, reserved: int = 0) -> Prompt:
        """A client's own prompt: a chat by the model's template, or a text or tokens as they are.

        A chat is tokenised only as far as it fits `room` with `reserved` tokens for the answer.
        Raises PromptTooLong; InputError for a chat that the template refuses, for a text without tokens, and for tokens
        that the tokenizer does not have.
        """
        if isinstance(text, str):
            text = tuple(
                self._tokenizer(text, add_special_tokens=True, split_special_tokens=False)["input_ids"]
            )
        if isinstance(text, tuple):
            if text and max(text) >= len(self._tokenizer):
                raise InputError(f"the tokenizer has no token {max(text)}", setting="prompt")
            ids = text
            texts: tuple[Span, ...] = (Span(0, len(text)),)
        else:
            ids, texts = chat_ids(self._tokenizer, text, partial(self._places_within, room, reserved))
        if not ids:
            raise InputError("the prompt is empty: send some text", setting="prompt")
        return Prompt.plain(ids, texts=texts)

    def chunk(self, passage: Passage) -> Chunk:
        """A passage as it stands in a prompt; without text, no tokens."""
        text = passage.chunk_text
        return Chunk(self._tokens(text + "\n\n", literal=True) if text else (), passage)

    def text_ids(self, text: str) -> TokenIds:
        """The token ids of any text, as it is: no control tokens, nothing stripped."""
        return self._tokens(text, literal=True)

    def chunk_ids(self, passages: Iterable[Passage]) -> list[TokenIds]:
        """The token ids of each passage's chunk."""
        return [self.chunk(p).ids for p in passages]

    def _kv_context(self, context: KVContext) -> TokenIds:
        """The tokens that chunk KV is computed after."""
        if context == "primer":
            primer = self.chunk_ids(Passage(text) for text in PRIMER.read_text("utf-8").split("\n\n"))
            return (*self.prefix, *(i for ids in primer for i in ids))
        # "bos" is the first token of the prefix: BOS, or what this template puts in its place.
        return {"prefix": self.prefix, "bos": self.prefix[:1], "none": ()}[context]

    def _template(self, history: Sequence[ChatMessage]) -> tuple[str, str]:
        """The chat's text before and after the passages, with sentinels in the place of texts."""
        places = [MESSAGE.format(i) for i in range(len(history))]
        messages = [{"role": m.role, "content": place} for m, place in zip(history, places, strict=True)]
        ours = [self._config.instruction.strip()]
        if not history or history[0].role != "system":
            messages.insert(0, {"role": "system", "content": self._config.system})
            ours.append(self._config.system.strip())
        asked = f"{self._config.instruction}\n\n{PASSAGES}Question:{QUESTION}"
        messages.append({"role": "user", "content": asked})
        for attempt in (messages, _without_system(messages)):
            text = self._render(attempt, bool(history))
            head, _, tail = text.partition(PASSAGES)
            if _SENTINEL.findall(text) == [*places, PASSAGES, QUESTION] and all(t in head for t in ours):
                return head, tail
        if not history:
            raise ModelUnsupported(
                "the model's chat template loses parts of the prompt: give its tokenizer another chat_template, or none"
            )
        roles = ", ".join(m["role"] for m in messages)
        raise InputError(
            f"the model's chat template cannot hold these messages ({roles}): "
            "begin with at most one system message, then let user and assistant alternate"
        )

    def _render(self, messages: Sequence[dict[str, str]], names_roles: bool) -> str:
        """Render messages by the model's own template; "" if it refuses them."""
        if not getattr(self._tokenizer, "chat_template", None):
            bos = self._tokenizer.bos_token or ""
            if not names_roles:
                return f"{bos}{' '.join(m['content'] for m in messages)}\nAnswer:"
            return bos + "".join(f"{m['role'].title()}: {m['content']}\n" for m in messages) + "Assistant:"
        from jinja2 import TemplateError  # not at the top: only chat templates need it

        from blendserve.models.tokenizer import prompt_at

        try:
            return prompt_at(self._tokenizer, messages, self._now)
        except TemplateError:
            return ""

    def _ids(self, template: str, said: Mapping[str, str] | None = None) -> TokenIds:
        """Template text with its control tokens, and texts by sentinel without any."""
        ids: list[int] = []
        for part in filter(None, _SENTINEL.split(template)):
            text = (said or {}).get(part)
            ids += self._tokens(part, literal=False) if text is None else self._tokens(text, literal=True)
        return tuple(ids)

    def _tokens(self, text: str, literal: bool) -> TokenIds:
        return tuple(self._encode(text, literal)["input_ids"])

    def _places_within(
        self, room: int | None, reserved: int, text: str, literal: bool, before: int
    ) -> Tokenized:
        """Ids and places of one more part of a prompt; before: tokens of the others. Raises PromptTooLong."""
        if room is None:
            return self._places(text, literal)
        left = max(0, room - reserved - before)
        least = self.at_least([text], left)
        ids, places = ((), []) if least else self._places(text, literal)
        if max(least, len(ids)) > left:
            raise PromptTooLong(before + max(least, len(ids)), room, reserved, at_least=True)
        return ids, places

    def _places(self, text: str, literal: bool) -> Tokenized:
        if not getattr(self._tokenizer, "backend_tokenizer", None):  # others do not know the places
            return self._tokens(text, literal), []
        encoded = self._encode(text, literal, return_offsets_mapping=True)
        return tuple(encoded["input_ids"]), encoded["offset_mapping"]

    def _encode(self, text: str, literal: bool, **options: bool) -> Any:
        tokenizer = self._literal if literal else self._tokenizer
        return tokenizer(text, add_special_tokens=False, split_special_tokens=literal, **options)


@lru_cache(maxsize=8)
def literal_tokenizer(tokenizer: Any) -> Any:
    """A copy to be called with split_special_tokens, as the tokenizer itself never is.

    Hugging Face keeps that choice in the tokenizer until the next call: two threads would get ids by each other's choice.
    """
    tokenizer("", add_special_tokens=False, split_special_tokens=False)
    own = copy.deepcopy(tokenizer)
    own("", add_special_tokens=False, split_special_tokens=True)
    return own


def _without_system(messages: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Move the system text into the first user message, for templates without a system role."""
    system, first, *rest = messages
    return [{"role": first["role"], "content": f"{system['content']}\n\n{first['content']}"}, *rest]
