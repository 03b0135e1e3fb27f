"""A model's tokenizer over the Rust tokenizer of its tokenizer.json: encode, decode, and the chat template.

It does what transformers' own does with the same file, without importing transformers, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from typing import Any

import tokenizers

from blendserve.models.chat_templates import TemplateLimit, choose, render


@dataclass(eq=False)
class Tokenizer:
    """Texts to token ids and back."""

    backend_tokenizer: tokenizers.Tokenizer
    special_tokens: dict[str, str]  # by name: bos_token, eos_token, ...
    eos_token_id: int | None
    chat_template: str | dict[str, str] | None  # of several, by their names

    @classmethod
    def of(cls, tokenizer: Any) -> Tokenizer:
        """Make one of transformers' tokenizer, which must have a Rust backend."""
        backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
        return cls(backend, special, tokenizer.eos_token_id, tokenizer.chat_template)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    def __call__(
        self,
        text: str,
        add_special_tokens: bool = True,
        split_special_tokens: bool = False,
        return_offsets_mapping: bool = False,
    ) -> dict[str, Any]:
        """split_special_tokens: special tokens in the text are text. return_offsets_mapping: also where tokens are."""
        if self.backend_tokenizer.encode_special_tokens != split_special_tokens:
            self.backend_tokenizer.encode_special_tokens = split_special_tokens
        encoded = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        places = {"offset_mapping": encoded.offsets} if return_offsets_mapping else {}
        return {"input_ids": encoded.ids, **places}

    def decode(
        self, ids: Any, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text; spaces stay as they are."""
        assert not clean_up_tokenization_spaces
        return str(
            self.backend_tokenizer.decode(list(map(int, ids)), skip_special_tokens=skip_special_tokens)
        )

    def get_vocab(self) -> dict[str, int]:
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        chat_template: None = None,
        **variables: Any,
    ) -> str:
        """The chat as text. Raises jinja2.TemplateError where the template refuses it.

        chat_template: none but the tokenizer's own. variables: further ones of the template.
        """
        assert not tokenize, "text and control tokens are tokenised apart"
        template = choose(self.chat_template, bool(tools))
        variables |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
        return _rendered(template, self.special_tokens, messages, **variables)


def prompt_at(tokenizer: Any, messages: Sequence[dict[str, Any]], now: datetime) -> str:
    """The chat as text, up to the answer, with this time in place of the present. Raises jinja2.TemplateError.

    tokenizer: transformers' own, too, which passes no function to a template.
    """
    template = choose(tokenizer.chat_template, has_tools=False)
    if "strftime_now" not in (template or ""):
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    special = tokenizer.special_tokens if isinstance(tokenizer, Tokenizer) else tokenizer.special_tokens_map
    return _rendered(
        template,
        {name: str(token) for name, token in special.items()},
        messages,
        tools=None,
        add_generation_prompt=True,
        strftime_now=now.strftime,
    )


def _rendered(
    template: str | None, special_tokens: dict[str, str], messages: Sequence[dict[str, Any]], **variables: Any
) -> str:
    """Raises jinja2.TemplateError where the template refuses the messages."""
    said = [dict(message) for message in messages]
    return render(template or "", messages=said, documents=None, **special_tokens, **variables)


SAMPLES = ("The cat sat on 12 mats.\n\n", " na\u00efve \u6f22\u5b57 \U0001f642\t x", "")
CHATS = (
    *(("system", "user"), ("user",)),
    *(("system", "user", "assistant", "user"), ("user", "assistant", "user")),
)
PARAMETERS = {"type": "object", "properties": {"q": {"type": "string", "description": "Na\u00efve?"}}}
TOOLS = [{"type": "function", "function": {"name": "find", "description": "", "parameters": PARAMETERS}}]


def agree(ours: Tokenizer, theirs: Any) -> bool:
    """Whether both encode, decode and render chats alike: a class of transformers may do more than its Rust backend."""
    choose(ours.chat_template, has_tools=False)  # or ModelError
    special = "".join(map(str, ours.special_tokens.values()))
    texts = (*SAMPLES, special, f"a {special} b")
    return _behaviour(ours, texts) == _behaviour(theirs, texts)


def _behaviour(tokenizer: Any, texts: Sequence[str]) -> list[Any]:
    """The vocabulary, ids and texts by every combination of options, and chats: None where they are refused."""
    ids = [
        list(tokenizer(text, add_special_tokens=add, split_special_tokens=split)["input_ids"])
        for text, add, split in product(texts, (False, True), (False, True))
    ]
    decoded = [
        tokenizer.decode(each, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        for each, skip in product(ids, (False, True))
    ]
    chats = [_chat(tokenizer, *chat) for chat in product(CHATS, (None, TOOLS)) if tokenizer.chat_template]
    return [len(tokenizer), tokenizer.get_vocab(), ids, decoded, chats]


def _chat(tokenizer: Any, roles: Sequence[str], tools: Any) -> Any:
    messages = [{"role": role, "content": f" {role} {n}\n"} for n, role in enumerate(roles)]
    try:
        return tokenizer.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=True)
    except TemplateLimit:
        raise
    except Exception:  # transformers' own raises whatever the template's parts raise
        return None
