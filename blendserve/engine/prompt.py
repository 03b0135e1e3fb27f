"""[ prefix | chunk 0 | chunk 1 | ... | suffix ] as token ids.

prefix = chat-template head + system text + instruction;  suffix = question + chat-template tail. Both come from the
reader's own chat template, rendered once with sentinels and split there. Every part is tokenised alone and joined as ids,
so a chunk's ids never depend on its neighbours. Passages and questions cannot smuggle in control tokens: their text is
tokenised with special tokens taken literally.

A chunk's KV is computed behind the prefix, or behind less, or behind the prefix and a primer: a few passages about
nothing in particular (primer.txt), so that a chunk is read as one passage among others, as it will be in most prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blendserve.config import Behind, PromptConfig
from blendserve.core import Chunk, Passage, Prompt, TokenIds
from blendserve.errors import ModelUnsupported

PRIMER = Path(__file__).with_name("primer.txt")
PASSAGES, QUESTION = "<<<blendserve-passages>>>", "<<<blendserve-question>>>"


class PromptBuilder:
    """Lays out prompts for one reader."""

    def __init__(self, tokenizer: Any, config: PromptConfig) -> None:
        """Raises ModelUnsupported for a chat template that does not repeat what it is given."""
        self._tokenizer = tokenizer
        head, _, rest = _render(tokenizer, config).partition(PASSAGES)
        before, _, after = rest.partition(QUESTION)
        self.prefix = self._template_ids(head)
        self._before, self._after = self._template_ids(before), self._template_ids(after)
        self.behind = self._front(config.behind)

    def build(self, question: str, passages: Sequence[Passage]) -> Prompt:
        """The whole prompt; passages in the order given."""
        suffix = (*self._before, *self._text_ids(" " + question.strip()), *self._after)
        return Prompt(self.prefix, tuple(self.chunk(p) for p in passages), suffix)

    def chunk(self, passage: Passage) -> Chunk:
        """A passage as the reader will see it; no text, no tokens."""
        lines = [part.strip() for part in (passage.title, passage.text) if part.strip()]
        return Chunk(self._text_ids("\n".join(lines) + "\n\n") if lines else (), passage)

    def _front(self, behind: Behind) -> TokenIds:
        """The tokens that chunk KV is computed behind."""
        if behind == "primer":
            passages = (self.chunk(Passage(text)) for text in PRIMER.read_text("utf-8").split("\n\n"))
            return (*self.prefix, *(i for chunk in passages for i in chunk.ids))
        # "bos" is the first token of the prefix: BOS, or what this template puts in its place.
        return {"prefix": self.prefix, "bos": self.prefix[:1], "none": ()}[behind]

    def _template_ids(self, text: str) -> TokenIds:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()

    def _text_ids(self, text: str) -> TokenIds:
        return tuple(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def _render(tokenizer: Any, config: PromptConfig) -> str:
    """The template's text with sentinels where passages and question go."""
    user = f"{config.instruction}\n\n{PASSAGES}Question:{QUESTION}"
    if not getattr(tokenizer, "chat_template", None):
        bos = tokenizer.bos_token or ""
        return f"{bos}{config.system} {user}\nAnswer:"
    messages = [{"role": "system", "content": config.system}, {"role": "user", "content": user}]
    text = _apply(tokenizer, messages)
    if not _holds(text, config):  # a template without a system role drops or refuses it
        text = _apply(tokenizer, [{"role": "user", "content": f"{config.system}\n\n{user}"}])
    if not _holds(text, config):
        raise ModelUnsupported(
            "the reader's chat template loses parts of the prompt: give its tokenizer another chat_template, or none"
        )
    return text


def _holds(text: str, config: PromptConfig) -> bool:
    """Whether a rendered template holds every part, the places of passages and question once and in order."""
    before, _, after = text.partition(PASSAGES)
    said = config.system.strip() in before and config.instruction.strip() in before
    return said and after.count(QUESTION) == 1 and PASSAGES not in after


def _apply(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError:
        return ""
