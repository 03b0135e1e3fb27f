"""Grammars that an answer follows: a JSON schema, a regular expression, some choices, or Lark rules.

llguidance compiles a grammar and says before each token which tokens may come next. They are all tokens whose bytes the
grammar allows, so a model may split a word as it likes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tokenizers
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from blendserve.errors import InputError
from blendserve.models.loader import LoadedModel

# Between JSON tokens, as llama.cpp has it: small models write nonsense where they may not indent, and spaces without end
# where nothing bounds them.
MAX_INDENT = 20
WHITESPACE: Any = {"whitespace_pattern": rf" |\n {{0,{MAX_INDENT}}}"}
# fields that _closed leaves alone
LITERAL = {"enum", "const", "default", "examples", "allOf", "if", "then", "else"}
# fields of an object that may have further properties
OPEN = {"allOf", "anyOf", "oneOf", "$ref", "if", "not", "additionalProperties", "unevaluatedProperties"}
OPEN |= {"patternProperties", "propertyNames", "minProperties"}


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer may look like, in llguidance's form.

    The constructors raise InputError for what llguidance cannot compile; the message names it.
    """

    rules: str

    def __post_init__(self) -> None:
        if message := LLMatcher.validate_grammar(self.rules):
            raise InputError(f"the grammar cannot be compiled: {' '.join(message.split())[:500]}")

    @classmethod
    def of_json(cls, schema: Mapping[str, Any]) -> Grammar:
        """JSON that is valid by a JSON schema. Objects have no properties that it does not name."""
        try:
            rules = LLMatcher.grammar_from_json_schema(json.dumps(_closed(schema)), overrides=WHITESPACE)
        except (ValueError, RecursionError) as error:  # nested too deeply
            raise InputError(f"the schema cannot be read: {error}") from None
        return cls(rules)

    @classmethod
    def of_regex(cls, pattern: str) -> Grammar:
        """A text that matches a regular expression (the syntax of Rust's crate regex) as a whole."""
        return cls(LLMatcher.grammar_from_regex(pattern))

    @classmethod
    def of_choices(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts."""
        return cls.of_lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))

    @classmethod
    def of_lark(cls, rules: str) -> Grammar:
        """A text by rules in Lark's syntax, as llguidance reads it."""
        return cls(LLMatcher.grammar_from_lark(rules))


def _closed(schema: Any) -> Any:
    """The schema without further properties where it lists some and says nothing of others, as in xgrammar's strict mode.

    A small model would write properties without end. Schemas that are combined with others stay as they are.
    """
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    inner = {name: each if name in LITERAL else _closed(each) for name, each in schema.items()}
    is_listed = isinstance(schema.get("properties"), Mapping) and schema.get("type") == "object"
    return inner | ({"additionalProperties": False} if is_listed and not schema.keys() & OPEN else {})


class Guide:
    """Which tokens may come next in one answer."""

    def __init__(self, grammar: Grammar, model: LoadedModel) -> None:
        """Raises InputError for a grammar that is too large to follow, and a tokenizer that llguidance cannot read."""
        self._matcher = LLMatcher(_vocabulary(model), grammar.rules, log_level=0)
        self._end = min(model.end_tokens)
        self._matcher.compute_bitmask()  # where the first takes a second, no other request should wait for it
        self._raise_error()

    def restrict(self, logits: Tensor) -> Tensor:
        """Logits [V] with -inf for all tokens that may not come next; an end token may where the grammar lets it end."""
        allowed = torch.zeros(len(logits), dtype=torch.bool)
        if self._matcher.is_stopped():
            self._raise_error()
            allowed[self._end] = True
        else:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            self._raise_error()
            known = np.unpackbits(bits, bitorder="little")[: len(logits)]
            allowed[: len(known)] = torch.from_numpy(known.view(np.bool_))
        return logits.masked_fill(~allowed.to(logits.device), float("-inf"))

    def allows(self, token: int) -> bool:
        """Whether this token may come next."""
        return not self._matcher.is_stopped() and self._matcher.validate_tokens([token]) == 1

    def push(self, token: int) -> None:
        """The token that came next."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            self._raise_error()

    def _raise_error(self) -> None:
        """Raises InputError for a grammar that is too large to follow, or wants bytes that no token has."""
        if self._matcher.is_error():
            reason = self._matcher.get_error().splitlines()[0]
            raise InputError(f"the answer cannot follow the grammar: {reason}")


_vocabularies = WeakKeyDictionary[Any, Any]()  # of tokenizers
_lock = threading.Lock()


def _vocabulary(model: LoadedModel) -> Any:
    """llguidance's view of a model's tokenizer; made once, in about a second. Raises InputError."""
    tokenizer = model.tokenizer
    with _lock:
        if tokenizer not in _vocabularies:
            # the words of a model with random weights mean nothing
            if not hasattr(tokenizer, "backend_tokenizer") or not hasattr(type(tokenizer), "__len__"):
                raise InputError("this model's tokenizer cannot follow a grammar: it has no tokenizer.json")
            backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            backend.no_padding()
            backend.no_truncation()
            n_tokens = max(len(tokenizer), model.decoder.vocab_size)
            made = LLTokenizer(backend.to_str(), n_vocab=n_tokens, eos_token=sorted(model.end_tokens))
            _vocabularies[tokenizer] = made
        return _vocabularies[tokenizer]
