"""What prompts need of a tokenizer beside its calls: a copy for texts without control tokens, its longest token."""

from __future__ import annotations

import copy
import re
from functools import lru_cache
from typing import Any

COMPOSED = 4  # characters of which Unicode's normal forms make one, at most
# Parts of a tokenizer that drop no text, by what they call themselves; and what they are told.
_FAITHFUL = {"Sequence", "Prepend", "NFC", "NFD", "NFKC", "NFKD", "ByteLevel", "Digits", "Metaspace", "Split"}
_TOLD = {"String", "Regex"}
_SPACES_AS_THEY_ARE = 'Replace(pattern=String(" "), content="▁")'


@lru_cache(maxsize=8)
def without_control(tokenizer: Any) -> Any:
    """A copy to be called with split_special_tokens, as the tokenizer itself never is.

    Hugging Face keeps that choice in the tokenizer, until the next call: of two threads, the one would get ids by the
    other's choice.
    """
    tokenizer("", add_special_tokens=False, split_special_tokens=False)
    own = copy.deepcopy(tokenizer)
    own("", add_special_tokens=False, split_special_tokens=True)
    return own


def longest_token(tokenizer: Any) -> int:
    """Characters that one token stands for, at most; 0 where that has no bound, or nobody can tell.

    A token stands for no more characters than it is written with: byte-level vocabularies write each as one to four,
    others as itself. It may stand for more where the tokenizer drops text (white space), composes characters, or
    has one token for whatever it does not know.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not _keeps_all(backend) or not _knows_all(backend.model):
        return 0
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    if any((token.lstrip or token.rstrip) and not token.special for token in added):
        return 0
    longest = max(map(len, tokenizer.get_vocab()), default=0)
    return longest if backend.normalizer is None else COMPOSED * longest


def _keeps_all(backend: Any) -> bool:
    """Whether all of a text's characters come to be tokens'."""
    parts = " ".join(repr(part) for part in (backend.normalizer, backend.pre_tokenizer) if part is not None)
    parts = parts.replace(_SPACES_AS_THEY_ARE, "")
    unquoted = re.sub(r'"(?:[^"\\]|\\.)*"', "", parts)
    return "Removed" not in unquoted and {*re.findall(r"(\w+)\(", unquoted)} <= _FAITHFUL | _TOLD


def _knows_all(model: Any) -> bool:
    """Whether there is no token for runs of unknown characters."""
    if type(model).__name__ != "BPE":
        return False
    return model.unk_token is None or bool(model.byte_fallback) or not model.fuse_unk
